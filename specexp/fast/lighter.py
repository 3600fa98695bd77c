"""Lighter passes of modules that have none of our own: the module's forward, in fewer launches.

On a GPU each operation takes two microseconds, whatever its size. transformers writes an RMS norm
as eight of them and a rotation as ten, copies keys for every query head, and reads every slot of
the cache under a mask. In the module's twin norms, rotations, gates and attention are operations
with kernels instead, wherever on a probe they give what the module's own code gives. Attention then
reads a row by its length, as in fused passes, and no mask is made.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specexp.fast import fused
from specexp.fast.fused import ROUNDING, AttentionInfo, attention
from specexp.models import load
from specexp.models.cache import SlotCache
from specexp.models.lm import LM, Network, Unfused
from specexp.models.scans import replaced
from specexp.ops import op
from specexp.tree import Branches

MLP = {"gate_proj", "up_proj", "down_proj"}
ROTATION, ATTENTION = "apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"  # of a module's library


@op
def rms_norm(x: Tensor, norm: Any) -> Tensor:
    """What an RMS norm of transformers (Zhang & Sennrich 2019) makes of x [..., E]. `norm.above`:
    to what its weight is added, 0 or 1."""
    y: Tensor = type(norm).forward(norm, x)
    return y


@op
def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, H, n, d] and k [B, K, n, d] rotated by cos and sin [B, n, d] (Su et al. 2021)."""
    cos, sin = cos[:, None], sin[:, None]
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@op
def gated(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    """SiLU of `gate` times `up`, alike in shape; `tanh`: GELU by its tangent (Shazeer 2020)."""
    return (F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)) * up


def mlp(part: Any, x: Tensor, tanh: bool) -> Tensor:
    """What a gated MLP of transformers makes of x [..., E]."""
    down: Tensor = part.down_proj(gated(part.gate_proj(x), part.up_proj(x), tanh))
    return down


def gates(part: Any) -> bool | None:
    """`tanh` of `mlp`; None: the module is none, or does something else."""
    if {name for name, _ in part.named_children()} - {"act_fn"} != MLP:
        return None
    try:
        weight = part.gate_proj.weight
        x = torch.linspace(-4, 4, weight.shape[1], dtype=weight.dtype, device=weight.device)
        made = part(x[None])
        near = 8 * torch.finfo(x.dtype).eps * made.norm()
        off = [(mlp(part, x[None], tanh) - made).norm() for tanh in (False, True)]
    except Exception:  # its weights are of another kind, say
        return None
    tanh = bool(off[1] < off[0])  # in bfloat16 both may be near
    return tanh if bool(off[tanh] <= near) else None


def above(norm: nn.Module) -> float | None:
    """What is added to the weight of an RMS norm, 0 or 1; None: the module does something else."""
    weights, eps = dict(norm.named_parameters()), epsilon(norm)
    if [*weights] != ["weight"] or weights["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    weight = weights["weight"].detach()
    sizes = torch.tensor([[1e-3], [0.1], [1.0], [30.0]])
    generator = torch.Generator().manual_seed(0)
    x = (sizes * torch.randn(len(sizes), len(weight), generator=generator)).to(weight)
    try:
        made = norm(x).double()
    except Exception:  # it takes more than x, say
        return None
    unit = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    for added in (0.0, 1.0):
        wanted = unit * (weight.double() + added)
        near = 8 * torch.finfo(x.dtype).eps * wanted.norm(dim=-1)
        if made.shape == wanted.shape and bool(((made - wanted).norm(dim=-1) <= near).all()):
            return added
    return None


def epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@cache
def rotates(function: Callable[..., Any]) -> bool:
    """Whether a library's function does what `rotate` does."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (2, 1, 1, 1))
    try:
        made = function(q, k, cos[:, 0], sin[:, 0])
    except Exception:
        return False
    wanted = _rotated(q, cos, sin), _rotated(k, cos, sin)
    return len(made) == 2 and all(map(torch.equal, made, wanted))


def in_place_of(own: Callable[..., Any]) -> Callable[..., Any]:
    """`rotate` in place of a library's function, where it is asked for nothing else."""

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **more: Any) -> Any:
        whole = cos.dim() == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        return own(q, k, cos, sin, **more) if more or not whole else rotate(q, k, cos, sin)

    return apply


