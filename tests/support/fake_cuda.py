"""Rounds as a GPU would run them, without one: tensors of device `meta` that say they are CUDA.

They have shapes, dtypes and strides and hold nothing, so reading a value or a shape that depends on
one raises. Attention returns the strides that CUDA's kernels return; those of a CPU are others.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.references import references
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specexp.drafters.crossed import Crossed
from specexp.drafters.planted import Planted
from specexp.engine import Engine
from specexp.models import int8
from specexp.recording import reaches_host
from specexp.sequences import Sequences
from specexp.tree import Tree

META = torch.device("meta")
ON_HOST = Crossed, Planted  # drafters that read prompts on the host
aten = torch.ops.aten


def _form(x: Any) -> Any:
    """All of an argument but its values: what decides the form of a kernel's result."""
    if isinstance(x, Tensor):
        return type(x), x.shape, x.stride(), x.dtype, x.is_meta
    if isinstance(x, (tuple, list)):
        return tuple(map(_form, x))
    return type(x), x


def _writes_one_tensor(func: torch._ops.OpOverload) -> bool:
    """A new one, and into nothing else."""
    schema = func._schema
    new = [str(x.type) == "Tensor" and x.alias_info is None for x in schema.returns]
    return func.namespace == "aten" and not schema.is_mutable and new == [True]


class Kernels(TorchDispatchMode):
    """Refuses whatever reaches the host or mixes devices. Numbers (no dimension) may lie on a CPU:
    they are arguments of a kernel. Forms of results are kept: torch takes long to find one."""

    forms: ClassVar[dict] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not reaches_host(func, args), f"{func} inside a round"
        kwargs = kwargs or {}
        form = func, _form(args), _form(list(kwargs.items()))
        if form in self.forms:
            shape, stride, dtype = self.forms[form]
            return torch.empty_strided(shape, stride, dtype=dtype, device=META)
        result = func(*args, **kwargs)
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, Tensor):
                assert x.is_meta or not x.dim(), f"{func} of a tensor on the {x.device.type}"
        if _writes_one_tensor(func) and type(result) is Tensor and result.is_meta:
            self.forms[form] = result.shape, result.stride(), result.dtype
        return result


def efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, False)[0]


def cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, False)[0]


# CUDA's kernels under a mask: float32 takes the first, bfloat16 on a recent GPU the second
ATTENTION = {efficient: torch.float32, cudnn: torch.bfloat16}


@contextmanager
def fake_cuda(attention: Callable[..., Tensor], *hollowed: object) -> Iterator[None]:
    """Meanwhile every tensor that these objects hold is hollow, and says that it is on CUDA."""

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
        assert q.shape[1] == k.shape[1], "a fused kernel under a mask takes no grouped queries"
        return attention(q, k, v, attn_mask)

    with references(), pytest.MonkeyPatch.context() as patch:
        for x in hollowed:
            _hollow(x, {}, patch)
        patch.setattr(F, "scaled_dot_product_attention", attend)
        patch.setattr(Tensor, "is_cuda", property(lambda x: x.is_meta), raising=False)
        with torch.inference_mode(), Kernels():
            yield


def _hollow(x: Any, seen: dict[int, Any], patch: pytest.MonkeyPatch) -> Any:
    """x with hollow tensors in place of all that it holds; what can be changed is, until `patch` is
    undone."""
    if id(x) in seen:
        return seen[id(x)]
    seen[id(x)] = x
    if isinstance(x, Tensor) and int8.is_quantised(x):
        names, context = x.__tensor_flatten__()
        parts = {name: _hollow(getattr(x, name), seen, patch) for name in names}
        seen[id(x)] = type(x).__tensor_unflatten__(parts, context, x.shape, x.stride())
    elif isinstance(x, Tensor):
        seen[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
        if isinstance(x, nn.Parameter):
            seen[id(x)] = nn.Parameter(seen[id(x)], requires_grad=False)
    elif isinstance(x, torch.device):
        seen[id(x)] = META
    elif isinstance(x, (tuple, list)):
        parts = [_hollow(part, seen, patch) for part in x]
        seen[id(x)] = type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    elif isinstance(x, dict):
        for key, part in list(x.items()):
            patch.setitem(x, key, _hollow(part, seen, patch))
    elif type(x) not in weakref.ProxyTypes and hasattr(x, "__dict__") and _ours(type(x)):
        _hollow(vars(x), seen, patch)
    return seen[id(x)]


def _ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("specexp", "support", "torch", "transformers")


@contextmanager
def begun(
    engine: Engine, prompts: list[list[int]], tree: Tree, attention: Callable[..., Tensor]
) -> Iterator[Sequences]:
    """Rows that have been prefilled on hollow tensors; meanwhile there are no others."""
    seqs = engine.begin(Sequences.of(prompts, 9, slack=tree.room))
    read = max(map(len, prompts)) - 1
    with fake_cuda(attention, engine, seqs):
        if not any(lm.net.parts for lm in engine.models):  # row by row, by lengths on the host
            states = engine.target.prefill(seqs, 0, read, engine.drafter.taps)
            if not isinstance(engine.drafter, ON_HOST):
                engine.drafter.prefill(seqs, states)
                engine.drafter.catch_up(seqs, read)
        yield seqs
