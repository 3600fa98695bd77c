"""Models with 8-bit weights: `NAME+int8` wherever a model is named, target or draft.

torchao quantises the weights only: each row of every `nn.Linear` becomes 8-bit integers and one
scale. Its products first turn them back into floats, so this saves memory, and time only where
kernels read the integers themselves (`scaled_rows`), as ours do. An LM head that is tied to the
embedding gets weights of its own, because most of what a small draft reads is its head. The
embedding, norms, biases and other kinds of layers are unchanged, and so are activations, keys and
values. A quantised draft can only cost acceptance; a quantised target is a different target, whose
output is kept exactly.

Folders whose files are quantised already are read by transformers and the library of their method.
This file does not know where models come from (load.py) or what runs them (lm.py).
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from specexp.errors import UserError, refusing

UNNAMED = "a method that its config does not name"  # as in the first files of bitsandbytes
DTYPES = (torch.float32, torch.bfloat16)  # those torchao can quantise


def check(config: Any, name: str) -> None:
    """Refuse, by its config alone, a model that cannot be quantised here."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f'{name}+int8 needs torchao: pip install "specexp[quant]"')
    if method(config):
        raise UserError(f"{name} is quantised as it is: leave out +int8")


def method(config: Any) -> str:
    """The method by which a model with this config is quantised already, or ""."""
    described = getattr(config, "quantization_config", None)
    if not described:
        return ""
    fields = described if isinstance(described, dict) else vars(described)  # of a module in memory
    return str(fields.get("quant_method") or UNNAMED)


def unpack(module: Any, dtype: torch.dtype, refused: str) -> None:
    """Run a first pass, in which some libraries unpack the weights of a quantised folder; matrices
    that they left in fewer bits than `dtype` are widened before. Raises UserError, a line that
    begins with `refused`, if that pass fails."""
    for name, weight in module.named_parameters():
        narrow = weight.dtype in (torch.bfloat16, torch.float16)
        if name.endswith(".weight") and narrow and type(weight.data) is Tensor:
            weight.data = weight.data.to(dtype)
    with torch.no_grad(), refusing(refused):
        module(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=module.device))


def linears(module: Any) -> list[nn.Linear]:
    """The layers of a transformers causal LM whose weights are quantised; none if all that there is
    is an LM head."""
    head = module.get_output_embeddings()
    parts = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return [] if parts == [head] else parts


def int8_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes of quantised weights [rows, columns]: per row a float32 scale and a zero point."""
    return sum(w.numel() + 5 * len(w) for w in weights)


def quantise(module: Any, device: str) -> None:
    """Quantise a transformers causal LM in place. Layers go to the device one by one, so that it
    holds at most one unquantised layer."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    parts = set(linears(module))
    config = Int8WeightOnlyConfig(set_inductor_config=False)  # inductor's settings are global
    quantize_(module, config, lambda part, _: part in parts, device=device)


def plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The plain tensors behind these; a quantised one consists of several."""
    for x in tensors:
        if is_quantised(x):
            yield from plain_tensors(_parts(x).values())
        else:
            yield x


def by_address(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """The plain tensors behind these, by address: a shared one occurs once."""
    return {x.data_ptr(): x for x in plain_tensors(tensors)}


def is_quantised(x: Tensor) -> bool:
    return hasattr(x, "__tensor_flatten__")


def by_rows(x: Tensor) -> bool:
    """Whether rows can be split and joined: a plain tensor, or one quantised by rows."""
    return all(type(p) is Tensor and p.shape[:1] == x.shape[:1] for p in plain_tensors([x.data]))


def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The 8-bit integers [rows, columns] and the float32 scales [rows, 1] whose product x is, both
    contiguous; None if it is anything else, or activations are to be quantised, too. The first call
    for a tensor reads its zero points, on a GPU by waiting for it."""
    if not is_quantised(x):
        return None
    parts, context = _parts(x), x.__tensor_flatten__()[1]  # type: ignore[attr-defined]
    rows, scales = parts.pop("qdata", None), parts.pop("scale", None)
    zeros = parts.pop("zero_point", None)
    if rows is None or scales is None or parts or context.get("act_quant_kwargs"):
        return None
    in_8_bits = rows.dtype == torch.int8 and scales.dtype == torch.float32
    if not in_8_bits or scales.shape != (len(rows), 1) or (zeros is not None and _shift(zeros)):
        return None
    if not rows.is_contiguous() or not scales.is_contiguous():
        return None
    return rows, scales


_SHIFT: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by zero points: whether any is not 0


def _shift(zeros: Tensor) -> bool:
    if zeros not in _SHIFT:
        _SHIFT[zeros] = bool(zeros.any())
    shift: bool = _SHIFT[zeros]
    return shift


def joined(weights: Sequence[Tensor], join: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Join the rows of matrices quantised by rows; `join` does that to their plain parts."""
    first: Any = weights[0]
    parts = {name: join([_parts(w)[name] for w in weights]) for name in _parts(first)}
    size = torch.Size((sum(map(len, weights)), *first.shape[1:]))
    _, context = first.__tensor_flatten__()
    whole: Tensor = type(first).__tensor_unflatten__(parts, context, size, first.stride())
    return whole


def _parts(x: Any) -> dict[str, Tensor]:
    return {name: getattr(x, name) for name in x.__tensor_flatten__()[0]}
