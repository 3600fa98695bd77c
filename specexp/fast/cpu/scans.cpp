// The recurrences and short convolutions of models/scans.py, over all tokens of a pass in one call.
// after: the entry of a buffer to which each token writes what it keeps, 0 for padding. Arrays
// without strides are contiguous.

#include "calls.h"
#include "products.h"
#include <vector>

// y [M, C vectors] = scale y + p [M, J] times x [J, C vectors]. Rows of x and y lie `size` apart,
// and the scales of rows `step`.
template <int M, int C>
INLINED void accumulate_block(int64_t J, const float *p, const float *x, int64_t size,
                              const float *scale, int64_t step, float *y) {
    vec acc[M][C];
    each<M>([&](auto i) {
        each<C>([&](auto u) { acc[i][u] = load(y + i * size + u * LANES) * scale[i * step]; });
    });
    for (int64_t j = 0; j < J; j++)
        each<C>([&](auto u) {
            const vec value = load(x + j * size + u * LANES);
            each<M>([&](auto i) { acc[i][u] += p[i * J + j] * value; });
        });
    each<M>([&](auto i) { each<C>([&](auto u) { *(vec *)(y + i * size + u * LANES) = acc[i][u]; }); });
}

// The same for any number of rows, and rows of any size.
static void accumulate(int64_t rows, int64_t J, const float *p, const float *x, int64_t size,
                       const float *scale, int64_t step, float *y) {
    blocks(rows, [&](auto M, int64_t r) {
        int64_t c = 0;
        auto by = [&](auto C) {
            for (; c + C * LANES <= size; c += C * LANES)
                accumulate_block<M, C>(J, p + r * J, x + c, size, scale + r * step, step,
                                       y + r * size + c);
        };
        by(std::integral_constant<int, BROAD>());
        by(std::integral_constant<int, 1>());
        for (; c < size; c++)
            for (int64_t i = r; i < r + M; i++) {
                float &to = y[i * size + c] *= scale[i * step];
                for (int64_t j = 0; j < J; j++) to += p[i * J + j] * x[j * size + c];
            }
    });
}

// y [rows, count] = the dot products of rows of x and rows of w, both `size` long.
static void dots(int64_t rows, const float *x, int64_t count, const float *w, int64_t size, float *y) {
    int64_t o = 0;
    auto by = [&](auto N) {
        for (; o + N <= count; o += N)
            blocks(rows, [&](auto M, int64_t r) {
                const float *none = nullptr;
                tile<M, N>(x + r * size, size, w + o * size, none, size, y + r * count + o, count, false);
            });
    };
    by(std::integral_constant<int, BROAD>());
    by(std::integral_constant<int, 1>());
}

