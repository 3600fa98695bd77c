"""Executes one grid point: from its notebook to a verified result in an attempt folder.

Papermill's own verdict is not trusted: it marks the cells of a dead kernel as completed and takes
SystemExit for success. A point succeeds only if every cell was executed without an error and its
result is complete, finite and has the point's parameters. Anything else raises `Failure`. This
module commits and publishes nothing, so it also runs on workers.
"""

import contextlib
import html
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines

from specexp.errors import ran_out
from specexp.grids import notebooks, paths
from specexp.grids.kernels import NoForkServer, Worker
from specexp.grids.points import Point
from specexp.grids.progress import REMOVED, Failure, failure_of
from specexp.terminal import harmless
from specexp.tracking import mlflow_view, redact, results
from specexp.tracking.results import NOTEBOOK, PAGE

LOG = "log.txt"
TIMINGS = ("latency/", "speedup/measured", "throughput/")
WIDGET = "application/vnd.jupyter.widget-view+json"
MAX_OUTPUT = 10_000_000  # characters that are kept of a cell's output
_HTML = threading.Lock()
_SCRIPT = re.compile(r"<script\b.*?</script>", re.DOTALL | re.IGNORECASE)
INERT = (  # a page runs nothing and fetches nothing, whatever its notebook has printed
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
    "font-src data:; style-src 'unsafe-inline'\">"
)

Watch = Callable[[str], None]


