"""Inputs of operations, on which a kernel is compared with its reference.

`INPUTS[operation](dice)` makes a `Case`. Sizes are small, ties, padding and rows that are done are
frequent, and some inputs are ones that a kernel may refuse: another dtype, strided, expanded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from support.scaled import Scaled
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specexp import engine, ops, rules, sampling, sequences
from specexp.drafters.ngram import NGram
from specexp.drafters.recycle import Table
from specexp.drafters.suffix import Suffix
from specexp.engine import Engine
from specexp.fast import fused, lighter
from specexp.models import cache, lm
from specexp.models.cache import SlotCache, Slots
from specexp.models.lm import Forward
from specexp.models.memory import Layer
from specexp.models.scans import FIRST, NOTHING, NOWHERE, Scan, Walk, Window
from specexp.rules import Block, Match, Reject
from specexp.sampling import ACCEPT, RESIDUAL, TOKEN, Certain, Noise, Sampling, _signed
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Branches, Nodes, Tree

SHAPES: list[dict[str, Any]] = [
    {}, {"top_k": 2}, {"top_k": 7}, {"top_p": 0.37}, {"top_p": 0.93, "top_k": 5},
]  # fmt: skip
LAST = (1 << 64) - 1


@dataclass
class Case:
    """Arguments of an operation; `changed` gives what it may have changed of them. `near`: by how
    much floating-point results may differ, relatively and absolutely."""

    args: tuple[Any, ...]
    changed: Callable[[], list[Tensor]] = list
    near: tuple[float, float] = (0.0, 0.0)


ROUNDED = (2e-6, 1e-37)


def tensors(x: Any) -> list[Tensor]:
    """The tensors in a result or in arguments, in order."""
    if isinstance(x, Tensor):
        return [x]
    if is_dataclass(x):
        return tensors([getattr(x, f.name) for f in fields(x)])
    if isinstance(x, (list, tuple)):
        return [tensor for part in x for tensor in tensors(part)]
    return tensors(x.state) if isinstance(x, Table) else []


class Dice(random.Random):
    """Chance, and tensors on one device."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__(seed)
        self.device = torch.device(device)
        self.torch = torch.Generator().manual_seed(seed)

    def often(self) -> bool:
        return self.random() < 0.3

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 from low to high - 1."""
        return torch.randint(low, high, shape, generator=self.torch).to(self.device)

    def uniform_(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.torch).to(self.device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.torch).to(self.device)

    def odd(self, x: Tensor) -> Tensor:
        """x, sometimes in another dtype or with other strides."""
        if self.random() < 0.1:
            return x.to(self.choice([torch.float64, torch.bfloat16]))
        if self.random() < 0.1 and x.dim():
            return torch.stack([x, x], -1)[..., 0]
        return x

    def weight(self, x: Tensor) -> Tensor:
        """A matrix of weights, sometimes in 8 bits."""
        return Scaled.of(x) if self.often() else x

    def tree(self) -> Tree:
        shape = self.choice(["chain", "chain", "3", "2x2", "3x1x1"])
        return Tree.parse(shape, self.randint(0, 4))

    def nodes(self, tree: Tree, B: int) -> Nodes:
        """A tree's, or those of one tree a row, each node following any before it."""
        if self.often():
            N = len(tree)
            rows = [[0, *sorted(map(self.randrange, range(1, N)))] for _ in range(B)]
            return Nodes.of(torch.tensor(rows, device=self.device), max(N - 1, 0), N)
        return tree.nodes(self.device)

    def rows(self, vocab: int = 4, S: int = 20) -> Sequences:
        """Rows of a bank and of its slots; some are done, ends of text are frequent."""
        B, first = self.randint(1, 4), self.randint(0, 2)
        length = self.whole(1, S - 12, first + B)
        bank = Sequences(
            self.whole(0, vocab, first + B, S), length, length + self.whole(-1, 5, first + B),
            self.whole(-9, 9, first + B), torch.arange(self.randint(0, 2), device=self.device),
            rng=self.noise(),
        )  # fmt: skip
        seqs = bank.window(first, B, S - self.randint(0, 2))
        if self.often():
            seqs.budget = self.whole(-1, 4, B)
        return seqs

    def depth(self, seqs: Sequences) -> Tensor:
        """[b, n]: of all rows, or of each."""
        return self.whole(-3, 5, self.choice([1, len(seqs.length)]), self.randint(0, 5))

    def logits(self, *shape: int) -> Tensor:
        """Some are -inf and some are equal, or are once the largest is subtracted, but one of a
        token is finite."""
        logits = self.normal(*shape) * self.choice([1, 4])
        logits = logits.round() if self.often() else logits
        if self.random() < 0.2:
            logits = torch.where(logits < 0, 0.1 + 1e-8 * logits, logits + 4)
        logits[self.uniform_(*shape) < self.choice([0, 0.3])] = -torch.inf
        logits[..., self.randrange(shape[-1])] = 1.0
        return logits

    def broken(self, *shape: int) -> Tensor:
        """Few different numbers, of which some are none."""
        w = self.whole(-1, 2, *shape).float()
        w[self.uniform_(*shape) < self.choice([0, 0.05])] = self.choice([torch.inf, torch.nan])
        w[self.uniform_(*shape[:-1]) < 0.1] = -torch.inf
        return w

    def noise(self) -> Noise:
        return Noise(self.randint(0, 9), by_round=self.often())