// Scan._scan. G heads of keys, H heads of values; D, the decays of a head, is 1 or K. A row has m
// slots, whose entries begin at `first`. seen [rows, folds + n, m]: with folds = 1 first the slots
// that are folded into the state, then those that each token sees. beta: of the delta rule or null.
// turned: states are [V, K].
static void scan(int64_t rows, int64_t n, int64_t m, int64_t first, int64_t folds, int64_t G, int64_t H,
                 int64_t K, int64_t V, int64_t D, int64_t turned, int64_t threads, const bool *seen,
                 const int64_t *place, const int64_t *own, const int64_t *after, const float *q,
                 const float *k, const float *v, const float *g, const float *beta, float *keys,
                 float *decays, float *writes, float *states, float *out) {
    const int64_t T = folds + n, N = beta ? 2 * n : n; // N: what reads: queries, then keys if beta
    std::vector<int64_t> slots(rows * m), count(rows); // of each row, the slots seen, by place
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = r * n; i < (r + 1) * n; i++) {
            if (!after[i]) continue;
            std::copy_n(k + i * G * K, G * K, keys + after[i] * G * K);
            std::copy_n(g + i * H * D, H * D, decays + after[i] * H * D);
            if (!beta) std::copy_n(v + i * H * V, H * V, writes + after[i] * H * V);
        }
        int64_t *begin = &slots[r * m], *end = begin;
        for (int64_t j = 0; j < m; j++) {
            bool any = false;
            for (int64_t i = 0; i < T; i++) any |= seen[(r * T + i) * m + j];
            if (any) *end++ = j;
        }
        std::sort(begin, end, [&](int64_t a, int64_t b) { return place[r * m + a] < place[r * m + b]; });
        count[r] = end - begin;
    }
    const float zero = 0, one = 1;
    auto head = [&](int64_t r, int64_t h, float *w) {
        const int64_t *slot = &slots[r * m], c = count[r], group = h / (H / G), J = (1 + c) * D;
        float *key = w + T * J + LANES, *weighed = key + c * K, *write = weighed + c * K, *x = write + c * V,
              *p = x + N * K, *read = p + std::max({N, K, V}) * c, *state = states + (r * H + h) * K * V;
        for (int64_t t = 0; t < c; t++) {
            const int64_t entry = first + r * m + slot[t];
            std::copy_n(keys + (entry * G + group) * K, K, key + t * K);
            std::copy_n(writes + (entry * H + h) * V, V, write + t * V);
        }
        // w [T, 1 + c, D]: the factors by which the state and each slot's write have decayed
        for (int64_t i = 0; i < T; i++) {
            float *sum = w + i * J;
            std::fill_n(sum, D, 0.0f);
            for (int64_t t = c - 1; t >= 0; t--) {
                const bool sees = seen[(r * T + i) * m + slot[t]];
                const float *by = decays + ((first + r * m + slot[t]) * H + h) * D;
                for (int64_t d = 0; d < D; d++) {
                    sum[(1 + t) * D + d] = sees ? sum[d] : -INFINITY;
                    sum[d] += sees ? by[d] : 0;
                }
            }
        }
        for (int64_t i = 0; i < T * J; i += LANES) *(vec *)(w + i) = exponential(load(w + i));
        // p [N, c]: how much each query or key reads of each write; x [N, K]: itself, decayed
        for (int64_t i = 0; i < n; i++) {
            const float *left = w + (folds + i) * J;
            for (int64_t t = 0; t < c; t++)
                for (int64_t u = 0; u < K; u++)
                    weighed[t * K + u] = key[t * K + u] * left[(1 + t) * D + (D > 1 ? u : 0)];
            for (int64_t a = i; a < N; a += n) {
                const float *from = (a < n ? q : k) + ((r * n + i) * G + group) * K;
                dots(1, from, c, weighed, K, p + a * c);
                for (int64_t u = 0; u < K; u++) x[a * K + u] = from[u] * left[D > 1 ? u : 0];
            }
        }
        std::fill_n(read, N * V, 0.0f);
        if (turned) dots(N, x, V, state, K, read);
        else accumulate(N, K, x, state, V, &zero, 0, read);
        for (int64_t i = 0; i < n && beta; i++) { // writes the part of v that its key does not read
            const int64_t token = r * n + i, at = std::find(slot, slot + c, own[token]) - slot;
            float *known = read + (n + i) * V, *by = p + (n + i) * c;
            if (at < c) by[at] = 0;
            accumulate(1, c, by, write, V, &one, 0, known);
            if (at == c || !after[token]) continue;
            for (int64_t u = 0; u < V; u++)
                write[at * V + u] = beta[token * H + h] * (v[(token * H + h) * V + u] - known[u]);
            std::copy_n(write + at * V, V, writes + (after[token] * H + h) * V);
        }
        accumulate(n, c, p, write, V, &one, 0, read);
        for (int64_t i = 0; i < n; i++) std::copy_n(read + i * V, V, out + ((r * n + i) * H + h) * V);
        int64_t f = folds ? c : 0; // the first f slots are folded into the state
        while (f && !seen[r * T * m + slot[f - 1]]) f--;
        for (int64_t u = 0; u < (turned ? V : K); u++)
            for (int64_t t = 0; t < f; t++)
                p[u * f + t] = w[(1 + t) * D + (D > 1 ? u : 0)] * (turned ? write[t * V + u] : key[t * K + u]);
        if (f && turned) accumulate(V, f, p, key, K, w, 0, state);
        else if (f) accumulate(K, f, p, write, V, w, D > 1, state);
    };
    const int64_t room = T * (1 + m) * D + LANES + m * (2 * K + V + std::max({N, K, V})) + N * (K + V);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> mine(room);
#pragma omp for collapse(2)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t h = 0; h < H; h++) head(r, h, mine.data());
    }
}

static inline vec silu(vec x) { return x / (1.0f + exponential(-x)); }

// Ends a convolution at channels c, c + 1, ... with sums y: adds the bias, takes SiLU if gated.
template <typename num>
static inline void finish(vec y, int64_t c, const num *bias, int64_t gated, num *out) {
    if (bias) y += load(bias + c);
    if (gated) y = silu(y);
    store(y, out + c);
}

// Scan.convolution of x [rows, n, C]; rows of x lie `down` apart, tokens `right`. weight [C, k],
// bias [C] or null. columns [rows, n, back]: the entries of which a token reads the last k. C is
// LANES or more.
template <typename num>
static void convolution(int64_t rows, int64_t n, int64_t C, int64_t k, int64_t back, int64_t down,
                        int64_t right, int64_t gated, const int64_t *after, const int64_t *columns,
                        const num *x, const num *weight, const num *bias, num *kept, num *out) {
    for (int64_t i = 0; i < rows * n; i++)
        if (after[i]) std::copy_n(x + i / n * down + i % n * right, C, kept + after[i] * C);
    std::vector<float> taps(k * LANES);
    for (int64_t begin = 0; begin < C; begin += LANES) {
        const int64_t c = std::min(begin, C - LANES);
        for (int64_t t = 0; t < k; t++)
            for (int64_t u = 0; u < LANES; u++) taps[t * LANES + u] = wide(weight[(c + u) * k + t]);
        for (int64_t i = 0; i < rows * n; i++) {
            const int64_t *column = columns + (i + 1) * back - k;
            vec y = {};
            for (int64_t t = 0; t < k; t++) y += load(&taps[t * LANES]) * load(kept + column[t] * C + c);
            finish(y, c, bias, gated, out + i * C);
        }
    }
}

