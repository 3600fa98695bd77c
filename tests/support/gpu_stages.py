"""`make gpu`: what a GPU makes of this toolkit, in stages that each stand alone.

    python -m support.gpu_stages --stage smoke,kernels --minutes 9 --out FOLDER

A stage runs in a process of its own, for so many minutes at most, and writes `gpu_STAGE.json` row
by row: what fails keeps its error, and the next row runs. It needs torch, transformers, pandas,
matplotlib and, for `exactness`, pytest; no typer, papermill or MLflow.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from support import gpu_kernels
from transformers import AutoConfig, AutoModelForCausalLM

from specexp import api, ops
from specexp.api import Pairing
from specexp.errors import UserError, first_line
from specexp.fast.recordings import Recordings
from specexp.measure import break_even, interleave, prompts
from specexp.measure.exactness import compare
from specexp.measure.hardware import peers, roofline, suites, work
from specexp.measure.prompts import Prompt
from specexp.measure.under_load import loops, served
from specexp.models import memory
from specexp.models.lm import LM
from specexp.models.load import of_module, weight_bytes
from specexp.names import read_target
from specexp.serving.cost_table import AXES, Costs
from specexp.zoo import files, shelf, train, twins
from specexp.zoo.heads import train_heads

ROOT = Path(__file__).parents[2]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox", "opt")
DRAFTERS = (
    "model", "sibling-1m", "eagle", "dflash", "medusa", "early_exit:4", "ngram", "suffix",
    "recycle", "planted:0.8", "lookup:eagle",
)  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "ffn_dim": 128,
    "word_embed_proj_dim": 64, "max_position_embeddings": 128, "initializer_range": 0.4,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GEMMA_3_4B = {
    "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "intermediate_size": 10240, "vocab_size": 262208, "sliding_window": 1024,
    "max_position_embeddings": 8192,
}  # fmt: skip
NEW, SERVED = 48, 192  # tokens of a text; of one that is served, among which prefill is less
REQUESTS = 4  # that are served in a turn, beyond one for each stream
FEW = 3  # texts of a pair of which transformers writes a token in 30 ms
DAMP = 0.045  # of deeper layers: α of the first 4 of 32 is then about 3/4
BATCHES = (1, 8, 32, 128, 256)
STREAMS, GAMMAS, TURNS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (2, 5), 5
PASSES = [(B, n, S) for B in (1, 8, 32) for n in (1, 6) for S in (256, 4096)]


class Rows:
    """What a stage has learned so far on a machine, in a file that is whole at any time."""

    def __init__(self, file: Path, machine: dict[str, Any]) -> None:
        self.file, self.machine, self.rows = file, machine, list[dict[str, Any]]()

    def add(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """A row of what `run` returns, or of why it did not."""
        begin = time.perf_counter()
        row: dict[str, Any] = {"name": name, "ok": True}
        try:
            row |= run()
        except Exception as e:  # whatever it is, the next row may be right
            row |= {"ok": False} | failed(e)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.keep(row | {"seconds": round(time.perf_counter() - begin, 2)})

    def keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        report = {"machine": self.machine, "rows": self.rows}
        files.write(self.file, json.dumps(report, indent=1))


def failed(e: Exception) -> dict[str, Any]:
    return {"error": f"{type(e).__name__}: {first_line(e)}", "traceback": traceback.format_exc()}


# --- the stages -----------------------------------------------------------------------------------


def smoke(rows: Rows, device: torch.device) -> None:
    """Does each family load, and does each drafter's round run and give the target's text?"""
    rows.add("copy", partial(copy_rate, device))
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            rows.add(f"{family} in {str(dtype)[6:]}", partial(loads, family, dtype, device))
    for drafter in DRAFTERS:
        for temperature in (0.0, 0.9):
            rows.add(f"{drafter} at {temperature}", partial(speaks, drafter, temperature, device))


def copy_rate(device: torch.device) -> dict[str, Any]:
    copy, copied = roofline.copying(device)
    turns = interleave.time_in_turns({"copy": copy}, range(10), device, "copy", lead=1)
    gb_s = 1e-9 * copied / interleave.median_s(turns["copy"])
    return {"kernels": ops.state(device), "copy_gb_s": gb_s}


def loads(family: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY))
    return {"net": type(of_module(module.to(device, dtype), family).net).__name__}


def speaks(drafter: str, temperature: float, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": temperature, "rule": "match"}
    pair = api.load("target-10m", drafter, device=str(device), dtype="float32", **options)
    texts = pair.encode(["def mean(values):", "import os\n"])
    made = pair.engine.generate(texts, NEW)
    plain, streams = pair.engine.plain(), range(len(texts))
    if bugs := compare(plain, texts, made.tokens, NEW, streams).bugs:
        raise AssertionError(f"{bugs} texts differ from the target's by more than rounding")
    recorder = pair.engine.recorder
    replays = recorder.replays.values() if isinstance(recorder, Recordings) else ()
    return {
        "nets": [type(lm.net).__name__ for lm in pair.engine.models],
        "acceptance": made.trace.acceptance.rate,
        "recorded": sum(replay.run is not None for replay in replays),
    }


def exactness(rows: Rows, device: torch.device) -> None:
    """The tests that need a GPU, in as many processes as there are cores: a fault of the device
    spoils what follows in its process."""
    import pytest

    command = ["tests", "-m", "cuda"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(os.cpu_count() or 1), "--dist", "worksteal"]
    if (code := pytest.main(command, plugins=[Outcomes(rows)])) not in (0, 1):
        raise RuntimeError(f"pytest ended with exit code {int(code)}: not all tests ran")


class Outcomes:
    """A plugin of pytest: a row for each file of tests, which counts each test as it ends."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.of_file = rows, dict[str, dict[str, Any]]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped or (report.when != "call" and report.passed):
            return
        file, _, test = report.nodeid.partition("::")
        if file not in self.of_file:
            self.of_file[file] = {"name": file, "ok": True, "tests": 0, "process_s": 0.0}
            self.rows.rows.append(self.of_file[file])
        row = self.of_file[file]
        row["tests"] += report.when != "teardown"
        row["process_s"] = round(row["process_s"] + report.duration, 2)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None) or report.longrepr
            wrong = row.setdefault("wrong", {})
            wrong[test] = str(getattr(crash, "message", crash))[:300]
            row |= {"ok": False, "error": f"{len(wrong)} tests fail: {json.dumps(wrong)}"}
        self.rows.write()