def unmixed(x: int) -> int:
    """The number of which `mix` makes x."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        y = x
        for _ in range(64 // shift):
            y = x ^ y >> shift
        x = y * pow(factor, -1, 1 << 64) & LAST
    return x


def key_of(noise: Noise, purpose: int, lane: int, bits: int) -> int:
    """The key at which this lane is hashed to these bits."""
    at = unmixed(bits) - lane * 0x9E3779B97F4A7C15
    return _signed((unmixed(at & LAST) - noise.salt(purpose)) & LAST)


# --- sampling.py ----------------------------------------------------------------------------------


def likeliest(dice: Dice) -> Case:
    shape = [dice.randint(1, 3) for _ in range(dice.randint(0, 2))]
    return Case((dice.odd(dice.broken(*shape, dice.choice([1, 3, 15, 16, 17, 40, 1000]))),))


def ranked(dice: Dice) -> Case:
    """No two are equal: of equals, torch's order is not said."""
    shape = dice.randint(1, 4), dice.randint(1, 3), dice.choice([1, 3, 16, 40, 250])
    w = dice.uniform_(*shape).argsort(-1).float() - dice.choice([0, 1, 20])
    w[w == 2] = -torch.inf
    w[w == 1] = dice.choice([1.0, torch.inf, torch.nan])
    return Case((dice.odd(w), dice.randint(1, min(shape[-1], dice.choice([9, 9, 40])))))


def race(dice: Dice) -> Case:
    noise, V = dice.noise(), dice.choice([2, 5, 17, 40])
    purpose = dice.choice([TOKEN, ACCEPT, RESIDUAL])
    if dice.often():
        odd = [key_of(noise, purpose, 1, bits) for bits in (0, 1, LAST, LAST >> 1)]
        keys = torch.tensor(odd, device=dice.device)
    else:
        keys = dice.whole(-(1 << 62), 1 << 62, dice.randint(1, 30), 6)[:, dice.randint(0, 5) :]
        keys = keys if dice.often() else keys.contiguous()
    w = torch.where(dice.uniform_(*keys.shape, V) < 0.2, 0, dice.uniform_(*keys.shape, V))
    return Case((noise, dice.odd(w), keys, purpose), near=ROUNDED)


def uncoupled(dice: Dice) -> Case:
    """Of one part and of several."""
    noise, w, keys, _ = race(dice).args
    if dice.often():
        w = w.repeat_interleave(dice.choice([64, 300]), -1)
        w[..., dice.randint(0, 900) :: dice.randint(1, 4)] = 0
    return Case((noise, w, keys))


def draw(dice: Dice) -> Case:
    """As many as have weights: of those without, torch's order is not said."""
    noise, w, keys, _ = race(dice).args
    few = int((w > 0).sum(-1).min().clamp(1, 9))
    return Case((noise, w, dice.randint(1, few), keys))


def law(dice: Dice) -> Case:
    shape = dice.randint(1, 4), dice.randint(1, 4), dice.choice([1, 2, 5, 17, 40])
    cuts = {} if dice.often() else dice.choice(SHAPES)
    sampling = Sampling(dice.choice([0.0, 0.3, 1.7]), **cuts)
    near = (1e-5, 1e-37)  # on a GPU torch multiplies by the reciprocal of a temperature
    return Case((sampling, dice.odd(dice.logits(*shape))), near=near)


# --- sequences.py ---------------------------------------------------------------------------------


def places(dice: Dice) -> Case:
    seqs = dice.rows()
    return Case((seqs, dice.depth(seqs)))


def keys(dice: Dice) -> Case:
    seqs = dice.rows()
    return Case((dice.noise(), seqs.stream, seqs.length, dice.depth(seqs)))


def read(dice: Dice) -> Case:
    seqs = dice.rows()
    B, S = seqs.tokens.shape
    slots = dice.whole(0, S, B, 6)
    return Case((seqs, slots[:, ::2] if dice.often() else slots))


