// One pass of a Llama-like network over a few rows, on a CPU: each weight is read once, and nothing
// is launched between the first token and the last logit.
//
// Every number is made in the same order whatever stands beside it: the logits of a token do not
// depend, not in their last bit, on how many tokens and rows share its pass.
//
// Weights, keys and values are `num`, float or bfloat16; all in between is float. native.py describes
// Layer, Net and Pass to Python.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <omp.h>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// Lanes of a vector, and rows of x and w whose products are summed at once, in registers.
#ifdef __AVX512F__
constexpr int LANES = 16, TALL = 6, BROAD = 4;
#else
constexpr int LANES = 8, TALL = 3, BROAD = 4;
#endif
constexpr int AHEAD = 1 << 14; // bytes
#ifdef __AVX__
#define HELD(x) asm("" : "+v"(x)) // stays in its register, and is not loaded again for every use
#else
#define HELD(x)
#endif
#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, int4{__VA_ARGS__})
#endif

template <typename T, int bytes> struct Laned {
    typedef T of __attribute__((vector_size(bytes), aligned(2), may_alias));
};
using vec = Laned<float, 4 * LANES>::of;
using half_vec = Laned<float, 2 * LANES>::of;
using vec4 = Laned<float, 16>::of;
using int4 = Laned<int32_t, 16>::of;
using ints = Laned<int32_t, 4 * LANES>::of;
using shorts = Laned<uint16_t, 2 * LANES>::of;

struct bfloat16 {
    uint16_t bits;
};

