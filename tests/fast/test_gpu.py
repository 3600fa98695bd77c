"""On a GPU everything is what it is on a CPU. The same tests run on both: `make gpu` the rest."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import in_turn, on_every_device, one_in
from support.tiny import DRAFTERS, FAMILIES, NEW, PROMPTS, SHAPES, TREES, NoHostReads, engine

from specexp.engine import Engine
from specexp.measure.exactness import TOLERANCE, compare
from specexp.policy import Fixed
from specexp.sequences import Sequences
from specexp.serving.engine_rows import EngineRows
from specexp.serving.requests import Request
from specexp.serving.server import Server
from specexp.serving.sources import Source, serve
from specexp.tree import Tree

FEW = ["chain", "branching", "grown"]
WRONG = [[*text[:5], (text[5] + 1) % 32, *text[6:]] for text in [list(range(NEW))] * len(PROMPTS)]


def bugs(texts: list[list[int]], temperature: float = 0.0) -> int:
    """Differences to plain text on the CPU that no rounding explains."""
    plain = engine("null", "empty", temperature=temperature, dtype=torch.float32)
    return compare(plain, PROMPTS, texts, NEW, range(len(PROMPTS))).bugs


@on_every_device
@pytest.mark.parametrize(
    ("kind", "rule", "tree"),
    one_in(4, ((kind, r, t) for kind, (r, t) in product(DRAFTERS, SHAPES) if t in FEW)),
)
def test_greedy_text_is_that_of_the_cpu(kind, rule, tree, device):
    made = engine(kind, tree, rule, dtype=torch.float32, device=device)
    assert bugs(made.generate(PROMPTS, NEW).tokens) == 0


@on_every_device
@pytest.mark.parametrize(("kind", "tree"), in_turn(DRAFTERS, FEW))
def test_sampled_text_under_match_is_that_of_the_cpu(kind, tree, device):
    made = engine(kind, tree, "match", temperature=0.9, dtype=torch.float32, device=device)
    assert bugs(made.generate(PROMPTS, NEW).tokens, temperature=0.9) == 0


def test_a_text_that_is_another_is_noticed():
    assert bugs(WRONG) == len(PROMPTS)


@torch.inference_mode()
def logits(made: Engine, passes: int, moved: int = 0) -> torch.Tensor:
    """[5, 8, V] of eight known tokens after known texts, in so many passes, so many slots late."""
    texts = torch.randint(1, 32, (5, 32), generator=torch.Generator().manual_seed(0))
    begun = [text[:length] for text, length in zip(texts.tolist(), range(24, 14, -2), strict=True)]
    seqs = made.begin(Sequences.of(begun, 9, slack=9, device=made.target.device))
    seqs.tokens[:, :32] = texts
    count = torch.arange(8 // passes, device=made.target.device)
    nodes, said = Tree.chain(len(count) - 1).nodes(made.target.device), []
    for _ in range(passes):
        draft = seqs.draft(nodes, seqs.tokens.gather(1, seqs.length[:, None] + count[:-1]))
        late = replace(seqs, length=seqs.length + moved)
        said.append(made.target.verify(late, draft).logits.float())
        seqs.length += len(count)
    return torch.cat(said, 1)


@on_every_device
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_says_in_bfloat16_what_single_steps_say(family, device):
    """Within rounding; what lies one slot from where it belongs is far outside."""
    made = engine("null", "empty", family=family, dtype=torch.bfloat16, device=device)
    single = logits(made, passes=8)

    def off(found: torch.Tensor) -> float:
        return float(((found - single).abs().amax(-1) / single.abs().amax(-1)).max())

    assert off(logits(made, passes=1)) <= TOLERANCE[torch.bfloat16]
    assert off(logits(made, passes=1, moved=1)) > 20 * TOLERANCE[torch.bfloat16]


@contextmanager
def watched(device: str):
    """Nothing in here may wait for the device, or reach the host."""
    if device == "cpu":
        with NoHostReads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tree", FEW)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_round_waits_for_nothing(kind, tree, dtype, device):
    made = engine(kind, tree, temperature=0.9, dtype=dtype, device=device)
    shape = TREES[tree]
    seqs = made.begin(Sequences.of(PROMPTS, NEW, slack=shape.room, device=device))
    made.round(seqs, shape)
    with watched(device):
        made.round(seqs, shape)


@on_every_device
@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.branching(2, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["null", "model", "eagle3", "dflash", "ngram", "recycle"])
def test_served_texts_are_those_of_the_cpu(kind, tree, device):
    """Three rows for five requests: texts join, leave and move."""
    made = engine(kind, tree, "match", dtype=torch.float32, device=device)
    bank = EngineRows(made, count=3, slots=64, slack=tree.room)
    requests = [Request(prompt, NEW, stream=i) for i, prompt in enumerate(PROMPTS)]
    responses = serve(Server(bank, Fixed(tree)), Source(requests, 4))
    assert [a.state for a in responses] == ["done"] * len(PROMPTS)
    in_order = sorted(responses, key=lambda a: a.request.stream)
    assert bugs([a.tokens for a in in_order]) == 0
