"""What a model's generation config means: where texts end, processors of logits, its own sampling.

load.py reads it. A setting is followed if it depends on the tokens of a row alone, since it is then
exact whatever is drafted. Any other setting that would change the text is refused by name.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specexp.errors import UserError, refusing, warn_once
from specexp.models.processors import (
    NoRepeatNgram,
    Processor,
    Processors,
    RepetitionPenalty,
    SequenceBias,
    unprocessed,
)
from specexp.sampling import Sampling
from specexp.sequences import Draft

# Settings that are followed, each with the values at which it changes nothing.
FOLLOWED: dict[str, tuple[Any, ...]] = {
    "sequence_bias": (), "repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "bad_words_ids": (), "suppress_tokens": ([],),
}  # fmt: skip
# Caches that give back what was written, unlike a quantised one.
WHOLE_CACHES = (
    "dynamic", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid",
    "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked", "paged",
)  # fmt: skip
# Settings that are refused: searches, further passes, other inputs, and those that count from the
# end of the prompt or of the text, or by the clock.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,), "constraints": (),
    "force_words_ids": (), "penalty_alpha": (0,), "dola_layers": (), "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,), "encoder_no_repeat_ngram_size": (0,),
    "watermarking_config": (), "token_healing": (False,), "stop_strings": ([],),
    "min_length": (0, 1), "min_new_tokens": (0,), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ([],), "max_time": (), "cache_implementation": WHOLE_CACHES,
}  # fmt: skip
# Cuts that `Sampling` does not have, refused where the model's own sampling is used.
NO_CUTS: dict[str, tuple[Any, ...]] = {
    "top_h": (), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,)
}  # fmt: skip
USUAL = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # where a config says nothing


def settings(config: Any, names: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The settings among `names` that this generation config has and that change something."""
    values = {name: getattr(config, name, None) for name in names}
    return {n: value for n, value in values.items() if value is not None and value not in names[n]}


def followed(config: Any) -> dict[str, Any]:
    """The settings of a generation config that shape logits here."""
    return settings(config, FOLLOWED)


def processors(
    config: Any, name: str, vocab: int, device: torch.device
) -> Callable[[Draft, Tensor], Tensor]:
    """The processors of logits [B, N, V] that a generation config asks for. `name`: the model's,
    for messages; `vocab`: V. Raises UserError if it has a setting that cannot be followed."""
    _refuse(settings(config, REFUSED), name)
    steps: dict[str, Processor] = {}
    for setting, value in followed(config).items():
        with refusing(_sets(name, setting, value)):
            steps[setting] = _step(setting, value, eos_tokens(config, name), vocab, device)
    banned = {n: s.alone.isneginf() for n, s in steps.items() if isinstance(s, SequenceBias)}
    if banned and bool(torch.stack([*banned.values()]).any(0).all()):
        raise UserError(
            f"generation_config.json of {name} rules out every token by {' and '.join(banned)}: "
            "allow some there"
        )
    return Processors(steps) if steps else unprocessed


def _step(setting: str, value: Any, eos: list[int], vocab: int, device: torch.device) -> Processor:
    if setting == "repetition_penalty":
        return RepetitionPenalty(value)
    if setting == "no_repeat_ngram_size":
        return NoRepeatNgram(value)
    if setting == "sequence_bias":
        pairs = value.items() if isinstance(value, dict) else value
        biases = {tuple(row): float(bias) for row, bias in pairs}
    elif setting == "suppress_tokens":
        biases = {(token,): -math.inf for token in value}
    else:
        biases = {tuple(row): -math.inf for row in value if list(row) not in [[t] for t in eos]}
    within = {row: bias for row, bias in biases.items() if min(row) >= 0 and max(row) < vocab}
    return SequenceBias(within, vocab, device)


def sampling(config: Any, name: str) -> Sampling:
    """The model's own sampling: greedy unless `do_sample`, and transformers' default for a value
    that the config does not give. Raises UserError for a cut that `Sampling` does not know."""
    if not getattr(config, "do_sample", False):
        return Sampling()
    _refuse(settings(config, NO_CUTS), name)
    values = USUAL | settings(config, dict.fromkeys(USUAL, ()))
    try:
        return Sampling(**values)
    except UserError as e:
        raise UserError(f"generation_config.json of {name}: {e}") from None


def eos_tokens(config: Any, name: str) -> list[int]:
    """The tokens that end a text."""
    eos = getattr(config, "eos_token_id", None)
    listed = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) for token in listed):
        raise UserError(f"{_sets(name, 'eos_token_id', eos)}: use a token or a list of tokens")
    return listed


def warn_of_no_end(config: Any, own: Any, name: str) -> None:
    """Warn, once, of a model whose generation config names no EOS, though its config.json does."""
    if not eos_tokens(config, name) and own.eos_token_id is not None:
        warn_once(
            "generation_config.json of %s names no EOS, so texts run to their limit, as in "
            "transformers; the eos_token_id %s of config.json does not count",
            name, str(own.eos_token_id),
        )  # fmt: skip


def _refuse(unsupported: dict[str, Any], name: str) -> None:
    for setting, value in unsupported.items():
        raise UserError(
            f"{_sets(name, setting, value)}, which changes the text and is not followed here: "
            "remove it there to generate without it"
        )


def _sets(name: str, setting: str, value: Any) -> str:
    return f"generation_config.json of {name} sets {setting} to {' '.join(repr(value).split()):.60}"