static inline vec load(const float *p) { return *(const vec *)p; }
static inline vec load(const bfloat16 *p) {
    return (vec)(__builtin_convertvector(*(const shorts *)p, ints) << 16);
}
static inline float wide(float x) { return x; }
static inline float wide(bfloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float made;
    memcpy(&made, &bits, sizeof made);
    return made;
}
static inline void narrow(float x, float *p) { *p = x; }
static inline void narrow(float x, bfloat16 *p) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    p->bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// What of two rows is multiplied at once, and the products onto sums.
template <typename num> constexpr int STEP = LANES;
static inline vec some(const float *p) { return load(p); }
#ifdef __AVX512BF16__
template <> constexpr int STEP<bfloat16> = 2 * LANES;
static inline __m512bh some(const bfloat16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
static inline void add(vec &sums, __m512bh a, __m512bh b) {
    sums = (vec)_mm512_dpbf16_ps((__m512)sums, a, b);
}
#else
static inline vec some(const bfloat16 *p) { return load(p); }
#endif
static inline void add(vec &sums, vec a, vec b) { sums += a * b; }

template <typename num> struct Layer {
    const num *before, *after, *q_norm, *k_norm;          // the last two or null
    const num *qkv, *out, *up, *down;                     // [outputs, inputs]
    const num *qkv_bias, *out_bias, *up_bias, *down_bias; // or null
};

template <typename num> struct Net {
    int64_t layers, width, reads, heads, keys, dim, hidden; // reads: of the first layer's attention
    int64_t known, vocab, all; // tokens that are read, that are told apart, and columns of logits
    int64_t adds;              // whether the first layer adds to the state beside the token, normed
    float eps, scale, stretch; // of norms, of scores, of cosines and sines
    const num *embed, *norm, *head; // the first two or null
    const num *token_norm, *state_norm; // attention begins with both side by side; or null
    const int64_t *ids;        // [vocab] columns of logits, the others being -inf; null: all
    const float *frequencies;  // [dim / 2]
    const Layer<num> *layer;
};

template <typename num> struct Pass {
    int64_t rows, n, seen, threads;            // texts, tokens of each, slots that they may read
    const int64_t *tokens, *positions, *slots; // [rows, n]; a token of -1 has no part in the pass
    const bool *visible;                       // [rows, n, seen]; null: its own slot, all before it
    const num *x; // [rows, n, width] in place of embeddings, or beside them; or null
    num *const *k, *const *v;                  // of each layer
    int64_t at, row_stride, head_stride;       // [rows, keys, seen, dim] of them, from `at` on
    int64_t last;                              // places of each text of which logits are wanted
    int64_t taps;
    const int64_t *tap; // states wanted: after so many layers, 0: embeddings, -1: before the last norm
    num *states;        // [rows, n, taps, width]; 0 of tokens that have no part
    float *logits;      // [rows, last, all]
    float *room;        // `room_for` numbers
};

// --- vectors --------------------------------------------------------------------------------------

static inline vec4 folded(vec v) {
    const half_vec half = ((half_vec *)&v)[0] + ((half_vec *)&v)[1];
    return LANES == 8 ? *(vec4 *)&half : ((vec4 *)&half)[0] + ((vec4 *)&half)[1];
}

static inline float sum(vec v) {
    const vec4 q = folded(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

// Four sums, each in the order of `sum`.
static inline vec4 sums(const vec *v) {
    const vec4 a = folded(v[0]), b = folded(v[1]), c = folded(v[2]), d = folded(v[3]);
    const vec4 ab = SHUFFLED(a, b, 0, 4, 1, 5) + SHUFFLED(a, b, 2, 6, 3, 7);
    const vec4 cd = SHUFFLED(c, d, 0, 4, 1, 5) + SHUFFLED(c, d, 2, 6, 3, 7);
    return SHUFFLED(ab, cd, 0, 1, 4, 5) + SHUFFLED(ab, cd, 2, 3, 6, 7);
}

// To 2e-7 of its size; 0 below -87. The polynomial is that of Cephes' expf.
static inline vec exponential(vec x) {
    const vec none = {};
    const ints small = x < -87.0f;
    x = small ? none : x > 88.0f ? none + 88.0f : x;
    const ints n = __builtin_convertvector(x * 1.44269504f + (x < 0.0f ? none - 0.5f : none + 0.5f), ints);
    const vec whole = __builtin_convertvector(n, vec);
    x -= whole * 0.693359375f;
    x += whole * 2.12194440e-4f;
    vec p = x * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    p = (p * x * x + x + 1.0f) * (vec)((n + 127) << 23);
    return small ? none : p;
}

// -log(1 - u) of 0 < u < 1, to 2e-7 of its size: y and what rounding it lost; log1p of FreeBSD's msun.
static inline vec waited(vec u) {
    const vec y = 1.0f - u, lost = (1.0f - y - u) * (1.0f + u);
    const ints n = ((ints)y - 0x3f3504f3) >> 23; // y is 2^n (1 + f)
    const vec whole = __builtin_convertvector(n, vec), f = (vec)((ints)y - (n << 23)) - 1.0f;
    const vec s = f / (2.0f + f), z = s * s, w = z * z, half = f * f * 0.5f;
    const vec p = z * (w * 0.28498786688f + 0.66666662693f) + w * (w * 0.24279078841f + 0.40000972152f);
    return half - (s * (half + p) + (whole * 9.0580006145e-06f + lost)) - f - whole * 6.9313812256e-01f;
}

// --- parts of a pass ------------------------------------------------------------------------------

// f(how many, which first) for blocks of at most TALL rows; how many is a constant.
template <int M = TALL, typename F> static inline void blocks(int64_t rows, F f, int64_t r = 0) {
    for (; r + M <= rows; r += M) f(std::integral_constant<int, M>(), r);
    if constexpr (M > 1) blocks<M - 1>(rows, f, r);
}

// f of every number below N, each a constant, so that what it indexes can be a register.
template <typename F, int... I> static inline void each(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F> static inline void each(F f) {
    each(f, std::make_integer_sequence<int, N>());
}

// M rows of x and N of w, all `size` long: their products y [M, N], set or added. Weights come from
// far away: those AHEAD are asked for in time, into the second cache, for the first is for x.
template <int M, int N, typename num>
static inline void tile(const num *x, int64_t x_stride, const num *w, const num *bias,
                        int64_t size, float *y, int64_t y_stride, bool added) {
    vec made[M][N];
    each<M>([&](auto i) { each<N>([&](auto j) { made[i][j] = vec{}; }); });
    int64_t k = 0;
    for (; k + STEP<num> <= size; k += STEP<num>) {
        decltype(some(x)) a[M];
        each<M>([&](auto i) {
            a[i] = some(x + i * x_stride + k);
            HELD(a[i]);
        });
        each<N>([&](auto j) {
            const auto b = some(w + j * size + k);
            __builtin_prefetch((const char *)(w + j * size + k) + AHEAD, 0, 2);
            each<M>([&](auto i) { add(made[i][j], a[i], b); });
        });
    }
    each<M>([&](auto i) {
        float s[N];
        if constexpr (N == 4) *(vec4 *)s = sums(made[i]);
        if constexpr (N == 1) s[0] = sum(made[i][0]);
        for (int j = 0; j < N; j++) {
            for (int64_t t = k; t < size; t++)
                s[j] = std::fma(wide(x[i * x_stride + t]), wide(w[j * size + t]), s[j]);
            if (bias) s[j] += wide(bias[j]);
            y[i * y_stride + j] = added ? y[i * y_stride + j] + s[j] : s[j];
        }
    });
}

// RMS norm (Zhang & Sennrich 2019).
template <typename num, typename out>
static void normed(const float *x, const num *weight, int64_t size, float eps, out *y) {
    float square;
    tile<1, 1, float>(x, size, x, nullptr, size, &square, 1, false);
    const float off = 1.0f / std::sqrt(square / size + eps);
    for (int64_t i = 0; i < size; i++) narrow(x[i] * off * wide(weight[i]), y + i);
}

// A thread's share of so many things, in lumps.
struct Share {
    int64_t from, to;
    Share(int64_t total, int64_t lump = 1) {
        const int64_t lumps = (total + lump - 1) / lump, T = omp_get_num_threads(),
                      me = omp_get_thread_num();
        from = std::min(total, lumps * me / T * lump), to = std::min(total, lumps * (me + 1) / T * lump);
    }
};

// My outputs of rows x [rows, inputs] times w [outputs, inputs].
template <typename num>
static void linear(int64_t rows, const num *x, const num *w, const num *bias, int64_t inputs,
                   float *y, int64_t outputs, bool added = false) {
    const Share mine(outputs, LANES);
    int64_t o = mine.from;
    auto next = [&](auto N) {
        blocks(rows, [&](auto M, int64_t r) {
            tile<M, N>(x + r * inputs, inputs, w + o * inputs, bias ? bias + o : bias, inputs,
                       y + r * outputs + o, outputs, added);
        });
        o += N;
    };
    while (o + BROAD <= mine.to) next(std::integral_constant<int, BROAD>());
    while (o < mine.to) next(std::integral_constant<int, 1>());
}

// My outputs of silu(gate) * up.
template <typename num>
static void gated(int64_t rows, const float *gate, const float *up, int64_t outputs, num *y) {
    const Share mine(outputs, LANES);
    for (; rows; rows--, gate += outputs, up += outputs, y += outputs) {
        int64_t i = mine.from;
        for (; i + LANES <= mine.to; i += LANES) {
            const vec g = load(gate + i), made = g / (1.0f + exponential(-g)) * load(up + i);
            for (int t = 0; t < LANES; t++) narrow(made[t], y + i + t);
        }
        for (; i < mine.to; i++) narrow(gate[i] / (1.0f + std::exp(-gate[i])) * up[i], y + i);
    }
}

// Turn a head x by its position: pairs are half a head apart.
template <typename num>
static void turned(const float *x, int64_t dim, const float *cosine, const float *sine, num *y) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        narrow(x[i] * cosine[i] - x[i + half] * sine[i], y + i);
        narrow(x[i + half] * cosine[i] + x[i] * sine[i], y + i + half);
    }
}

// --- a pass ---------------------------------------------------------------------------------------

// Which tokens have a part: their numbers among all [rows, n], and where each text's begin. Of those
// of which logits are wanted, which of the kept each is, and where its logits belong.
struct Kept {
    std::vector<int64_t> at, begins{0}, read, written;

    template <typename num> explicit Kept(const Pass<num> &p) {
        for (int64_t i = 0; i < p.rows * p.n; i++) {
            const int64_t row = i / p.n, place = i % p.n + p.last - p.n;
            if (p.tokens[i] != -1) {
                if (place >= 0) read.push_back(at.size()), written.push_back(row * p.last + place);
                at.push_back(i);
            }
            if (i % p.n == p.n - 1) begins.push_back(at.size());
        }
    }
};

// What R tokens carry along: the residual stream, what products read, what they make.
template <typename num> struct Room {
    float *x, *qkv, *gate, *up, *cosines, *sines, *scores, *some, *end;
    num *read, *heads;

    Room(const Net<num> &net, const Pass<num> &p) {
        const int64_t R = p.rows * p.n, half = net.dim / 2, wide = net.heads * net.dim;
        const int64_t most = std::max({net.width, wide, net.hidden, net.reads});
        x = p.room;
        qkv = x + R * net.width;
        gate = qkv + R * (wide + 2 * net.keys * net.dim);
        up = gate + R * net.hidden;
        cosines = up + R * net.hidden;
        sines = cosines + R * half;
        scores = sines + R * half;
        some = scores + p.threads * TALL * (p.seen + LANES);
        read = (num *)(some + (net.ids ? p.rows * p.last * net.vocab : 0));
        heads = read + R * most;
        end = (float *)(heads + R * most) + 1;
    }
};

// M queries of a text that read the same key, from its `first` on: those of a token follow each
// other, and tokens too. Over the keys and values of the slots that each of them sees (Pass).
template <int M, typename num>
static void attend(const Net<num> &net, const Pass<num> &p, const Room<num> &room, const Kept &kept,
                   int64_t layer, int64_t row, int64_t key, int64_t first) {
    const int64_t d = net.dim, G = net.heads / net.keys, stride = p.seen + LANES;
    const int64_t place = p.at + row * p.row_stride + key * p.head_stride, from = kept.begins[row];
    const num *q = room.heads + ((from * net.keys + key * (kept.begins[row + 1] - from)) * G + first) * d;
    const num *k = p.k[layer] + place, *v = p.v[layer] + place;
    float *scores = room.scores + omp_get_thread_num() * TALL * stride;
    int64_t reach[M], slots = 0, j = 0;
    const bool *visible[M];
    num *y[M];
    for (int i = 0; i < M; i++) {
        const int64_t r = from + (first + i) / G, token = kept.at[r];
        y[i] = room.read + (r * net.heads + key * G + (first + i) % G) * d;
        visible[i] = p.visible ? p.visible + token * p.seen : nullptr;
        reach[i] = p.visible ? p.seen : p.slots[token] + 1;
        while (p.visible && reach[i] && !visible[i][reach[i] - 1]) reach[i]--;
        slots = std::max(slots, reach[i]);
    }
    for (; j + BROAD <= slots; j += BROAD)
        tile<M, BROAD>(q, d, k + j * d, (const num *)nullptr, d, scores + j, stride, false);
    for (; j < slots; j++)
        tile<M, 1>(q, d, k + j * d, (const num *)nullptr, d, scores + j, stride, false);
    for (int i = 0; i < M; i++) {
        float *s = scores + i * stride;
        for (j = 0; visible[i] && j < reach[i]; j++) s[j] = visible[i][j] ? s[j] : -INFINITY;
        for (j = reach[i]; j < slots || j % LANES; j++) s[j] = -INFINITY;
        vec most = vec{} - INFINITY, total = {};
        for (j = 0; j < slots; j += LANES) {
            const vec score = load(s + j) * net.scale;
            *(vec *)(s + j) = score;
            most = score > most ? score : most;
        }
        for (int t = 1; t < LANES; t++) most[0] = std::max(most[0], most[t]);
        for (j = 0; j < slots; j += LANES) {
            const vec weight = exponential(load(s + j) - most[0]);
            *(vec *)(s + j) = weight;
            total += weight;
        }
        const float share = 1.0f / sum(total);
        for (j = 0; j < slots; j++) s[j] *= share;
    }
    auto mixed = [&](auto C, int64_t c) { // C vectors of coordinates from c on
        vec made[M][C];
        each<M>([&](auto i) { each<C>([&](auto u) { made[i][u] = vec{}; }); });
        for (int64_t j = 0; j < slots; j++)
            each<C>([&](auto u) {
                const vec value = load(v + j * d + c + u * LANES);
                each<M>([&](auto i) { made[i][u] += scores[i * stride + j] * value; });
            });
        each<M>([&](auto i) {
            each<C>([&](auto u) {
                for (int t = 0; t < LANES; t++) narrow(made[i][u][t], y[i] + c + u * LANES + t);
            });
        });
    };
    int64_t c = 0;
    for (; c + BROAD * LANES <= d; c += BROAD * LANES) mixed(std::integral_constant<int, BROAD>(), c);
    for (; c + LANES <= d; c += LANES) mixed(std::integral_constant<int, 1>(), c);
    for (; c < d; c++)
        for (int i = 0; i < M; i++) {
            float made = 0;
            for (j = 0; j < slots; j++)
                made = std::fma(scores[i * stride + j], wide(v[j * d + c]), made);
            narrow(made, y[i] + c);
        }
}

// A thread's part of a pass. The tokens kept are numbered through, 0 to R.
template <typename num>
static void part(const Net<num> &net, const Pass<num> &p, const Room<num> &room, const Kept &kept) {
    const int64_t n = p.n, R = kept.at.size(), E = net.width, d = net.dim, F = net.hidden;
    const int64_t H = net.heads, K = net.keys, Q = (H + 2 * K) * d;
    const int64_t G = H / K, lot = std::clamp<int64_t>(R * H / p.threads, 1, TALL);
    const int64_t parts = (n * G + lot - 1) / lot; // of the queries that read the same key
    const Share mine(R), shared(p.rows * K * parts);
    float *x = room.x;
    num *read = room.read, *heads = room.heads;

    for (int64_t r = mine.from; r < mine.to; r++) {
        const int64_t token = kept.at[r];
        const num *embedded = net.embed + p.tokens[token] * E;
        num *both = read + r * net.reads;
        auto begins = [&](const num *state) {
            for (int64_t i = 0; i < E; i++) x[r * E + i] = wide(state[i]);
        };
        if (net.token_norm) begins(embedded), normed(x + r * E, net.token_norm, E, net.eps, both);
        begins(p.x ? p.x + token * E : embedded);
        if (net.token_norm) normed(x + r * E, net.state_norm, E, net.eps, both + E);
        if (net.adds) begins(both + E);
        for (int64_t i = 0; i < d / 2; i++) {
            const float angle = p.positions[token] * net.frequencies[i];
            room.cosines[r * d / 2 + i] = std::cos(angle) * net.stretch;
            room.sines[r * d / 2 + i] = std::sin(angle) * net.stretch;
        }
    }
    auto copied = [&](const auto *from, num *to) {
        for (int64_t i = 0; i < E; i++) narrow(wide(from[i]), to + i);
    };
    auto norm = [&](const num *weight) {
        for (int64_t r = mine.from; r < mine.to; r++)
            if (!weight) copied(x + r * E, read + r * E);
            else normed(x + r * E, weight, E, net.eps, read + r * E);
    };
    auto tap = [&](int64_t layer, const auto *states) {
        for (int64_t t = 0; t < p.taps; t++)
            for (int64_t r = mine.from; p.tap[t] == layer && r < mine.to; r++)
                copied(states + r * E, p.states + (kept.at[r] * p.taps + t) * E);
    };
    for (int64_t at = 0; at < net.layers; at++) {
        const Layer<num> &layer = net.layer[at];
        const bool given = net.token_norm && !at;
        tap(at, x);
        if (!given) norm(layer.before);
#pragma omp barrier
        linear(R, read, layer.qkv, layer.qkv_bias, given ? net.reads : E, room.qkv, Q);
#pragma omp barrier
        for (int64_t r = mine.from; r < mine.to; r++) {
            const float *cosine = room.cosines + r * d / 2, *sine = room.sines + r * d / 2;
            const int64_t row = kept.at[r] / n, from = kept.begins[row];
            const int64_t tall = kept.begins[row + 1] - from; // of its text
            int64_t place = p.at + row * p.row_stride + p.slots[kept.at[r]] * d;
            for (int64_t h = 0; h < H + K; h++) {
                float *here = room.qkv + r * Q + h * d;
                const num *weight = h < H ? layer.q_norm : layer.k_norm;
                if (weight) normed(here, weight, d, net.eps, here);
                num *to = p.k[at] + place + (h - H) * p.head_stride;
                if (h < H) to = heads + ((from * K + h / G * tall + r - from) * G + h % G) * d;
                turned(here, d, cosine, sine, to);
            }
            for (int64_t h = 0; h < K; h++, place += p.head_stride)
                for (int64_t i = 0; i < d; i++)
                    narrow(room.qkv[r * Q + (H + K + h) * d + i], p.v[at] + place + i);
        }
#pragma omp barrier
        for (int64_t i = shared.from; i < shared.to; i++) {
            const int64_t first = i % parts * lot, row = i / parts / K;
            const int64_t queries = (kept.begins[row + 1] - kept.begins[row]) * G;
            blocks(std::min(lot, queries - first), [&](auto M, int64_t r) {
                attend<M>(net, p, room, kept, at, row, i / parts % K, first + r);
            });
        }
#pragma omp barrier
        linear(R, read, layer.out, layer.out_bias, H * d, x, E, true);
#pragma omp barrier
        norm(layer.after);
#pragma omp barrier
        linear(R, read, layer.up, layer.up_bias, E, room.gate, F);
        linear(R, read, layer.up + F * E, layer.up_bias ? layer.up_bias + F : nullptr, E, room.up, F);
        gated(R, room.gate, room.up, F, heads);
#pragma omp barrier
        linear(R, heads, layer.down, layer.down_bias, F, x, E, true);
#pragma omp barrier
    }
    tap(-1, x);
    norm(net.norm);
    tap(net.layers, read);
    int64_t wanted = kept.read.size();
    for (int64_t i = 0; i < wanted; i++)
        if (const int64_t r = kept.read[i]; mine.from <= r && r < mine.to)
            memcpy(heads + i * E, read + r * E, E * sizeof *read);
#pragma omp barrier
    linear<num>(wanted, heads, net.head, nullptr, E, net.ids ? room.some : p.logits, net.vocab);
    if (net.ids) {
#pragma omp barrier
        const Share places(p.rows * p.last);
        std::fill(p.logits + places.from * net.all, p.logits + places.to * net.all, 0.0f);
        for (int64_t i = 0; i < wanted; i++) {
            if (kept.written[i] < places.from || kept.written[i] >= places.to) continue;
            float *made = p.logits + kept.written[i] * net.all;
            std::fill_n(made, net.all, -INFINITY);
            for (int64_t o = 0; o < net.vocab; o++) made[net.ids[o]] = room.some[i * net.vocab + o];
        }
        return;
    }
    const Share outputs(net.vocab, LANES); // they lie side by side: to their places, from the last on
    auto mine_of = [&](int64_t i) { return p.logits + i * net.vocab + outputs.from; };
    const size_t bytes = (outputs.to - outputs.from) * sizeof(float);
    for (int64_t i = p.rows * p.last - 1; i >= wanted; i--)
        if (wanted && kept.written[wanted - 1] == i) memmove(mine_of(i), mine_of(--wanted), bytes);
        else memset(mine_of(i), 0, bytes);
}

static std::atomic<int64_t> spent{0}; // nanoseconds, in all passes

// Whether every token and slot is one that there is; only then is anything done.
template <typename num> static bool run(const Net<num> &net, const Pass<num> &p) {
    const Kept kept(p);
    for (const int64_t r : kept.at)
        if (((!p.x || net.token_norm) && (p.tokens[r] < 0 || p.tokens[r] >= net.known)) || p.slots[r] < 0 ||
            p.slots[r] >= p.seen)
            return false;
    const int64_t tapped = p.taps * net.width;
    for (int64_t i = 0; i < p.rows * p.n && tapped; i++)
        if (p.tokens[i] == -1) memset(p.states + i * tapped, 0, tapped * sizeof *p.states);
    const Room<num> room(net, p);
    const auto begin = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(p.threads)
    part(net, p, room, kept);
    spent += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
    return true;
}

template <typename num> static int64_t room_for(const Net<num> &net, const Pass<num> &p) {
    const Room<num> room(net, p);
    return room.end - room.x;
}

extern "C" {
int64_t room_for_float32(const Net<float> *net, const Pass<float> *p) { return room_for(*net, *p); }
int64_t room_for_bfloat16(const Net<bfloat16> *n, const Pass<bfloat16> *p) { return room_for(*n, *p); }
}

// --- between passes -------------------------------------------------------------------------------

// What rounds do besides: few numbers, but each of torch's operations is slow, for the pass before
// has left its code cold. Described where those do the same: likeliest (sampling.py), LM.feed,
// Match, Sequences.commit, Engine._report. Numbers are contiguous, but for rows of text.

// The first place of the largest of so many numbers, or of one that is none.
static int64_t largest(const float *w, int64_t size) {
    vec most = vec{} - INFINITY; // of each lane, and where
    ints place = {}, here = {}, odd = {};
    int64_t best = 0, i = 0;
    for (; i + LANES <= size; i += LANES, here += LANES) {
        const vec x = load(w + i);
        place = x > most ? here : place;
        most = x > most ? x : most;
        odd |= x != x;
    }
    auto meets = [&](int64_t at) {
        if (w[at] > w[best] || (w[at] == w[best] && at < best)) best = at;
    };
    bool none = false;
    for (int64_t t = 0; t < LANES && i; t++) meets(place[t] + t), none |= odd[t];
    for (; i < size; i++) meets(i), none |= w[i] != w[i];
    return none ? std::find_if(w, w + size, [](float x) { return x != x; }) - w : best;
}

static void likeliest(int64_t rows, int64_t size, const float *w, int64_t *best) {
    for (; rows--; w += size) *best++ = largest(w, size);
}

// Places of the `most` largest, the largest first, of equals the first.
static void ranked(int64_t rows, int64_t size, int64_t most, const float *w, int64_t *best) {
    for (; rows--; w += size, best += most)
        for (int64_t i = 0, kept = 0; i < size; i++) {
            if (kept == most && !(w[i] > w[best[most - 1]])) continue;
            int64_t at = kept < most ? kept++ : most - 1;
            for (; at && w[i] > w[best[at - 1]]; at--) best[at] = best[at - 1];
            best[at] = i;
        }
}

static void spoil(int64_t rows, int64_t size, int64_t first, const float *w, float *fault) {
    for (fault += first; rows--; w += size) *fault++ += 0 * w[largest(w, size)];
}

// parents: of all rows, if they are shared, or of each.
static void follow(int64_t rows, int64_t nodes, int64_t places, int64_t shared, const int64_t *tokens,
            const int64_t *sample, const int64_t *parents, int64_t *path, int64_t *n, int64_t *made) {
    std::vector<int64_t> depth(nodes);
    for (; rows--; tokens += nodes, sample += nodes, n++) {
        int64_t last = 0;
        for (int64_t i = 1; i < nodes; i++) {
            const int64_t up = parents[i];
            depth[i] = depth[up] < 0 || tokens[i] != sample[up] ? -1 : depth[up] + 1;
            if (depth[i] > depth[last]) last = i;
        }
        *n = depth[last];
        for (int64_t d = places; d--; last = d > *n ? last : parents[last])
            path[d] = last, made[d] = sample[last];
        path += places, made += places, parents += shared ? 0 : nodes;
    }
}

static void commit(int64_t rows, int64_t places, int64_t ends, int64_t stride, const int64_t *made,
            const int64_t *n, const int64_t *eos, int64_t *tokens, int64_t *length, int64_t *limit,
            int64_t *counts) {
    for (; rows--; made += places, tokens += stride, n++, length++, limit++, counts += 3) {
        const int64_t before_end = std::find_first_of(made, made + places, eos, eos + ends) - made;
        const int64_t room = std::max<int64_t>(*limit - *length, 0);
        const int64_t emitted = std::min(std::min(*n, before_end) + 1, room);
        std::copy_n(made, emitted, tokens + *length);
        *length += emitted;
        if (emitted > before_end) *limit = *length;
        counts[0] = *n, counts[1] = emitted, counts[2] = *length < *limit;
    }
}

// A column for each model's `faults` goes between those of counts [rows, 3] and guesses.
static void report(int64_t rows, int64_t nodes, int64_t models, int64_t first, const int64_t *counts,
            const int64_t *tokens, int64_t *made, const float *const *faults) {
    for (int64_t row = 0; row < rows; row++) {
        made = std::copy_n(counts + row * 3, 3, made);
        for (int64_t i = 0; i < models; i++) *made++ = faults[i][first + row] != 0;
        made = std::copy_n(tokens + row * nodes + 1, nodes - 1, made);
    }
}

// How many tokens up to `end` are those up to `last`, of so many.
static int64_t agreed(const int64_t *tokens, int64_t last, int64_t end, int64_t most) {
    int64_t n = 0;
    while (n < most && n <= end && tokens[end - n] == tokens[last - n]) n++;
    return n;
}

// What followed the best earlier ends of a text's last words, as drafters/ngram.py has it; branch:
// for each guess which of the `ends` it follows.
static void lookup(int64_t rows, int64_t nodes, int64_t most, int64_t ends, int64_t stride,
            const int64_t *branch, const int64_t *depth, const int64_t *length,
            const int64_t *tokens, int64_t *made) {
    struct End { int64_t agrees, at; };
    const auto better = [](End a, End b) {
        return a.agrees > b.agrees || (a.agrees == b.agrees && a.at > b.at);
    };
    for (; rows--; tokens += stride, made += nodes) {
        const int64_t last = *length++ - 1;
        std::vector<End> best(ends, {0, 0});
        for (End end{0, 0}; end.at < last; end.at++) {
            end.agrees = agreed(tokens, last, end.at, most);
            if (!better(end, best.back())) continue;
            best.back() = end;
            std::inplace_merge(best.begin(), best.end() - 1, best.end(), better);
        }
        made[0] = tokens[last];
        for (int64_t i = 1; i < nodes; i++) {
            const End end = best[branch[i - 1]]; // past the end of the text the copy copies itself
            made[i] = end.agrees ? tokens[end.at + 1 + (depth[i] - 1) % (last - end.at)] : -1;
        }
    }
}

// What most often followed the ends that agree for longest with a text's last words, as
// drafters/suffix.py has it. An end votes for what followed it, until something else is guessed:
// those that agree with a node lie side by side, and fall to its children.
static void vote(int64_t rows, int64_t nodes, int64_t longest, int64_t vocab, int64_t stride,
                 const float *least, const float *stretch, const int64_t *parents,
                 const int64_t *depth, const int64_t *length, const int64_t *tokens, int64_t *made) {
    struct Voter { int64_t says, end; };
    struct Party { int64_t from, to; float trust; };
    for (; rows--; tokens += stride, made += nodes) {
        const int64_t last = *length++ - 1;
        int64_t most = 1;
        std::vector<Voter> voters;
        for (int64_t end = 0; end < last; end++) {
            const int64_t agrees = agreed(tokens, last, end, longest);
            if (agrees > most) voters.clear(), most = agrees;
            if (agrees == most) voters.push_back({0, end});
        }
        const auto bigger = [&](const Party &a, const Party &b) { // or, of equals, later
            const int64_t more = (a.to - a.from) - (b.to - b.from);
            return more > 0 || (!more && voters[a.to - 1].end > voters[b.to - 1].end);
        };
        std::vector<Party> of(nodes);
        of[0] = {0, (int64_t)voters.size(), 1.0f};
        made[0] = tokens[last];
        for (int64_t parent = 0, i = 1; i < nodes; parent++) {
            const Party all = of[parent];
            for (int64_t v = all.from; v < all.to; v++) {
                const int64_t at = voters[v].end + 1 + depth[parent];
                int64_t node = parent; // what is guessed is text, too
                while (at > last && depth[node] > at - last) node = parents[node];
                voters[v].says = at > last ? made[node] : tokens[at];
            }
            std::sort(voters.begin() + all.from, voters.begin() + all.to, [](Voter a, Voter b) {
                return a.says < b.says || (a.says == b.says && a.end < b.end);
            });
            std::vector<Party> parties;
            for (int64_t v = all.from, from = v; v < all.to; from = v) {
                const int64_t says = voters[v].says;
                while (v < all.to && voters[v].says == says) v++;
                const float share = (float)(v - from) / (all.to - all.from);
                if (says >= 0 && says < vocab) parties.push_back({from, v, all.trust * share});
            }
            std::sort(parties.begin(), parties.end(), bigger);
            for (auto next = parties.begin(); i < nodes && parents[i] == parent; i++) {
                made[i] = -1;
                if (next == parties.end()) continue;
                if (next->trust >= *least && depth[i] <= *stretch * most)
                    of[i] = *next, made[i] = voters[next->from].says;
                next++;
            }
        }
    }
}

// What is noted of tokens, which lie so far apart down and to the right; -1 where nothing is. The
// last place of each row is for torch's operations (drafters/recycle.py).
static void recall(int64_t rows, int64_t n, int64_t places, int64_t size, int64_t down, int64_t right,
                   const int64_t *tokens, const int64_t *owner, const int64_t *notes, int64_t *made) {
    for (; rows--; tokens += down, owner += places + 1, notes += (places + 1) * size)
        for (int64_t i = 0; i < n; i++) {
            const int64_t token = tokens[i * right], place = token % places;
            const bool known = token >= 0 && owner[place] == token;
            made = known ? std::copy_n(notes + place * size, size, made) : std::fill_n(made, size, -1);
        }
}

// Of twins the last counts.
static void note(int64_t rows, int64_t n, int64_t places, int64_t size, const int64_t *tokens,
                 const int64_t *news, int64_t *owner, int64_t *notes) {
    for (; rows--; owner += places + 1, notes += (places + 1) * size)
        for (int64_t i = 0; i < n; i++, tokens++, news += size) {
            if (*tokens < 0) continue;
            const int64_t place = *tokens % places;
            owner[place] = *tokens;
            std::copy_n(news, size, notes + place * size);
        }
}

// What the target said along a branch of so many `steps`, as drafters/lookahead.py learns of it: a
// line of what comes after the n accepted, and `size` tokens in a row for the `pool` of the token
// before them.
static void learn(int64_t rows, int64_t nodes, int64_t steps, int64_t line, int64_t places,
                  int64_t pool, int64_t size, const int64_t *branch, const int64_t *fed,
                  const int64_t *said, const int64_t *n, int64_t *lines, int64_t *owner,
                  int64_t *notes) {
    const int64_t grams = std::max<int64_t>(steps - size, 0), wide = pool * size;
    std::vector<int64_t> keys(grams), news(grams * wide), gram(size);
    for (; rows--; fed += nodes, said += nodes, n++) {
        for (int64_t i = 0; i < line; i++) *lines++ = said[branch[std::min(*n + 1 + i, steps - 1)]];
        for (int64_t g = 0; g < grams; g++) {
            int64_t *kept = news.data() + g * wide, *end = kept + wide;
            keys[g] = fed[branch[g]];
            recall(1, 1, places, wide, 0, 0, &keys[g], owner, notes, kept);
            for (int64_t i = 0; i < size; i++) gram[i] = said[branch[g + i]];
            const int64_t *found = kept;
            while (found < end && !std::equal(gram.begin(), gram.end(), found)) found += size;
            if (found < end) continue;
            std::copy_backward(kept, end - size, end);
            std::copy(gram.begin(), gram.end(), kept);
        }
        note(1, grams, places, wide, keys.data(), news.data(), owner, notes);
        owner += places + 1, notes += (places + 1) * wide;
    }
}

// Rows of tokens, so far apart, and of others where there is none.
static void either(int64_t rows, int64_t n, int64_t down, int64_t others_down, const int64_t *tokens,
                   const int64_t *others, int64_t *made) {
    for (; rows--; tokens += down, others += others_down)
        for (int64_t i = 0; i < n; i++) *made++ = tokens[i] >= 0 ? tokens[i] : others[i];
}

// Slots or positions at these depths below the last token of each row; none is less than 0.
static void places(int64_t rows, int64_t n, int64_t shared, const int64_t *length,
                   const int64_t *depth, int64_t *made) {
    for (; rows--; length++, depth += shared ? 0 : n)
        for (int64_t i = 0; i < n; i++) *made++ = std::max<int64_t>(*length - 1 + depth[i], 0);
}

static bool read(int64_t rows, int64_t n, int64_t stride, const int64_t *tokens,
                 const int64_t *slots, int64_t *made) {
    for (; rows--; tokens += stride)
        for (int64_t i = 0; i < n; i++, slots++) {
            if (*slots < 0 || *slots >= stride) return false;
            *made++ = tokens[*slots];
        }
    return true;
}

// Strides of depth, from row to row and from token to token.
static void until(int64_t rows, int64_t n, int64_t down, int64_t right, const int64_t *tokens,
                  const int64_t *depth, const int64_t *budget, int64_t *made) {
    for (; rows--; depth += down, budget++)
        for (int64_t i = 0; i < n; i++, tokens++)
            *made++ = depth[i * right] <= *budget ? *tokens : -1;
}

static void columns(int64_t rows, int64_t n, int64_t *made, const int64_t *const *parts,
                    const int64_t *strides) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < n; i++) *made++ = parts[i][row * strides[i]];
}