def commit(dice: Dice) -> Case:
    seqs, D = dice.rows(), dice.randint(0, 5)
    B = len(seqs.length)
    path = dice.whole(0, D + 1, B, D + 1)
    verdict = Verdict(path, dice.whole(0, D + 1, B), dice.whole(0, 4, B, D + 1))

    def changed() -> list[Tensor]:
        slot = torch.arange(seqs.tokens.shape[1], device=dice.device)
        text = seqs.tokens.masked_fill(slot >= seqs.length[:, None], -1)
        return [text, seqs.length, seqs.limit]

    return Case((seqs, verdict), changed)


def columns(dice: Dice) -> Case:
    B = dice.randint(1, 4)
    parts = [dice.whole(-1, 9, B, 3)[:, dice.randint(0, 2)] for _ in range(dice.randint(1, 5))]
    return Case(tuple(x[:, None] for x in parts))


def until(dice: Dice) -> Case:
    tree, seqs = dice.tree(), dice.rows()
    B, depth = len(seqs.length), dice.nodes(tree, len(seqs.length)).depth
    tokens, budget = dice.whole(-1, 9, B, len(tree)), dice.whole(-1, 4, B)
    return Case((tokens, depth if dice.random() < 0.7 else dice.whole(0, 4, 1, 1), budget))


def round_report(dice: Dice) -> Case:
    B, N = dice.randint(1, 4), dice.randint(1, 5)
    fault = torch.where(dice.uniform_(3, B + 2) < 0.3, torch.nan, 0.0)
    faults = [row[1 : B + 1] for row in fault[: dice.randint(1, 3)]]
    return Case((dice.whole(0, 9, B, 3), dice.whole(-1, 9, B, N), faults))


# --- rules.py -------------------------------------------------------------------------------------


def follow(dice: Dice) -> Case:
    """Draft tokens agree often, some were not made."""
    seqs, tree = dice.rows(), dice.tree()
    B, nodes = len(seqs.length), dice.nodes(tree, len(seqs.length))
    draft = seqs.draft(nodes, dice.whole(-1, 2, B, len(tree) - 1))
    return Case((draft, dice.whole(0, 2, B, len(tree))))


def judged(dice: Dice, tree: Tree, nodes: Nodes, B: int) -> tuple[Draft, Tensor]:
    """A draft and the target's p: draft tokens that were drawn or chosen, twins among siblings, or
    none; q like p, or far from it, or none, or 0 in some rows, or so large that nothing of p is
    left."""
    N, V = len(tree), dice.choice([2, 5, 17, 40])
    if B < 5 and dice.random() < 0.1:
        V = 2 * sampling.PART + 40
    p, away = dice.logits(B, N, V).softmax(-1), dice.logits(B, N, V).softmax(-1)
    behind = dice.choice([p, away, (p + away) / 2, torch.ones_like(p)])
    seqs = Sequences(
        dice.whole(0, V, B, 9), dice.whole(1, 9, B), torch.full((B,), 9, device=dice.device),
        dice.whole(0, 9, B), dice.whole(0, 1, 0), rng=dice.noise(),
    )  # fmt: skip
    drawn = behind.gather(1, nodes.parents.expand(B, N)[..., None].expand(B, N, V))
    drafted = torch.multinomial(drawn.flatten(0, 1).cpu(), 1, generator=dice.torch)
    drafted = drafted.view(B, N)[:, 1:].to(dice.device)
    drafted = drafted.masked_fill(dice.uniform_(B, N - 1) < dice.choice([0, 0.2]), -1)
    behind = behind.masked_fill(dice.uniform_(B, 1, 1) < dice.choice([0, 0.4]), 0)
    return seqs.draft(nodes, drafted, behind if dice.random() < 0.7 else None), p


def reject(dice: Dice) -> Case:
    B, tree = dice.choice([1, 4, 30]), dice.tree()
    draft, p = judged(dice, tree, dice.nodes(tree, B), B)
    rng = Certain() if dice.random() < 0.1 else dice.noise()
    return Case((Reject(dice.choice([1.0, 0.6])), draft, dice.odd(p), rng))


