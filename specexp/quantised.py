"""Models with 8-bit weights: `NAME+int8` wherever a model is named, for target or draft.

torchao does it, weight only: of every `nn.Linear` but the LM head, each row of weights becomes
8-bit integers and one scale. A product makes them floats again first, so this saves memory, and
time only where a kernel does both at once. The LM head (often the embedding under another name),
the embedding, norms, biases, and layers of other kinds stay as they are, and so do activations,
keys and values. A quantised draft costs acceptance at most; a quantised target is another target,
and its texts are exactly its own.

This file does not know where models come from, nor what runs them: lm.py does.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specexp.errors import UserError

DTYPES = (torch.float32, torch.bfloat16)  # in which torchao reads weights


def split(name: str) -> tuple[str, str]:
    """A model's own name, and `+int8` or "". A folder that is called so is that folder.

    Raises UserError for `NAME+` anything else.
    """
    named = re.fullmatch(r"(.+)\+(\w+)", name)
    if not named or os.path.isdir(name):
        return name, ""
    if named[2] != "int8":
        raise UserError(
            f"{name}: weights can be quantised as {named[1]}+int8, and +{named[2]} is unknown"
        )
    return named[1], "+int8"


def check(config: Any, name: str) -> None:
    """Refuse what cannot be quantised here, by its config alone."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f'{name}+int8 needs torchao: pip install "specexp[quant]"')
    if getattr(config, "quantization_config", None):
        raise UserError(f"{name} is quantised as it is: leave out +int8")


def linears(module: Any) -> list[nn.Linear]:
    """The layers whose weights are quantised, of a causal LM of transformers."""
    head = module.get_output_embeddings()
    return [m for m in module.modules() if isinstance(m, nn.Linear) and m is not head]


def reckoned(weights: Iterable[Tensor]) -> int:
    """Bytes of quantised weights [rows, columns]: each row has a float32 scale and a zero point."""
    return sum(w.numel() + 5 * len(w) for w in weights)


def quantise(module: Any, device: str) -> None:
    """Quantise a causal LM of transformers in place. It goes to the device layer by layer, so that
    this never holds more than one as it was."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    wanted = set(linears(module))
    how = Int8WeightOnlyConfig(set_inductor_config=False)  # inductor's settings are everybody's
    quantize_(module, how, lambda part, _: part in wanted, device=device)


def held(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """What is really in memory of these tensors: of a quantised one its parts."""
    for x in tensors:
        if small(x):
            yield from held(_parts(x).values())
        else:
            yield x


def small(x: Tensor) -> bool:
    """Is it a quantised tensor?"""
    return hasattr(x, "__tensor_flatten__")


def by_rows(x: Tensor) -> bool:
    """Does each of its rows stand for itself, whether it is quantised or plain?"""
    return all(type(p) is Tensor and p.shape[:1] == x.shape[:1] for p in held([x.data]))


def joined(weights: Sequence[Tensor], join: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """The rows of matrices that are quantised by rows as one; `join` does that to their parts."""
    first: Any = weights[0]
    made = {name: join([_parts(w)[name] for w in weights]) for name in _parts(first)}
    size = torch.Size((sum(map(len, weights)), *first.shape[1:]))
    _, how = first.__tensor_flatten__()
    whole: Tensor = type(first).__tensor_unflatten__(made, how, size, first.stride())
    return whole


def _parts(x: Any) -> dict[str, Tensor]:
    return {name: getattr(x, name) for name in x.__tensor_flatten__()[0]}
