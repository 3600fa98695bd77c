"""What fused passes take from a module: its weights, joined. They are not made if it is more."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from specexp.models import int8
from specexp.models.lm import Linear, ShortHead

PRODUCTS = ("_proj", "lm_head")  # how the names of linear layers end
INERT = "transformers.utils.output_capturing"  # its hooks only look


def beyond_weights(module: nn.Module, **borrowed: Any) -> str:
    """In words, what a part of this module, or one that it borrows, does that its weights do not
    tell; "" if there is none. A probe need not show it: in bfloat16 an adapter may change logits by
    no more than rounding."""
    for name, part in (*module.named_modules(), *borrowed.items()):
        hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
        if any(getattr(hook, "__module__", "") != INERT for hook in hooks):
            return f"it has a hook on {name or 'itself'}"
        if "forward" in vars(part):
            return f"{name or 'it'} has a forward of its own"
        if name.endswith(PRODUCTS) and type(part) not in (nn.Linear, Linear, ShortHead):
            return f"{name} is no nn.Linear but a {type(part).__name__}"
        if name.endswith("act_fn") and type(part).__name__ not in ("SiLU", "SiLUActivation"):
            return f"{name} is no SiLU but a {type(part).__name__}"
        if name.endswith("lm_head") and part.bias is not None:
            return "its LM head has a bias"
    return ""


def weights_of(module: Any) -> list[Any]:
    """What tells whether a module has other weights than before: where they are, in which dtype."""
    plain = int8.plain_tensors(module.parameters())
    return [(p.data_ptr(), p.dtype, p.device) for p in plain]


def joined(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix [sum of outputs, inputs] and one bias, or None, which hold the rows of all parts
    in order. The parts' parameters become views of them, so that no weight is stored twice. A part
    that is given other weights later leaves these as they are."""
    return _side_by_side([p.weight for p in parts]), (
        None if parts[0].bias is None else _side_by_side([p.bias for p in parts])
    )


def _side_by_side(parts: list[Tensor]) -> Tensor:
    first, size = parts[0], sum(len(p) for p in parts)
    if int8.is_quantised(first):
        return int8.joined(parts, _side_by_side)
    places = accumulate((p.numel() for p in parts), initial=first.storage_offset())
    in_order = all(p.storage_offset() == at for p, at in zip(parts, places, strict=False))
    if in_order and len({p.untyped_storage().data_ptr() for p in parts}) == 1:
        return first.detach().as_strided((size, *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parts])
    for p, view in zip(parts, whole.split([len(p) for p in parts]), strict=True):
        p.data = view
    return whole