def kernel_times(rows: Rows, device: torch.device) -> None:
    """Kernels beside their references and beside a copy of as many bytes."""
    for B, n, S in ((1, 6, 4096), (32, 6, 1024), (1, 512, 1024)):
        for call in gpu_kernels.calls(B, n, S, torch.bfloat16, str(device)):
            name = f"{call.name}, {B} x {n} tokens, {S} slots"
            rows.add(name, partial(gpu_kernels.timed, call, device))


def passes(rows: Rows, device: torch.device) -> None:
    """Passes of random models made on the device: Llamas of two sizes, and Gemma 3."""
    configs = {params: twins.SHAPES[params].config() for params in ("8B", "1B")}
    configs["Gemma 3 4B"] = AutoConfig.for_model(**GEMMA_3_4B)
    for kind, config in configs.items():
        made: list[LM] = []
        rows.add(f"{kind}: weights", partial(random_weights, kind, config, device, made))
        for lm, (B, n, S) in product(made, PASSES):
            name = f"{kind}: {B} x {n} tokens, {S} slots"
            rows.add(name, partial(one_pass, lm, B, n, S, roofline.copying(device)))


def random_weights(name: str, config: Any, device: torch.device, made: list[LM]) -> dict[str, Any]:
    """Adds the LM to `made`. Raises UserError if its weights do not fit, and says which would."""
    free = memory.free_memory(device)
    if (need := weight_bytes(config, torch.bfloat16)) > free:
        raise UserError(
            f"the weights take {memory.gib(need)} GiB and {memory.gib(free)} GiB are free: "
            f"{memory.advice(need, 'bfloat16', free)}"
        )
    made.append(of_module(random_module(config, device), f"random {name}"))
    return {"parameters": made[0].parameters, "net": type(made[0].net).__name__}


