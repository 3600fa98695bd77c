"""What a pass takes over layers with a window, or with a state, beside layers of full attention.

    OMP_NUM_THREADS=1 PYTHONPATH=tests python -m support.layers --out data/measurements

Builds random models of one kind of layer and, of each, a counterpart that differs in one thing: all
its layers read every token. Where these layers have fewer weights, its MLPs are wider, so that both
read as many. Both are saved, loaded as any folder is, and timed in turns over the tokens of a draft
at the end of a text: the pass, the roll back and the commit, in which one draft token is accepted.
Prints each ratio and writes all of them, `layers.json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from specexp.fast import cuda_graphs
from specexp.measure import interleave
from specexp.measure.hardware import suites
from specexp.measure.interleave import Turn
from specexp.models import load
from specexp.models.lm import LM
from specexp.models.load import DTYPES
from specexp.sequences import Sequences
from specexp.tree import Tree
from specexp.zoo import files

DRAFTS = {
    "1": Tree.chain(0), "5": Tree.chain(4), "9": Tree.chain(8), "9, a tree": Tree.branching(2, 3),
}  # fmt: skip
WINDOW, MULTIPLE = 128, 16  # tokens; of what the width of an MLP is
READ = 64  # tokens of a text that are read; slots before them take as long to read empty
SIDES = "own", "full"  # this kind of layer, full attention
FILE = "layers.json"
WHAT = (
    "CPU seconds (on a GPU seconds) of a round that is not judged: pass, roll back, commit of one "
    "draft token; over those of a model whose layers read every token, with as many weights; ratio "
    "of medians, turns paired, 95 % interval; ms, weights and networks: of both"
)
WARM = 8  # calls of an arm that are not timed, at most


class Family(NamedTuple):
    """Sizes by the model's width E, and the fields that make all its layers of one kind, and of
    full attention; `contexts`: tokens of the texts that are read."""

    kind: str
    layer: str
    contexts: tuple[int, ...]
    mlp: float
    sizes: Callable[[int], dict[str, int]]
    own: Callable[[int], dict[str, Any]]
    full: Callable[[int], dict[str, Any]]


def layer_types(kind: str, **more: Any) -> Callable[[int], dict[str, Any]]:
    return lambda count: {"layer_types": [kind] * count} | more


def heads(E: int, head_dim: int) -> dict[str, int]:
    """Query heads as wide as the model, and a key head for four of them."""
    H = E // head_dim
    return {"num_attention_heads": H, "num_key_value_heads": H // 4, "head_dim": head_dim}


FULL = layer_types("full_attention")
FAMILIES = {  # in the proportions of published models: Gemma 3 1B, Mistral 7B, LFM2 350M, ...
    "Gemma 3": Family(
        "gemma3_text", "window", (64, 1024), 6, lambda E: heads(E, E // 4),
        layer_types("sliding_attention", sliding_window=WINDOW),
        layer_types("full_attention", sliding_window=WINDOW),
    ),
    "Mistral": Family(
        "mistral", "window", (64, 1024), 3.5, lambda E: heads(E, E // 8),
        lambda _: {"sliding_window": WINDOW}, lambda _: {"sliding_window": None},
    ),
    "LFM 2": Family(
        "lfm2", "short convolution", (64,), 4.5,
        lambda E: heads(E, E // 16) | {"block_auto_adjust_ff_dim": False},
        layer_types("conv"), FULL,
    ),
    "Granite 4": Family(
        "granitemoehybrid", "Mamba 2", (64,), 2.75,
        lambda E: heads(E, E // 8) | {
            "mamba_n_heads": 32, "mamba_d_head": E // 16, "mamba_d_state": E // 8,
            "mamba_chunk_size": WINDOW, "num_local_experts": 0, "num_experts_per_tok": 0,
        },
        layer_types("linear_attention"), FULL,
    ),
    "Qwen 3.5": Family(
        "qwen3_5_text", "gated delta rule", (64,), 3.5,
        lambda E: heads(E, E // 4) | {
            "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 16,
            "linear_num_value_heads": 16, "linear_key_head_dim": E // 8,
            "linear_value_head_dim": E // 8,
        },
        layer_types("linear_attention"), FULL,
    ),
    "Jamba": Family(
        "jamba", "Mamba 1", (64,), 3.5,
        lambda E: heads(E, E // 8) | {"num_experts": 1, "mamba_dt_rank": E // 16},
        lambda count: {"attn_layer_period": count + 1, "attn_layer_offset": count},
        lambda _: {"attn_layer_period": 1, "attn_layer_offset": 0},
    ),
}  # fmt: skip


def built(family: Family, E: int, count: int, wide: int, full: bool) -> Any:
    """A random model of `count` layers with MLPs this wide."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(
        family.kind, **family.sizes(E), **(family.full if full else family.own)(count),
        hidden_size=E, num_hidden_layers=count, intermediate_size=wide,
        shared_intermediate_size=wide, vocab_size=256, max_position_embeddings=2048,
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def pair(family: Family, E: int, count: int) -> tuple[Any, Any]:
    """The family's model and its counterpart, whose MLPs make up for the weights it lacks."""

    def weights(wide: int, full: bool) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in built(family, E, count, wide, full).parameters())

    wide = int(family.mlp * E)
    lacks, step = weights(wide, False) - weights(wide, True), weights(wide + MULTIPLE, True)
    wider = wide + MULTIPLE * round(lacks / (step - weights(wide, True)))
    set_seed(0)
    return built(family, E, count, wide, False), built(family, E, count, wider, True)


