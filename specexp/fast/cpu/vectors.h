// Vectors of floats, by extensions of gcc and clang: 16 lanes with AVX-512, else 8.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __AVX512F__
#include <immintrin.h>
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, int4{__VA_ARGS__})
#endif

template <typename T, int bytes> struct Laned {
    typedef T of __attribute__((vector_size(bytes), aligned(sizeof(T) < 2 ? 1 : 2), may_alias));
};
using vec = Laned<float, 4 * LANES>::of;
using half_vec = Laned<float, 2 * LANES>::of;
using vec4 = Laned<float, 16>::of;
using int4 = Laned<int32_t, 16>::of;
using ints = Laned<int32_t, 4 * LANES>::of;
using shorts = Laned<uint16_t, 2 * LANES>::of;
using bytes = Laned<int8_t, LANES>::of;

// Calls f with 0, ..., N - 1 as compile-time constants, so that arrays indexed by them can stay in
// registers. Inlined early, because compilers would otherwise keep a copy of them in memory.
#define INLINED __attribute__((always_inline)) static inline
template <typename F, int... I> INLINED void each(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F> INLINED void each(F f) {
    each(f, std::make_integer_sequence<int, N>());
}

struct bfloat16 {
    uint16_t bits;
};

// `load` and `wide` make floats of numbers in memory; `store` and `narrow` write floats as such
// numbers. To bfloat16 they round to nearest, ties to even, and a NaN stays one.
static inline vec load(const float *p) { return *(const vec *)p; }
static inline vec load(const bfloat16 *p) {
    return (vec)(__builtin_convertvector(*(const shorts *)p, ints) << 16);
}
static inline vec load(const int8_t *p) {
#ifdef __AVX512F__ // compilers take several times as many instructions for the lines below
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const bytes *)p, ints), vec);
#endif
}
static inline float wide(float x) { return x; }
static inline float wide(int8_t x) { return x; }
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

static inline void store(vec v, float *p) { *(vec *)p = v; }
static inline void store(vec v, bfloat16 *p) {
    const ints bits = (ints)v, none = {}, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *(shorts *)p = __builtin_convertvector(v != v ? none + 0x7fc0 : rounded, shorts);
}

static inline vec4 folded(vec v) {
    const half_vec half = ((half_vec *)&v)[0] + ((half_vec *)&v)[1];
    return LANES == 8 ? *(vec4 *)&half : ((vec4 *)&half)[0] + ((vec4 *)&half)[1];
}

static inline float sum(vec v) {
    const vec4 q = folded(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

// The sums of four vectors, each added up in the same order as by `sum`.
static inline vec4 sums(const vec *v) {
    const vec4 a = folded(v[0]), b = folded(v[1]), c = folded(v[2]), d = folded(v[3]);
    const vec4 ab = SHUFFLED(a, b, 0, 4, 1, 5) + SHUFFLED(a, b, 2, 6, 3, 7);
    const vec4 cd = SHUFFLED(c, d, 0, 4, 1, 5) + SHUFFLED(c, d, 2, 6, 3, 7);
    return SHUFFLED(ab, cd, 0, 1, 4, 5) + SHUFFLED(ab, cd, 2, 3, 6, 7);
}

// exp(x) with a relative error of 2e-7; 0 for x < -87, and x > 88 counts as 88. The polynomial is
// that of Cephes' expf.
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

// -log(1 - u) with a relative error of 2e-7 for 0 < u < 1; `softplus` needs -1 <= u <= 0, too. y is
// corrected by its rounding error, as in FreeBSD's log1p.
static inline vec arrival(vec u) {
    const vec y = 1.0f - u, lost = (1.0f - y - u) * (1.0f + u);
    const ints n = ((ints)y - 0x3f3504f3) >> 23; // y = 2^n (1 + f)
    const vec whole = __builtin_convertvector(n, vec), f = (vec)((ints)y - (n << 23)) - 1.0f;
    const vec s = f / (2.0f + f), z = s * s, w = z * z, half = f * f * 0.5f;
    const vec p = z * (w * 0.28498786688f + 0.66666662693f) + w * (w * 0.24279078841f + 0.40000972152f);
    return half - (s * (half + p) + (whole * 9.0580006145e-06f + lost)) - f - whole * 6.9313812256e-01f;
}

// log(1 + exp(x)) with a relative error of 4e-7.
static inline vec softplus(vec x) {
    const vec none = {};
    return (x > 0.0f ? x : none) - arrival(-exponential(x > 0.0f ? -x : x));
}

// The index of the largest of w [size], the first of equals; if there is a NaN, that of the first.
static inline int64_t largest(const float *w, int64_t size) {
    vec most = vec{} - INFINITY; // each lane's largest number; `place` is the index of its vector
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
