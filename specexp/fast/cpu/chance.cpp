// Distributions, noise and the rules that compare p with q, as in sampling.py and rules.py; ops.py
// says why they are compiled. One thread computes a row, except where its numbers do not depend on
// each other. So results do not depend on the number of threads.

#include "calls.h"
#include "vectors.h"
#include <functional>
#include <numeric>
#include <vector>

constexpr int64_t MUCH = 1 << 16, LUMP = 1 << 12; // numbers worth several threads; of one task
constexpr int64_t PART = 1024;                     // see sampling.py
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15;

// See sampling.mix.
static inline uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

// Noise.uniform of one lane. at: the hash of the sum of key and salt.
static inline float uniform(uint64_t at, uint64_t lane) {
    return ((float)(int64_t)(mix(at + lane * GOLDEN) & INT64_MAX) + 0.5f) * 0x1p-63f;
}

// Loads a vector of numbers, or `count` and then `none` if there are fewer; `put` stores as many.
static inline vec filled(const float *x, int64_t count, float none) {
    if (count >= LANES) return load(x);
    vec out = vec{} + none;
    memcpy(&out, x, count * sizeof *x);
    return out;
}

static inline void put(vec out, float *y, int64_t count) {
    if (count >= LANES) *(vec *)y = out;
    else memcpy(y, &out, count * sizeof *y);
}

// The sum of w [size]. Parts are summed first, because a small number that is added to a large sum
// is rounded away.
static float total(int64_t size, const float *w) {
    vec sums = {};
    for (int64_t i = 0, end; i < size; i = end) {
        vec part = {};
        end = std::min(i + LUMP, size);
        for (int64_t j = i; j < end; j += LANES) part += filled(w + j, size - j, 0);
        sums += part;
    }
    return sum(sums);
}

// Returns the sum of w [size] and, if that is positive, scales w to sum 1.
static float scaled(int64_t size, float *w) {
    const float all = total(size, w);
    for (int64_t i = 0; all > 0 && i < size; i++) w[i] /= all;
    return all;
}

