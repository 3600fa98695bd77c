"""Lighter passes of modules that fused.py cannot run: their own `forward`, in fewer launches.

On a GPU each operation takes two microseconds, whatever its size. transformers writes an RMS norm
as eight of them and a rotation as ten, copies keys for every query head, and reads every slot of
the cache under a mask. So norms, rotations, gates and attention of a copy of the module, its twin,
are replaced by operations with kernels, each only if it gives on a probe what the module's own code
gives. Attention then reads each row up to its length, and no mask is made. If the logits of the
whole differ from the module's, the pass is tried with the library's attention and masks; if they
still differ, the module runs as it is.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specexp.fast import fused
from specexp.fast.fused import ROUNDING, AttentionInfo, attention
from specexp.fitting import UNLIMITED
from specexp.models import load
from specexp.models.cache import SlotCache
from specexp.models.lm import LM, Network, Unfused
from specexp.models.scans import replaced
from specexp.objects import signature
from specexp.ops import op

MLP = {"gate_proj", "up_proj", "down_proj"}
LARGE = 40.0  # of a gate on a probe; models that bound gates bound them at 7 to 10
ROTATION, ATTENTION = "apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"  # names in a model's file


@op
def rms_norm(x: Tensor, norm: Any) -> Tensor:
    """x [..., E] after an RMS norm of transformers (Zhang & Sennrich 2019). `norm.above`: what is
    added to its weight, 0 or 1."""
    y: Tensor = type(norm).forward(norm, x)
    return y


@op
def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, H, n, d] and k [B, K, n, d] rotated by cos and sin [B, n, d] (RoPE: Su et al. 2021).
    cos and sin may be float32 where q and k are not, as in OLMo 2."""
    cos, sin = cos[:, None], sin[:, None]
    return _rotated(q, cos, sin).to(q.dtype), _rotated(k, cos, sin).to(k.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@op
def gated(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    """SiLU of `gate` times `up`, of the same shape; with `tanh`, GELU in its approximation by a
    hyperbolic tangent (GLU variants: Shazeer 2020)."""
    return (F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)) * up


def mlp(part: Any, x: Tensor, tanh: bool) -> Tensor:
    """x [..., E] after a gated MLP of transformers, whose gate is that of `gated`."""
    down: Tensor = part.down_proj(gated(part.gate_proj(x), part.up_proj(x), tanh))
    return down


def gates(part: Any) -> bool | None:
    """The `tanh` with which `mlp` does what this module does; None if neither does, or it is no
    gated MLP. The probe has gates so large that a bound on them shows."""
    if {name for name, _ in part.named_children()} - {"act_fn"} != MLP:
        return None
    try:
        x = torch.linspace(-8, 8, 1000, dtype=torch.float32)
        theirs, one = part.act_fn(x), torch.ones_like(x)
        tanh = not torch.allclose(theirs, gated(x, one, False), atol=1e-6)
        if tanh and not torch.allclose(theirs, gated(x, one, True), atol=1e-6):
            return None
        weight = part.gate_proj.weight
        x = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device)[None]
        x *= LARGE / part.gate_proj(x).abs().max()
        theirs, ours = part(x).double(), mlp(part, x, tanh).double()
        near = rounding(x.dtype) * theirs.norm()
        return tanh if bool((ours - theirs).norm() <= near) else None
    except Exception:  # for example, its weights are of another kind
        return None


def rounding(dtype: torch.dtype) -> float:
    """The relative difference that rounding alone may cause in the output of a norm or an MLP. In
    16 bits that is far less than another function would cause (half a unit in the last place was
    seen); in 32 bits it is generous."""
    return max(4 * torch.finfo(dtype).eps, 1e-5)