def execute(
    point: Point, folder: Path, worker: Worker,
    watch: Watch = lambda message: None, environment: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Run the point's notebook into `folder`, which keeps notebook and log even on failure.

    `watch` is called with the progress; `environment`: variables for the kernel, in addition to
    this process's own. Raises Failure.
    """
    try:
        _run(point, folder, worker, watch, environment or {})
    except Failure:
        with contextlib.suppress(Exception):
            _tidy(folder)
        raise
    _tidy(folder)
    _check(point, folder)


def _tidy(folder: Path) -> None:
    if not results.is_folder(folder):
        raise Failure("invalid-result", REMOVED)
    results.only_files(folder)
    ours = [folder / name for name in (NOTEBOOK, LOG, results.RESULT)]
    for file in filter(Path.exists, ours):
        text = file.read_text(errors="replace")
        safe = redact.hide(text)
        if (safe := harmless(safe) if file.name == LOG else safe) != text:
            file.write_text(safe)
    for file in sorted({*folder.rglob("*")} - {*ours}):  # what the notebook wrote itself
        name = file.relative_to(folder).as_posix()
        with contextlib.suppress(OSError):
            if redact.shows(file.name.encode()) or (file.is_file() and not redact.clean(file)):
                shutil.rmtree(file) if file.is_dir() else file.unlink()
                with (folder / LOG).open("a") as log:
                    message = f"[left out, as it shows a secret: {redact.hide(name)}]"
                    log.write(f"\n{harmless(message)}\n")
    _to_html(folder)


def _run(
    point: Point, folder: Path, worker: Worker, watch: Watch, environment: Mapping[str, str]
) -> None:
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        worker.kill()

    watchdog = threading.Timer(point.timeout_s, expire)
    watchdog.daemon = True
    watchdog.start()
    env = os.environ | {
        "SPECEXP_ATTEMPT": str(folder), "SPECEXP_EXPERIMENT": point.experiment,
        "SPECEXP_MLRUNS": str(results.root()),
        "MLFLOW_DISABLE_TELEMETRY": "true", "TOKENIZERS_PARALLELISM": "false",
        **environment,
    }  # fmt: skip
    try:
        with worker.kernel(
            env=env, cwd=point.notebook.parent, log=folder / LOG,
            seed=int(point.run_key[:8], 16), device=point.device,
        ) as kernel, (folder / LOG).open("a") as log:  # fmt: skip
            ran = papermill.execute_notebook(
                _literal(point.notebook), _literal(folder / NOTEBOOK), parameters=point.params,
                engine_name="specexp", kernel_name="python3", language="python",
                progress_bar=False, km=kernel, log_file=log, watch=watch,
            )  # fmt: skip
    except papermill.PapermillExecutionError as e:
        folders = point.notebook.parent, point.file.parent
        message = paths.as_written(f"{e.ename}: {e.evalue}", point.params, *folders)
        raise Failure(_kind(e.ename, e.evalue), message) from e
    except Failure:
        raise
    except Exception as e:
        if expired.is_set():
            raise Failure(
                "timeout",
                f"took longer than {point.timeout_s:g} s: raise timeout_s in grid {point.grid}",
            ) from e
        if isinstance(e, NoForkServer):
            raise Failure("lost", str(e)) from e
        if isinstance(e, DeadKernelError):
            raise Failure("kernel-died", _death(worker.ended) or str(e)) from e
        if isinstance(e, OSError) and e.errno:  # not the notebook's: papermill wraps those
            raise failure_of(e, folder) from e
        raise Failure("error", f"{type(e).__name__}: {e}") from e
    finally:
        watchdog.cancel()
    code = (cell for cell in ran.cells if cell.cell_type == "code")
    own = (cell.source for cell in code if notebooks.INJECTED not in cell.metadata.get("tags", []))
    if notebooks.digest_of(own) != point.identity.parts["notebook"]:
        raise Failure("invalid-result", "the notebook changed before it ran: run the grid again")


def _literal(path: Path) -> str:
    """A path escaped for papermill, which would replace {names} by parameters."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _kind(name: str, value: str) -> str:
    if name == "OSError" and any(f"[Errno {n}]" in value for n in results.FULL):
        return "disk"
    return "oom" if name in ("OutOfMemoryError", "MemoryError") or ran_out(value) else "error"


def _death(ended: str) -> str:
    why = "it crashed, or the notebook ended it"
    if "SIGKILL" in ended:
        why = "most likely the machine ran out of memory"
    return ended and f"the kernel {ended}: {why}"


class _Client(PapermillNotebookClient):
    """Papermill's client, with a log, progress messages and a limit on output."""

    def __init__(self, *args: Any, log_file: Any, watch: Watch, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log, self._watch = log_file, watch
        self._written: dict[int, int] = {}
        self.on_cell_start = lambda cell, cell_index: self._tell(cell_index)
        self.on_cell_executed = self._executed

    def _executed(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        """Fail if a cell called `exit`: it counts as executed, and the kernel ends only later."""
        payload = execute_reply["content"].get("payload", ())
        if any(part.get("source") == "ask_exit" for part in payload):
            raise Failure("invalid-result", f"cell {cell_index + 1} calls exit or quit")

    def start_new_kernel_client(self) -> Any:
        """Replies are waited for a second at a time: one that comes while a widget's output is sent
        through the same socket may wake nobody, and its cell would never end."""
        client = super().start_new_kernel_client()
        get_msg = client.shell_channel.get_msg

        async def patient(timeout: float | None = None) -> Any:
            while timeout is None:
                with contextlib.suppress(Empty):
                    return await get_msg(timeout=1)
            return await get_msg(timeout=timeout)

        client.shell_channel.get_msg = patient
        return client

    def _tell(self, cell_index: int, message: str = "") -> None:
        self._watch(f"cell {cell_index + 1} of {len(self.nb.cells)}  {message[:80]}")

    def handle_comm_msg(self, outs: Any, msg: dict[str, Any], cell_index: int) -> None:
        """A progress bar is a widget here: its text comes beside the cell's output."""
        text = msg["content"]["data"].get("state", {}).get("value")
        if isinstance(text, str) and text:
            self._tell(cell_index, html.unescape(text).replace("\u2007", " "))
        super().handle_comm_msg(outs, msg, cell_index)

    def output(self, outs: Any, msg: dict[str, Any], display_id: Any, cell_index: int) -> Any:
        text = msg["content"].get("text", "")
        before = self._written.get(cell_index, 0)
        size = len(text) or len(json.dumps(msg["content"].get("data", ""), default=str))
        self._written[cell_index] = before + size
        if before + size > MAX_OUTPUT:
            if before <= MAX_OUTPUT:
                message = f"\n[more than {MAX_OUTPUT:,} characters: the rest is left out]\n"
                outs.append(nbformat.v4.new_output("stream", name="stderr", text=message))
                self._log.write(message)
            return None
        if text:
            self._log.write(text)
            self._log.flush()
            self._tell(cell_index, text.strip().rpartition("\n")[2].rpartition("\r")[2])
        return super().output(outs, msg, display_id, cell_index)


class _Engine(NBClientEngine):
    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **kwargs: Any) -> Any:
        options = {n: kwargs[n] for n in ("km", "log_file", "watch")}
        # a cell whose reply is there has ended, even if a flood of output has lost the end of it
        options |= {"raise_on_iopub_timeout": False}
        return _Client(nb_man, kernel_name=kernel_name, **options).execute()


papermill_engines.register("specexp", _Engine)


def _check(point: Point, folder: Path) -> None:
    try:
        ran = nbformat.read(folder / NOTEBOOK, as_version=4)
    except (ValueError, nbformat.ValidationError):
        raise Failure("invalid-result", f"{NOTEBOOK} cannot be read") from None
    for number, cell in enumerate(ran.cells, 1):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        if cell.execution_count is None:
            raise Failure("invalid-result", f"cell {number} was never executed")
        for output in cell.outputs:
            if output.output_type == "error":
                raise Failure("invalid-result", f"cell {number} raised {output.ename}")
    device = point.identity.parts["device"]
    try:
        record = results.load(folder / results.RESULT)
        problems = mlflow_view.problems_of(record)
        logged = dict(record["params"])
        ran_on = record.get("tags", {}).get("device", device)
    except FileNotFoundError:
        raise Failure("invalid-result", "the notebook never called runs.log") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Failure("invalid-result", f"{results.RESULT} cannot be read") from None
    logged_by_all = (n for ran in results.runs_in(record).values() for n in ran["metrics"])
    if not point.timed and (timings := [n for n in logged_by_all if n.startswith(TIMINGS)]):
        problems.append(
            f"it logs {timings[0]}, but its metadata say that it measures no time, so other points "
            'may have run beside it: remove "timed": false there'
        )
    if logged != point.params:
        odd = [n for n in point.params if logged.get(n) != point.params[n]]
        odd += [n for n in logged if n not in point.params]
        problems.append(f"it logged parameters that differ from its own: {', '.join(odd)}")
    if ran_on != device:
        advice = "leave out --jobs, or name GPUs of one kind in CUDA_VISIBLE_DEVICES"
        problems.append(f"it ran on {ran_on}, and its key names {device}: {advice}")
    if problems:
        raise Failure("invalid-result", "; ".join(problems))


def _make_readable(ran: Any) -> None:
    """Title a notebook by its first heading, and drop its widgets: no kernel moves them."""
    for cell in ran.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
        heading = re.search(r"^# +(.+)", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and heading:
            ran.metadata.setdefault("title", heading[1])


_exporter = cache(HTMLExporter)


def _to_html(folder: Path) -> None:
    page, text = f"This notebook could not be converted to HTML; see {NOTEBOOK}.", ""
    with _HTML, contextlib.suppress(Exception):  # the result may be right all the same
        ran = nbformat.read(folder / NOTEBOOK, as_version=4)
        _make_readable(ran)
        text = f"{nbformat.writes(ran)}\n"
        page, _ = _exporter().from_notebook_node(ran)
        page = _SCRIPT.sub("", page).replace("<head>", f"<head>\n{INERT}", 1)
    if text:
        (folder / NOTEBOOK).write_text(text)
    (folder / PAGE).write_text(harmless(page))