def random_module(config: Any, device: torch.device) -> Any:
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return AutoModelForCausalLM.from_config(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def one_pass(lm: Any, B: int, n: int, S: int, copy: Any) -> dict[str, Any]:
    arms = {"copy": copy[0], "pass": roofline.a_pass(lm, [1, 2, 3], B, n, S)}
    turns = interleave.time_in_turns(arms, range(roofline.PASSES), lm.device, "pass", lead=1)
    read, pass_s = roofline.pass_bytes(lm, B, n, S), interleave.median_s(turns["pass"])
    share = interleave.ratio(turns["copy"], turns["pass"], read / copy[1])._asdict()
    return {"ms": 1e3 * pass_s, "bytes": read, "gb_s": 1e-9 * read / pass_s, "of_copy": share}


def pair(rows: Rows, device: torch.device) -> None:
    """Whole texts of random models of 8 and 1 billion parameters and drafts that are their first
    layers: where a round's time goes, fixed batches of several sizes, and transformers at the same
    work."""
    for params, size in (("8B", ""), ("1B", "1B: ")):
        made: list[Pairing] = []
        rows.add(f"{size}weights", partial(twin, params, device, made))
        while made:
            of_pair(rows, size, made.pop())


def of_pair(rows: Rows, size: str, pairing: Pairing) -> None:
    suite = partial(suites.run, pairing=pairing, prompts=prompts.load("all", limit=FEW),
                    batches=(1, 8), max_new_tokens=NEW, repeats=2)  # fmt: skip
    rows.add(f"{size}prefill", partial(prefill, pairing))
    rows.add(f"{size}round", partial(suite, "round"))
    for streams in STREAMS[::2]:
        rows.add(f"{size}batch {streams}", partial(in_batch, streams, pairing))
    rows.add(f"{size}peers", partial(suite, "peers"))  # last: transformers compiles for minutes


def prefill(pairing: Pairing) -> dict[str, float]:
    """Milliseconds before the first round of a text, of the target alone and with the drafter:
    medians over texts, each read `TURNS` times once it has been read."""
    texts = pairing.encode([prompt.text for prompt in prompts.load("all", limit=20)])
    row = {"tokens": median(map(len, texts))}
    for name, engine in {"plain": pairing.engine.plain(), "drafting": pairing.engine}.items():
        traces = [engine.generate([text], 1).trace for _ in range(1 + TURNS) for text in texts]
        row[f"{name}_ms"] = 1e3 * median(trace.prefill_s for trace in traces[len(texts) :])
    return row


def in_batch(streams: int, pairing: Pairing) -> dict[str, Any]:
    """How much faster each draft length is than plain decoding, all texts together."""
    texts = pairing.encode([prompt.text for prompt in prompts.load("all", limit=20)])
    batch = [texts[i % len(texts)] for i in range(streams)]
    engines = {"plain": pairing.engine.plain()}
    engines |= {f"gamma {g}": pairing.with_(gamma=g).engine for g in GAMMAS}
    for engine in engines.values():
        engine.eos = ()
    arms = {name: peers.ours(engine, NEW) for name, engine in engines.items()}
    turns = interleave.time_in_turns(
        arms, [batch] * TURNS, pairing.target.device, f"batch {streams}"
    )
    return {name: peers.compared(turns["plain"], turns[name]) for name in engines}


@torch.inference_mode()
def twin(params: str, device: torch.device, made: list[Pairing]) -> dict[str, Any]:
    """Adds a pairing to `made`: a twin as `zoo twin` writes it, but drawn on the device."""
    shape = twins.SHAPES[params]
    target = random_module(shape.config(), device)
    for name, weight in target.named_parameters():
        damp = DAMP if shape.is_deep(name) else 1.0
        weight.copy_(twins.draw(name, weight.shape, weight.dtype, 0, damp, device))
    draft = random_module(replace(shape, layers=shape.draft).config(), device)
    draft.load_state_dict(target.state_dict(), strict=False, assign=True)
    tokenizer = deepcopy(read_target("target-10m").tokenizer)
    tokenizer.add_tokens([f"<{token}>" for token in range(len(tokenizer), shape.rows)])
    made.append(api.load(target, draft, tokenizer=tokenizer))
    return {"parameters": made[0].target.parameters, "draft": shape.draft}


def bench(rows: Rows, device: torch.device) -> None:
    """The suites of `specexp bench` on the zoo's pair; last those with transformers, which compiles
    for minutes, on few texts and on all."""
    pair = api.load("target-10m", "model", device=str(device), dtype="bfloat16")
    texts = prompts.load("all", limit=work.PROMPTS)
    rows.add("prefill", partial(prefill, pair))
    for name in work.NAMES[1:]:
        rows.add(name, partial(suites.run, name, pair, texts, BATCHES, NEW, 3))
    rows.add("peers, few texts", partial(suites.run, "peers", pair, texts[:FEW], (1,), NEW, 1))
    rows.add("peers", partial(suites.run, "peers", pair, texts, BATCHES, NEW, 3))


def sweep(rows: Rows, device: torch.device) -> None:
    """How fast the zoo's pair is served at 1 to 256 streams: plain, at a fixed draft length, and by
    the load."""
    pair = api.load("target-10m", "model", device=str(device), dtype="bfloat16")
    texts = prompts.load("all")
    costs: list[Costs] = []

    def priced() -> dict[str, Any]:
        costs.append(break_even.profile(pair))
        return {name: getattr(costs[0], name) for name in ("batches", "tokens", "lengths")} | {
            name: getattr(costs[0], name).round(7).tolist() for name in AXES
        }

    rows.add("cost table", priced)
    policies = ["plain", "always:4", *("goodput" for _ in costs)]
    for streams in STREAMS:
        rows.add(f"{streams} streams", partial(served_at, streams, pair, policies, costs, texts))


def served_at(
    streams: int, pair: Pairing, policies: list[str], costs: list[Costs], texts: list[Prompt]
) -> dict[str, Any]:
    with patch.object(loops, "turn_tokens", lambda streams: SERVED * (REQUESTS + streams)):
        table = loops.closed_loops(
            pair, policies, next(iter(costs), None), texts, [streams], SERVED, TURNS
        )
    return {"rates": served.rates(table).to_dict("records")}


def training(rows: Rows, device: torch.device) -> None:
    """The zoo's recipes of heads in full, a row at every checkpoint; the next run goes on there."""
    for kind in ("eagle3", "medusa"):
        rows.add(kind, partial(trained, kind, rows, device))


def trained(kind: str, rows: Rows, device: torch.device, quick: bool = False) -> dict[str, Any]:
    def watch(curve: train.Curve) -> None:
        rows.keep({"name": f"{kind} at step {max(curve)}", "ok": True} | curve[max(curve)])

    target = shelf.find("target-10m")
    folder = train_heads(kind, target, device=str(device), quick=quick, watch=watch)
    return {"folder": folder.name}


STAGES: dict[str, Callable[[Rows, torch.device], None]] = {
    "smoke": smoke, "exactness": exactness, "kernels": kernel_times, "passes": passes,
    "pair": pair, "bench": bench, "sweep": sweep, "training": training,
}  # fmt: skip


# --- running them ---------------------------------------------------------------------------------


def supervise(name: str, device: str, minutes: float, out: Path) -> dict[str, Any]:
    """Run a stage in a process of its own; its report, which is also in its file."""
    file = out / f"gpu_{name}.json"
    file.unlink(missing_ok=True)
    options = ["--inside", f"--stage={name}", f"--device={device}", f"--out={out}"]
    begin = time.perf_counter()
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, *options], cwd=ROOT, start_new_session=True,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    try:
        code = process.wait(60 * minutes)
        error = f"it ended with exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        error = f"it was not finished after {minutes:g} minutes"
    report = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    good = sum(row["ok"] for row in report["rows"])
    error = error or ("" if report["rows"] else "it did nothing")
    report |= {"stage": name, "ok": not error and good == len(report["rows"]), "good": good}
    report |= {"error": error, "seconds": round(time.perf_counter() - begin, 1)}
    files.write(file, json.dumps(report, indent=1))
    return report


