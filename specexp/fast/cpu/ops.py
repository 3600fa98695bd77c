"""The kernels of a CPU: each calls a compiled function (rounds.cpp, chance.cpp, scans.cpp).

Besides its passes, a round is many operations on few numbers, and each takes torch microseconds. A
kernel has the arguments of the operation in its decorator, whose docstring says what it computes.
It takes contiguous int64 and float32 tensors on a CPU, except as its own docstring says, and
returns NotImplemented for others, so that the reference runs. Without compiled code (build.py) no
kernel here is used.
"""

from collections.abc import Callable, Sequence
from ctypes import c_int64
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from specexp import ops, rules, sampling, sequences
from specexp.drafters import ngram, recycle, suffix
from specexp.fast import cpu_replays, fused, fused_block, fused_eagle, huge_pages
from specexp.fast.cpu import build
from specexp.models import int8, lm
from specexp.models.scans import FIRST, Scan, Walk
from specexp.sampling import ACCEPT, RESIDUAL, Noise, Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

P = ParamSpec("P")
T = TypeVar("T")
# importing these registers their kernels
__all__ = ["cpu_replays", "fused", "fused_block", "fused_eagle", "huge_pages"]

FEW = 16  # the most rows of a compiled product
PLAIN = (Tensor, torch.nn.Parameter)  # the memory of a tensor of another class may be elsewhere


def state() -> str:
    """In words, which kernels run on this CPU."""
    off = ops.switched_off("SPECEXP_GRAPHS")
    return build.state() + ", rounds are not replayed (SPECEXP_GRAPHS=off)" * off