// p [size]: Sampling.law of logits x.
static void filtered_softmax(int64_t size, int64_t top_k, float temperature, float top_p,
                             const float *x, float *p) {
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

static void law(int64_t rows, int64_t size, int64_t threads, int64_t top_k, float temperature,
                float top_p, const float *logits, float *p) {
#pragma omp parallel for num_threads(threads) if (rows * size > MUCH)
    for (int64_t i = 0; i < rows * size; i += size)
        filtered_softmax(size, top_k, temperature, top_p, logits + i, p + i);
}

// out = w / arrival times, for numbers from..to-1, whose lanes are i or, with `parts`, ~i; see
// Noise.race and Noise.uncoupled.
static void run_race(int64_t from, int64_t to, uint64_t at, const float *w, float *out,
                     bool parts = false) {
    for (int64_t i = from; i < to; i += LANES) {
        vec u;
        for (int t = 0; t < LANES; t++) u[t] = uniform(at, parts ? ~(i + t) : i + t);
        const vec latest = vec{} + (1 - 0x1p-24f);
        put(filled(w + i, to - i, 0) / arrival(u < latest ? u : latest), out + i, to - i);
    }
}

// Noise.race of w [rows, size], with keys [rows / n, n] of row stride `down`.
static void race(int64_t rows, int64_t n, int64_t down, int64_t size, int64_t threads,
                 uint64_t salt, const int64_t *keys, const float *w, float *out) {
    const int64_t lumps = (size + LUMP - 1) / LUMP;
#pragma omp parallel for num_threads(threads) if (rows * size > MUCH)
    for (int64_t i = 0; i < rows * lumps; i++) {
        const int64_t row = i / lumps, from = i % lumps * LUMP, key = keys[row / n * down + row % n];
        run_race(from, std::min(from + LUMP, size), mix(key + salt), w + row * size, out + row * size);
    }
}

// Noise.keys.
static void addresses(int64_t rows, int64_t n, int64_t shared, int64_t by_round,
                      const int64_t *stream, const int64_t *length, const int64_t *depth,
                      int64_t *out) {
    for (; rows--; depth += shared ? 0 : n) {
        const uint64_t root = mix(*stream++) + *length++;
        for (int64_t i = 0; i < n; i++) *out++ = mix((by_round ? mix(root) : root) + depth[i]);
    }
}

// A row's draft and verdict, its p and q [nodes, size] (q may be null), and scratch memory `room`
// [4, size].
struct DraftRow {
    int64_t nodes, size, places, width;
    uint64_t accept_salt, residual_salt; // of the noise for the two purposes
    float lenience;
    const int64_t *tokens, *children, *keys;
    const float *p, *q;
    float *room;
    int64_t *path, *n, *out;

    const float *p_at(int64_t node) const { return p + node * size; }
    const float *q_at(int64_t node) const { return q ? q + node * size : nullptr; }
    float coin(int64_t node, int64_t lane) const { return uniform(mix(keys[node] + accept_salt), lane); }

    // The distribution x was drawn from: q, or a one-hot in `room`; zeros if there is no x (-1).
    const float *drawn(const float *q, int64_t x) const {
        if (q && x >= 0 && q[x] > 0) return q;
        std::fill_n(room, size, 0);
        if (x >= 0) room[x] = 1;
        return room;
    }

    // rest = (owed * law - lenience * drawn)+, a residual that is not normalised.
    void subtract(float owed, const float *law, const float *drawn, float *rest) const {
        for (int64_t i = 0; i < size; i++)
            rest[i] = std::max(owed * law[i] - lenience * drawn[i], 0.0f);
    }

    void keep(int64_t count, int64_t node) const { path[count] = node, out[count - 1] = tokens[node]; }

    // A token drawn from `law`, as by Noise.uncoupled. at: the hash of the sum of key and salt.
    int64_t drawn_from(const float *law, uint64_t at) const {
        const int64_t parts = (size + PART - 1) / PART;
        for (int64_t i = 0; i < parts; i++) room[i] = total(std::min(PART, size - i * PART), law + i * PART);
        run_race(0, parts, at, room, room, true);
        const int64_t first = largest(room, parts) * PART, end = std::min(first + PART, size);
        run_race(first, end, at, law, room);
        return first + largest(room + first, end - first);
    }

    // Ends the verdict after `count` accepted tokens, with a bonus token drawn from `law`.
    void end(int64_t count, const float *law) const {
        std::fill(out + count, out + places, drawn_from(law, mix(keys[path[count]] + residual_salt)));
        std::fill(path + count, path + places, path[count]);
        *n = count;
    }
};

// Reject at one node: returns the accepted child, or 0. `rest_of_p`: p at first, then the residual
// after each rejected child.
static int64_t accepted_child(const DraftRow &row, int64_t node, const float *&rest_of_p) {
    const int64_t size = row.size, *children = row.children + node * row.width;
    float *rest = row.room + size, *spare = rest + size, *others = spare + size;
    const float *q = row.q_at(node);
    rest_of_p = row.p_at(node);
    for (int64_t rank = 0; rank < row.width; rank++) {
        const int64_t child = children[rank], x = child < 0 ? -1 : row.tokens[child];
        if (x < 0) continue;
        const float chance = q && q[x] > 0 ? q[x] : 1;
        if (row.coin(node, rank) <= rest_of_p[x] / (row.lenience * chance)) return child;
        const float *drawn = row.drawn(q, x);
        row.subtract(1, rest_of_p, drawn, spare);
        if (scaled(size, spare) > 0) rest_of_p = spare, std::swap(rest, spare);
        if (!q || rank + 1 == row.width) continue;
        q = std::copy_n(drawn, size, others) - size;
        others[x] = 0;
        scaled(size, others);
    }
    return 0;
}

static void reject(const DraftRow &row) {
    const float *rest_of_p;
    int64_t count = row.path[0] = 0;
    while (const int64_t child = accepted_child(row, row.path[count], rest_of_p))
        row.keep(++count, child);
    row.end(count, rest_of_p);
}

static void block(const DraftRow &row) {
    float *rest = row.room + row.size, *spare = rest + row.size, owed = 1;
    const float *law = row.p;
    int64_t count = row.path[0] = 0;
    for (int64_t i = 0, x = 0; x >= 0; i++) {
        const float *p = row.p_at(i);
        x = i + 1 < row.nodes ? row.tokens[i + 1] : -1;
        const float *drawn = row.drawn(row.q_at(i), x);
        row.subtract(owed, p, drawn, spare);
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

// Judges all rows by a rule. children [1 or rows, nodes, width]; p, q [rows, nodes, size]; path and
// out [rows, places]. Returns false if a draft token is not in the vocabulary.
template <void (*rule)(const DraftRow &)>
static bool judge(int64_t rows, int64_t nodes, int64_t size, int64_t places, int64_t width,
                  int64_t shared, int64_t threads, uint64_t accept, uint64_t residual,
                  float lenience, const int64_t *tokens, const int64_t *children,
                  const int64_t *keys, const float *p, const float *q, float *room, int64_t *path,
                  int64_t *n, int64_t *out) {
    for (int64_t i = 0; i < rows * nodes; i++)
        if (i % nodes && tokens[i] >= size) return false;
#pragma omp parallel for num_threads(threads) if (rows * size > MUCH)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t first = row * nodes;
        rule({nodes, size, places, width, accept, residual, lenience, tokens + first,
              children + (shared ? 0 : first * width), keys + first, p + first * size,
              q ? q + first * size : q, room + row * 4 * size, path + row * places, n + row,
              out + row * places});
    }
    return true;
}

CALLED(law, law)
CALLED(race, race)
CALLED(addresses, addresses)
CALLED(reject, judge<reject>)
CALLED(block, judge<block>)