static void at_least(int64_t size, int64_t least, const int64_t *x, int64_t *made) {
    for (; size--; x++) *made++ = std::max(*x, least);
}

// --- chance ---------------------------------------------------------------------------------------

// Laws, noise and the rules that weigh p against q, as sampling.py and rules.py have them. Every row
// is reckoned by one thread, or every number by itself.

constexpr int64_t MUCH = 1 << 16, LUMP = 1 << 12; // numbers: worth several threads, worth one
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15;

static inline uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

// Uniform noise of the lane so much further than an address.
static inline float uniform(uint64_t at, uint64_t lane) {
    return ((float)(int64_t)(mixed(at + lane * GOLDEN) & INT64_MAX) + 0.5f) * 0x1p-63f;
}

// Up to a vector of numbers, filled up with `none`, and back.
static inline vec filled(const float *x, int64_t count, float none) {
    if (count >= LANES) return load(x);
    vec made = vec{} + none;
    memcpy(&made, x, count * sizeof *x);
    return made;
}

static inline void put(vec made, float *y, int64_t count) {
    if (count >= LANES) *(vec *)y = made;
    else memcpy(y, &made, count * sizeof *y);
}

// The sum of w [size], which is scaled to sum 1 if there is any.
static float scaled(int64_t size, float *w) {
    vec sums = {};
    for (int64_t i = 0; i < size; i += LANES) sums += filled(w + i, size - i, 0);
    const float total = sum(sums);
    for (int64_t i = 0; total > 0 && i < size; i++) w[i] /= total;
    return total;
}

