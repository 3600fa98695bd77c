"""8-bit weights without torchao, which a machine with a GPU may lack."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Scaled(Tensor):
    """The matrix rows [E, depth] of 8-bit integers times scales [E, 1], as `int8.scaled_rows` reads
    torchao's. Any operation widens it."""

    qdata: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Any:
        made = Tensor._make_wrapper_subclass(cls, rows.shape, dtype=dtype, device=rows.device)
        made.qdata, made.scale = rows, scales
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Any:
        """The nearest to a matrix of floats, none of whose rows is 0."""
        scales = weight.abs().amax(1, keepdim=True).float() / 127
        return cls((weight / scales).round().to(torch.int8), scales, weight.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["qdata", "scale"], {}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def wide(x: Any) -> Any:
            return (x.qdata * x.scale).to(x.dtype) if isinstance(x, cls) else x

        return func(*tree_map(wide, args), **tree_map(wide, kwargs or {}))