def judged_whole(dice: Dice) -> Case:
    """A rule, and what the target said as logits. Few numbers occur in them, so many are equal."""
    rule = dice.choice([Match(), Reject(dice.choice([1.0, 0.6])), Reject(), Block()])
    tree = Tree.chain(dice.randint(0, 4)) if isinstance(rule, Block) else dice.tree()
    B = dice.randint(1, 3)
    nodes = tree.nodes(dice.device) if isinstance(rule, Block) else dice.nodes(tree, B)
    draft, p = judged(dice, tree, nodes, B)
    sampling = Sampling(
        dice.choice([0.0, 0.3, 1.7]), **(dice.choice(SHAPES) if dice.often() else {})
    )
    logits = p.log() if dice.often() else dice.logits(*p.shape)
    logits = logits.to(dice.choice([torch.float32, torch.bfloat16, torch.float16]))
    made = SimpleNamespace(rule=rule, sampling=sampling, rng=sampling.rng(dice.randint(0, 9)))
    made.law = partial(Engine.law, made)
    return Case((draft, Forward(dice.odd(logits), None), made))


def block(dice: Dice) -> Case:
    B, tree = dice.choice([1, 4, 30]), Tree.chain(dice.randint(0, 4))
    draft, p = judged(dice, tree, tree.nodes(dice.device), B)
    return Case((Block(), draft, dice.odd(p), dice.noise()))


# --- drafters/ ------------------------------------------------------------------------------------


def drafting(dice: Dice) -> tuple[int, Sequences, Tree]:
    """A vocabulary, rows whose prompts hold ids beyond it, and a tree."""
    V = dice.choice([3, 6, 12])
    trees = Tree.branching(2, 2), Tree.branching(3, 1, 2), Tree((-1, 0, 0, 0, 1, 1, 3, 4))
    tree = dice.choice([*trees, *map(Tree.chain, range(6))])
    seqs = dice.rows(dice.choice([2, V, V + 2]), 45)
    if dice.often():  # what follows a match soon runs past the end of the text
        slot = torch.arange(seqs.tokens.shape[1], device=dice.device)
        seqs.tokens.copy_(seqs.tokens[:, slot % dice.randint(2, 5)])
    return V, seqs, tree


def lookup(dice: Dice) -> Case:
    V, seqs, tree = drafting(dice)
    return Case((NGram(dice.choice([1, 2, 3, 4, 99]), V), seqs, tree, Certain()))


def vote(dice: Dice) -> Case:
    V, seqs, tree = drafting(dice)
    shares = dice.choice([0.1, 0.2, 0.5]), dice.choice([0.5, 1.0, 3.0])
    return Case((Suffix(V, dice.choice([1, 2, 3, 4, 99]), *shares), seqs, tree, Certain()))


def table(dice: Dice) -> tuple[Table, slice, Tensor]:
    """A table in which tokens share places, some of its rows, and tokens of which some are none."""
    B, first, V = dice.randint(1, 4), dice.randint(0, 2), dice.choice([3, 6, 12])
    k = dice.choice([4, 6])
    notes = Table(first + B, V, k, dice.device, dice.choice([2, V]))
    rows = slice(first, first + B)
    for _ in range(dice.randint(0, 2)):
        some = dice.whole(-1, V, B, 5)
        notes.write(rows, some, dice.whole(-1, V, *some.shape, k))
    tokens = dice.whole(-1, V + 2, B, 6)
    return notes, rows, tokens[:, ::2] if dice.often() else tokens


def recall(dice: Dice) -> Case:
    return Case(table(dice))


def note(dice: Dice) -> Case:
    notes, rows, tokens = table(dice)
    news = dice.whole(-1, 9, *tokens.shape, *notes.notes.shape[2:])

    def changed() -> list[Tensor]:
        some = torch.arange(-1, 14, device=dice.device).expand(len(tokens), -1)
        return [type(notes).read.__wrapped__(notes, rows, some)]  # type: ignore[attr-defined]

    return Case((notes, rows, tokens, news), changed)


# --- models/ --------------------------------------------------------------------------------------


def spoil(dice: Dice) -> Case:
    B, V = dice.randint(1, 4), dice.choice([3, 17, 40])
    fault = torch.where(dice.uniform_(B + 2) < 0.2, torch.nan, 0.0)
    logits = dice.broken(B, dice.randint(1, 3), V)
    logits = logits[..., :-1] if dice.often() else logits
    return Case((fault[1 : B + 1], logits), lambda: [fault.isnan()])


def product(dice: Dice) -> Case:
    n, inputs, outputs = dice.randint(1, 20), dice.choice([3, 33, 1024]), dice.choice([1, 8, 40])
    n = 30 if dice.random() < 0.1 else n
    x, weight = dice.normal(n, inputs), dice.normal(outputs, inputs) / inputs**0.5
    x = torch.stack([x, x], -1)[..., 0] if dice.often() else x
    x = x[None] if dice.often() else x
    dtype = torch.float64 if dice.often() else torch.float32  # no matrices of bfloat16
    bias = None if dice.often() else dice.normal(outputs).to(dtype)
    return Case((x.to(dtype), dice.weight(weight.to(dtype)), bias), near=(1e-5, 1e-5))