static void shape(int64_t size, int64_t top_k, float temperature, float top_p, const float *x, float *p) {
    const float most = x[largest(x, size)];
    for (int64_t i = 0; i < size; i++) p[i] = (x[i] - most) / temperature;
    float least = -INFINITY;
    if (0 < top_k && top_k < size && most == most) {
        std::vector<float> ranked(p, p + size);
        std::nth_element(ranked.begin(), ranked.begin() + top_k - 1, ranked.end(), std::greater<>());
        least = ranked[top_k - 1];
    }
    for (int64_t i = 0; i < size; i += LANES) {
        const vec x = filled(p + i, size - i, -INFINITY), none = {};
        put(x < least ? none : exponential(x), p + i, size - i);
    }
    scaled(size, p);
    if (top_p >= 1) return;
    std::vector<int64_t> left(size);
    std::iota(left.begin(), left.end(), 0);
    const auto later = [&](int64_t a, int64_t b) { return p[a] < p[b] || (p[a] == p[b] && a > b); };
    std::make_heap(left.begin(), left.end(), later);
    for (double before = 0; before < top_p && left.size(); left.pop_back()) {
        std::pop_heap(left.begin(), left.end(), later);
        before += p[left.back()];
    }
    for (const int64_t i : left) p[i] = 0;
    scaled(size, p);
}