def rounds(lm: LM, context: int, turns: int) -> dict[str, Callable[[Any], float]]:
    """For each draft, a round after a text that is not judged: the pass, the roll back and the
    commit of one draft token. Returns the CPU seconds that it took. All go on in one text."""
    lm = lm.apart()
    lm.room = max(tree.room for tree in DRAFTS.values())
    ids = torch.randint(lm.vocab, (context + lm.room,), generator=torch.manual_seed(0))
    most = (turns + WARM) * 2 * len(DRAFTS)
    seqs = Sequences.of([ids[:context].tolist()], most, slack=lm.room, device=lm.device)
    lm.allocate(*seqs.tokens.shape)
    lm.prefill(seqs, max(0, context - READ), context - 1)

    def arm(tree: Tree) -> Callable[[Any], float]:
        nodes = tree.nodes(lm.device)
        drafted = ids[None, context:][:, : len(tree) - 1].to(lm.device)
        path = torch.arange(min(2, len(tree)), device=lm.device)[None]  # the root, and its child
        accepted = torch.full((1,), path.shape[1] - 1, device=lm.device)

        @torch.inference_mode()
        def one() -> None:
            draft = seqs.draft(nodes, drafted)
            lm.verify(seqs, draft)
            verdict = draft.judged(path, accepted, accepted)
            lm.keep(seqs, draft, verdict)
            seqs.commit(verdict)

        again = cuda_graphs.capture(one, lm.device)

        def timed(_: Any) -> float:
            begin = time.process_time()
            again()
            return time.process_time() - begin

        return timed

    return {nodes: arm(tree) for nodes, tree in DRAFTS.items()}


def compared(name: str, dtype: str, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each context and draft."""
    family = FAMILIES[name]
    lms = []
    with tempfile.TemporaryDirectory() as folder:
        for side, module in zip(SIDES, pair(family, asked.width, asked.layers), strict=True):
            module.to(DTYPES[dtype]).save_pretrained(f"{folder}/{side}")
            lms.append(load.load(f"{folder}/{side}", f"{name}, {side}", dtype, asked.device))
    for context in family.contexts:
        arms = {(side, nodes): run for side, lm in zip(SIDES, lms, strict=True)
                for nodes, run in rounds(lm, context, asked.turns).items()}  # fmt: skip
        arms = dict(sorted(arms.items(), key=lambda arm: arm[0][1]))  # those compared, together
        label = f"{name}, {family.layer}, {dtype}, {context} tokens"
        timed = interleave.time_in_turns(arms, range(asked.turns), lms[0].device, label)
        if asked.device == "cpu":
            timed = {arm: [Turn(turn.result) for turn in turns] for arm, turns in timed.items()}
        for nodes in DRAFTS:
            turns = [timed[side, nodes] for side in SIDES]
            ratio = interleave.ratio(*turns)
            tqdm.write(f"{label}, nodes {nodes}: {ratio}")
            yield {
                "layer": family.layer, "dtype": dtype, "context": context,
                "nodes": nodes, "ratio": ratio._asdict(),
                "ms": [1e3 * interleave.median_s(turn) for turn in turns],
                "weights": [lm.parameters for lm in lms],
                "networks": [type(lm.net).__name__ for lm in lms],
            }  # fmt: skip


def main(args: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path("data/measurements"))
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options.add_argument("--families", nargs="+", default=[*FAMILIES], choices=[*FAMILIES])
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=[*DTYPES])
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--turns", type=int, default=20)
    asked = options.parse_args(args)
    params = {name: value for name, value in vars(asked).items() if name not in ("out", "families")}
    file = asked.out / FILE
    families = json.loads(file.read_text())["families"] if file.is_file() else {}
    for name in asked.families:  # those of other families stay
        about = suites.about(torch.device(asked.device), torch.float32)
        rows = [row for dtype in asked.dtypes for row in compared(name, dtype, asked)]
        families[name] = {"params": params, "about": about, "rows": rows}
        report = {"experiment": "layers", "what": WHAT, "families": families}
        files.write(file, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