class Table:
    """Stands in a twin for transformers' table of attention functions. `off`: those are used, under
    masks. `infos`: of each layer, in a pass that makes no mask; `masked`: whether one had to be
    made after all."""

    def __init__(self) -> None:
        self.infos: list[AttentionInfo] = []
        self.off = self.masked = False

    def get_interface(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        return self if self.infos else ALL_ATTENTION_FUNCTIONS.get_interface(name, own)

    def __call__(
        self, module: Any, q: Tensor, keys: Tensor, values: Tensor, mask: Any,
        scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
        position_bias: Any = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if position_bias is not None:
            raise NotImplementedError("scores have a bias")
        (B, H, n, d), info = q.shape, self.infos[module.layer_idx]
        scale = d**-0.5 if scaling is None else scaling
        heads = attention(q, keys, values, info, scale, softcap or 0.0, s_aux)
        self.masked |= bool(info.masks)
        return heads.view(B, n, H, -1), None


@dataclass(frozen=True)
class Lighter(Unfused):
    """A module some of whose operations are kernels; `table`: of its attention."""

    table: Table = field(default_factory=Table)

    @property
    def by_length_up_to(self) -> int:  # type: ignore[override]
        return 0 if self.table.off or self.table.masked else 1 << 30

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible: Branches | None, cache: SlotCache,
        taps: tuple[int, ...], last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `lm.Network`."""
        if not self.table.off:
            infos = {k: AttentionInfo(cache, visible, positions, k) for k in set(cache.kinds)}
            self.table.infos = [infos[kind] for kind in cache.kinds]
        try:
            return super().__call__(tokens, positions, visible, cache, taps, last, **inputs)
        finally:
            self.table.infos = []

    def masks(self, visible: Branches | None, cache: SlotCache) -> Any:
        if not self.table.infos:
            return super().masks(visible, cache)
        b, _, n, _ = cache.slots.shape
        unread = torch.zeros(b, 1, n, 1, dtype=self.module.dtype, device=cache.slots.device)
        return cache.by_kind(lambda *_: unread)


def network(module: Any, name: str, vocab: int) -> Network:
    """The module's lighter passes, if it has any that agree with it."""
    if not isinstance(module, PreTrainedModel):
        return NotImplemented
    if module not in _LIGHTER:
        _LIGHTER[module] = _lighter(module, name, vocab)
    net: Any = _LIGHTER[module] or NotImplemented
    return net


_LIGHTER: WeakKeyDictionary[Any, Lighter | None] = WeakKeyDictionary()


@torch.inference_mode()
def _lighter(module: Any, name: str, vocab: int) -> Lighter | None:
    """Without masks if those passes agree with the module, else with them."""
    whole = Unfused.of(module)
    net = Lighter(**vars(whole))
    changed = lighten(whole.module, net.table)
    tried = LM(module, name, vocab, net)
    for masks in (not whole.attends, True):
        net.table.off = masks
        try:
            off = load.difference(tried, load.probe_length(tried))
        except Exception as e:
            fused.failure(e)
            continue
        if off <= ROUNDING.get(module.dtype, 0.0):
            load.PROBED.add(module)  # by the same comparison
            return net
    for part in changed:
        del part.forward
    return None


def lighten(whole: nn.Module, table: Table) -> list[Any]:
    """Let norms, rotations, gates and attention of a twin be operations; returns what changed."""
    changed: list[Any] = []
    for part in whole.modules():
        if "forward" in vars(part):
            continue
        if "RMSNorm" in type(part).__name__ and (added := above(part)) is not None:
            part.above = added  # type: ignore[assignment]
            part.forward = lambda x, norm=part: rms_norm(x, norm)
        elif (tanh := gates(part)) is not None:
            part.forward = partial(mlp, part, tanh=tanh)
        elif own := _in_place(part, table):
            part.forward = replaced(part, own)
        else:
            continue
        changed.append(part)
    return changed


def _in_place(part: nn.Module, table: Table) -> dict[str, Any]:
    """What stands for names of its library in a module's forward."""
    forward: Any = inspect.unwrap(type(part).forward)
    used = getattr(getattr(forward, "__code__", None), "co_names", ())
    own: dict[str, Any] = {ATTENTION: table} if ATTENTION in used else {}
    if ROTATION in used and rotates(theirs := forward.__globals__[ROTATION]):
        own[ROTATION] = in_place_of(theirs)
    return own