static void law(int64_t rows, int64_t size, int64_t threads, int64_t top_k, double temperature,
                double top_p, const float *logits, float *p) {
#pragma omp parallel for num_threads(threads) if (rows * size > MUCH)
    for (int64_t i = 0; i < rows * size; i += size)
        shape(size, top_k, temperature, top_p, logits + i, p + i);
}

// My numbers of w [size], over when each lane arrives.
static void run_race(int64_t from, int64_t to, uint64_t at, const float *w, float *made) {
    for (int64_t i = from; i < to; i += LANES) {
        vec u;
        for (int t = 0; t < LANES; t++) u[t] = uniform(at, i + t);
        const vec latest = vec{} + (1 - 0x1p-24f);
        put(filled(w + i, to - i, 0) / waited(u < latest ? u : latest), made + i, to - i);
    }
}

// keys [rows / n, n], so far from row to row.
static void race(int64_t rows, int64_t n, int64_t down, int64_t size, int64_t threads,
                 uint64_t salt, const int64_t *keys, const float *w, float *made) {
    const int64_t lumps = (size + LUMP - 1) / LUMP;
#pragma omp parallel for num_threads(threads) if (rows * size > MUCH)
    for (int64_t i = 0; i < rows * lumps; i++) {
        const int64_t row = i / lumps, from = i % lumps * LUMP, key = keys[row / n * down + row % n];
        run_race(from, std::min(from + LUMP, size), mixed(key + salt), w + row * size, made + row * size);
    }
}

