// One forward pass of a Llama-like network over a few tokens, on a CPU, as one call; passes.py says
// why, and declares Layer, Net and Pass to Python.
//
// Every sum is made in an order that does not depend on the other tokens of the pass. So the logits
// of a token are the same to the last bit however many tokens and rows share its pass.
//
// Weights, keys and values are of type `num`, float or bfloat16; a `Matrix` may be of 8-bit
// integers. Sums and the residual are float; what a matrix multiplies is rounded to `num` first.

#include "calls.h"
#include "products.h"
#include "tiles.h"
#include "vectors.h"
#include <atomic>
#include <chrono>
#include <omp.h>
#include <optional>
#include <vector>

// Up to so many numbers, each thread norms, or packs, all of them itself, to save a barrier.
constexpr int64_t NORMED_ALONE = 1 << 12, PACKED_ALONE = 1 << 16;

// A matrix [outputs, inputs] of numbers or, if it has scales [outputs], of 8-bit integers, which are
// multiplied by those of their rows. bias [outputs]: added to the product; or null.
template <typename num> struct Matrix {
    const void *weights;
    const num *bias;
    const float *scales;

    Matrix from(int64_t row, int64_t inputs) const { // the rows from this one on
        const int64_t size = scales ? 1 : sizeof(num);
        return {(const char *)weights + row * inputs * size, bias ? bias + row : bias,
                scales ? scales + row : scales};
    }
};

template <typename num> struct Layer {
    const num *before, *after, *q_norm, *k_norm; // weights of norms; the last two or null
    Matrix<num> qkv, out, up, down;              // qkv: q, k, v joined; up: gate and up
};

template <typename num> struct Net {
    int64_t layers, width, reads, heads, keys, dim, hidden; // reads: inputs of the first attention
    int64_t known, vocab, all; // rows of `embed`; rows of `head`; columns of the logits
    int64_t adds;              // 1: the residual starts from the normed state
    float eps, scale, stretch; // eps of norms; factors of attention scores, of cosines and sines
    const num *embed, *norm;            // may be null
    Matrix<num> head;
    const num *token_norm, *state_norm; // norms of what the first attention reads, or both null
    const int64_t *ids;        // [vocab]: the logits' column of each row of `head`; null: in order
    const float *frequencies;  // [dim / 2], of the rotation
    const Layer<num> *layer;
};

template <typename num> struct Pass {
    int64_t rows, n, seen, threads;            // n: tokens of a row; seen: slots that they may read
    const int64_t *tokens, *positions, *slots; // [rows, n]; a token of -1 is padding, and skipped
    const bool *visible;                       // [rows, n, seen]; null: own slot and all before it
    const num *x; // [rows, n, width]: states, read beside embeddings or in place of them; or null
    num *const *k, *const *v;            // each layer's keys and values, [rows, keys, seen, dim]
    int64_t at, row_stride, head_stride; // where their first row begins, and their strides
    int64_t last;                        // how many tokens of each row get logits, the last ones
    int64_t taps;                        // how many hidden states are returned
    const int64_t *tap; // [taps]: after how many layers; 0: embeddings; -1: before the last norm
    num *states;        // [rows, n, taps, width]; 0 for padding
    float *logits;      // [rows, last, all]; 0 for padding
    float *room;        // scratch memory of `room_for` floats
};

// --- parts of a pass ------------------------------------------------------------------------------

// y [size] = RMS norm (Zhang & Sennrich 2019) of x [size].
template <typename num, typename out>
static void rms_norm(const float *x, const num *weight, int64_t size, float eps, out *y) {
    float square;
    tile<1, 1, float>(x, size, x, nullptr, size, &square, 1, false);
    const float off = 1.0f / std::sqrt(square / size + eps);
    for (int64_t i = 0; i < size; i++) narrow(x[i] * off * wide(weight[i]), y + i);
}