COARSE = {torch.float32: (1e-5, 1e-5), torch.float16: (5e-3, 5e-3), torch.bfloat16: (0.03, 0.03)}
KINDS = list(COARSE)
ROWS = [1, 3, 16, 17, 30]  # of a product


def attention_info(dice: Dice) -> tuple[fused.AttentionInfo, SimpleNamespace, int, torch.dtype]:
    """Tokens of some rows of a cache with one layer in use, a line or a tree; and that layer."""
    kinds = KINDS if dice.device.type == "cuda" else KINDS[:2]  # Triton's interpreter multiplies
    dtype, d = dice.choice(kinds), dice.choice([4, 16, 24])  # no matrices of bfloat16
    K, group = dice.choice([(1, 4), (2, 2), (2, 1)])
    first, B, n = dice.randint(0, 1), dice.randint(1, 2), dice.choice([1, 2, 5])
    S, window = dice.choice([12, 40, 150]), dice.choice([0, 0, 3, 9])
    if block := dice.random() < 0.2:  # all see each other, and are more than a program takes
        n, S, window = 20, 150, 0
    cache = SlotCache([Layer(window=window)], first + B, S + 3)
    if window and dice.often():  # a ring, of as few places as a pass may need
        size = min(S + 3, window + n)
        cache.sizes = {window: size}
        cache.layers = [Slots(cache, window)]
    slots = dice.whole(0, S - 2 * n, B, 1) + torch.arange(n, device=dice.device)
    cache.aim(slice(first, first + B), slots, S)
    positions = slots
    if block or dice.often():
        b, M = dice.choice([1, B]), n + dice.randint(0, 2)
        own = torch.eye(n, M, dtype=torch.bool, device=dice.device)
        above = (dice.uniform_(b, n, M) < 0.5).tril(-1) | own
        every = torch.arange(M, device=dice.device).expand(b, n, M) < n
        cache.see(visible := Branches(slots[:, :1], every if block else above))
        positions = slots[:, :1] + visible.ancestors.sum(-1) - 1
    norms = None
    if dice.often():
        norms = [SimpleNamespace(weight=dice.normal(d).to(dtype), variance_epsilon=1e-5)] * 2
        norms = [fused.Norm(norm) for norm in norms]
    layer = SimpleNamespace(heads=K * group, keys=K, norms=norms, cache=cache)
    return fused.AttentionInfo(cache, positions, cache.kinds[0]), layer, d, dtype


def keep(dice: Dice) -> Case:
    """Slots that overlap those they move to."""
    first, B, n = dice.randint(0, 1), dice.randint(1, 3), dice.randint(1, 5)
    cache = SlotCache(1, first + B, 30)
    [layer] = cache.layers
    one = dice.normal(B, 2, n, dice.choice([4, 24])).to(dice.choice(KINDS))
    layer.lazy_initialization(one, one)
    for buffer in layer.buffers:
        buffer.copy_(dice.normal(*buffer.shape))
    to = dice.whole(0, 8, B, 1) + torch.arange(n, device=dice.device)
    source = to + dice.whole(0, 4, B, n).cumsum(1)
    rows = slice(first, first + B)
    return Case((layer, rows, source, to), lambda: list(layer.buffers))


def store(dice: Dice) -> Case:
    """Keys and values of different widths, or strided."""
    B, K, n, dtype = dice.randint(1, 3), dice.randint(1, 3), dice.randint(1, 4), dice.choice(KINDS)
    wide = [dice.choice([4, 24]) for _ in range(2)]
    keys, values = (dice.normal(B, K, 9, d).to(dtype) for d in wide)
    new = [dice.normal(B, n, K, d).transpose(1, 2).to(dtype) for d in wide]
    places = (dice.whole(0, 5, B, 1) + torch.arange(n, device=dice.device)).view(B, 1, n, 1)
    return Case((keys, values, places, dice.odd(new[0]), new[1]), lambda: [keys, values])


def attention(dice: Dice) -> Case:
    seen, layer, d, dtype = attention_info(dice)
    (B, n), size = seen.slots.shape, seen.size
    S = min(seen.cache.seen, size)
    last = dice.choice([n, n, 1])  # some modules have layers over the last tokens alone
    q = dice.normal(B, last, layer.heads, d).transpose(1, 2).to(dtype)
    keys, values = (dice.normal(B, layer.keys, size, d)[:, :, :S].to(dtype) for _ in range(2))
    cap = dice.choice([0.0, 0.0, 2.0])
    sinks = dice.normal(layer.heads).to(dtype) if dice.often() else None
    return Case((dice.odd(q), keys, values, seen, d**-0.5, cap, sinks), near=COARSE[dtype])


