"""The command line `specexp ...`. Each command is a few lines over the package.

Imports are inside the commands, so that `--help` does not wait for torch.
"""

import os
import sys
from typing import Any

import typer

from specexp.commands import bench, check, generate, grid, lab, recommend, serve, store, zoo
from specexp.commands.options import Command, Group, complain, own
from specexp.errors import NonFiniteLogits, UserError, first_line, panicked, ran_out
from specexp.terminal import died, guard

app = typer.Typer(
    cls=Group,
    help="""Experiments with speculative decoding: does it pay for your models, prompts and load?

    Example: `specexp generate --prompt "def mean(values):"`

    Example: `specexp grid run notebooks/grids/acceptance.yaml`
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line. Each problem of the input is one line on stderr, with exit code 2."""
    if root := os.environ.get("SPECEXP_MLRUNS"):  # kernels run in other folders
        os.environ["SPECEXP_MLRUNS"] = os.path.abspath(os.path.expanduser(root))
    guard()
    try:
        app(prog_name="specexp")
    except UserError as e:
        for line in str(e).splitlines():
            complain("error", line)
        sys.exit(e.code)
    except NonFiniteLogits as e:
        complain("failed", str(e))
        sys.exit(1)
    except RuntimeError as e:
        if not ran_out(str(e)):
            raise
        reason = ". ".join(first_line(e).split(". ")[:2]).rstrip(".")
        complain("out of memory", f"{reason}: use a smaller batch, fewer tokens or a smaller model")
        sys.exit(1)
    except OSError as e:
        from specexp.grids import runner
        from specexp.tracking import results

        if e.errno in results.FULL:
            complain("disk full", f"{e.strerror}: {e.filename or results.root()}")
            sys.exit(runner.DISK_FULL)
        if e.filename is None:
            raise
        complain("error", f"cannot read or write {e.filename}: {e.strerror}")
        sys.exit(2)
    except BaseException as e:
        if not panicked(e):
            raise
        complain("error", first_line(e))
        sys.exit(2)
    finally:
        sys.excepthook = died  # typer has put its own there


@app.callback(invoke_without_command=True)
def options(version: bool = own("Print the version and exit.", False)) -> None:
    if version:
        import specexp

        print(f"specexp {specexp.__version__}")
        raise typer.Exit


def doctor() -> None:
    """Report versions, device, speed by dtype and disk space, and what is missing (exit code 1)."""
    from specexp.commands.doctor import examine

    raise typer.Exit(0 if examine() else 1)


PANELS: dict[str, dict[str, Any]] = {  # of --help, and the commands and groups in each
    "Try": {"generate": generate.generate, "theory": generate.theory, "lab": lab.lab},
    "Experiments": {"grid": grid.app, "recommend": recommend.recommend, "report": store.report,
                    "check": check.check, "ui": store.ui, "store": store.app},
    "This machine": {"doctor": doctor, "profile": bench.profile, "serve": serve.serve,
                     "bench": bench.bench},
    "Models": {"models": zoo.models, "zoo": zoo.app},
}  # fmt: skip
for panel, entries in PANELS.items():
    for name, entry in entries.items():
        if isinstance(entry, typer.Typer):
            app.add_typer(entry, name=name, rich_help_panel=panel)
        else:
            passed_on = {"ignore_unknown_options": entry is lab.lab}  # to JupyterLab
            app.command(name, cls=Command, rich_help_panel=panel, context_settings=passed_on)(entry)


if __name__ == "__main__":
    main()