// This thread's share of `total` items, `from` to `to` - 1, cut at multiples of `lump`.
struct Share {
    int64_t from, to;
    Share(int64_t total, int64_t lump = 1) {
        const int64_t lumps = (total + lump - 1) / lump, T = omp_get_num_threads(),
                      me = omp_get_thread_num();
        from = std::min(total, lumps * me / T * lump), to = std::min(total, lumps * (me + 1) / T * lump);
    }
};

template <typename num> constexpr bool TILED = TILES && std::is_same_v<num, bfloat16>;

// Activations [rows, inputs], and the same packed for tiles (tiles.h) or null.
template <typename num> struct Input {
    const num *x, *packed;
};

// This thread's outputs of these rows times w, set or added. The shape of w alone decides which code
// multiplies, so a token's outputs do not depend on the rows beside it.
template <typename num, typename out>
static void linear(int64_t rows, Input<num> in, const Matrix<num> &w, int64_t inputs, out *y,
                   int64_t outputs, bool added = false) {
    const Share mine(outputs, LANES);
    int64_t o = mine.from;
    if constexpr (TILED<num> && std::is_same_v<out, float>)
        if (in.packed && outputs % SIDE == 0) {
            auto next = [&](auto N) {
                const Matrix<num> some = w.from(o, inputs);
                tiled<N>(rows, in.packed, (const num *)some.weights, some.bias, inputs, y + o, outputs,
                         added);
                o += N * SIDE;
            };
            while (rows > SIDE && o + 4 * SIDE <= mine.to) next(std::integral_constant<int, 4>());
            while (o < mine.to) next(std::integral_constant<int, 1>());
            return;
        }
    for (int64_t to; o < mine.to; o = to) { // blocks of tokens share weights in the cache
        to = rows > TALL ? std::min(o + BROAD, mine.to) : mine.to;
        blocks(rows, [&](auto M, int64_t r) {
            int64_t i = o;
            auto by = [&](auto N) {
                for (; i + N <= to; i += N) {
                    const Matrix<num> some = w.from(i, inputs);
                    auto multiply = [&](const auto *weights) {
                        tile<M, N>(in.x + r * inputs, inputs, weights, some.bias, inputs,
                                   y + r * outputs + i, outputs, added, some.scales);
                    };
                    if (w.scales) multiply((const int8_t *)some.weights);
                    else multiply((const num *)some.weights);
                }
            };
            by(std::integral_constant<int, BROAD>());
            by(std::integral_constant<int, 1>());
        });
    }
}

// This thread's columns of y [rows, outputs] = silu(gate) * up.
template <typename num>
static void swiglu(int64_t rows, const float *gate, const float *up, int64_t outputs, num *y) {
    const Share mine(outputs, LANES);
    for (; rows; rows--, gate += outputs, up += outputs, y += outputs) {
        int64_t i = mine.from;
        for (; i + LANES <= mine.to; i += LANES) {
            const vec g = load(gate + i), h = g / (1.0f + exponential(-g)) * load(up + i);
            for (int t = 0; t < LANES; t++) narrow(h[t], y + i + t);
        }
        for (; i < mine.to; i++) narrow(gate[i] / (1.0f + std::exp(-gate[i])) * up[i], y + i);
    }
}

// y [dim] = a head x, rotated (RoPE: Su et al. 2021); the numbers of a pair are half a head apart.
template <typename num>
static void rotate(const float *x, int64_t dim, const float *cosine, const float *sine, num *y) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        narrow(x[i] * cosine[i] - x[i + half] * sine[i], y + i);
        narrow(x[i + half] * cosine[i] + x[i] * sine[i], y + i + half);
    }
}

// --- a pass ---------------------------------------------------------------------------------------