def compiled(operation: Callable[P, T]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as an operation's kernel, which is used if there is compiled code."""
    return ops.kernel(operation, "cpu", ready=lambda _: build.library())


def packed(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    """Whether these tensors are contiguous, of this dtype and on a CPU, but for those that are
    None."""
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN or x.dtype != dtype or not x.is_cpu or not x.is_contiguous():
            return False
    return True


def of_dtype(name: str, x: Tensor) -> Any:
    """The compiled function of this name for x's dtype, such as `product_float32`, or None."""
    return getattr(build.functions(), f"{name}_{str(x.dtype).removeprefix('torch.')}", None)


integers, floats = partial(packed, torch.int64), partial(packed, torch.float32)


def filled(run: build.Function, shape: Sequence[int], *arguments: Any) -> Tensor:
    """New int64 memory of this shape, filled by a compiled function: it is its last argument."""
    out = torch.empty(shape, dtype=torch.int64)
    run(*arguments, out)
    return out


def strided(x: Tensor) -> bool:
    """Whether x is int64 and on a CPU, whatever its strides."""
    return type(x) in PLAIN and x.dtype == torch.int64 and x.is_cpu


def by_rows(x: Tensor) -> bool:
    """Whether x [n] or [B, n] is int64 and on a CPU, with the numbers of a row side by side; the
    rows may lie apart."""
    return strided(x) and x.stride(-1) == 1


# --- sampling.py ----------------------------------------------------------------------------------


@compiled(sampling.likeliest)
def likeliest(w: Tensor) -> Tensor:
    if not floats(w) or not w.numel():
        return NotImplemented
    rows = w.shape[:-1]
    return filled(build.functions().likeliest, rows, rows.numel(), w.shape[-1], w)


@compiled(sampling.ranked)
def ranked(w: Tensor, k: int) -> Tensor:
    """Among equals, the lowest index comes first."""
    *rows, V = w.shape
    if not 1 < k <= V or not floats(w):
        return NotImplemented
    return filled(build.functions().ranked, (*rows, k), w.numel() // V, V, k, w)


@compiled(Noise.keys)
def keys(self: Noise, stream: Tensor, length: Tensor, depth: Tensor) -> Tensor:
    (b, n), B = depth.shape, len(length)
    if not integers(stream, length, depth) or b not in (1, B):
        return NotImplemented
    arguments = b == 1, self.by_round, stream, length, depth
    return filled(build.functions().addresses, (B, n), B, n, *arguments)


@compiled(Noise.race)
def race(self: Noise, w: Tensor, keys: Tensor, purpose: int) -> Tensor:
    """keys [n] or [B, n]: the rows may lie apart."""
    if type(self) is not Noise or not floats(w) or w.requires_grad or not w.numel():
        return NotImplemented
    if w.shape[:-1] != keys.shape or not 0 < keys.dim() < 3 or not by_rows(keys):
        return NotImplemented
    weights, threads = torch.empty_like(w), torch.get_num_threads()
    shape = keys.numel(), keys.shape[-1], keys.stride(0), w.shape[-1], threads
    build.functions().race(*shape, self.salt(purpose), keys, w, weights)
    return weights


@compiled(Sampling.law)
def law(self: Sampling, logits: Tensor) -> Tensor:
    """Logits may be strided or of 16 bits, and are copied then. The reference runs for temperature
    0, min-p and float64."""
    if (
        self.temperature == 0
        or self.min_p > 0
        or logits.dtype == torch.float64
        or logits.requires_grad
    ):
        return NotImplemented
    logits = logits.float().contiguous()
    if not floats(logits) or not logits.numel():
        return NotImplemented
    p, V = torch.empty_like(logits), logits.shape[-1]
    shape = self.top_k, float(self.temperature), float(self.top_p)
    build.functions().law(p.numel() // V, V, torch.get_num_threads(), *shape, logits, p)
    return p


# --- sequences.py ---------------------------------------------------------------------------------


@compiled(Sequences.places)
def places(self: Sequences, depth: Tensor) -> Tensor:
    (b, n), B = depth.shape, len(self.length)
    if not integers(self.length, depth) or b not in (1, B):
        return NotImplemented
    return filled(build.functions().places, (B, n), B, n, b == 1, self.length, depth)


@compiled(Sequences.read)
def read(self: Sequences, slots: Tensor) -> Tensor:
    """Raises IndexError for a slot outside its row. The rows of the sequences may lie apart."""
    if not integers(slots) or not by_rows(self.tokens) or len(slots) > len(self.tokens):
        return NotImplemented
    tokens, S = torch.empty(slots.shape, dtype=torch.int64), self.tokens.shape[1]
    row = self.tokens.stride(0)
    if not build.functions().read(*slots.shape, S, row, self.tokens, slots, tokens):
        raise IndexError(f"a slot is outside the {S} slots of a row")
    return tokens


@compiled(Sequences.commit)
def commit(self: Sequences, verdict: Verdict) -> Tensor:
    """Unlike the reference, it writes no tokens past a row's new length."""
    arguments = verdict.new, verdict.n, self.eos
    changed = self.tokens, self.length, self.limit
    if not integers(*arguments, *changed[1:]) or not by_rows(self.tokens):
        return NotImplemented
    B, n = verdict.new.shape
    shape = B, n, len(self.eos), self.tokens.stride(0)
    return filled(build.functions().commit, (B, 3), *shape, *arguments, *changed)


@compiled(sequences.columns)
def columns(*parts: Tensor) -> Tensor:
    """Takes parts [B, 1] alone, which may be strided."""
    B, n = len(parts[0]), len(parts)
    if any(x.shape != (B, 1) or not strided(x) for x in parts):
        return NotImplemented
    arguments = build.addresses(parts), (c_int64 * n)(*(x.stride(0) for x in parts))
    return filled(build.functions().columns, (B, n), B, n, *arguments)


@compiled(sequences.until)
def until(tokens: Tensor, depth: Tensor, budget: Tensor) -> Tensor:
    (B, n), (b, wide) = tokens.shape, depth.shape
    if not integers(tokens, depth, budget) or b not in (1, B) or wide not in (1, n):
        return NotImplemented
    strides = wide if b > 1 else 0, wide > 1
    return filled(build.functions().until, (B, n), B, n, *strides, tokens, depth, budget)


@compiled(sequences.round_report)
def round_report(counts: Tensor, tokens: Tensor, faults: Sequence[Tensor]) -> Tensor:
    if not integers(counts, tokens) or not floats(*faults):
        return NotImplemented
    (B, N), F = tokens.shape, len(faults)
    arguments = counts, tokens, build.addresses(faults)
    return filled(build.functions().report, (B, 3 + F + N - 1), B, N, F, *arguments)


# --- rules.py -------------------------------------------------------------------------------------


@compiled(rules.follow)
def follow(draft: Draft, sample: Tensor) -> Verdict:
    (B, N), parents = draft.tokens.shape, draft.nodes.parents
    if not integers(draft.tokens, sample, parents) or sample.shape != (B, N):
        return NotImplemented
    result = Verdict.empty(draft)
    shape = B, N, result.path.shape[1], len(parents) == 1
    parts = result.path, result.n, result.new
    build.functions().follow(*shape, draft.tokens, sample, parents, *parts)
    return result


@compiled(rules.Reject.__call__)
def reject(self: rules.Reject, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
    return _judged("reject", self.lenience, draft, p, rng)


@compiled(rules.Block.__call__)
def block(self: rules.Block, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
    is_chain = draft.nodes.deepest == p.shape[1] - 1
    return _judged("block", 1.0, draft, p, rng) if is_chain else NotImplemented


def _judged(rule: str, lenience: float, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
    """The verdict of a rule of chance.cpp. Raises IndexError for a draft token outside V."""
    children, q = draft.nodes.children, draft.q
    if type(rng) is not Noise or not floats(p, q) or (q is not None and q.shape != p.shape):
        return NotImplemented
    if not integers(draft.tokens, children, draft.keys):
        return NotImplemented
    (B, N, V), (b, _, K) = p.shape, children.shape
    result = Verdict.empty(draft)
    shape = B, N, V, result.path.shape[1], K, b == 1, torch.get_num_threads()
    chance = rng.salt(ACCEPT), rng.salt(RESIDUAL), float(lenience)
    arguments = draft.tokens, children, draft.keys, p, q, p.new_empty(B, 4, V)
    judge = getattr(build.functions(), rule)
    if not judge(*shape, *chance, *arguments, result.path, result.n, result.new):
        raise IndexError(f"a draft token is outside the vocabulary of {V} tokens")
    return result


# --- drafters/ ------------------------------------------------------------------------------------


@compiled(ngram.NGram.propose)
def lookup(self: ngram.NGram, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
    if len(tree) == 1 or not integers(seqs.length) or not by_rows(seqs.tokens):
        return NotImplemented
    device = seqs.device
    nodes, (leaves, branch) = tree.nodes(device), ngram.first_leaf(tree, device)
    size = len(seqs.length), len(tree)
    shape = *size, self.n, leaves, self.vocab, seqs.tokens.stride(0)
    arguments = branch, nodes.depth, seqs.length, seqs.tokens
    return Draft(filled(build.functions().lookup, size, *shape, *arguments), nodes, seqs)


@compiled(suffix.Suffix.propose)
def vote(self: suffix.Suffix, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
    if len(tree) == 1 or not integers(seqs.length) or not by_rows(seqs.tokens):
        return NotImplemented
    nodes, size = tree.nodes(seqs.device), (len(seqs.length), len(tree))
    shape = *size, self.longest, self.vocab, seqs.tokens.stride(0)
    limits = float(self.least), float(self.stretch)
    arguments = *limits, nodes.parents, nodes.depth, seqs.length, seqs.tokens
    return Draft(filled(build.functions().vote, size, *shape, *arguments), nodes, seqs)


@compiled(recycle.Table.read)
def recall(self: recycle.Table, rows: slice, tokens: Tensor) -> Tensor:
    """`tokens` may be strided."""
    owner, notes = (x[rows] for x in self.state)
    if not integers(owner, notes) or not strided(tokens) or len(tokens) != len(owner):
        return NotImplemented
    size = *tokens.shape, notes.shape[2]
    shape = *tokens.shape, self.places, notes.stride(1), *tokens.stride()
    return filled(build.functions().recall, size, *shape, tokens, owner, notes)


@compiled(recycle.Table.write)
def note(self: recycle.Table, rows: slice, tokens: Tensor, notes: Tensor) -> None:
    changed = [x[rows] for x in self.state]
    if not integers(tokens, notes, *changed) or len(tokens) != len(changed[0]):
        return NotImplemented
    shape = *tokens.shape, self.places, changed[1].stride(1)
    build.functions().note(*shape, tokens, notes, *changed)
    return None


# --- models/ --------------------------------------------------------------------------------------


@compiled(lm.product)
def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Takes at most FEW rows, of float32 or bfloat16: their product takes as long as reading the
    weights, which may be 8-bit integers, and for more rows torch's is faster. x may be strided."""
    (outputs, inputs), rows = weight.shape, x.numel() // max(1, weight.shape[1])
    run = of_dtype("product", x)
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if run is None or learns or not 0 < rows <= FEW or x.shape[-1] != inputs:
        return NotImplemented
    if bias is not None and bias.shape != (outputs,):
        return NotImplemented
    x, (weights, scales) = x.contiguous(), int8.scaled_rows(weight) or (weight, None)
    kind = x.dtype if scales is None else torch.int8
    if not packed(x.dtype, x, bias) or not packed(kind, weights):
        return NotImplemented
    y = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype)
    run(rows, inputs, outputs, torch.get_num_threads(), x, weights, bias, scales, y)
    return y


@compiled(lm.spoil)
def spoil(fault: Tensor, logits: Tensor) -> None:
    if not floats(fault, logits) or len(fault) != len(logits):
        return NotImplemented
    build.functions().spoil(len(fault), logits[0].numel(), logits, fault)
    return None


@compiled(Scan.convolution)
def convolution(
    self: Scan, x: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Takes float32 and bfloat16. x [b, C, n] has 16 channels or more, which lie side by side; its
    rows and tokens may be strided."""
    run = of_dtype("convolution", x)
    (b, C, n), window = x.shape, self.window
    if run is None or window is None or activation not in (None, "silu") or C < 16:
        return NotImplemented
    kept, taps = self.buffers["conv", 0], weight.shape[-1]
    fit = weight.shape == (C, taps) and kept.shape[1:] == (C,) and len(window.after) == b * n
    if not fit or taps > window.back or (bias is not None and bias.shape != (C,)):
        return NotImplemented
    if not packed(x.dtype, kept, weight, bias) or x.stride(1) != 1:
        return NotImplemented
    y = torch.empty(b, n, C, dtype=x.dtype)
    shape = b, n, C, taps, window.back, x.stride(0), x.stride(2), activation == "silu"
    run(*shape, window.after, window.columns, x, weight, bias, kept, y)
    return y.transpose(1, 2)


@compiled(Scan._scan)
def scan(
    self: Scan, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None
) -> Tensor:
    """The inputs may be strided."""
    if (window := self.window) is None:
        return NotImplemented
    kept = [self.buffers[name, 0] for name in ("key", "decay", "write")]
    state = self.buffers["recurrent", 0][window.rows]
    given = [None if x is None else x.contiguous() for x in (q, k, v, g, beta)]
    if not floats(*given, *kept, state):
        return NotImplemented
    (b, n, H, V), (G, K) = v.shape, k.shape[2:]
    fit = q.shape == k.shape == (b, n, G, K) and g.shape[:3] == (b, n, H) and not H % G
    fit &= all(x.shape[1:] == one.shape[2:] for x, one in zip(kept, (k, g, v), strict=True))
    fit &= (len(state), len(window.after)) == (b, b * n)
    if not fit or (beta is not None and beta.shape != (b, n, H)):
        return NotImplemented
    shape = b, n, window.size, FIRST + window.rows.start * window.size, window.folds, G, H, K, V
    how = g.shape[3], self.turned, torch.get_num_threads()
    seen = window.paths.seen.contiguous(), window.paths.place, window.own, window.after
    y = state.new_empty(b, n, H, V)
    build.functions().scan(*shape, *how, *seen, *given, *kept, state, y)
    return y


@compiled(Walk.convolution)
def shift(
    self: Walk, x: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Takes weights [C, 4], and x [b, C, n] as `convolution` does, with C a multiple of 16."""
    run, kept = of_dtype("shift", x), self.buffers["conv", 0]
    b, C, n = x.shape
    if run is None or activation not in (None, "silu") or C % 16 or self.before.shape != (n, b):
        return NotImplemented
    if not kept.shape[1:] == weight.shape == (C, 4) or (bias is not None and bias.shape != (C,)):
        return NotImplemented
    if not packed(x.dtype, kept, weight, bias) or x.stride(1) != 1:
        return NotImplemented
    y = torch.empty(b, n, C, dtype=x.dtype)
    shape = b, n, C, x.stride(0), x.stride(2), activation == "silu"
    run(*shape, self.before, self.after, x, weight, bias, kept, y)
    return y.transpose(1, 2)


@compiled(Walk.recurrence)
def recurrence(
    self: Walk, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Takes states [H, K] with H and K multiples of 16, and only with all that Mamba 1 has: D, z, a
    bias of dt, and its softplus. x, dt, B, C and z are float32 or bfloat16, and may be strided."""
    run, kept = of_dtype("recurrence", x), self.buffers["recurrent", 0]
    if run is None or D is None or z is None or delta_bias is None or not delta_softplus:
        return NotImplemented
    (b, H, n), K = x.shape, kept.shape[2]
    fit = x.shape == dt.shape == z.shape and B.shape == C.shape == (b, K, n) and H % 16 == 0
    fit &= A.shape == kept.shape[1:] == (H, K) and D.shape == delta_bias.shape == (H,)
    if not fit or K % 16 or self.before.shape != (n, b):
        return NotImplemented
    given = [y.transpose(1, 2).contiguous() for y in (x, B, C, z)]
    given.insert(1, dt.contiguous())
    if not packed(x.dtype, *given) or not floats(A, D, delta_bias, kept):
        return NotImplemented
    y = torch.empty_like(given[0])
    shape = b, n, H, K, torch.get_num_threads()
    run(*shape, self.before, self.after, *given, A, D, delta_bias, kept, y)
    y = y.transpose(1, 2)
    return (y, y) if return_last_state else y