def above(norm: nn.Module) -> float | None:
    """`above` of `rms_norm`: what this module adds to its weight, 0 or 1; None: it is no RMS norm
    that `rms_norm` could replace."""
    weights, eps = dict(norm.named_parameters()), epsilon(norm)
    if [*weights] != ["weight"] or weights["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    if len(signature(norm.forward).parameters) > 1:  # for example, x and a gate
        return None
    weight = weights["weight"].detach()
    sizes = torch.tensor([[1e-3], [0.1], [1.0], [30.0]]) * torch.linspace(0, 2, len(weight))
    generator = torch.Generator().manual_seed(0)  # a norm by groups, or of x - mean, must differ
    x = (sizes * (1 + torch.randn(sizes.shape, generator=generator))).to(weight)
    try:
        theirs = norm(x).double()
    except Exception:  # for example, it needs more than x
        return None
    unit = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    for added in (0.0, 1.0):
        wanted = unit * (weight.double() + added)
        near = rounding(x.dtype) * wanted.norm(dim=-1)
        if theirs.shape == wanted.shape and bool(((theirs - wanted).norm(dim=-1) <= near).all()):
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
        theirs = function(q, k, cos[:, 0], sin[:, 0])
    except Exception:
        return False
    wanted = _rotated(q, cos, sin), _rotated(k, cos, sin)
    return len(theirs) == 2 and all(map(torch.equal, theirs, wanted))


def in_place_of(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `rotate` where its arguments are those of `rotate`, else `own`, the
    library's function that it replaces."""

    def apply(*given: Any, **more: Any) -> Any:
        widths = {x.shape[-1] for x in given[:3]}
        usual = len(given) == 4 and not more and given[2].dim() == 3 and len(widths) == 1
        return rotate(*given) if usual else own(*given, **more)

    return apply


class Table:
    """Replaces, in a twin, transformers' table of attention functions; `attention` runs instead.
    `off`: the library's functions are used after all, under masks. `infos`: for each layer, what
    `attention` needs to know of the pass that is running. `masked`: some pass had to make a mask,
    because the reference of `attention` ran. A call raises NotImplementedError if a layer adds a
    bias to scores or chooses keys itself."""

    def __init__(self) -> None:
        self.infos: list[AttentionInfo] = []
        self.off = self.masked = False

    def get_interface(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        return self if self.infos else ALL_ATTENTION_FUNCTIONS.get_interface(name, own)

    def __call__(
        self, module: Any, q: Tensor, keys: Tensor, values: Tensor, attention_mask: Any,
        scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
        position_ids: Any = None, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        masked = attention_mask is not None and attention_mask.shape[-1] > 1
        if masked or any(map(torch.is_tensor, more.values())):
            raise NotImplementedError("its scores have a bias, or it chooses keys itself")
        (B, H, n, d), info = q.shape, self.infos[module.layer_idx]
        scale = d**-0.5 if scaling is None else scaling
        heads = attention(q, keys, values, info, scale, softcap or 0.0, s_aux)
        self.masked |= bool(info.masks)
        return heads.view(B, n, H, -1), None


@dataclass(frozen=True)
class Lighter(Unfused):
    """A module some of whose parts are replaced by operations. `table`: what runs its attention."""

    table: Table = field(default_factory=Table)

    @property
    def by_length_up_to(self) -> int:  # type: ignore[override]
        return 0 if self.table.off or self.table.masked else UNLIMITED

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, taps: tuple[int, ...],
        last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `lm.Network`."""
        if not self.table.off:
            infos = {k: AttentionInfo(cache, positions, k) for k in set(cache.kinds)}
            self.table.infos = [infos[kind] for kind in cache.kinds]
        try:
            return super().__call__(tokens, positions, cache, taps, last, **inputs)
        finally:
            self.table.infos = []

    def masks(self, cache: SlotCache) -> Any:
        if not self.table.infos:
            return super().masks(cache)
        b, _, n, _ = cache.slots.shape
        unread = torch.zeros(b, 1, n, 1, dtype=self.module.dtype, device=cache.slots.device)
        return cache.by_kind(lambda *_: unread)


def network(module: Any, name: str, vocab: int) -> Network:
    """The module's lighter passes; NotImplemented if none agree with the module."""
    if not isinstance(module, PreTrainedModel):
        return NotImplemented
    return fused.kept(module, "lighter", lambda: _lighter(module, name, vocab) or NotImplemented)


@torch.inference_mode()
def _lighter(module: Any, name: str, vocab: int) -> Lighter | None:
    """Passes without masks if these agree with the module, else with masks, else None."""
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
    """Replace norms, rotations, gates and attention of a twin by operations, and let `table` run
    its attention. Returns the modules whose `forward` has changed."""
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
    """What the names ROTATION and ATTENTION stand for in a module's `forward`, if it uses them."""
    forward: Any = inspect.unwrap(type(part).forward)
    used = getattr(getattr(forward, "__code__", None), "co_names", ())
    own: dict[str, Any] = {ATTENTION: table} if ATTENTION in used else {}
    if ROTATION in used and rotates(theirs := forward.__globals__[ROTATION]):
        own[ROTATION] = in_place_of(theirs)
    return own
