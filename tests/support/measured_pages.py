"""Every measured number on a page comes from a file in data/measurements.

    PYTHONPATH=tests python -m support.measured_pages

writes it there: what stands between `<!-- measured: NAME -->` and `<!-- measured: end -->` is the
text of the function NAME below. It also draws README's two figures.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import specexp
from specexp import figures
from specexp.figures import style
from specexp.fitting import shipped
from specexp.measure import statistics

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "data" / "measurements"
PAGES = [ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")]
MORE = 1.05  # what a window or a state may make of a pass
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n)(.*?)(<!-- measured: end -->)", re.DOTALL)
SHOWN = {"suffix": "`suffix`", "model": "`sibling-3m`, a draft model", "eagle": "`eagle` (EAGLE-3)",
         "medusa": "`medusa`"}  # fmt: skip
OWN = " (itself in 8 bits)"  # as a draft


def load(name: str) -> Any:
    return json.loads((MEASURED / f"{name}.json").read_text())


def drafters() -> pd.DataFrame:
    """Of those that there still are, planted ones aside."""
    runs = pd.DataFrame(load("drafters")["runs"])
    kept = runs["drafter"].str.split(":").str[0].isin({*shipped()} - {"planted"})
    return runs[kept].reset_index(drop=True)


def speedup(run: Any) -> str:
    """Of the metrics of a run, with its interval if there is one."""
    value = f"{run['speedup/measured']:.2f}x"
    if "speedup/ci_low" not in run:
        return value
    return f"{value} [{run['speedup/ci_low']:.2f}, {run['speedup/ci_high']:.2f}]"


def row(run: pd.Series, label: str, *more: str, last: tuple[str, ...] = ()) -> str:
    cells = [
        label, f"{run['acceptance/rate']:.0%}".replace("%", " %"), *more,
        f"{run['acceptance/length']:.2f}", f"{run['cost/draft_steps']:.2f}",
        f"{run['cost/verify_steps']:.2f}", speedup(run), *last,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def paragraph(text: str, width: int = 118) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False) + "\n"


# --- what stands between the marks ---------------------------------------------------------------


def results() -> str:
    """README: the setting, one row for each of some drafters, and what happens under load."""
    file, table = load("drafters"), drafters().set_index("drafter")
    params = file["params"]
    judged = stages("pair")["round"]
    alone = batches().set_index(["arm", "batch"]).loc[(f"γ = {judged['gamma']}", 1), "value"]
    head = (
        f"Greedy decoding of one stream: `{params['target']}`, of the *zoo* (small models in "
        f"`data/zoo`), on {file['device']}, "
        f"{params['gamma']} draft tokens, {params['limit']} prompts "
        "([data](data/measurements/drafters.json)). "
        "A *plain step* is the time of a token of plain decoding. Lookups (`suffix`, `ngram`) copy "
        "earlier text and often draft fewer tokens than they may. The last row is on an "
        f"NVIDIA {gpu_of('pair')}, with {judged['gamma']} draft tokens and "
        f"{judged['texts']} prompts, too few for an interval (in the figure above, one stream is "
        f"one prompt, at {alone:.2f}x); its weights are random, so only its "
        "costs are those of a real pair ([data](data/measurements/gpu_pair.json)).\n"
    )
    rows = "".join(row(table.loc[name], label) for name, label in SHOWN.items())
    return (
        f"{head}\n"
        "| drafter | acceptance rate | tokens per pass "
        "| draft, in plain steps | verify, in plain steps | speedup |\n"
        f"|---|---:|---:|---:|---:|---:|\n{rows}{gpu_row()}\n"
        f"{paragraph(under_load() + gpu() + real(), 120)}"
    )


def real() -> str:
    """A pretrained model: the speedup of its three fastest drafters."""
    file = load("real")
    device = file["device"].replace("shared ", "").removesuffix(" with AMX")
    each = [
        f"`{run['drafter']}`{OWN * run['drafter'].endswith('+int8')} {speedup(run)}"
        for run in sorted(file["runs"], key=lambda run: -run["speedup/measured"])[:3]
    ]
    return f"[SmolLM2-135M](data/measurements/real.json), in chat on {device}: {', '.join(each)}."


def under_load() -> str:
    file = load("load_aware")
    loops = pd.DataFrame(file["closed_loop"])
    one = loops[loops["policy"] == "always:1"].set_index("load")["speedup"]
    lost = 1 - one[one < 1]
    regrets = loops.loc[loops["policy"] == "goodput", "regret"]
    worst, mean = regrets.max(), regrets.mean()
    aware = f"is at least {-worst:.1%} faster than the best fixed length at every load"
    if worst > 0:
        aware = (
            f"is within {worst:.1%} of the best fixed length at every load, {mean:.1%} on average"
        )
    return (
        f"Under load a gain becomes a loss: with `{file['about']['drafter']}` and "
        f"{lost.index.min()} to {lost.index.max()} streams, one draft token costs {lost.min():.0%} "
        f"to {lost.max():.0%} of throughput ([data](data/measurements/load_aware.json)); the "
        f"load-aware policy `goodput` {aware}. "
    ).replace("%", " %")


def stages(name: str) -> dict[str, Any]:
    """The rows of a stage of `make gpu`, by name."""
    return {row["name"]: row for row in load(f"gpu_{name}")["rows"]}


def gpu_of(stage: str) -> str:
    """Its model, as in "H100". The first files of stages name it in that of smoke alone."""
    machine = load(f"gpu_{stage}").get("machine") or stages("smoke")["machine"]
    return str(machine["device"]).removeprefix("NVIDIA ").split()[0]


def verifying() -> pd.DataFrame:
    """What a pass over six tokens takes, in passes over one, by batch; on the GPU and the CPU."""
    passes, batches = stages("passes"), (1, 8, 32)
    rows = []
    for slots in (256, 4096):
        for B in batches:
            one, six = (passes[f"8B: {B} x {n} tokens, {slots} slots"]["ms"] for n in (1, 6))
            rows.append((f"{gpu_of('passes')}, 8B shape, {slots:,} slots", B, six / one))
    costs = load("load_aware")["costs"]
    at, slots = costs["gammas"].index(5), costs["contexts"].index(256)
    for B in batches:
        ms = costs["verify_ms"][costs["batches"].index(B)]
        rows.append(("CPU, target-10m, 256 slots", B, ms[at][slots] / ms[0][slots]))
    return pd.DataFrame(rows, columns=["arm", "batch", "steps"])


def batches() -> pd.DataFrame:
    """Speedup of the pair of 8 billion parameters on the GPU, by draft length and batch size."""
    rows = [
        {"arm": arm.replace("gamma ", "γ = "), "batch": int(name.split()[1]), **side["ratio"]}
        for name, sides in stages("pair").items()
        if name.startswith("batch ")
        for arm, side in sides.items()
        if arm.startswith("gamma ")
    ]
    return pd.DataFrame(rows)


def gpu_row() -> str:
    """README's table: a pair of 8 billion parameters on a GPU. The interval in its file mixes
    repeats with prompts, of which there are few."""
    pair = stages("pair")
    plain, fast = pair["round"]["plain"]["phases"], pair["round"]["fast"]["phases"]
    step = sum(phase["ms"] for phase in plain.values())
    record = pair["round"]["acceptance"]
    run = {
        "acceptance/rate": record["rate"], "acceptance/length": record["length"],
        "cost/draft_steps": fast["draft"]["ms"] / step,
        "cost/verify_steps": fast["verify"]["ms"] / plain["verify"]["ms"],
        "speedup/measured": pair["round"]["speedup"]["measured"]["value"],
    }  # fmt: skip
    layers = pair["weights"]["draft"]
    where = f"8B shape on the {gpu_of('pair')}, drafting with {layers} of its layers"
    return row(pd.Series(run), where)


def gpu() -> str:
    """README: what passes and kernels take on a GPU."""
    peers, one = stages("pair")["peers"]["rows"], stages("passes")["8B: 1 x 1 tokens, 256 slots"]
    assisted = next(peer["ratio"]["value"] for peer in peers if peer["work"] == "draft")
    loss = batches().query("arm == 'γ = 5'").set_index("batch")["value"]
    alone, crowd = (
        f"{r['speedup']:.2f}x"
        for n in (1, 256)
        for r in stages("sweep")[f"{n} streams"]["rates"]
        if r["policy"] == "always:4"
    )
    return (
        f"On the {gpu_of('passes')} (bfloat16), a plain 8B step takes {one['ms']:.1f} ms "
        f"({one['of_copy']['value']:.0%} of memory-copy bandwidth). The 8B pair runs at "
        f"{assisted:.1f}x transformers' assisted generation, but at "
        f"{loss[loss.index.max()]:.2f}x plain decoding at batch {loss.index.max()}; the "
        f"zoo's pair serves one stream at {alone} and 256 at {crowd}. "
    ).replace("%", " %")


def eight_bits() -> str:
    """drafters/README: acceptance, size and time of a draft with 8-bit weights, and of a model that
    drafts for itself."""
    file, real = load("quantised"), load("real")
    whole, small = (pd.Series(run) for run in file["runs"])
    [own] = (run for run in real["runs"] if run["drafter"].endswith("+int8"))
    rate, size, cost = "acceptance/rate", "memory/weights_mb", "cost/draft_steps"
    return paragraph(
        "On the zoo's pair, 8-bit weights shrink the draft model to "
        f"{small[size] / whole[size]:.0%} of its memory at no cost in acceptance: of "
        f"{file['params']['gamma']} draft tokens, {small[rate]:.1%} are accepted instead of "
        f"{whole[rate]:.1%}. On {file['device']}, a draft takes "
        f"{small[cost]:.1f} plain steps instead of {whole[cost]:.1f} "
        "([data](../../data/measurements/quantised.json)). A model can draft for itself, too, with "
        "nothing to train: `--target smollm2 --drafter smollm2+int8` runs there at "
        f"{speedup(own)}, with {own[rate]:.0%} of {real['params']['gamma']} draft tokens accepted "
        "([data](../../data/measurements/real.json))."
        .replace("%", " %"), 104,
    )  # fmt: skip


def longer() -> str:
    """drafters/README: tokens per pass of short and long drafts, alone and behind a lookup."""
    blocks = pd.DataFrame(load("blocks")["runs"]).set_index(["drafter", "gamma"])
    runs = pd.DataFrame(load("lookup")["runs"]).set_index(["temperature", "gamma", "drafter"])
    alone, length = blocks["acceptance/length"], runs["acceptance/length"]
    labels = {"eagle": "`eagle` (EAGLE-3)", "dflash": "`dflash` (the zoo's DSpark)",
              "sibling-3m": "`sibling-3m`"}  # fmt: skip
    cells = [
        (label, *(length[0.0, n, f"{behind}{name}"] for behind in ("", "lookup:") for n in (3, 7)))
        for name, label in labels.items()
    ]
    cells += [
        (label, alone[name, 3], alone[name, 7])
        for name, label in (("dflash2", "DFlash 2"), ("dflash", "DFlash, without a Markov head"))
    ]
    rows = [[label, *(f"{n:.2f}" for n in lengths), "", ""][:5] for label, *lengths in cells]
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    first, editing = blocks["acceptance/first"], runs["length/editing"]
    warm = [f"{length[1.0, 3, f'lookup:{name}']:.2f} instead of {length[1.0, 3, name]:.2f}"
            for name in ("eagle", "sibling-3m")]  # fmt: skip
    return (
        paragraph(
            "Tokens per greedy target pass, with three and seven draft tokens, alone and behind a "
            "lookup, which drafts well where the text repeats itself ([data]"
            "(../../data/measurements/lookup.json), [blocks](../../data/measurements/blocks.json)):"
        )
        + "\n| drafter | three | seven | three, behind a lookup | seven, behind a lookup |\n"
        f"|---|---:|---:|---:|---:|\n{lines}\n"
        + paragraph(
            "EAGLE-3 takes a pass for each draft token; a block is drafted in one, which for "
            "DFlash 2 is not compiled on a CPU. A DFlash block should be as long as in training: "
            f"of its first draft tokens, {first['dflash', 7]:.0%} are accepted in drafts of seven, "
            f"{first['dflash', 3]:.0%} in drafts of three. Behind a lookup, edits of a text gain "
            f"most: {editing[0.0, 7, 'lookup:eagle']:.2f} tokens per pass instead of "
            f"{editing[0.0, 7, 'eagle']:.2f} from seven of EAGLE-3. At temperature 1, where a "
            f"lookup's tokens are chosen, not drawn, three of EAGLE-3 yield {warm[0]}, and three "
            f"of sibling-3m {warm[1]}.".replace("%", " %")
        )
    )  # fmt: skip


def all_drafters() -> str:
    """drafters/README: one row a drafter, and what they share."""
    labels = {"model": "`model` (sibling-3m)", "early_exit:4": "`early_exit:4` (untrained for it)",
              "dflash": "`dflash` (DSpark)"}  # fmt: skip
    rows = "".join(
        row(run, labels.get(run["drafter"], f"`{run['drafter']}`"),
            f"{run['category/prose']:.0%}".replace("%", " %"), last=(f"{run['again']:.2f}x",))
        for _, run in drafters().iterrows()
    )  # fmt: skip
    bench = load("bench")["suites"]["wide"]["rows"]
    wide = next(r for r in bench if r["model"] == "target-10m" and r["tokens"] > 1)
    rules = next(
        r for r in load("rules")["runs"] if r["drafter"] == "sibling-3m" and r["gamma"] == 8
    )
    lengths = rules["length"]
    return (
        "| drafter | acceptance rate | on prose | tokens per pass | draft | verify | speedup "
        "| a minute later |\n"
        f"|---|---:|---:|---:|---:|---:|---:|---:|\n{rows}\n"
    ) + paragraph(
        "Compare acceptance: costs hold for one machine only, and change by the hour. On two Intel "
        f"cores, verifying {wide['tokens']} tokens takes {wide['over_step']['value']:.1f} plain "
        "passes ([data](../../data/measurements/bench.json)), so wide trees gain little. At "
        f"temperature 1, Block accepts more than Reject: {lengths['block']:.2f} tokens per pass "
        f"instead of {lengths['reject']:.2f}, with {rules['gamma']} draft tokens of sibling-3m "
        "([data](../../data/measurements/rules.json)).", 104,
    )  # fmt: skip


def few_prompts() -> str:
    """notebooks/README: what few prompts say of speedups that are the same on all of them."""
    words = []
    for n in (10, 20):
        same = (statistics.speedup(np.full(n, s), *np.ones((3, n))) for s in np.arange(1, 3, 0.01))
        unsure = list(takewhile(lambda speedup: speedup.low <= 1, same))
        below, said = f"{unsure[-1].value + 0.01:.2f}x", statistics.verdict(unsure[0])
        words.append(f'with {n} prompts, one below {below} is "{said}"')
    return paragraph(f"if all prompts show the same speedup: {'; '.join(words)}.", 100)


def servers() -> str:
    """notebooks/README: what other engines do with the same models, drafts and prompts."""
    file, lines = load("servers"), []
    for run in file["runs"]:
        off = [f"{run[f'missing{end}']:+.2f}" for end in ("", "_low", "_high")]
        note = f", {run['note']}" * bool(run["note"])
        lines.append(
            f"| {run['engine']} | `{run['target']}` with `{run['drafter']}`{note} | {run['texts']} "
            f"| {run['alike']:.0f} | {run['per_draft']:.2f} | {run['here_per_draft']:.2f} "
            f"| {off[0]} [{off[1]}, {off[2]}] |\n"
        )
    head = paragraph(
        f"Real servers on {file['device']}, {len(file['runs'][0]['prompts'])} prompts "
        "([data](../data/measurements/servers.json)). With the same draft model, EAGLE-3 or "
        "Medusa heads, DSpark or DFlash 2, vLLM accepts in every prompt just what the reference "
        "accepts, but for two faults that the check found. On a CPU, vLLM's kernel for norms gives "
        "both layers of a block drafter the weights of the first; with that kernel mended, all is "
        "equal (*kernel mended*). And vLLM leaves out the biases of Medusa heads unless their "
        "config.json has `medusa_fc_bias` (heads trained here do now). Lookups differ by "
        "definition: vLLM copies what followed the earliest match, llama.cpp drafts only where "
        "three tokens match, specexp copies after the latest of the longest matches. llama.cpp "
        "keeps keys in 16 bits, and "
        "without drafting it writes the same text.",
        104,
    )
    return (
        f"{head}\n| engine | models | prompts with the target's text | prompts with equal counts "
        "| accepted tokens per draft | in the reference | difference |\n"
        "|---|---|---:|---:|---:|---:|---|\n"
        f"{''.join(lines)}"
    )


def servers_load() -> str:
    """notebooks/README: a server with and without drafting, by load."""
    file = load("servers_load")
    first, *_, last = file["rates"]
    gains = " and ".join(
        f"{row['speedup']:.2f}x [{row['low']:.2f}, {row['high']:.2f}] at load {row['load']}"
        for row in (first, last)
    )
    ttft, plain, tpot = first["ttft_ms"], first["plain_tpot_ms"], first["tpot_ms"]
    reading = first["ttft_ms"] / (first["ttft_ms"] + (file["max_new_tokens"] - 1) * tpot)
    return paragraph(
        f"For example, {file['engine']} with {file['model']}, on {file['device']}, "
        f"{file['prompts']} chats ([data](../data/measurements/servers_load.json)): "
        f"`{file['drafter']}` brings {gains}, though {first['rate']:.0%} of its draft tokens are "
        f"accepted. It drafts in few rounds ({tpot:.1f} ms a token, not {plain:.1f}), and an "
        f"answer of {file['max_new_tokens']} tokens spends {reading:.0%} of its time on the prompt "
        f"(TTFT {ttft:.0f} ms).",
        104,
    )


def simulated() -> str:
    """notebooks/README: how often simulated intervals hold, and a best arm is called faster."""
    table = pd.DataFrame(load("intervals"))
    held = table[~table["what"].str.contains(",")]
    false = table[table["what"].str.startswith("faster")]
    held_in, held_before = (f"{held[when].min():.1%}"[:-1] for when in ("now", "before"))
    false_in, false_before = (f"{false[when].max():.1%}"[:-1] for when in ("now", "before"))
    return paragraph(
        f"with {held['x'].min()} to {held['x'].max()} prompts, of two kinds or Pareto-distributed, "
        f"at least {held_in} % of the 95 % intervals contain the true speedup (an earlier method: "
        f"{held_before} %). The best of up to {false['x'].max()} draft lengths, all as fast as "
        f"plain decoding, is called faster in at most {false_in} % of runs (earlier: "
        f"{false_before} %).", 100,
    )  # fmt: skip


def spread() -> str:
    """measurements/README: one pairing at two streams, in three files."""
    loops = pd.DataFrame(load("load_aware")["closed_loop"]).set_index(["policy", "load"])["speedup"]
    maps = pd.DataFrame(load("break_even")["compared"]).set_index(["gamma", "batch"])["speedup"]
    demo = load("demo")["series"]
    return paragraph(
        "with three draft tokens of sibling-3m, a fixed batch of two measured "
        f"{demo['speedup/at_batch']['2']:.2f}x (`demo.json`) and {maps[3, 2]:.2f}x "
        "(`break_even.json`), and two streams that come and go measured "
        f"{demo['served/at_batch']['2']:.2f}x (`demo.json`) and {loops['always:3', 2]:.2f}x "
        "(`load_aware.json`).", 98,
    )  # fmt: skip


def layers() -> str:
    """models/README: layers with windows or states over layers of full attention."""
    families = load("layers")["families"]
    table = pd.DataFrame(
        [{"family": family, **row, **row["ratio"]}
         for family, part in families.items() for row in part["rows"]]
    )  # fmt: skip
    cases = table.groupby(["family", "layer", "context"], sort=False)
    lines = []
    for (family, layer, context), case in cases:
        cells = [
            ", ".join(f"**{r.value:.2f}**" if r.low > MORE else f"{r.value:.2f}" for r in rows)
            for rows in (case[case["dtype"] == d].itertuples() for d in ("float32", "bfloat16"))
        ]
        lines.append(f"| {family} | {layer} | {context} | {' | '.join(cells)} |\n")
    above, clear = table[table["value"] > MORE], table[table["low"] > MORE]
    unsure = above[above["low"] <= MORE]
    said = [f"{r.family} in {r.dtype} at {r.context} tokens, nodes {r.nodes}: {r.value:.2f} "
            f"[{r.low:.2f}, {r.high:.2f}]" for r in unsure.itertuples()]  # fmt: skip
    params = next(iter(families.values()))["params"]
    return paragraph(
        "The time of a round's pass and roll back, relative to a model of as many weights (its "
        "MLPs are wider) whose layers all attend to every token. Each cell has 1, 5 and 9 nodes in "
        f"a chain, then 9 in a tree; bold if the whole interval lies above {MORE}. Layers are "
        f"{params['width']:,} wide; {params['turns']} turns on one thread of a shared CPU "
        "([data](../../data/measurements/layers.json))."
    ) + (
        "\n| model | its layers | tokens before | float32 | bfloat16 |\n|---|---|---:|---|---|\n"
        f"{''.join(lines)}\n"
    ) + paragraph(
        f"Clearly above {MORE}: {' and '.join(dict.fromkeys(clear['family'])) or 'none'}. "
        f"Above {MORE}, but not clearly: {'; '.join(said) or 'none'}."
    )  # fmt: skip


TEXTS: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        results,
        eight_bits,
        all_drafters,
        longer,
        few_prompts,
        servers,
        servers_load,
        simulated,
        spread,
        layers,
    )
}


def written(page: str) -> str:
    """The page as the measurements have it."""
    return BLOCK.sub(lambda m: m[1] + TEXTS[m[2]]() + m[4], page)


def by_batch(passes: pd.DataFrame, speedups: pd.DataFrame) -> Figure:
    """What verifying takes, and what becomes of the speedup."""
    with style.panels(2, 5.0, 4.2) as (figure, both):
        looks = style.marks([*passes["arm"].unique(), *speedups["arm"].unique()])
        sides = (
            (passes, "steps", "pass over 6 tokens / over 1"),
            (speedups, "value", f"speedup of the 8B shape, {gpu_of('pair')}"),
        )
        for axes, (table, column, label) in zip(both, sides, strict=True):
            axes.axhline(1, color=style.PLAIN, lw=1.5)
            for arm, rows in table.groupby("arm", sort=False):
                axes.plot(rows["batch"], rows[column], label=arm, **looks[arm])
            style.batch_axis(axes, sorted(table["batch"].unique()))
            axes.set(ylabel=label, ylim=(0, None))
            axes.legend()
        wide = speedups[speedups["batch"] == speedups["batch"].max()].set_index("arm")["value"]
        alone = speedups[speedups["batch"] == 1].set_index("arm")["value"]
        said = [f"{alone[arm]:.2f}x becomes {wide[arm]:.2f}x ({arm})" for arm in alone.index]
        batch = speedups["batch"].max()
        style.title(
            figure,
            f"From one stream to {batch} on the {gpu_of('pair')}, {', '.join(said)}",
            "Left: time of a pass. Right: a prompt per stream, random weights; too few repeats for "
            "intervals",
        )
    return figure


def draw() -> None:
    """The figures of README: its two tables, and the rounds of its snippet."""
    columns = {"drafter": "arm", "speedup/measured": "speedup", "speedup/ci_low": "low",
               "speedup/ci_high": "high", "acceptance/length": "length"}  # fmt: skip
    table = drafters().rename(columns=columns)
    steps_s = 1e3 / load("drafters")["plain_step_ms"]
    table = table.assign(promised=table["speedup"].max(), doubt="", plain_tok_s=steps_s)
    params = load("drafters")["params"]
    figures.style.subject(
        f"{params['target']}, {params['gamma']} draft tokens, greedy, one stream, "
        f"{params['limit']} prompts, {load('drafters')['device']}"
    )
    figures.pairings.forest(table).savefig(MEASURED / "drafters.png", dpi=100)
    by_batch(verifying(), batches()).savefig(MEASURED / "gpu.png", dpi=100)
    pair = specexp.load("target-10m", drafter="sibling-3m", gamma=4)
    out = pair.generate(["def mean(values):"], max_new_tokens=64)
    figures.style.subject(str(pair))
    figures.rounds.strip(out, most=12).savefig(MEASURED / "quickstart.png", dpi=100)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
    draw()
