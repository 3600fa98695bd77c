"""The kernels of a GPU at the sizes of a model of 8 billion parameters (Llama 3): their arguments,
and how long they take beside their references, and beside a copy of as many bytes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from support.scaled import Scaled
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specexp import engine, ops, rules, sampling
from specexp.drafters.ngram import NGram
from specexp.drafters.suffix import Suffix
from specexp.engine import Engine
from specexp.fast import cuda_graphs, fused, lighter
from specexp.fast.fused import AttentionInfo, Norm
from specexp.measure import interleave
from specexp.measure.hardware.roofline import copying
from specexp.models import lm
from specexp.models.cache import SlotCache, Slots, store
from specexp.models.lm import Forward
from specexp.models.memory import Layer
from specexp.rules import Block, Match, Reject, Rule
from specexp.sampling import Noise, Sampling
from specexp.sequences import Sequences, Verdict
from specexp.tree import Branches, Tree

H, K, D, E, HIDDEN, V = 32, 8, 128, 4096, 14336, 128256
WINDOW = 512
TURNS = 20
RECORDED = 6  # calls after which a graph has been captured
TOGETHER = 10  # calls of a graph, so that starting it does not count


class Call(NamedTuple):
    """An operation with arguments, and the bytes that it must read and write."""

    name: str
    operation: Callable[..., Any]
    args: tuple[Any, ...]
    bytes: int


def calls(B: int, n: int, S: int, dtype: torch.dtype, device: str) -> Iterator[Call]:
    """Every operation with a kernel, over n tokens of B rows, which fill half of S slots."""

    def some(*shape: int, of: torch.dtype = dtype) -> Any:
        return torch.randn(shape, device=device).to(of)  # zeros are faster

    def norm(width: int) -> Any:
        return Norm(SimpleNamespace(weight=some(width), variance_epsilon=1e-5))

    size = dtype.itemsize
    slots = S // 2 + torch.arange(n, device=device).repeat(B, 1)
    turns = some(B, 1, n, D), some(B, 1, n, D)

    def info(
        window: int = 0, visible: Branches | None = None, keys: int = K, width: int = D
    ) -> AttentionInfo:
        cache = SlotCache([Layer(window=window)], B, S, room=n)
        cache.aim(slice(0, B), slots, S, visible=visible)
        cache.layers[0].lazy_initialization(*[some(B, keys, n, width)] * 2)
        return AttentionInfo(cache, slots, cache.kinds[0])

    line = info()
    [layer] = line.cache.layers
    qkv, q = some(B * n, (H + 2 * K) * D), some(B, H, n, D)
    for name, norms in (("", None), (" with norms", (norm(D), norm(D)))):
        net = SimpleNamespace(heads=H, keys=K, norms=norms)
        rotated = qkv, net, turns, layer
        yield Call(f"turned{name}", fused.rotate_and_store, rotated, 2 * qkv.numel() * size)
    tree = Branches(slots[:, :1], Tree.chain(n - 1).nodes(device).ancestors)
    for name, seen in {
        "": line, " of a tree": info(visible=tree), " in a window": info(WINDOW),
    }.items():  # fmt: skip
        if seen.cache.visible and n >= 64:
            continue  # a prompt is no tree
        [own] = seen.cache.layers
        most = min(S // 2 + n, seen.cache.kinds[0].window + n if seen.cache.kinds[0].window else S)
        read = (B * most * 2 * K + 2 * B * n * H) * D * size
        arguments = q, own.keys[:, :, :S], own.values[:, :, :S], seen, D**-0.5
        yield Call(f"attention{name}", fused.attention, arguments, read)
    if size == 2:  # in float32 they spill up to 40 bytes
        all_at_once = info(WINDOW, tree if n < 64 else None, 4, 256)  # like Gemma 2's and gpt-oss's
        wide = ("", all_at_once, (50.0, some(8))), (" of a chain", info(keys=4, width=256), ())
        for name, few, more in wide:
            [own] = few.cache.layers
            read = (B * min(S // 2 + n, WINDOW + n if more else S) * 8 + 2 * B * n * 8) * 256 * size
            held = own.keys[:, :, :S], own.values[:, :, :S]
            given = some(B, 8, n, 256), *held, few, 0.06, *more
            yield Call(f"attention of wide heads{name}", fused.attention, given, read)
    heads = some(B, n, H, D).transpose(1, 2), some(B, n, K, D).transpose(1, 2)
    waves = turns[0][:, 0], turns[1][:, 0]
    moved = 2 * (H + K) * B * n * D * size
    yield Call("rotated heads", lighter.rotate, (*heads, *waves), moved)
    x = some(B * n, E)
    rms: Any = LlamaRMSNorm(E).to(device, dtype)
    rms.above = 0.0
    yield Call("normed", lighter.rms_norm, (x, rms), 2 * x.numel() * size)
    yield Call("added", fused.add_norm, (x, x, norm(E)), 4 * x.numel() * size)
    hidden = some(B * n, 2 * HIDDEN)
    yield Call("gated", fused.swiglu, (hidden,), hidden.numel() * size * 3 // 2)
    apart = [half.contiguous() for half in hidden.chunk(2, -1)]
    yield Call("gated by GELU", lighter.gated, (*apart, True), hidden.numel() * size * 3 // 2)
    for kind, width in (("", size), (" in 8 bits", 1)) if B * n <= 16 else ():
        both, one = some(2 * HIDDEN, E), some((H + 2 * K) * D, E)
        both, one = (Scaled.of(w) if kind else w for w in (both, one))
        given = x, both, None
        yield Call(f"gated products{kind}", fused.product_swiglu, given, both.numel() * width)
        for name, depth in (("", E), (" of the hidden", HIDDEN)):
            y, down = some(B * n, depth), some(E, depth)
            given = x, y, Scaled.of(down) if kind else down, None, norm(E)
            name = f"added product{name}{kind}"
            yield Call(name, fused.product_add_norm, given, down.numel() * width)
        yield Call(f"product{kind}", lm.product, (x, one, None), one.numel() * width)

    if n >= 64:  # a prompt gains one token
        return
    noise, logits, warm = Noise(0), 3 * some(B, n, V), Sampling(0.8)
    p, keys = logits.float().softmax(-1), torch.arange(B * n, device=device).view(B, n)
    for name, cut in (("", warm), (" of a nucleus", Sampling(0.8, top_k=50, top_p=0.9))):
        yield Call(f"law{name}", Sampling.law, (cut, logits), p.numel() * (size + 4))
    yield Call("likeliest", sampling.likeliest, (logits,), p.numel() * size)
    for k in (4, 10):
        yield Call(f"{k} ranked", sampling.ranked, (logits, k), p.numel() * size)
        yield Call(f"{k} drawn", Noise.draw, (noise, p, k, keys), 4 * p.numel())
    yield Call("categorical", Noise.categorical, (noise, p, keys, 1), 4 * p.numel())
    yield Call("uncoupled", Noise.uncoupled, (noise, p, keys), 4 * p.numel())
    seqs, chain = Sequences.empty(B, S, device=device), Tree.chain(n - 1)
    ways: list[tuple[str, Rule, Any, Tree]] = [
        ("match", Match(), None, chain), ("reject of chosen tokens", Reject(), None, chain),
        ("reject of drawn tokens", Reject(), p, chain), ("block", Block(), p, chain),
        ("reject of a tree", Reject(), p, Tree((-1, *(i // 2 for i in range(n - 1))))),
    ]  # fmt: skip
    for name, rule, q, shape in ways:
        draft = seqs.draft(shape.nodes(device), keys[:, 1:], q)
        made: Any = SimpleNamespace(rule=rule, sampling=warm, rng=noise)
        made.law = partial(Engine.law, made)
        of_q = B * V if rule.name == "reject" and shape is chain else p.numel()  # where it stops
        read = p.numel() * size + (0 if q is None else 4 * of_q)
        yield Call(name, engine.judged, (draft, Forward(logits), made), read)
    yield Call("faults", lm.spoil, (some(B, of=torch.float32), logits), logits.numel() * size)
    nodes = chain.nodes(device)
    yield Call("keys", Noise.keys, (noise, seqs.stream, seqs.length, nodes.depth), 16 * B * n)
    verdict = Verdict(keys, seqs.length, keys)
    yield Call("commit", Sequences.commit, (seqs, verdict), 16 * B * n)
    moved = 4 * B * n * K * D * size
    yield Call("keep", Slots.keep, (layer, slice(0, B), slots, slots), moved)
    new = some(B, K, n, D), some(B, K, n, D)
    given = layer.keys, layer.values, slots[:, None, :, None], *new
    yield Call("store", store, given, moved)
    draft = seqs.draft(nodes, keys[:, 1:])
    yield Call("follow", rules.follow, (draft, keys), 32 * B * n)
    yield Call("lookup", NGram.propose, (NGram(3), seqs, chain, noise), 8 * B * S)
    yield Call("votes", Suffix.propose, (Suffix(V), seqs, chain, noise), 8 * B * S)


@torch.inference_mode()
def timed(call: Call, device: torch.device) -> dict[str, Any]:
    """Medians of a kernel and its reference, each replayed in a graph of several calls, and the
    share of a copy's bandwidth that the kernel reaches. (It can be above 1: what is read again in
    the next call may still be in the cache, as logits are that a pass has just written.)"""
    op = ops.OPS[call.operation]
    copy, copied = copying(device)
    arms: dict[str, Callable[[Any], Any]] = {"copy": copy}
    for name, run in {"kernel": call.operation, "reference": op.reference}.items():
        arms[name] = _replay(partial(run, *call.args), device)
    with _references():  # those that the reference calls, too
        for _ in range(RECORDED):
            arms["reference"](None)
    turns = interleave.time_in_turns(arms, range(TURNS), device, call.name, lead=1)
    median = {name: interleave.median_s(took) for name, took in turns.items()}
    copy_s = median["copy"] * call.bytes / copied
    median = {name: seconds / TOGETHER for name, seconds in median.items()}
    return {
        "bytes": call.bytes, "kernel_us": 1e6 * median["kernel"],
        "reference_us": 1e6 * median["reference"], "of_copy": copy_s / median["kernel"],
        "runs": any(run is not op.reference for run in op.chosen.values()),
    }  # fmt: skip


@contextmanager
def _references() -> Iterator[None]:
    before = os.environ.get("SPECEXP_FAST")
    os.environ["SPECEXP_FAST"] = "off"
    ops.forget()
    try:
        yield
    finally:
        os.environ.pop("SPECEXP_FAST")
        os.environ |= {} if before is None else {"SPECEXP_FAST": before}
        ops.forget()


def _replay(run: Callable[[], Any], device: torch.device) -> Callable[[Any], Any]:
    again = cuda_graphs.capture(lambda: [run() for _ in range(TOGETHER)][-1], device)
    return lambda _: again()
