"""An EAGLE layer with less work makes the features and logits of the layer as it is."""

import copy
import logging

import pytest
import torch
from conftest import also, on_every_device
from support.fusing import (
    NEAR,
    bound,
    furthest,
    in_float64,
    of_its_own,
    through_kernels,
    uncompiled,
    where_kernels_run,
)
from support.norms import DEFAULTS, with_norms
from support.tiny import PROMPTS, V, heads

from specexp.fast.cpu.passes import Native
from specexp.fast.fused import Fused
from specexp.fast.fused_eagle import FusedEagle
from specexp.models.heads import eagle as layers
from specexp.models.heads import layouts
from specexp.models.heads.eagle import Eagle
from specexp.models.heads.weights import save
from specexp.models.lm import LM, Unfused
from specexp.sequences import Sequences
from specexp.tree import Branches, Tree

KINDS = {
    "eagle": lambda: heads("eagle", torch.float32),
    "eagle3": lambda: with_norms(),
    "peagle": lambda: heads("peagle", torch.float32),
    **{norm: lambda norm=norm: with_norms(norm) for norm in (*DEFAULTS, "fc_norm")},
}
TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 5))


def made(kind: str, dtype: torch.dtype, device: str = "cpu") -> Eagle:
    return of_its_own(copy.deepcopy(KINDS[kind]()), dtype, device)


def passed(eagle: Eagle, net) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and logits of a line of places and of a tree after it, over a ragged batch."""
    lm = LM(eagle, "it", V, net or Unfused(eagle))
    seqs = Sequences.of(PROMPTS, 4, slack=len(TREE), device=lm.device)
    B, S = seqs.tokens.shape
    lm.allocate(B, S)
    noise = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 32, (B, 9 + len(TREE)), generator=noise).to(lm.device)
    features = torch.randn(B, 9 + len(TREE), 32, generator=noise).to(lm.device, lm.dtype)
    at = torch.arange(9, device=lm.device).expand(B, -1)
    line = lm.feed(seqs, tokens[:, :9], at, at, None, (0,), features=features[:, :9])
    draft = seqs.draft(TREE.nodes(lm.device), tokens[:, 10:])
    root, nodes = seqs.length[:, None] - 1, draft.nodes
    slots = root + torch.arange(len(TREE), device=lm.device)
    visible = Branches(root, nodes.ancestors)
    tree = lm.feed(
        seqs, draft.tokens, slots, root + nodes.depth, visible, (0,), last=5,
        features=features[:, 9:],
    )  # fmt: skip
    ids = eagle.draft_ids if eagle.shape.fused else slice(None)
    logits = torch.cat([line.logits, tree.logits], 1)[..., ids]
    return torch.cat([line.hidden, tree.hidden], 1), logits


def off(kind: str, dtype: torch.dtype, device: str = "cpu") -> float:
    """By how much they differ from those of the layer as it is in float64, of their size."""
    eagle = made(kind, dtype, device)
    ours = passed(eagle, layers.network(eagle, "it", V))
    return furthest(ours, passed(in_float64(made(kind, dtype, device)), None))


def tells_apart(eagle: Eagle) -> bool:
    """Whether tokens that the head does not know are impossible, and nothing is said of none."""
    lm = LM(eagle, "it", V, layers.network(eagle, "it", V))
    lm.allocate(2, 4)
    tokens = torch.tensor([[5, -1, 7], [-1, 3, -1]])
    at = torch.arange(3).expand(2, -1)
    dirt = [torch.full((64,), float("nan")) for _ in range(64)]  # rooms are not empty
    del dirt
    features = torch.linspace(-1, 1, 2 * 3 * 32).view(2, 3, 32)
    seqs = Sequences.of([[1], [1]], 1, slack=2)
    seen = lm.feed(seqs, tokens, at, at, None, (0,), features=features)
    known = torch.zeros(eagle.config.vocab_size, dtype=torch.bool).index_fill(
        0, eagle.draft_ids, True
    )
    part = tokens >= 0
    told = seen.logits[part]
    nothing = seen.logits[~part].any() or seen.hidden[~part].any()
    return bool(
        told[:, known].isfinite().all() and (told[:, ~known] == -torch.inf).all() and not nothing
    )


@pytest.fixture
def plain(monkeypatch):
    uncompiled(monkeypatch)


@on_every_device
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("kind", KINDS)
def test_fused_eagle_matches_the_layer(plain, kind, dtype, device):
    assert isinstance(layers.network(made(kind, dtype, device), "it", V).net, Fused)
    assert off(kind, dtype, device) < bound(dtype, device)


@where_kernels_run
@pytest.mark.parametrize("kind", ["peagle", *also(*(kind for kind in KINDS if kind != "peagle"))])
def test_eagle_through_kernels_matches_the_layer(kind, device):
    with through_kernels(device):
        assert isinstance(layers.network(made(kind, torch.float32, device), "it", V).net, Fused)
        assert off(kind, torch.float32, device) < bound(torch.float32, "cuda")


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_eagle_matches_the_layer(kind, dtype):
    assert isinstance(layers.network(made(kind, dtype), "it", V).net, Native)
    assert off(kind, dtype) < NEAR[dtype]


@pytest.mark.compiler
def test_tokens_outside_the_draft_vocabulary_are_impossible():
    assert tells_apart(made("eagle3", torch.float32))


def test_eagle_pass_without_logits_makes_the_same_features():
    eagle = made("eagle3", torch.float32)
    lm = LM(eagle, "it", V, layers.network(eagle, "it", V))
    lm.allocate(1, 4)
    seqs, at = Sequences.of([[1]], 1, slack=2), torch.zeros(1, 1, dtype=torch.int64)
    asked = seqs, at + 3, at, at, None, (0,)
    features = torch.linspace(-1, 1, 32)[None, None]
    wanted = lm.feed(*asked, features=features).hidden
    seen = lm.feed(*asked, last=0, features=features)
    assert not seen.logits.numel()
    assert torch.equal(seen.hidden, wanted)


def test_fusing_keeps_the_eagle_layer_and_its_files(tmp_path):
    eagle = made("eagle3", torch.float32)
    weights = {name: tensor.clone() for name, tensor in eagle.state_dict().items()}
    assert isinstance(layers.network(eagle, "it", V), FusedEagle)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in eagle.state_dict().items())
    save(tmp_path, eagle, "target")
    held = layouts.read(tmp_path).tensors()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in held.items())


def biased(eagle):
    eagle.borrowed = eagle.borrowed[0], torch.nn.Linear(32, 32)


def odd(eagle):
    eagle.rotary.inv_freq *= 1.5


def hooked(eagle):
    eagle.layers[0].mlp.register_forward_pre_hook(lambda m, args: args)


def broken(eagle):
    eagle.fc.weight.data[0, 0] = torch.nan


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (biased, "has a bias"),
        (odd, "differ by"),
        (hooked, "it has a hook on layers.0.mlp"),
        (broken, "differ by nan"),
    ],
)
def test_eagle_layer_that_differs_is_unfused_and_logged(spoil, said, caplog):
    eagle = made("eagle", torch.float32)
    spoil(eagle)
    with caplog.at_level(logging.WARNING, "specexp"):
        assert isinstance(layers.network(eagle, "mine", V), Unfused)
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith("mine: run by transformers, not fused, because ")
    assert said in line
