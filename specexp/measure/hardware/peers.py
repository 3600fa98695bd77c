"""The suite `peers`: other engines do the same work with the same weights, in turns.

Each side takes prompts as token lists and returns token lists. The whole call is timed, prefill
included, and delivered tokens are counted. EOS is ignored on both sides, so that all generate the
same number: specexp's engines have no `eos`, and while the suite runs, the modules' generation
config has no `eos_token_id`, the same sampling, and those settings of the target's own that specexp
applies. transformers reads the draft length from the *draft model's* generation config: gamma,
constant, with a confidence threshold of 0, so that no draft ends early.

Prompt lookup differs: among earlier occurrences of up to three tokens, transformers copies what
follows the first one, specexp what follows the latest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from specexp.api import Pairing
from specexp.drafters.model import DraftModel
from specexp.engine import Engine
from specexp.errors import first_line
from specexp.measure import interleave, statistics
from specexp.measure.exactness import compare
from specexp.measure.hardware.work import MAX_BATCH
from specexp.measure.interleave import Turn
from specexp.measure.prompts import Prompt
from specexp.sampling import Sampling

SUFFIX = 3  # most tokens that prompt lookup matches, on both sides
Texts = list[list[int]]  # of a batch, row by row
Writer = Callable[[Texts], Texts]  # prompts to new tokens

# (work, their arm, our arm) of each comparison
ONE_STREAM = (
    *((work, work, work) for work in ("plain", "draft", "lookup")),
    ("plain over compiled", "compiled", "plain"),
)
BATCHED = (("plain", "plain", "plain"), ("draft over plain", "plain", "draft"))


def peers(
    pairing: Pairing, prompts: Sequence[Prompt], batches: Sequence[int], max_new_tokens: int,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """One row per comparison: tokens/s of the peer (or why it is missing) and of specexp, their
    ratio, and how much of each output equals specexp's plain decoding (`equal`). The unit is a
    repeat of all prompts, or of the whole batch."""
    new, gamma, device = max_new_tokens, pairing.gamma, pairing.target.device
    batch = max([b for b in batches if b <= MAX_BATCH], default=min(batches))
    ids = pairing.encode([prompt.text for prompt in prompts])
    batch_ids = [ids[i % len(ids)] for i in range(batch)]
    engines = {
        "plain": pairing.engine.plain(),
        "draft": pairing.with_().engine,
        "lookup": pairing.with_(drafter=f"ngram:{SUFFIX}", rule="auto").engine,
    }
    for engine in engines.values():
        engine.eos = ()
    theirs, missing = others(pairing, new, max(map(len, ids)))
    each = [[row] for row in ids]
    longest_first = sorted(each, key=lambda rows: -len(rows[0]))
    modules = [pairing.target.module, *_draft_module(pairing)]
    with same_settings(modules, gamma, pairing.engine.sampling, pairing.followed):
        missing |= failing(theirs, longest_first[0])
        arms = {("ours", name): ours(engine, new) for name, engine in engines.items()}
        arms |= {("theirs", n): write for n, write in theirs.items() if n not in missing}
        in_both = {arm: arms[arm] for arm in arms if arm[1] == "plain" or arm == ("ours", "draft")}
        alone = interleave.time_in_turns(arms, each * repeats, device, "peers", warm=longest_first)
        several = [batch_ids] * max(repeats, statistics.MIN_REPEATS)
        in_batch = interleave.time_in_turns(in_both, several, device, f"peers, batch {batch}")
    rows = [
        {"work": work, "batch": size}
        | compared(turns.get(("theirs", their)), turns["ours", our], turns_each)
        | {"missing": missing.get(their)}
        | {"equal": equal(engines["plain"], texts, turns.get(("theirs", their)), new)}
        for size, turns, texts, turns_each, comparisons in (
            (1, alone, ids, len(ids), ONE_STREAM),
            (batch, in_batch, batch_ids, 1, BATCHED),
        )
        for work, their, our in comparisons
    ]
    return {
        "gamma": gamma, "drafter": pairing.drafter, "prompts": len(ids), "repeats": repeats,
        "new_tokens": new, "batch": batch, "rows": rows,
    }  # fmt: skip


def compared(
    theirs: Sequence[Turn] | None, ours: Sequence[Turn], turns_each: int = 1
) -> dict[str, Any]:
    """Delivered tokens/s of both sides over all turns, and the ratio of ours to theirs, of whose
    interval the unit is a repeat of so many turns."""
    s, tokens = _timed(ours, turns_each)
    own: dict[str, Any] = {"tok_s": float(tokens.sum() / s.sum())}
    if not theirs:
        return own | {"their_tok_s": None, "ratio": None}
    their_s, their_tokens = _timed(theirs, turns_each)
    ratio = statistics.speedup(their_s, their_tokens, s, tokens, same_work=True)
    return own | {"their_tok_s": float(their_tokens.sum() / their_s.sum()),
                  "ratio": ratio._asdict()}  # fmt: skip


def equal(
    plain: Engine, ids: Texts, turns: Sequence[Turn] | None, max_new_tokens: int
) -> dict[str, float] | None:
    """How far an arm's first greedy outputs for `ids` equal those of `plain`: the share of tokens
    before each row's first difference, and the rows that differ at a near tie or for any other
    reason. None for sampled output, whose noise differs."""
    if turns is None or plain.sampling.temperature > 0:
        return None
    texts = [row for turn in turns for row in turn.result][: len(ids)]
    exact = compare(plain, ids, texts, max_new_tokens, range(len(ids)))
    share = exact.tokens / (len(ids) * max_new_tokens)
    return {"share": share, "ties": exact.ties, "others": exact.bugs}


def _timed(turns: Sequence[Turn], turns_each: int) -> np.ndarray:
    """[2, repeats]: the seconds and the delivered tokens of each repeat."""
    each = np.array([(turn.seconds, sum(map(len, turn.result))) for turn in turns])
    return each.reshape(-1, turns_each, 2).sum(1).T


# --- the arms ------------------------------------------------------------------------------------


def ours(engine: Engine, max_new_tokens: int) -> Writer:
    return lambda texts: engine.generate(texts, max_new_tokens).tokens


def others(
    pairing: Pairing, max_new_tokens: int, longest: int
) -> tuple[dict[str, Writer], dict[str, str]]:
    """The peers available here, and why the others are not. longest: of the prompts, in tokens."""
    module, new = pairing.target.module, max_new_tokens
    lookup = transformers(
        module, new,
        prompt_lookup_num_tokens=pairing.gamma, max_matching_ngram_size=SUFFIX,
    )  # fmt: skip
    writers = {"plain": transformers(module, new), "lookup": lookup}
    missing = {}
    if why := unassisted(pairing):
        missing["draft"] = why
    else:
        [draft] = _draft_module(pairing)
        writers["draft"] = transformers(module, new, assistant_model=draft)
    if module.device.type == "cuda":
        writers["compiled"] = transformers(module, new, longest, cache_implementation="static")
    else:
        missing["compiled"] = "transformers compiles its passes on a GPU alone"
    return writers, missing


def failing(writers: Mapping[str, Writer], texts: Texts) -> dict[str, str]:
    """Why those of these peers fail that do, by name: the others are timed without them."""
    reasons = {}
    for name, write in writers.items():
        try:
            write(texts)
        except Exception as e:  # of a library, or of what compiles its passes: anything
            reasons[name] = f"it fails with {type(e).__name__}: {first_line(e)}"
    return reasons


def unassisted(pairing: Pairing) -> str:
    """Why transformers' assisted generation cannot run this pairing; "" if it can."""
    drafter = pairing.engine.drafter
    if not isinstance(drafter, DraftModel):
        return f"assisted generation needs a draft model, and {pairing.drafter} is not one"
    sizes = [lm.config.vocab_size for lm in (pairing.target, drafter.lm)]
    if sizes[0] != sizes[1]:
        return (
            f"{pairing.target.name} has {sizes[0]} logits and {drafter.name} {sizes[1]}, which "
            "assisted generation mistakes for different tokenizers"
        )
    return ""


