"""From logits to a distribution, and from a distribution to a token.

`Sampling` shapes target and drafter logits alike. The noise behind every draw is a function, not a
stateful stream: each uniform is a hash of (seed, the row's stream, position, purpose, lane). So a
row's sample does not depend on its batch, a recorded graph can replay it, and under the rule match
speculative output equals plain sampling token for token. A drafter that reads the noise which the
target will read is *coupled* to it and agrees with it more often (common random numbers; the race
of exponentials is the Gumbel-max trick).
"""

from dataclasses import asdict, dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specexp import fitting
from specexp.errors import UserError
from specexp.ops import op

TOKEN, ACCEPT, RESIDUAL = 1, 2, 3  # purposes of noise; ACCEPT uses one lane per sibling
PART = 1024  # tokens that are raced together in `Rng.uncoupled`


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


@op
def likeliest(w: Tensor) -> Tensor:
    """argmax over w [..., V], int64 [...]; the lowest index at a tie."""
    return w.argmax(-1)


@op
def ranked(w: Tensor, k: int) -> Tensor:
    """Indices of the k largest of w [..., V], largest first, int64 [..., k]. NaN counts as largest.
    Among equals, kernels take the lowest index, torch any. Raises UserError if k > V."""
    if k > w.shape[-1]:
        raise UserError(f"a vocabulary of {w.shape[-1]} has no {k} likeliest tokens; use fewer")
    return likeliest(w)[..., None] if k == 1 else w.topk(k).indices


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_M1, _M2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def mix(x: Tensor) -> Tensor:
    """A bijective hash of int64 (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


class Rng(Protocol):
    """The source of randomness of drafters and rules. keys [...] address it; w [..., V] >= 0.

    A draw is a function of its address: equal keys and equal weights give equal draws.
    """

    def keys(self, stream: Tensor, length: Tensor, depth: Tensor) -> Tensor:
        """[B, n]: addresses of the tokens that follow nodes at `depth` [b, n], in rows of these
        noise streams [B] and lengths [B]."""

    def bernoulli(self, p: Tensor, keys: Tensor, lane: int) -> Tensor:
        """bool [...]: True with probability p [...]; `lane` separates draws at one key."""

    def categorical(self, w: Tensor, keys: Tensor, purpose: int) -> Tensor:
        """int64 [...]: a token with probability proportional to w; `purpose` separates draws at one
        key."""

    def uncoupled(self, w: Tensor, keys: Tensor) -> Tensor:
        """int64 [...]: as `categorical`, for a draw that no other should agree with; one at each
        key. It takes less noise."""

    def draw(self, w: Tensor, k: int, keys: Tensor) -> Tensor:
        """int64 [..., k]: tokens drawn without replacement, in order; those of weight 0 last."""


@dataclass(frozen=True)
class Noise:
    """Uniforms addressed by (seed, key, purpose, lane).

    A key is a hash of the row's stream and the token's position, so a row's noise depends on
    neither its batch nor its drafts. A rule that looks ahead uses the noise of positions that it
    then does not commit, and must not use it again. Under such a rule (`by_round`) the key is a
    hash of the stream, the root's position and the distance from the root: new noise every round.
    """

    seed: int
    by_round: bool = False

    @op
    def keys(self, stream: Tensor, length: Tensor, depth: Tensor) -> Tensor:
        root = mix(stream)[:, None] + length[:, None]
        return mix((mix(root) if self.by_round else root) + depth)

    def salt(self, purpose: int) -> int:
        """The offset that separates the addresses of one purpose from those of another."""
        return _signed((self.seed * 8 + purpose) * _GOLDEN % (1 << 64))

    def uniform(self, keys: Tensor, purpose: int, lanes: Tensor) -> Tensor:
        """float32 in (0, 1], fine-grained near 0, for keys [...] and lanes [L] or [..., L]."""
        at = mix(keys + self.salt(purpose))
        bits = mix(at[..., None] + lanes * _GOLDEN) & 0x7FFFFFFFFFFFFFFF
        return (bits.float() + 0.5) * 2.0**-63

    @op
    def race(self, w: Tensor, keys: Tensor, purpose: int) -> Tensor:
        """w [..., V] divided by exponential arrival times: the argmax is a draw from w, and the k
        largest are k draws without replacement."""
        return w / self.arrivals(keys, purpose, torch.arange(w.shape[-1], device=w.device))

    def arrivals(self, keys: Tensor, purpose: int, lanes: Tensor) -> Tensor:
        """Exponential arrival times, finite and above 0, for keys [...] and lanes [..., L]."""
        u = self.uniform(keys, purpose, lanes).clamp(max=1 - 2**-24)
        return -torch.log1p(-u)

    def bernoulli(self, p: Tensor, keys: Tensor, lane: int) -> Tensor:
        u = self.uniform(keys, ACCEPT, torch.full((1,), lane, device=p.device))[..., 0]
        return u <= p

    @op
    def categorical(self, w: Tensor, keys: Tensor, purpose: int) -> Tensor:
        """A draw from w, where the race is won."""
        return likeliest(self.race(w, keys, purpose))

    @op
    def uncoupled(self, w: Tensor, keys: Tensor) -> Tensor:
        """Parts of the vocabulary race by their sums, then the tokens of the part that won."""
        size, device = min(PART, w.shape[-1]), w.device
        parts = F.pad(w, (0, -w.shape[-1] % size)).unflatten(-1, (-1, size))
        part, token = (torch.arange(n, device=device) for n in parts.shape[-2:])
        won = likeliest(parts.sum(-1) / self.arrivals(keys, RESIDUAL, ~part))[..., None]
        its = torch.take_along_dim(parts, won[..., None], -2)[..., 0, :]
        tokens = won * size + token
        first = likeliest(its / self.arrivals(keys, RESIDUAL, tokens))[..., None]
        return tokens.gather(-1, first)[..., 0]

    @op
    def draw(self, w: Tensor, k: int, keys: Tensor) -> Tensor:
        if k == 1:
            return self.categorical(w, keys, TOKEN)[..., None]
        return ranked(self.race(w, keys, TOKEN), k)


class Certain:
    """The `Rng` of temperature 0: distributions are one-hot, so no noise is needed."""

    def keys(self, stream: Tensor, length: Tensor, depth: Tensor) -> Tensor:
        return depth.expand(len(length), -1)  # any numbers will do

    def bernoulli(self, p: Tensor, keys: Tensor, lane: int) -> Tensor:
        return p > 0.5

    def categorical(self, w: Tensor, keys: Tensor, purpose: int) -> Tensor:
        return likeliest(w)

    def uncoupled(self, w: Tensor, keys: Tensor) -> Tensor:
        return likeliest(w)

    def draw(self, w: Tensor, k: int, keys: Tensor) -> Tensor:
        return ranked(w, k)


@dataclass(frozen=True)
class Sampling:
    """From logits to a distribution: temperature, top-k, top-p, min-p in turn, for p and q alike.

    Attributes:
        temperature: 0 is greedy: a one-hot distribution.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens up to this total probability (nucleus sampling, Holtzman et
            al. 2020).
        min_p: Keep the tokens at least so likely as this times the likeliest (Nguyen et al. 2024).

    Raises:
        UserError: A value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        fitting.check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def __str__(self) -> str:
        """`greedy`, or `temperature 0.8, top_p 0.9`: without what keeps all tokens."""
        if self.temperature == 0:
            return "greedy"
        own = {n: value for n, value in asdict(self).items() if value != getattr(Sampling, n)}
        return ", ".join(f"{n} {value:g}" for n, value in own.items())

    def rng(self, seed: int, by_round: bool = False) -> Rng:
        return Noise(seed, by_round) if self.temperature > 0 else Certain()

    @op
    def law(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V] from logits [..., V], in float32 (float64 stays float64).
        Temperature 0 gives a one-hot distribution (the lowest token at a tie), so rules and
        drafters need no case for greedy decoding."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, likeliest(logits)[..., None], 1.0)
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]  # ties with the k-th are kept, too
            logits = logits.masked_fill(logits < least, -torch.inf)
        p = logits.softmax(-1)
        if self.top_p < 1:
            ranked, order = p.sort(dim=-1, descending=True, stable=True)
            nucleus = ranked.masked_fill(ranked.cumsum(-1) - ranked >= self.top_p, 0)
            p = torch.zeros_like(p).scatter(-1, order, nucleus)
            p = p / p.sum(-1, keepdim=True)
        if self.min_p > 0:
            p = p.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), 0)
            p = p / p.sum(-1, keepdim=True)
        return p
