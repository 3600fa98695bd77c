"""Draws from a distribution, which may be given by logits alone; the largest of a row, and ranks.

The references write the noise of all tokens, and read it again; here none is written. It is that of
`Noise`: uniforms are equal to the bit, arrival times up to a few units in the last place. A program
owns a block of a row [rows, V], so that even one row keeps a GPU busy, and writes the block's best
to `bests` [rows, COUNT, 2]. The last program of a row to finish takes the best of these. Among
equals the lowest token wins, as in the references. Of a draw that is uncoupled, blocks are the
parts: a program writes its own arrival, and the last one races the tokens of the part that won.

The K largest lie in the K groups of tokens whose maxima are largest. So a program writes only the
maximum of each group, and the last program of a row reads the tokens of K groups again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp import sampling
from specexp.fast.gpu.launches import power_of_2, wait_for_previous
from specexp.fast.gpu.laws import (
    BITS,
    BLOCK,
    MANY,
    all_zero,
    by_blocks,
    counters,
    is_last,
    weight,
)
from specexp.sampling import RESIDUAL, TOKEN, Noise

GROUP = 128  # tokens
MOST = 32  # the largest k of `ranked`
NONE = tl.constexpr(-0x80000000)  # below the `order` of every number
GOLDEN, M1, M2 = (tl.constexpr(x) for x in (sampling._GOLDEN, sampling._M1, sampling._M2))


@triton.jit
def mix(x):
    """See sampling.mix."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(key, salt, lane):
    """See Noise.uniform."""
    bits = mix(mix(key + salt) + lane.to(tl.int64) * GOLDEN) & 0x7FFFFFFFFFFFFFFF
    return (bits.to(tl.float32) + 0.5) * 1.0842021724855044e-19  # 2**-63


@triton.jit
def arrival(key, salt, lane):
    """-log(1 - u) of a uniform u, to about two units in the last place. 1 - u is 2**k (1 + r), with
    1 + r from 1 / sqrt 2 to sqrt 2, and log(1 + r) the polynomial of Cephes' logf (Moshier 1992).
    The hardware's logarithm is off in the fourth digit of early arrivals, which matter most."""
    u = tl.minimum(uniform(key, salt, lane), 0.99999994)  # 1 - 2**-24
    k = ((1 - u).to(tl.int32, bitcast=True) - 0x3F3504F3) >> 23  # 0x3F3504F3: 1 / sqrt 2
    shrink = ((127 - k) << 23).to(tl.float32, bitcast=True)  # 2**-k
    r = (shrink - 1) - u * shrink
    z = r * r
    series = 0.11676998740 + r * (-0.11514610310 + r * 0.070376836292)
    series = 0.14249322787 + r * (-0.12420140846 + r * series)
    series = 0.20000714765 + r * (-0.16668057665 + r * series)
    series = 0.33333331174 + r * (-0.24999993993 + r * series)
    return k.to(tl.float32) * -0.6931472 + (0.5 * z - r) - r * z * series


@triton.jit
def best_of(value, token):
    """The largest value and its token, the lowest among equals."""
    most = tl.max(value, 0)
    return most, tl.min(tl.where(value == most, token, 0x7FFFFFFF), 0)


@triton.jit
def put_best(bests, block, value, token):
    """Write the largest value of a block, and its token, to a row's `bests`. The value is written
    as an integer of the same bits, which has the order of floats that are not negative."""
    most, winner = best_of(value, token)
    tl.store(bests + block * 2, most.to(tl.int32, bitcast=True))
    tl.store(bests + block * 2 + 1, winner)


@triton.jit
def raced(w, token, key, salt, V: tl.constexpr):
    """w / arrival times of these tokens, as in Noise.race; -1 from V on."""
    return tl.where(token < V, w / arrival(key, salt, token), -1.0)


@triton.jit
def put_part(bests, block, w, key, salt):
    """`put_best` in the race of blocks by the sums of their weights w; see Noise.uncoupled."""
    mine = tl.sum(w, 0) / arrival(key, salt, tl.full([], -1, tl.int32) - block)
    tl.store(bests + block * 2, mine.to(tl.int32, bitcast=True))
    tl.store(bests + block * 2 + 1, block)


@triton.jit
def put_none(bests, block):
    """`put_best` for a block in which no token has a chance."""
    tl.store(bests + block * 2, -0x80000000)
    tl.store(bests + block * 2 + 1, 0)


@triton.jit
def best_put(bests, blocks, ROOM: tl.constexpr):
    """The largest value that the programs of a row have written, and its token."""
    block = tl.arange(0, ROOM)
    most = tl.load(bests + block * 2, block < blocks, -0x80000000, cache_modifier=".cg")
    return best_of(most, tl.load(bests + block * 2 + 1, block < blocks, 0, cache_modifier=".cg"))