// The tokens of a pass that are not padding.
struct Kept {
    std::vector<int64_t> at, begins{0}; // indices in [rows, n]; where each row's begin in `at`
    std::vector<int64_t> read, written; // of tokens with logits: index in `at`, in [rows, last]

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

// Scratch memory of a pass over R tokens, in `p.room`.
template <typename num> struct Room {
    int64_t lot; // numbers in a thread's part of `packed`, where each packs all itself
    float *x, *qkv, *gate, *up, *cosines, *sines, *scores, *head_logits, *end;
    num *read, *heads, *own, *packed; // each thread has a part of `own`; `packed`: see `lot`

    Room(const Net<num> &net, const Pass<num> &p) {
        const int64_t R = p.rows * p.n, half = net.dim / 2, wide = net.heads * net.dim;
        const int64_t most = std::max({net.width, wide, net.hidden, net.reads});
        const int64_t all = TILED<num> ? padded(R) * most : 0;
        lot = std::min(all, PACKED_ALONE);
        x = p.room;
        qkv = x + R * net.width;
        gate = qkv + R * (wide + 2 * net.keys * net.dim);
        up = gate + R * net.hidden;
        cosines = up + R * net.hidden;
        sines = cosines + R * half;
        scores = sines + R * half;
        head_logits = scores + p.threads * TALL * (p.seen + LANES);
        read = (num *)(head_logits + (net.ids ? p.rows * p.last * net.vocab : 0));
        heads = read + R * most;
        own = heads + R * most;
        packed = own + p.threads * std::min(R * net.width, NORMED_ALONE);
        end = (float *)(packed + std::max(p.threads * lot, all)) + 1;
    }
};

// Attention of M queries of a row that share a key head, the first of which is number `first`. The
// queries of a token are neighbours, and tokens are in order.
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
    auto weighted_sum = [&](auto C, int64_t c) { // of values, in C vectors of coordinates from c on
        vec acc[M][C];
        each<M>([&](auto i) { each<C>([&](auto u) { acc[i][u] = vec{}; }); });
        for (int64_t j = 0; j < slots; j++)
            each<C>([&](auto u) {
                const vec value = load(v + j * d + c + u * LANES);
                each<M>([&](auto i) { acc[i][u] += scores[i * stride + j] * value; });
            });
        each<M>([&](auto i) {
            each<C>([&](auto u) {
                for (int t = 0; t < LANES; t++) narrow(acc[i][u][t], y[i] + c + u * LANES + t);
            });
        });
    };
    int64_t c = 0;
    for (; c + BROAD * LANES <= d; c += BROAD * LANES)
        weighted_sum(std::integral_constant<int, BROAD>(), c);
    for (; c + LANES <= d; c += LANES) weighted_sum(std::integral_constant<int, 1>(), c);
    for (; c < d; c++)
        for (int i = 0; i < M; i++) {
            float acc = 0;
            for (j = 0; j < slots; j++)
                acc = std::fma(scores[i * stride + j], wide(v[j * d + c]), acc);
            narrow(acc, y[i] + c);
        }
}

