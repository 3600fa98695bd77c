"""The command line `specexp ...`. Each command is a few lines over the package.

Imports are inside the commands, so that `--help` does not wait for torch.
"""

import os
import sys

import typer

from specexp.commands import bench, generate, grid, lab, serve, store, zoo
from specexp.commands.options import Command, complain
from specexp.errors import NonFiniteLogits, UserError, first_line, panicked
from specexp.terminal import died, guard

app = typer.Typer(
    help="Experiments with speculative decoding: does it pay for your models, prompts and load?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line. Each problem of the input is one line on stderr, with exit code 2."""
    if root := os.environ.get("SPECEXP_MLRUNS"):  # kernels run in other folders
        os.environ["SPECEXP_MLRUNS"] = os.path.abspath(root)
    guard()
    try:
        app()
    except UserError as e:
        for line in str(e).splitlines():
            complain("error", line)
        sys.exit(e.code)
    except NonFiniteLogits as e:
        complain("failed", str(e))
        sys.exit(1)
    except OSError as e:
        from specexp.grids import runner
        from specexp.tracking import results

        if e.errno not in results.FULL:
            raise
        complain("disk full", f"{e.strerror}: {e.filename or results.root()}")
        sys.exit(runner.DISK_FULL)
    except BaseException as e:
        if not panicked(e):
            raise
        complain("error", first_line(e))
        sys.exit(2)
    finally:
        sys.excepthook = died  # typer has put its own there


def _print_version(show: bool) -> None:
    if show:
        import specexp

        print(f"specexp {specexp.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    pass


def doctor() -> None:
    """Report versions, device, speed by dtype and disk space, and what is missing (exit code 1)."""
    from specexp.commands.doctor import examine

    raise typer.Exit(0 if examine() else 1)


for command in (
    generate.generate, generate.theory, bench.profile, serve.serve, bench.bench, zoo.models, doctor,
    store.report, store.ui, lab.lab,
):  # fmt: skip
    app.command(cls=Command)(command)
app.add_typer(grid.app, name="grid")
app.add_typer(store.app, name="store")
app.add_typer(zoo.app, name="zoo")


if __name__ == "__main__":
    main()
