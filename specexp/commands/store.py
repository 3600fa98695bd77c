"""`specexp store` and `specexp ui`: results, and MLflow as a view of them."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import typer

from specexp.commands import options as opt
from specexp.errors import UserError

app = typer.Typer(
    cls=opt.Group,
    help="Check results, and publish them to MLflow: to the store's own database or to any server.",
    no_args_is_help=True,
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
INERT = ("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip


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
    """Write one HTML page to send: question, answer, figures, table, exactness, environment and
    parameters.

    It needs no network, no server and no MLflow, and runs nothing.
    """
    from specexp.tracking import report as reporting
    from specexp.tracking import results

    path, everything = Path(what), reporting.of(what)
    name = path.name
    if path.suffix in (".yaml", ".yml") and path.is_file():
        from specexp.grids import points

        every = points.load(
            [path], lambda count: True, checked=False, on_disk=True, kernels="not asked"
        )
        params, name = [p.params for p in every], f"{results.grid_name(path)}.yaml"
        everything = [run for run in everything if run.result["params"] in params]
        if not everything:
            raise UserError(f"none of the points that {what} has now has a result: run it")
    if out is not None:
        opt.check_writable(out)
    if pdf:
        chromium()
    try:
        page = reporting.write(everything, out, [name])
    except (OSError, UserError) as e:
        why = e.__cause__ or e
        if out or not isinstance(why, OSError) or why.errno in results.MACHINE_ERRORS:
            raise
        where = results.root() / "reports"
        raise UserError(f"cannot write to {where}: {why.strerror}; name a file with --out") from e
    for written in [page, *([print_pdf(page)] if pdf else [])]:
        opt.say(str(opt.relative(written)))


def chromium() -> list[str]:
    """The command of Chromium without window or own requests. Raises UserError if there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        names = ", ".join(BROWSERS)
        raise UserError(f"no Chromium on PATH ({names}): install one, or print the page by hand")
    return [browser, *INERT, *["--no-sandbox"] * (os.geteuid() == 0)]  # as root it needs that


def print_pdf(html: Path) -> Path:
    """Print a page to a PDF file beside it; returns its path. Raises UserError."""
    pdf = html.with_suffix(".pdf").resolve()
    with tempfile.TemporaryDirectory() as profile:
        line = [*chromium(), f"--user-data-dir={profile}", "--no-pdf-header-footer",
                f"--print-to-pdf={pdf}", html.resolve().as_uri()]  # fmt: skip
        ran = subprocess.run(line, capture_output=True, text=True, check=False)
    if ran.returncode or not pdf.is_file():
        last = (ran.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"Chromium could not print {html}: {last:.200}")
    return pdf


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
