"""The suite `roofline`: is a pass limited by the hardware, or by what the toolkit adds to it?

A pass over few tokens reads every weight once and computes little, so memory bandwidth bounds it.
Two references are timed in the same turns: a copy of a buffer larger than any cache, and the bare
matrix products of the same model by torch, back to back (a compiled pass may beat those). A model
with quantised weights has no such products: torch would widen the weights first, in each of them.
"""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from specexp.api import Pairing
from specexp.fast import cuda_graphs
from specexp.measure import interleave
from specexp.models.int8 import by_address, is_quantised, method
from specexp.models.lm import LM
from specexp.models.memory import free_memory
from specexp.sequences import Sequences
from specexp.tree import Tree

PASSES = 10  # turns per repeat: a single pass is short
CONTEXT = 256  # cache slots that a pass reads, or the model's context if that is shorter
COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes: several times a usual last-level cache


def weight_bytes(module: nn.Module, tokens: int) -> int:
    """Bytes of weights that a pass over `tokens` tokens reads.

    A tensor shared by several modules counts once. An embedding not tied to the LM head counts only
    the rows looked up. All experts of a mixture are counted."""
    looked_up: dict[int, Tensor] = {}
    read: dict[int, Tensor] = {}
    for part in module.modules():
        own = by_address(part.parameters(recurse=False))
        (looked_up if isinstance(part, nn.Embedding) else read).update(own)
    rows = [w[:tokens] for pointer, w in looked_up.items() if pointer not in read]
    return sum(w.nbytes for w in (*read.values(), *rows))


def pass_bytes(lm: LM, batch: int, tokens: int, context: int) -> int:
    """Bytes that a pass over `tokens` tokens a row must read: the weights, and the keys and values
    of `context` slots a row. The few tokens' keys and values that it writes are left out."""
    return weight_bytes(lm.module, batch * tokens) + batch * lm.kv_bytes(context)


def products(module: nn.Module, tokens: int) -> Callable[[Any], None]:
    """The bare matrix products of a pass over `tokens` tokens: every linear layer's weight
    [out, in] applied to a random activation [tokens, in], in order, without biases."""
    weights = linear_weights(module)
    x = {
        w.shape[1]: torch.randn(tokens, w.shape[1], device=w.device, dtype=w.dtype) for w in weights
    }

    @torch.inference_mode()
    def multiply() -> None:
        for w in weights:
            nn.functional.linear(x[w.shape[1]], w)

    run = cuda_graphs.capture(multiply, weights[0].device)
    return lambda _: run()


def linear_weights(module: nn.Module) -> list[Tensor]:
    """The weights [out, in] of all linear layers, LM head included. GPT-2 stores them [in, out]."""
    weights: list[Any] = []
    for part in module.modules():
        if isinstance(part, nn.Linear):
            weights.append(part.weight)
        elif type(part).__name__ == "Conv1D":
            weights.append(part.weight.T)
    return weights


def a_pass(
    lm: LM, ids: list[int], batch: int, tokens: int, context: int, slack: int = 0
) -> Callable[[Any], Any]:
    """A repeatable pass over `tokens` tokens a row, at the end of a prompt that fills a buffer of
    `context` slots except the last `slack` (at least `tokens`). It has a cache of its own. ids: any
    tokens; they are repeated to fill the prompt."""
    lm, slack = lm.apart(), max(slack, tokens)
    lm.room = tokens
    length = max(1, context - slack)
    text = [token % lm.vocab for token in islice(cycle(ids), length + tokens)]
    seqs = Sequences.of([text[:length]] * batch, 0, slack=context - length, device=lm.device)
    drafted = torch.tensor([text[length : length + tokens - 1]] * batch, device=lm.device)
    draft = seqs.draft(Tree.chain(tokens - 1).nodes(lm.device), drafted.long())
    lm.allocate(*seqs.tokens.shape)
    lm.prefill(seqs, 0, length - 1)
    run = cuda_graphs.capture(torch.inference_mode()(lambda: lm.verify(seqs, draft)), lm.device)
    return lambda _: run()


def copying(device: torch.device) -> tuple[Callable[[Any], Any], int]:
    """A copy between two large buffers, and the bytes that it moves: half read, half written. (A
    processor that reads a cache line before overwriting it moves half as much again.)"""
    size = min(COPIED[device.type], free_memory(device) // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda _: target.copy_(source), 2 * size


def roofline(pairing: Pairing, texts: Sequence[str], repeats: int) -> dict[str, Any]:
    """One row per model (see `causal`) and pass, over 1 token and over gamma + 1, as plain data:
    model, tokens, context (slots), bytes (that it must read), ms and bare_ms (median), gb_s, and
    the intervals of_copy (share of the copy's bandwidth), over_bare and over_step (ratios); bare_ms
    and over_bare are None for quantised weights. Beside the rows: turns, gamma, and the copy's
    bytes, ms and gb_s."""
    gamma, ids = pairing.gamma, [t for row in pairing.encode(texts) for t in row]
    copy, copied = copying(pairing.target.device)
    arms: dict[Any, Callable[[Any], Any]] = {"copy": copy}
    kinds = [(at, lm, n) for at, lm in enumerate(causal(pairing)) for n in (1, gamma + 1)]
    for at, lm, tokens in kinds:
        arms[at, tokens] = a_pass(lm, ids, 1, tokens, _context(lm), gamma + 1)
        if not quantised(lm):
            arms[at, tokens, "bare"] = products(lm.module, tokens)
    times = range(repeats * PASSES)
    turns = interleave.time_in_turns(arms, times, pairing.target.device, "roofline", lead=1)
    copy_s = interleave.median_s(turns["copy"])
    rows = []
    for at, lm, tokens in kinds:
        passes, bare = turns[at, tokens], turns.get((at, tokens, "bare"))
        read = pass_bytes(lm, 1, tokens, _context(lm))
        pass_s = interleave.median_s(passes)
        rows.append({
            "model": lm.name, "tokens": tokens, "context": _context(lm), "bytes": read,
            "ms": 1e3 * pass_s, "gb_s": 1e-9 * read / pass_s,
            "bare_ms": 1e3 * interleave.median_s(bare) if bare else None,
            "of_copy": interleave.ratio(turns["copy"], passes, read / copied)._asdict(),
            "over_bare": interleave.ratio(passes, bare)._asdict() if bare else None,
            "over_step": interleave.ratio(passes, turns[at, 1])._asdict(),
        })  # fmt: skip
    about_copy = {"bytes": copied, "ms": 1e3 * copy_s, "gb_s": 1e-9 * copied / copy_s}
    return {"turns": repeats * PASSES, "gamma": gamma, "copy": about_copy, "rows": rows}


def causal(pairing: Pairing) -> list[LM]:
    """The target, and the drafter's models that read tokens alone. An EAGLE layer also reads the
    target's hidden states; its cost is in the suite `round`."""
    return [lm for lm in pairing.engine.models if hasattr(lm.module, "base_model")]


def quantised(lm: LM) -> bool:
    """Whether a model has weights in fewer bits than torch multiplies in."""
    return bool(method(lm.config)) or any(map(is_quantised, lm.module.parameters()))


def _context(lm: LM) -> int:
    return min(CONTEXT, lm.context)
