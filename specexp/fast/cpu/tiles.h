// Matrix products in bfloat16 by Intel's AMX: one instruction multiplies 16 outputs x 32 inputs of
// the weights by 32 inputs x 16 tokens. Without AMX, TILES is false and nothing here is called.
//
// Weights [outputs, inputs] are read where they are. Activations are packed first, a tile for every
// 16 tokens and 32 inputs: [16 pairs of inputs, 16 tokens, 2]. An output's products are summed in an
// order that does not depend on how many tokens are multiplied.

#pragma once
#include "vectors.h"

constexpr int64_t SIDE = 16;          // outputs, tokens, and pairs of inputs in a tile
constexpr int64_t DEEP = 2 * SIDE;    // inputs in a tile
constexpr int64_t TILE = SIDE * DEEP; // numbers in a tile
static inline int64_t padded(int64_t tokens) { return (tokens + SIDE - 1) / SIDE * SIDE; }

#ifdef __AMX_BF16__
constexpr bool TILES = true;
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Whether Linux lets this process use the tile registers, which it is asked once.
static inline bool tiles_allowed() {
    constexpr long REQUEST = 0x1023, TILES = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = !syscall(SYS_arch_prctl, REQUEST, TILES);
    return allowed;
}

// While such an object lives, this thread's eight tile registers have 16 rows of 64 bytes each.
struct Tiles {
    Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, none[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        _tile_loadconfig(&shape);
    }
    ~Tiles() { _tile_release(); }
};

template <int T> static inline void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> static inline void load_tile(const void *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> static inline void store_tile(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int sums, int a, int b> static inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

// Transposes a 16 x 16 matrix of 32-bit numbers in registers; steps swap blocks of 8, 4, 2 and 1.
static inline void transpose(__m512 (&row)[SIDE]) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int half = SIDE / 2; half; half /= 2) {
        const __m512i by = _mm512_set1_epi32(half);
        const __mmask16 right = _mm512_test_epi32_mask(lane, by);
        const __m512i second = _mm512_add_epi32(lane, _mm512_set1_epi32(SIDE));
        const __m512i upper = _mm512_mask_sub_epi32(lane, right, second, by);
        const __m512i lower = _mm512_mask_mov_epi32(_mm512_add_epi32(lane, by), right, second);
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) {
            if (i & half) continue;
            const __m512 a = row[i], b = row[i + half];
            row[i] = _mm512_permutex2var_ps(a, upper, b);
            row[i + half] = _mm512_permutex2var_ps(a, lower, b);
        }
    }
}

// Packs tiles `from` to `to` - 1 of x [rows, inputs]; copies of the last row fill the last tiles.
static inline void pack(int64_t rows, const bfloat16 *x, int64_t inputs, int64_t from, int64_t to,
                        bfloat16 *packed) {
    const int64_t chunks = inputs / DEEP;
    for (int64_t i = from; i < to; i++) {
        const int64_t first = i / chunks * SIDE, at = i % chunks * DEEP;
        __m512 row[SIDE];
        for (int64_t t = 0; t < SIDE; t++)
            row[t] = _mm512_loadu_ps(x + std::min(first + t, rows - 1) * inputs + at);
        transpose(row);
        for (int64_t t = 0; t < SIDE; t++) _mm512_storeu_ps(packed + i * TILE + t * DEEP, row[t]);
    }
}

// Sets, or adds to, the first 16 N columns of y [rows, outputs]. While their weights are read,
// those of the next 16 N columns are prefetched into the second-level cache.
template <int N>
static inline void tiled(int64_t rows, const bfloat16 *packed, const bfloat16 *w, const bfloat16 *bias,
                         int64_t inputs, float *y, int64_t outputs, bool added) {
    const int64_t chunks = inputs / DEEP, lump = SIDE * inputs;
    for (int64_t first = 0; first < rows; first += SIDE, packed += chunks * TILE) {
        each<N>([&](auto u) { zero_tile<u>(); });
        for (int64_t c = 0; c < chunks; c++) {
            load_tile<N>(packed + c * TILE, 64);
            each<N>([&](auto u) {
                const bfloat16 *from = w + u * lump + c * DEEP;
                load_tile<N + 1 + u % (7 - N)>(from, 2 * inputs);
                multiply_tiles<u, N + 1 + u % (7 - N), N>();
                if (first) return;
                for (int64_t t = 0; t < SIDE; t++)
                    __builtin_prefetch(from + N * lump + t * inputs, 0, 2);
            });
        }
        each<N>([&](auto u) {
            alignas(64) float made[SIDE][SIDE];
            store_tile<u>(made, sizeof made[0]);
            __m512 row[SIDE];
            for (int64_t t = 0; t < SIDE; t++) row[t] = _mm512_load_ps(made[t]);
            transpose(row);
            const vec off = bias ? load(bias + u * SIDE) : vec{};
            for (int64_t t = 0; t < std::min(SIDE, rows - first); t++) {
                float *to = y + (first + t) * outputs + u * SIDE;
                const vec sums = (vec)row[t] + off;
                *(vec *)to = added ? load(to) + sums : sums;
            }
        });
    }
}
#else
constexpr bool TILES = false;
struct Tiles {};
static inline bool tiles_allowed() { return false; }
static inline void pack(int64_t, const bfloat16 *, int64_t, int64_t, int64_t, bfloat16 *) {}
template <int N>
static inline void tiled(int64_t, const bfloat16 *, const bfloat16 *, const bfloat16 *, int64_t, float *,
                         int64_t, bool) {}
#endif