def _draft_module(pairing: Pairing) -> list[Any]:
    drafter = pairing.engine.drafter
    return [drafter.lm.module] if isinstance(drafter, DraftModel) else []


def transformers(module: Any, max_new_tokens: int, least: int = 0, **how: Any) -> Writer:
    """`module.generate` with rows padded on the left, to `least` tokens or more: passes over a
    static cache are compiled for its size; how: options besides `same_settings`."""

    def write(texts: Texts) -> Texts:
        width = max(least, *map(len, texts))
        ids = [[0] * (width - len(row)) + row for row in texts]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in texts]
        output = module.generate(
            input_ids=torch.tensor(ids, device=module.device),
            attention_mask=torch.tensor(mask, device=module.device),
            max_new_tokens=max_new_tokens, **how,
        )  # fmt: skip
        return [row[width:] for row in output.tolist()]

    return write


@contextmanager
def same_settings(
    modules: Sequence[Any], gamma: int, sampling: Sampling, processors: dict[str, Any]
) -> Iterator[None]:
    """While active, the modules `generate` as specexp does: without EOS, with the same processors,
    greedily or from the same distribution, and with a constant draft length of gamma."""
    how: dict[str, Any] = processors | {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        how |= asdict(sampling) | {"min_p": sampling.min_p or None}
    configs = [(module, module.generation_config) for module in modules]
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # assisted generation warns of the arguments it passes itself
    try:
        for module, config in configs:
            module.generation_config = type(config)(
                eos_token_id=None, pad_token_id=0, num_assistant_tokens=gamma,
                num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0, **how,
            )  # fmt: skip
        yield
    finally:
        logging.set_verbosity(verbosity)
        for module, config in reversed(configs):
            module.generation_config = config
