// Dot products of rows. Several are summed at once, so that one load serves several of them.

#pragma once
#include "vectors.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// At most TALL rows of x and BROAD rows of w are multiplied at once, with their sums in registers.
#ifdef __AVX512F__
constexpr int TALL = 6, BROAD = 4;
#else
constexpr int TALL = 3, BROAD = 4;
#endif
// How many rows of float w are read side by side for one row of x: AMD's processors, which alone
// have SSE4A, read memory fastest in its order, Intel's if several rows are prefetched.
#if defined(__AVX512F__) && defined(__SSE4A__)
constexpr int ALONE = 1;
#else
constexpr int ALONE = BROAD;
#endif
constexpr int AHEAD = 1 << 14; // weights are prefetched so many bytes before they are used
#ifdef __AVX__
#define HELD(x) asm("" : "+v"(x)) // keeps x in a register: the compiler would load it at every use
#else
#define HELD(x)
#endif

// One instruction multiplies STEP numbers of a row: `load_step` loads them, and `add_products` adds
// their products to sums. Numbers of two types are made float.
template <typename num> constexpr int STEP = LANES;
template <typename stored> static inline vec load_step(const stored *p) { return load(p); }
#ifdef __AVX512BF16__
template <> constexpr int STEP<bfloat16> = 2 * LANES;
static inline __m512bh load_step(const bfloat16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
static inline void add_products(vec &sums, __m512bh a, __m512bh b) {
    sums = (vec)_mm512_dpbf16_ps((__m512)sums, a, b);
}
#endif
static inline void add_products(vec &sums, vec a, vec b) { sums += a * b; }
template <typename other, typename num> static inline auto load_for(const other *, const num *p) {
    if constexpr (std::is_same_v<num, other>) return load_step(p);
    else return load(p);
}
// How many rows of weights are read side by side for M tokens. Memory is often read fastest one row
// after the other, unless multiplying takes longer: with many tokens, or if weights are first made
// float.
template <typename num, int M>
constexpr int ABREAST = STEP<num> * sizeof(num) < sizeof(vec) ? BROAD
                        : STEP<num> == LANES                  ? (M == 1 ? ALONE : BROAD)
                                                              : (M <= 4 ? 1 : 2);

// Calls f(size, first row) for blocks of at most TALL rows; size is a compile-time constant.
template <int M = TALL, typename F> static inline void blocks(int64_t rows, F f, int64_t r = 0) {
    for (; r + M <= rows; r += M) f(std::integral_constant<int, M>(), r);
    if constexpr (M > 1) blocks<M - 1>(rows, f, r);
}

// Sets y [M, N], or adds to it, the dot products of M rows of x and N rows of w, each `size` long,
// times each row's scale if w has scales [N], plus bias [N] if there is one.
// Weights are prefetched into the second-level cache, because the first-level cache holds x. Where
// one or two tokens read one row after the other, the processor prefetches better by itself.
template <int M, int N, typename num, typename stored, typename out>
static inline void tile(const num *x, int64_t x_stride, const stored *w, const num *bias, int64_t size,
                        out *y, int64_t y_stride, bool added, const float *scales = nullptr) {
    constexpr int R = std::min(N, ABREAST<stored, M>);
    vec acc[M][N];
    each<M>([&](auto i) { each<N>([&](auto j) { acc[i][j] = vec{}; }); });
    const int64_t end = size - size % STEP<stored>;
    each<N / R>([&](auto g) {
        for (int64_t k = 0; k < end; k += STEP<stored>) {
            decltype(load_for(w, x)) a[M];
            each<M>([&](auto i) {
                a[i] = load_for(w, x + i * x_stride + k);
                HELD(a[i]);
            });
            each<R>([&](auto r) {
                constexpr int j = g * R + r;
                const stored *at = w + j * size + k;
                const auto b = load_for(x, at);
                if (R > 1 || M > 2) __builtin_prefetch((const char *)at + AHEAD, 0, 2);
                each<M>([&](auto i) { add_products(acc[i][j], a[i], b); });
            });
        }
    });
    each<M>([&](auto i) {
        float s[N];
        int u = 0;
        for (; u + 4 <= N; u += 4) *(vec4 *)(s + u) = sums(acc[i] + u);
        for (; u < N; u++) s[u] = sum(acc[i][u]);
        for (int j = 0; j < N; j++) {
            for (int64_t t = end; t < size; t++)
                s[j] = std::fma(wide(x[i * x_stride + t]), wide(w[j * size + t]), s[j]);
            if (scales) s[j] *= scales[j];
            if (bias) s[j] += wide(bias[j]);
            out *to = y + i * y_stride + j;
            narrow(added ? wide(*to) + s[j] : s[j], to);
        }
    });
}