MODULE = "support.gpu_stages"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__.split("\n")[0])
    every = ",".join(STAGES)
    parser.add_argument("--stage", default=every, help=f"by default {every}")
    parser.add_argument("--minutes", type=float, default=9, help="at most, of one stage")
    parser.add_argument("--out", type=Path, default=Path("data/measurements"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.stage.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"stage {unknown[0]!r} is unknown; there are {every}")
    if options.device.startswith("cuda") and (why := memory.no_cuda()):
        print(f"{why}; --device cpu runs the stages on a CPU", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        file = options.out / f"gpu_{names[0]}.json"
        device = torch.empty(0, device=options.device).device  # with its number
        rows = Rows(file, suites.about(device, torch.bfloat16))
        try:
            STAGES[names[0]](rows, device)
        except Exception as e:
            rows.keep({"name": names[0], "ok": False} | failed(e))
        return 0
    reports = [supervise(name, options.device, options.minutes, options.out) for name in names]
    for report in reports:
        print(f"{report['stage']}: {report['good']} of {len(report['rows'])} rows are right, "
              f"{report['seconds']:.0f} s {report['error']}")  # fmt: skip
        for row in report["rows"]:
            if not row["ok"]:
                print(f"  {row['name']}: {row['error']}")
    return int(not all(report["ok"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())