def rotate_and_store(dice: Dice) -> Case:
    seen, layer, d, dtype = attention_info(dice)
    B, n = seen.slots.shape
    angles = dice.normal(B, n, d // 2)
    cos, sin = (torch.cat([f(-angles), f(angles)], -1)[:, None] for f in (torch.cos, torch.sin))
    rotations = cos.to(dtype), sin.to(dtype)
    [slots] = seen.cache.layers
    if dice.random() < 0.9:  # else this is the first pass of all
        one = dice.normal(B, layer.keys, n, d).to(dtype)
        slots.lazy_initialization(one, one)
    qkv = dice.normal(B * n, (layer.heads + 2 * layer.keys) * d).to(dtype)
    return Case((dice.odd(qkv), layer, rotations, slots), near=COARSE[dtype])


def rms_norm(dice: Dice) -> Case:
    """Rows that lie apart, too, as queries do before they are rotated."""
    dtype, E = dice.choice(KINDS), dice.choice([4, 33, 600])
    norm = dice.choice([LlamaRMSNorm, Gemma3RMSNorm])(E)
    norm.above = float(isinstance(norm, Gemma3RMSNorm))
    norm.weight = torch.nn.Parameter(dice.normal(E).to(dtype), requires_grad=False)
    x = dice.normal(dice.randint(1, 2), dice.randint(1, 4), dice.randint(1, 3), E).to(dtype)
    x = dice.choice([x, x[0], x.transpose(1, 2)])
    return Case((dice.odd(x), norm), near=COARSE[dtype])


def gated(dice: Dice) -> Case:
    dtype, hidden = dice.choice(KINDS), dice.choice([1, 7, 40, 1500])
    shape = dice.choice([(3, hidden), (2, 4, hidden)])
    gate, up = (4 * dice.normal(*shape).to(dtype) for _ in range(2))
    return Case((dice.odd(gate), up, dice.often()), near=COARSE[dtype])


def rotate(dice: Dice) -> Case:
    dtype, B, n, d = (
        dice.choice(KINDS),
        dice.randint(1, 2),
        dice.randint(1, 4),
        dice.choice([2, 24]),
    )
    q, k = (dice.normal(B, n, dice.choice([1, 4]), d).transpose(1, 2).to(dtype) for _ in range(2))
    wide = dice.choice([dtype, torch.float32])
    cos, sin = (dice.normal(dice.choice([1, B]), n, d).to(wide) for _ in range(2))
    return Case((dice.odd(q), k, cos, sin), near=COARSE[dtype])


def add_norm(dice: Dice) -> Case:
    dtype, shape = dice.choice(KINDS), (dice.randint(1, 5), dice.choice([4, 33, 600]))
    norm = SimpleNamespace(weight=dice.normal(shape[1]).to(dtype), variance_epsilon=1e-5)
    x, y = dice.normal(*shape).to(dtype), dice.normal(*shape).to(dtype)
    return Case((x, dice.odd(y), fused.Norm(norm)), near=COARSE[dtype])


def product_add_norm(dice: Dice) -> Case:
    dtype = dice.choice(KINDS if dice.device.type == "cuda" else KINDS[:2])
    rows, E, depth = dice.choice(ROWS), dice.choice([4, 33, 100]), dice.choice([5, 1024])
    norm = SimpleNamespace(weight=dice.normal(E).to(dtype), variance_epsilon=1e-5)
    shapes = (rows, E), (rows, depth), (E, depth)
    x, y, weight = (dice.normal(*shape).to(dtype) for shape in shapes)
    bias = dice.normal(E).to(dtype) if dice.often() else None
    weight = dice.weight(weight / depth**0.5)
    return Case((x, dice.odd(y), weight, bias, fused.Norm(norm)), near=COARSE[dtype])


def swiglu(dice: Dice) -> Case:
    dtype = dice.choice(KINDS)
    wide = 4 * dice.normal(dice.randint(1, 4), 2 * dice.choice([1, 7, 40, 1500])).to(dtype)
    return Case((dice.odd(wide),), near=COARSE[dtype])


def product_swiglu(dice: Dice) -> Case:
    dtype = dice.choice(KINDS if dice.device.type == "cuda" else KINDS[:2])
    rows, E, hidden = dice.choice(ROWS), dice.choice([4, 33, 200]), dice.choice([3, 40])
    x, weight = dice.normal(rows, E).to(dtype), dice.normal(2 * hidden, E).to(dtype)
    bias = dice.normal(2 * hidden).to(dtype) if dice.often() else None
    return Case((dice.odd(x), dice.weight(weight / E**0.5), bias), near=COARSE[dtype])


def tokens_of_a_window(dice: Dice, size: int, back: int) -> tuple[Window, Tensor]:
    """Some rows of the last `size` slots of each, aimed at a line or at a tree; the tokens are
    those of a round's first pass or of a later one, and padding follows those of a row."""
    first, b, n = dice.randint(0, 1), dice.randint(1, 2), dice.randint(1, 4)
    window = Window(first + b, size, back, dice.device)
    window.based.copy_(dice.whole(0, 40, first + b))
    rows = slice(first, first + b)
    slots = window.based[rows, None] + dice.whole(0, size - n, b, 1)
    slots = slots + torch.arange(n, device=dice.device)
    tokens = torch.where(slots - slots[:, :1] > dice.whole(0, n + 1, b, 1), -1, slots)
    visible = None
    if dice.often():
        root = slots[:, :1] - dice.randint(0, 1)
        M = slots[:, -1:] - root[:1] + 1
        own = slots[0] - root[0]
        seen = dice.uniform_(b, n, int(M[0])) < 0.5
        place = torch.arange(int(M[0]), device=dice.device)
        visible = Branches(root, (seen & (place < own[:, None])) | (place == own[:, None]))
    window.aim(rows, slots, tokens, visible, dice.random() < 0.7)
    return window, tokens


def convolved(dice: Dice) -> Case:
    """Channels of which some fill no vector, in a part of wider rows."""
    back = dice.choice([3, 4])
    window, tokens = tokens_of_a_window(dice, 9, back)
    dtype, C, k = dice.choice(KINDS), dice.choice([5, 16, 40]), dice.choice([2, back])
    scan = Scan(torch.nn.Identity())
    scan.window = window
    kept = dice.normal(FIRST + 9 * len(window.based), C).to(dtype)
    scan.buffers = {("conv", 0): kept}
    x = dice.normal(*tokens.shape, C + 3).to(dtype)[..., 3:].transpose(1, 2)
    bias = dice.normal(C).to(dtype) if dice.often() else None
    weight, activation = dice.normal(C, k).to(dtype), dice.choice(["silu", "silu", None, "gelu"])
    args = scan, x, weight, bias, activation
    return Case(args, lambda: [kept[FIRST:]], COARSE[dtype])


def scanned(dice: Dice) -> Case:
    """The delta rule with a decay a head or a key, or Mamba 2, whose states are turned."""
    window, tokens = tokens_of_a_window(dice, dice.choice([6, 9]), 4)
    (b, n), B, m = tokens.shape, len(window.based), window.size
    K, V, G = dice.choice([3, 16, 40]), dice.choice([5, 16, 100]), dice.choice([1, 2])
    H, kind = G * dice.choice([1, 2]), dice.choice(["delta", "kimi", "mamba"])
    H, D = (G, K) if kind == "kimi" else (H, 1)
    scan = Scan(torch.nn.Identity())
    scan.window, scan.turned = window, kind == "mamba"
    states = (V, K) if scan.turned else (K, V)
    scan.buffers = {
        ("key", 0): dice.normal(FIRST + B * m, G, K) / K**0.5,
        ("decay", 0): -dice.uniform_(FIRST + B * m, H, D),
        ("write", 0): dice.normal(FIRST + B * m, H, V),
        ("recurrent", 0): dice.normal(B, H, *states),
    }
    q, k = (dice.normal(b, n, G, K) / K**0.5 for _ in range(2))
    v, g = dice.normal(b, n, H, V), -dice.uniform_(b, n, H, D)
    beta = None if scan.turned else dice.uniform_(b, n, H)
    kept = list(scan.buffers.values())

    def changed() -> list[Tensor]:
        return [kept[3], *(x[FIRST:] for x in kept[:3])]

    return Case((scan, q, k, dice.odd(v), g, beta), changed, (1e-4, 1e-5))


def walk_of(dice: Dice, name: str, kept: Tensor) -> tuple[Walk, int, int]:
    """Tokens [b, n] of a Mamba 1 that go on from nothing, from a text or from one another; of its
    states `kept`, of this name, padding keeps none, and the last tokens overwrite the first."""
    n, text = dice.randint(1, 6), torch.arange(FIRST, len(kept), 5, device=dice.device)
    entries = torch.stack([text * 0 + NOTHING, text, *(text + 1 + i % 4 for i in range(n))])
    parents = torch.stack([dice.whole(0, i + 2, len(text)) for i in range(n)])
    walk = Walk(torch.nn.Identity())
    after = entries[2:].masked_fill(dice.uniform_(n, len(text)) < 0.1, NOWHERE)
    walk.aim({(name, 0): kept}, entries.gather(0, parents), after)
    return walk, len(text), n


def stepped(dice: Dice) -> Case:
    """Channels of which some fill no vector, in a part of wider rows."""
    C, k, dtype = dice.choice([5, 16, 48]), dice.choice([2, 4, 4, 4]), dice.choice(KINDS)
    kept = dice.normal(FIRST + 5 * dice.randint(1, 3), C, k).to(dtype)
    walk, b, n = walk_of(dice, "conv", kept)
    x = dice.normal(b, n, C + 3).to(dtype)[..., 3:].transpose(1, 2)
    bias = dice.normal(C).to(dtype) if dice.often() else None
    weight, activation = dice.normal(C, k).to(dtype), dice.choice(["silu", "silu", None, "gelu"])
    args = walk, x, weight, bias, activation
    return Case(args, lambda: [kept[NOTHING:]], COARSE[dtype])


def walked(dice: Dice) -> Case:
    """Steps of a Mamba 1 of which some are small, with or without what it may lack."""
    dtype, H, K = dice.choice(KINDS), dice.choice([16, 48, 48, 5]), dice.choice([16, 16, 32, 4])
    kept = dice.normal(FIRST + 5 * dice.randint(1, 3), H, K)
    walk, b, n = walk_of(dice, "recurrent", kept)
    dt, A = (3 * dice.normal(b, H, n) - 2).to(dtype), -4 * dice.uniform_(H, K)
    x, z = (dice.normal(b, n, H + 3).to(dtype)[..., 3:].transpose(1, 2) for _ in range(2))
    B, C = ((dice.normal(b, n, K) / K**0.5).to(dtype).transpose(1, 2) for _ in range(2))
    D, bias = dice.normal(H), dice.normal(H)
    more = (None, z, bias, True) if dice.random() < 0.1 else (D, z, bias, dice.random() < 0.9)
    args = walk, x, dt, dice.odd(A), B, C, *more, True
    return Case(args, lambda: [kept[NOTHING:]], COARSE[dtype])


INPUTS: dict[Callable[..., Any], Callable[[Dice], Case]] = {
    sampling.likeliest: likeliest,
    sampling.ranked: ranked,
    Noise.race: race,
    Noise.categorical: race,
    Noise.uncoupled: uncoupled,
    Noise.draw: draw,
    Sampling.law: law,
    Sequences.places: places,
    Sequences.read: read,
    Noise.keys: keys,
    Sequences.commit: commit,
    sequences.columns: columns,
    sequences.until: until,
    sequences.round_report: round_report,
    rules.follow: follow,
    Reject.__call__: reject,
    Block.__call__: block,
    engine.judged: judged_whole,
    NGram.propose: lookup,
    Suffix.propose: vote,
    Table.read: recall,
    Table.write: note,
    lm.spoil: spoil,
    Scan.convolution: convolved,
    Scan._scan: scanned,
    Walk.convolution: stepped,
    Walk.recurrence: walked,
    lm.product: product,
    Slots.keep: keep,
    fused.attention: attention,
    fused.rotate_and_store: rotate_and_store,
    cache.store: store,
    lighter.rms_norm: rms_norm,
    lighter.rotate: rotate,
    lighter.gated: gated,
    fused.add_norm: add_norm,
    fused.product_add_norm: product_add_norm,
    fused.swiglu: swiglu,
    fused.product_swiglu: product_swiglu,
}


def differing(
    operation: Callable[..., Any], kernel: str, device: str, seeds: Iterable[int]
) -> tuple[list[int], int]:
    """The seeds of inputs on which an operation's kernel for one device and its reference differ,
    and on how many it ran. What it refuses it must leave as it was."""
    op, differ, taken = ops.OPS[operation], [], 0
    run, _ = op.kernels[kernel]
    for seed in seeds:
        ours, theirs = (INPUTS[operation](Dice(seed, device)) for _ in range(2))
        result = run(*ours.args)
        if result is NotImplemented:
            same = matches(tensors(ours.args), tensors(theirs.args), (0.0, 0.0))
        else:
            taken += 1
            wanted = op.reference(*theirs.args)
            pairs = tensors(result) + ours.changed(), tensors(wanted) + theirs.changed()
            same = matches(*pairs, ours.near)
        if not same:
            differ.append(seed)
    return differ, taken


def matches(ours: list[Tensor], theirs: list[Tensor], near: tuple[float, float]) -> bool:
    def same(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.allclose(a, b, *near, equal_nan=True)

    return len(ours) == len(theirs) and all(map(same, ours, theirs))