constexpr int TAPS = 4; // columns that a convolution of Mamba 1 reads

// Walk.convolution of x [rows, n, C], laid out as above, by weight [C, TAPS]. A token reads all but
// the first of its parent's columns [C, TAPS], at the entry in `before` [n, rows], and its own. It
// keeps these at the entry in `after`. C is a multiple of LANES.
template <typename num>
static void shift(int64_t rows, int64_t n, int64_t C, int64_t down, int64_t right, int64_t gated,
                  const int64_t *before, const int64_t *after, const num *x, const num *weight,
                  const num *bias, num *kept, num *out) {
    for (int64_t c = 0; c < C; c += LANES) {
        float taps[LANES * TAPS] = {}, own_tap[LANES], products[LANES * TAPS], y[LANES];
        for (int64_t u = 0; u < LANES; u++) {
            const num *of = weight + (c + u) * TAPS;
            for (int64_t t = 1; t < TAPS; t++) taps[u * TAPS + t] = wide(of[t - 1]);
            own_tap[u] = wide(of[TAPS - 1]);
        }
        for (int64_t i = 0; i < rows * n; i++) {
            const num *own = x + i % rows * down + i / rows * right + c;
            const num *from = kept + (before[i] * C + c) * TAPS;
            num *to = kept + (after[i] * C + c) * TAPS;
            for (int64_t j = 0; j < LANES * TAPS; j++) products[j] = wide(from[j]) * taps[j];
            for (int64_t u = 0; u < LANES; u++) {
                const float *of = products + u * TAPS;
                y[u] = of[1] + of[2] + of[3];
            }
            memmove(to, from + 1, (LANES * TAPS - 1) * sizeof *to);
            for (int64_t u = 0; u < LANES; u++) to[u * TAPS + TAPS - 1] = own[u];
            num *at = out + (i % rows * n + i / rows) * C;
            finish(load(y) + load(own) * load(own_tap), c, bias, gated, at);
        }
    }
}

// Walk.recurrence. x, z, out [rows, n, H]; dt [rows, H, n]; A [H, K]; B, C [rows, n, K]; D and bias
// [H]. A token goes on from its parent's state [H, K], at the entry in `before` [n, rows]. It keeps
// its own at the entry in `after`. H and K are multiples of LANES.
template <typename num>
static void recurrence(int64_t rows, int64_t n, int64_t H, int64_t K, int64_t threads, const int64_t *before,
                       const int64_t *after, const num *x, const num *dt, const num *B, const num *C,
                       const num *z, const float *A, const float *D, const float *bias, float *states,
                       num *out) {
#pragma omp parallel for num_threads(threads)
    for (int64_t h = 0; h < H; h += LANES)
        for (int64_t i = 0; i < n * rows; i++) {
            const int64_t row = i % rows, token = row * n + i / rows, at = token * H + h;
            const float *from = states + (before[i] * H + h) * K;
            float *to = states + (after[i] * H + h) * K;
            vec step, y;
            for (int64_t u = 0; u < LANES; u++) step[u] = wide(dt[(row * H + h + u) * n + i / rows]);
            step = softplus(step + load(bias + h));
            const vec given = load(x + at), write = step * given;
            for (int64_t u = 0; u < LANES; u += 4) {
                vec read[4] = {};
                each<4>([&](auto v) {
                    for (int64_t k = 0, j = (u + v) * K; k < K; k += LANES, j += LANES) {
                        const vec S = exponential(load(A + h * K + j) * step[u + v]) * load(from + j) +
                                      write[u + v] * load(B + token * K + k);
                        *(vec *)(to + j) = S;
                        read[v] += S * load(C + token * K + k);
                    }
                });
                ((vec4 *)&y)[u / 4] = sums(read);
            }
            store((y + given * load(D + h)) * silu(load(z + at)), out + at);
        }
}

CALLED(scan, scan)
CALLED(convolution_float32, convolution<float>)
CALLED(convolution_bfloat16, convolution<bfloat16>)
CALLED(shift_float32, shift<float>)
CALLED(shift_bfloat16, shift<bfloat16>)
CALLED(recurrence_float32, recurrence<float>)
CALLED(recurrence_bfloat16, recurrence<bfloat16>)