@triton.jit
def order(x):
    """float32 x as int32 in the same order; a NaN is above all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes -0 a 0
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def weights_of(
    w, laws, row, token, stride, scale, V: tl.constexpr, COUNT: tl.constexpr,
    BY_LOGITS: tl.constexpr,
):  # fmt: skip
    """The weights of these tokens in `draw_kernel`; any below V only."""
    its = tl.load(w + row * stride + token, token < V, other=0.0).to(tl.float32)
    if BY_LOGITS:  # to what p is proportional
        its = weight(its, token, laws + row * (4 + COUNT), scale)
    return its


@triton.jit
def draw_kernel(
    w, laws, keys, bests, out, ended, salt, n, keys_b, keys_n, stride, scale,
    V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, ROOM: tl.constexpr,
    BY_LOGITS: tl.constexpr, COUPLED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Noise.categorical or, without COUPLED, Noise.uncoupled: writes to out [rows] a token drawn by
    the weights w [rows, V] of each row. BY_LOGITS: w are logits, drawn by their `laws` (laws.py).
    If weights are NaN, any token."""
    wait_for_previous(DEPENDENT)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bests += row * COUNT * 2
    key = tl.load(keys + row // n * keys_b + row % n * keys_n)
    skip = block < 0
    if BY_LOGITS:
        skip = all_zero(laws, row, block, scale, COUNT)
    if skip:
        put_none(bests, block)
    else:
        token = block * BLOCK + tl.arange(0, BLOCK)
        its = weights_of(w, laws, row, token, stride, scale, V, COUNT, BY_LOGITS)
        if COUPLED:
            put_best(bests, block, raced(its, token, key, salt, V), token)
        else:
            put_part(bests, block, tl.where(token < V, its, 0.0), key, salt)
    if is_last(ended, row, COUNT):
        winner = best_put(bests, COUNT, ROOM)[1]
        if not COUPLED:
            token = winner * BLOCK + tl.arange(0, BLOCK)
            its = weights_of(w, laws, row, token, stride, scale, V, COUNT, BY_LOGITS)
            winner = best_of(raced(its, token, key, salt, V), token)[1]
        tl.store(out + row, tl.minimum(winner, V - 1).to(tl.int64))


@triton.jit
def likeliest_kernel(
    w, bests, out, ended, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    ROOM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """sampling.likeliest: writes to out [rows] the token with the largest w [rows, V]."""
    wait_for_previous(DEPENDENT)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    its = order(tl.load(w + row * V + token, token < V, other=0.0).to(tl.float32))
    bests += row * COUNT * 2
    put_best(bests, block, tl.where(token < V, its, NONE), token)
    if is_last(ended, row, COUNT):
        tl.store(out + row, best_put(bests, COUNT, ROOM)[1].to(tl.int64))


@triton.jit
def race_order(w, token, key, salt, V: tl.constexpr, RACE: tl.constexpr):
    """The `order` of w [V] at these tokens or, with RACE, of its Noise.race; NONE beyond V."""
    x = tl.load(w + token, token < V, other=0.0).to(tl.float32)
    if RACE:
        x = x / arrival(key, salt, token)
    return tl.where(token < V, order(x), NONE)


@triton.jit
def ranked_of(value, index, count: tl.constexpr, WIDE: tl.constexpr):
    """The indices [WIDE] of the `count` largest values, the largest first and the lowest first
    among equals; then 0. `index` may hold a number twice, which is returned once."""
    pairs = (value.to(tl.int64) << 32) + (0x7FFFFFFF - index)
    rank, last = tl.arange(0, WIDE), tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    ids = tl.zeros([WIDE], tl.int64)
    for i in range(count):
        last = tl.max(tl.where(pairs < last, pairs, -0x8000000000000000))
        ids = tl.where(rank == i, 0x7FFFFFFF - (last & 0xFFFFFFFF), ids)
    return ids


@triton.jit
def ranked_kernel(
    w, keys, tops, out, ended, salt, n, keys_b, keys_n, V: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, ROOM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    K: tl.constexpr, WIDE: tl.constexpr, RACE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """sampling.ranked of w [rows, V] or, with RACE, Noise.draw, written to out [rows, K]. A program
    owns GROUPS groups, and writes the largest `order` of each to tops [rows, COUNT * GROUPS].
    WIDE: K rounded up to a power of two."""
    wait_for_previous(DEPENDENT)
    row, key = tl.program_id(0).to(tl.int64), 0
    if RACE:
        key = tl.load(keys + row // n * keys_b + row % n * keys_n)
    ALL: tl.constexpr = COUNT * GROUPS
    w, tops, at = w + row * V, tops + row * ALL, tl.arange(0, GROUP)[None, :]
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    its = race_order(w, group[:, None] * GROUP + at, key, salt, V, RACE)
    tl.store(tops + group, tl.max(its, 1))
    if is_last(ended, row, COUNT):
        every, rank = tl.arange(0, ROOM * GROUPS), tl.arange(0, WIDE)
        largest = tl.load(tops + every, every < ALL, NONE, cache_modifier=".cg")
        few = ranked_of(largest, every, min(K, ALL), WIDE)
        token = few[:, None] * GROUP + at
        best = ranked_of(race_order(w, token, key, salt, V, RACE), token, K, WIDE)
        tl.store(out + row * K + rank, best, rank < K)


def floats(*weights: Tensor) -> bool:
    """Whether these are float32, contiguous and not empty."""
    return all(w.dtype == torch.float32 and w.is_contiguous() and w.numel() for w in weights)


def drawable(noise: Noise, w: Tensor, keys: Tensor) -> bool:
    """Whether the kernels draw by weights w [..., V] with this noise and keys [n] or [B, n]."""
    one_each = w.shape[:-1] == keys.shape and keys.dim() in (1, 2)
    return type(noise) is Noise and floats(w) and one_each


def key_layout(keys: Tensor) -> tuple[int, int, int]:
    """n and the two strides of keys [n] or [B, n]."""
    return keys.shape[-1], keys.stride(0) if keys.dim() > 1 else 0, keys.stride(-1)


def likeliest(w: Tensor) -> Tensor:
    if w.dtype not in BITS or not w.is_contiguous() or not w.numel():
        return NotImplemented
    tokens = torch.empty(w.shape[:-1], dtype=torch.int64, device=w.device)
    rows = tokens.numel()
    tile = by_blocks(w, 4 if rows >= MANY else 1)
    bests = torch.empty(rows, tile["COUNT"], 2, dtype=torch.int32, device=w.device)
    likeliest_kernel[rows, tile["COUNT"]](
        w, bests, tokens, counters(w.device, rows), num_warps=8 if rows >= MANY else 4, **tile
    )
    return tokens


def ranked(w: Tensor, k: int) -> Tensor:
    if w.dtype not in BITS or not w.is_contiguous() or not w.numel():
        return NotImplemented
    return rank(w, k, None, 0)


def draw_few(self: Noise, w: Tensor, k: int, keys: Tensor) -> Tensor:
    return rank(w, k, keys, self.salt(TOKEN)) if drawable(self, w, keys) else NotImplemented


def rank(w: Tensor, k: int, keys: Tensor | None, salt: int) -> Tensor:
    """The k largest of w [..., V], int64 [..., k]; with keys, those of its race."""
    if not 1 < k <= min(w.shape[-1], MOST):
        return NotImplemented
    tokens = torch.empty(*w.shape[:-1], k, dtype=torch.int64, device=w.device)
    rows = tokens.numel() // k
    tile = by_blocks(w, 4 if rows >= MANY and keys is None else 1)
    group = min(GROUP, tile["BLOCK"])
    groups = tile["BLOCK"] // group
    tops = torch.empty(rows, tile["COUNT"], groups, dtype=torch.int32, device=w.device)
    ranked_kernel[rows, tile["COUNT"]](
        w, w if keys is None else keys, tops, tokens, counters(w.device, rows), salt,
        *((1, 0, 0) if keys is None else key_layout(keys)), GROUP=group, GROUPS=groups, K=k,
        WIDE=power_of_2(k), RACE=keys is not None, num_warps=8 if tile["BLOCK"] > BLOCK else 4,
        **tile,
    )  # fmt: skip
    return tokens


def categorical(self: Noise, w: Tensor, keys: Tensor, purpose: int | None) -> Tensor:
    if not drawable(self, w, keys):
        return NotImplemented
    return draw(self, w, keys, purpose)


def uncoupled(self: Noise, w: Tensor, keys: Tensor) -> Tensor:
    return categorical(self, w, keys, None)


def draw(
    noise: Noise, w: Tensor, keys: Tensor, purpose: int | None, laws: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Tokens like keys, int64, drawn by weights w [..., V], or by logits w, their `laws` and their
    `logit_scale`. purpose: None for an uncoupled draw."""
    rows = keys.numel()
    tile = by_blocks(w)
    bests = torch.empty(rows, tile["COUNT"], 2, dtype=torch.int32, device=w.device)
    tokens = torch.empty(keys.shape, dtype=torch.int64, device=w.device)
    draw_kernel[rows, tile["COUNT"]](
        w, w if laws is None else laws, keys, bests, tokens, counters(w.device, rows),
        noise.salt(purpose or RESIDUAL), *key_layout(keys), w.stride(-2), scale,
        BY_LOGITS=laws is not None, COUPLED=purpose is not None, **tile,
    )  # fmt: skip
    return tokens