static void addresses(int64_t rows, int64_t n, int64_t shared, int64_t by_round,
                      const int64_t *stream, const int64_t *length, const int64_t *depth,
                      int64_t *made) {
    for (; rows--; depth += shared ? 0 : n) {
        const uint64_t root = mixed(*stream++) + *length++;
        for (int64_t i = 0; i < n; i++) *made++ = mixed((by_round ? mixed(root) : root) + depth[i]);
    }
}

// A row's draft, its laws p and q [nodes, size] (q or null), and its verdict; room: [4, size].
struct Judged {
    int64_t nodes, size, places, width;
    uint64_t accept, residual; // what sets the noise of either purpose apart
    float lenience;
    const int64_t *tokens, *children, *keys;
    const float *p, *q;
    float *room;
    int64_t *path, *n, *made;

    const float *p_at(int64_t node) const { return p + node * size; }
    const float *q_at(int64_t node) const { return q ? q + node * size : nullptr; }
    float coin(int64_t node, int64_t lane) const { return uniform(mixed(keys[node] + accept), lane); }

    // The law that x was drawn from: q, or a certain one; of no guess, nothing.
    const float *drawn(const float *q, int64_t x) const {
        if (q && x >= 0 && q[x] > 0) return q;
        std::fill_n(room, size, 0);
        if (x >= 0) room[x] = 1;
        return room;
    }

