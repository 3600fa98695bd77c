"""`specexp store` and `specexp ui`: results, and MLflow as a view of them."""

from pathlib import Path

import typer

from specexp.commands import options as opt
from specexp.errors import UserError

app = typer.Typer(
    cls=opt.Group,
    help="Check results, and publish them to MLflow's own database or to any server.",
    no_args_is_help=True,
)


def ui(
    port: int = opt.own("Port to listen on, 1 to 65535.", 5000),
    host: str = opt.own("Address to listen on; 127.0.0.1 admits only this machine.", "127.0.0.1"),
) -> None:
    """Serve the MLflow UI for this machine and print a link to each experiment's shared view."""
    if not 1 <= port <= 65535:
        raise UserError(f"--port is {port}; it must be 1 to 65535")

    from specexp.tracking import mlflow_server

    mlflow_server.show(port, host)


def report(
    what: str = typer.Argument(
        help="An experiment's name, a grid file or a result folder.", metavar="RESULTS"
    ),
    out: Path | None = opt.own("The page to write. Default: in the store's reports/."),
    pdf: bool = opt.own("Also print it as PDF, beside it, with Chromium.", False),
) -> None:
    """Write one HTML page to send: question, answer, figures, table, exactness and environment.

    It needs no network, no server and no MLflow, and runs nothing.
    """
    from specexp.tracking import report as reporting
    from specexp.tracking import results

    path, everything = Path(what), reporting.of(what)
    name = path.name
    if path.suffix in (".yaml", ".yml") and path.is_file():
        from specexp.grids import points

        every = points.load(
            [path], lambda count: True, checked=False, on_disk=True, may_compile=None
        )
        params, name = [p.params for p in every], f"{results.grid_name(path)}.yaml"
        everything = [run for run in everything if run.result["params"] in params]
        if not everything:
            raise UserError(f"none of the points that {what} has now has a result: run it")
    if out is not None:
        opt.check_writable(out)
    if pdf:
        reporting.chromium()
    page = reporting.write(everything, out, [name])
    for written in [page, *([reporting.print_pdf(page)] if pdf else [])]:
        opt.say(str(opt.relative(written)))


@app.command("check", cls=opt.Command)
def check() -> None:
    """Check that every result is intact and in MLflow once, unchanged; exit code 4 if not."""
    from specexp.tracking import audit

    raise typer.Exit(0 if audit.show(opt.console) else 4)


@app.command("rebuild", cls=opt.Command)
def rebuild() -> None:
    """Publish every result to MLflow: its database is built anew, the old one is renamed.

    Any server gets what it lacks: `MLFLOW_TRACKING_URI=http://HOST:5000 specexp store rebuild`
    """
    from specexp.tracking import audit
    from specexp.tracking import rebuild as rebuilding

    rebuilding.show(rebuilding.rebuild(opt.console), opt.console)
    raise typer.Exit(0 if audit.show(opt.console) else 4)