// One thread's part of a pass over the tokens that are not padding.
template <typename num>
static void part(const Net<num> &net, const Pass<num> &p, const Room<num> &room, const Kept &kept) {
    const int64_t n = p.n, R = kept.at.size(), E = net.width, d = net.dim, F = net.hidden;
    const int64_t H = net.heads, K = net.keys, Q = (H + 2 * K) * d;
    const int64_t G = H / K, lot = std::clamp<int64_t>(R * H / p.threads, 1, TALL);
    const int64_t parts = (n * G + lot - 1) / lot; // into which a key head's queries are divided
    const Share mine(R), shared(p.rows * K * parts);
    float *x = room.x;
    num *read = room.read, *heads = room.heads;

    for (int64_t r = mine.from; r < mine.to; r++) {
        const int64_t token = kept.at[r];
        const num *embedded = net.embed + p.tokens[token] * E;
        num *both = read + r * net.reads;
        auto start_from = [&](const num *state) { // sets the token's residual
            for (int64_t i = 0; i < E; i++) x[r * E + i] = wide(state[i]);
        };
        if (net.token_norm)
            start_from(embedded), rms_norm(x + r * E, net.token_norm, E, net.eps, both);
        start_from(p.x ? p.x + token * E : embedded);
        if (net.token_norm) rms_norm(x + r * E, net.state_norm, E, net.eps, both + E);
        if (net.adds) start_from(both + E);
        for (int64_t i = 0; i < d / 2; i++) {
            const float angle = p.positions[token] * net.frequencies[i];
            room.cosines[r * d / 2 + i] = std::cos(angle) * net.stretch;
            room.sines[r * d / 2 + i] = std::sin(angle) * net.stretch;
        }
    }
    auto copy = [&](const auto *from, num *to) {
        for (int64_t i = 0; i < E; i++) narrow(wide(from[i]), to + i);
    };
    const bool few = R * E <= NORMED_ALONE;
    num *ours = few ? room.own + omp_get_thread_num() * R * E : read;
    auto norm = [&](const num *weight) { // of all residuals, to `ours`; null: only copies them
        for (int64_t r = few ? 0 : mine.from; r < (few ? R : mine.to); r++)
            if (!weight) copy(x + r * E, ours + r * E);
            else rms_norm(x + r * E, weight, E, net.eps, ours + r * E);
        if (few) return;
#pragma omp barrier
    };
    auto tap = [&](int64_t layer, const auto *states) {
        for (int64_t t = 0; t < p.taps; t++)
            for (int64_t r = mine.from; p.tap[t] == layer && r < mine.to; r++)
                copy(states + r * E, p.states + (kept.at[r] * p.taps + t) * E);
    };
    const bool tiled = TILED<num> && tiles_allowed();
    std::optional<Tiles> tiles;
    if (tiled) tiles.emplace();
    auto input = [&](const num *rows, int64_t count, int64_t inputs, const auto &w) -> Input<num> {
        if constexpr (TILED<num>)
            if (tiled && !w.scales && inputs % DEEP == 0) {
                const int64_t all = padded(count) * inputs / TILE;
                const bool alone = all * TILE <= PACKED_ALONE;
                const Share shared(all);
                num *to = room.packed + (alone ? omp_get_thread_num() * room.lot : 0);
                pack(count, rows, inputs, alone ? 0 : shared.from, alone ? all : shared.to, to);
                if (!alone) {
#pragma omp barrier
                }
                return {rows, to};
            }
        return {rows, nullptr};
    };
#pragma omp barrier
    for (int64_t at = 0; at < net.layers; at++) {
        const Layer<num> &layer = net.layer[at];
        const bool given = net.token_norm && !at;
        tap(at, x);
        if (!given) norm(layer.before);
        const int64_t reads = given ? net.reads : E;
        linear(R, input(given ? read : ours, R, reads, layer.qkv), layer.qkv, reads, room.qkv, Q);
#pragma omp barrier
        for (int64_t r = mine.from; r < mine.to; r++) {
            const float *cosine = room.cosines + r * d / 2, *sine = room.sines + r * d / 2;
            const int64_t row = kept.at[r] / n, from = kept.begins[row];
            const int64_t count = kept.begins[row + 1] - from; // tokens of this row
            int64_t place = p.at + row * p.row_stride + p.slots[kept.at[r]] * d;
            for (int64_t h = 0; h < H + K; h++) {
                float *here = room.qkv + r * Q + h * d;
                const num *weight = h < H ? layer.q_norm : layer.k_norm;
                if (weight) rms_norm(here, weight, d, net.eps, here);
                num *to = p.k[at] + place + (h - H) * p.head_stride;
                if (h < H) to = heads + ((from * K + h / G * count + r - from) * G + h % G) * d;
                rotate(here, d, cosine, sine, to);
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
        linear(R, input(read, R, H * d, layer.out), layer.out, H * d, x, E, true);
#pragma omp barrier
        norm(layer.after);
        const Input<num> both = input(ours, R, E, layer.up);
        linear(R, both, layer.up, E, room.gate, F);
        linear(R, both, layer.up.from(F, E), E, room.up, F);
        swiglu(R, room.gate, room.up, F, heads);
#pragma omp barrier
        linear(R, input(heads, R, F, layer.down), layer.down, F, x, E, true);
#pragma omp barrier
    }
    tap(-1, x);
    norm(net.norm);
    tap(net.layers, ours);
    int64_t wanted = kept.read.size();
    for (int64_t i = 0; i < wanted; i++)
        if (const int64_t r = kept.read[i]; mine.from <= r && r < mine.to)
            memcpy(heads + i * E, ours + r * E, E * sizeof *ours);
#pragma omp barrier
    linear(wanted, input(heads, wanted, E, net.head), net.head, E, net.ids ? room.head_logits : p.logits,
           net.vocab);
    if (net.ids) {
#pragma omp barrier
        const Share places(p.rows * p.last);
        std::fill(p.logits + places.from * net.all, p.logits + places.to * net.all, 0.0f);
        for (int64_t i = 0; i < wanted; i++) {
            if (kept.written[i] < places.from || kept.written[i] >= places.to) continue;
            float *columns = p.logits + kept.written[i] * net.all;
            std::fill_n(columns, net.all, -INFINITY);
            const float *logits = room.head_logits + i * net.vocab;
            for (int64_t o = 0; o < net.vocab; o++) columns[net.ids[o]] = logits[o];
        }
        return;
    }
    const Share outputs(net.vocab, LANES); // now each token's logits move to its place, last first
    auto mine_of = [&](int64_t i) { return p.logits + i * net.vocab + outputs.from; };
    const size_t bytes = (outputs.to - outputs.from) * sizeof(float);
    for (int64_t i = p.rows * p.last - 1; i >= wanted; i--)
        if (wanted && kept.written[wanted - 1] == i) memmove(mine_of(i), mine_of(--wanted), bytes);
        else memset(mine_of(i), 0, bytes);
}

static std::atomic<int64_t> spent{0}; // nanoseconds, in all passes
static int64_t spent_ns() { return spent; }

// Runs a pass. Returns false, and does nothing, if a token or a slot is out of range.
template <typename num> static bool pass(const Net<num> *its_net, const Pass<num> *call) {
    const Net<num> &net = *its_net;
    const Pass<num> &p = *call;
    const Kept kept(p);
    for (const int64_t r : kept.at)
        if (((!p.x || net.token_norm) && (p.tokens[r] < 0 || p.tokens[r] >= net.known)) || p.slots[r] < 0 ||
            p.slots[r] >= p.seen)
            return false;
    const int64_t tapped = p.taps * net.width;
    for (int64_t i = 0; i < p.rows * p.n && tapped; i++)
        if (p.tokens[i] == -1) memset(p.states + i * tapped, 0, tapped * sizeof *p.states);
    if (kept.at.empty()) { // no threads needed
        memset(p.logits, 0, p.rows * p.last * net.all * sizeof *p.logits);
        return true;
    }
    const Room<num> room(net, p);
    const auto begin = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(p.threads)
    part(net, p, room, kept);
    spent += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
    return true;
}

template <typename num> static int64_t room_for(const Net<num> *net, const Pass<num> *p) {
    const Room<num> room(*net, *p);
    return room.end - room.x;
}

// lm.product: y [rows, outputs] = x [rows, inputs] times a `Matrix` [outputs, inputs].
template <typename num>
static void product(int64_t rows, int64_t inputs, int64_t outputs, int64_t threads, const num *x,
                    const void *weights, const num *bias, const float *scales, num *y) {
#pragma omp parallel num_threads(threads)
    linear<num>(rows, {x, nullptr}, {weights, bias, scales}, inputs, y, outputs);
}

CALLED(float32, pass<float>)
CALLED(bfloat16, pass<bfloat16>)
CALLED(product_float32, product<float>)
CALLED(product_bfloat16, product<bfloat16>)
CALLED(room_for_float32, room_for<float>)
CALLED(room_for_bfloat16, room_for<bfloat16>)
CALLED(spent_ns, spent_ns)