    // What one drawn from leaves of a law of which so much is owed.
    void uncovered(float owed, const float *law, const float *drawn, float *rest) const {
        for (int64_t i = 0; i < size; i++)
            rest[i] = std::max(owed * law[i] - lenience * drawn[i], 0.0f);
    }

    void keep(int64_t count, int64_t node) const { path[count] = node, made[count - 1] = tokens[node]; }

    void end(int64_t count, const float *law) const {
        run_race(0, size, mixed(keys[path[count]] + residual), law, room);
        std::fill(made + count, made + places, largest(room, size));
        std::fill(path + count, path + places, path[count]);
        *n = count;
    }
};

// The child of a node that is kept, 0: none, and the law that those before it left.
static int64_t taken(const Judged &row, int64_t node, const float *&left) {
    const int64_t size = row.size, *children = row.children + node * row.width;
    float *rest = row.room + size, *spare = rest + size, *others = spare + size;
    const float *q = row.q_at(node);
    left = row.p_at(node);
    for (int64_t rank = 0; rank < row.width; rank++) {
        const int64_t child = children[rank], x = child < 0 ? -1 : row.tokens[child];
        if (x < 0) continue;
        const float chance = q && q[x] > 0 ? q[x] : 1;
        if (row.coin(node, rank) <= left[x] / (row.lenience * chance)) return child;
        const float *drawn = row.drawn(q, x);
        row.uncovered(1, left, drawn, spare);
        if (scaled(size, spare) > 0) left = spare, std::swap(rest, spare);
        if (!q || rank + 1 == row.width) continue;
        q = std::copy_n(drawn, size, others) - size;
        others[x] = 0;
        scaled(size, others);
    }
    return 0;
}

static void reject(const Judged &row) {
    const float *left;
    int64_t count = row.path[0] = 0;
    while (const int64_t child = taken(row, row.path[count], left)) row.keep(++count, child);
    row.end(count, left);
}

static void block(const Judged &row) {
    float *rest = row.room + row.size, *spare = rest + row.size, owed = 1;
    const float *law = row.p;
    int64_t count = row.path[0] = 0;
    for (int64_t i = 0, x = 0; x >= 0; i++) {
        const float *p = row.p_at(i);
        x = i + 1 < row.nodes ? row.tokens[i + 1] : -1;
        const float *drawn = row.drawn(row.q_at(i), x);
        row.uncovered(owed, p, drawn, spare);
        const float mass = scaled(row.size, spare), all = mass + 1 - owed;
        if (!i || row.coin(i - 1, 0) <= (all > 0 ? mass / all : 1)) {
            count = i, law = mass > 0 ? spare : p;
            std::swap(rest, spare);
        }
        if (x >= 0) owed = std::min(owed * (p[x] / drawn[x]), 1.0f);
    }
    for (int64_t i = 1; i <= count; i++) row.keep(i, i);
    row.end(count, law);
}

// children [1 or rows, nodes, width]; false: a guess is no token.
template <void (*rule)(const Judged &)>
static bool judge(int64_t rows, int64_t nodes, int64_t size, int64_t places, int64_t width,
                  int64_t shared, int64_t threads, uint64_t accept, uint64_t residual,
                  double lenience, const int64_t *tokens, const int64_t *children,
                  const int64_t *keys, const float *p, const float *q, float *room, int64_t *path,
                  int64_t *n, int64_t *made) {
    for (int64_t i = 0; i < rows * nodes; i++)
        if (i % nodes && tokens[i] >= size) return false;
#pragma omp parallel for num_threads(threads) if (rows * size > MUCH)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t first = row * nodes;
        rule({nodes, size, places, width, accept, residual, (float)lenience, tokens + first,
              children + (shared ? 0 : first * width), keys + first, p + first * size,
              q ? q + first * size : q, room + row * 4 * size, path + row * places, n + row,
              made + row * places});
    }
    return true;
}


// --- what Python calls ----------------------------------------------------------------------------

// Numbers and addresses of any function above, as they lie in an array.
template <typename A> static A as(int64_t given) {
    if constexpr (std::is_same_v<A, double>) {
        double number;
        memcpy(&number, &given, sizeof number);
        return number;
    } else return (A)given;
}

template <typename R, typename... A, size_t... i>
static bool spread(R (*f)(A...), const int64_t *given, std::index_sequence<i...>) {
    if constexpr (std::is_void_v<R>) return f(as<A>(given[i])...), true;
    else return f(as<A>(given[i])...);
}

template <typename R, typename... A> static bool spread(R (*f)(A...), const int64_t *given) {
    return spread(f, given, std::index_sequence_for<A...>());
}

struct Call {
    bool (*function)(const int64_t *given);
    const int64_t *given;
};

template <typename num> static bool pass(const Net<num> *net, const Pass<num> *p) {
    return run(*net, *p);
}

extern "C" {
bool call_float32(const int64_t *given) { return spread(pass<float>, given); }
bool call_bfloat16(const int64_t *given) { return spread(pass<bfloat16>, given); }
bool call_likeliest(const int64_t *given) { return spread(likeliest, given); }
bool call_ranked(const int64_t *given) { return spread(ranked, given); }
bool call_spoil(const int64_t *given) { return spread(spoil, given); }
bool call_follow(const int64_t *given) { return spread(follow, given); }
bool call_commit(const int64_t *given) { return spread(commit, given); }
bool call_report(const int64_t *given) { return spread(report, given); }
bool call_lookup(const int64_t *given) { return spread(lookup, given); }
bool call_vote(const int64_t *given) { return spread(vote, given); }
bool call_recall(const int64_t *given) { return spread(recall, given); }
bool call_note(const int64_t *given) { return spread(note, given); }
bool call_learn(const int64_t *given) { return spread(learn, given); }
bool call_either(const int64_t *given) { return spread(either, given); }
bool call_places(const int64_t *given) { return spread(places, given); }
bool call_read(const int64_t *given) { return spread(read, given); }
bool call_until(const int64_t *given) { return spread(until, given); }
bool call_columns(const int64_t *given) { return spread(columns, given); }
bool call_at_least(const int64_t *given) { return spread(at_least, given); }
bool call_law(const int64_t *given) { return spread(law, given); }
bool call_race(const int64_t *given) { return spread(race, given); }
bool call_addresses(const int64_t *given) { return spread(addresses, given); }
bool call_reject(const int64_t *given) { return spread(judge<reject>, given); }
bool call_block(const int64_t *given) { return spread(judge<block>, given); }

int64_t spent_ns() { return spent; }

// One after another, as long as they succeed.
bool replay(int64_t count, const Call *calls) {
    for (; count && calls->function(calls->given); count--) calls++;
    return !count;
}
}
