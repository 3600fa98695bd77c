// The steps of a round besides its passes. They compute with few numbers, but torch's operations
// are slow here: the pass before has evicted their code from the cache. ops.py says of which
// operation a function is the kernel. Arrays are contiguous, except where strides are given.

#include "calls.h"
#include "vectors.h"
#include <chrono>
#include <vector>

static void likeliest(int64_t rows, int64_t size, const float *w, int64_t *best) {
    for (; rows--; w += size) *best++ = largest(w, size);
}

// Whether a is larger than b, where a NaN is larger than every number.
static inline bool above(float a, float b) { return a > b || (a != a && b == b); }

// best [rows, most]: the indices of the largest numbers of each row of w [rows, size], the largest
// first, and the lowest index first at a tie.
static void ranked(int64_t rows, int64_t size, int64_t most, const float *w, int64_t *best) {
    for (; rows--; w += size, best += most)
        for (int64_t i = 0, kept = 0; i < size; i++) {
            if (kept == most && !above(w[i], w[best[most - 1]])) continue;
            int64_t at = kept < most ? kept++ : most - 1;
            for (; at && above(w[i], w[best[at - 1]]); at--) best[at] = best[at - 1];
            best[at] = i;
        }
}

static void spoil(int64_t rows, int64_t size, const float *w, float *fault) {
    for (; rows--; w += size) *fault++ += 0 * w[largest(w, size)];
}

// parents [1 or rows, nodes]; `places` is D + 1.
static void follow(int64_t rows, int64_t nodes, int64_t places, int64_t shared, const int64_t *tokens,
            const int64_t *sample, const int64_t *parents, int64_t *path, int64_t *n, int64_t *out) {
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
            path[d] = last, out[d] = sample[last];
        path += places, out += places, parents += shared ? 0 : nodes;
    }
}

static void commit(int64_t rows, int64_t places, int64_t ends, int64_t stride, const int64_t *out,
            const int64_t *n, const int64_t *eos, int64_t *tokens, int64_t *length, int64_t *limit,
            int64_t *counts) {
    for (; rows--; out += places, tokens += stride, n++, length++, limit++, counts += 3) {
        const int64_t before_end = std::find_first_of(out, out + places, eos, eos + ends) - out;
        const int64_t room = std::max<int64_t>(*limit - *length, 0);
        const int64_t emitted = std::min(std::min(*n, before_end) + 1, room);
        std::copy_n(out, emitted, tokens + *length);
        *length += emitted;
        if (emitted > before_end) *limit = *length;
        counts[0] = *n, counts[1] = emitted, counts[2] = *length < *limit;
    }
}

// Columns: counts [rows, 3], whether each model's faults [rows] are not 0, then the draft tokens.
static void report(int64_t rows, int64_t nodes, int64_t models, const int64_t *counts,
                   const int64_t *tokens, const float *const *faults, int64_t *out) {
    for (int64_t row = 0; row < rows; row++) {
        out = std::copy_n(counts + row * 3, 3, out);
        for (int64_t i = 0; i < models; i++) *out++ = faults[i][row] != 0;
        out = std::copy_n(tokens + row * nodes + 1, nodes - 1, out);
    }
}

// How many of the tokens that end at place `end` equal those that end at `last`, at most `most`.
static int64_t match_length(const int64_t *tokens, int64_t last, int64_t end, int64_t most) {
    int64_t n = 0;
    while (n < most && n <= end && tokens[end - n] == tokens[last - n]) n++;
    return n;
}

// NGram.propose: copies what followed the `ends` best earlier matches of a sequence's last tokens.
// branch [nodes - 1]: which match each draft token continues.
static void lookup(int64_t rows, int64_t nodes, int64_t most, int64_t ends, int64_t vocab,
            int64_t stride, const int64_t *branch, const int64_t *depth, const int64_t *length,
            const int64_t *tokens, int64_t *out) {
    struct End { int64_t agrees, at; }; // an earlier match: its length, and where it ends
    const auto better = [](End a, End b) {
        return a.agrees > b.agrees || (a.agrees == b.agrees && a.at > b.at);
    };
    for (; rows--; tokens += stride, out += nodes) {
        const int64_t last = *length++ - 1;
        std::vector<End> best(ends, {0, 0});
        for (End end{0, 0}; end.at < last; end.at++) {
            end.agrees = match_length(tokens, last, end.at, most);
            if (!better(end, best.back())) continue;
            best.back() = end;
            std::inplace_merge(best.begin(), best.end() - 1, best.end(), better);
        }
        out[0] = tokens[last];
        for (int64_t i = 1; i < nodes; i++) {
            const End end = best[branch[i - 1]]; // past the text, the copy repeats itself
            out[i] = end.agrees ? tokens[end.at + 1 + (depth[i] - 1) % (last - end.at)] : -1;
            if (out[i] >= vocab) out[i] = -1;
        }
    }
}

// Suffix.propose: drafts what most often followed the longest earlier matches of a sequence's last
// tokens. A match votes for the token after it, as long as the draft tokens so far are those that
// followed it. The voters of a node are adjacent, and are divided among its children.
static void vote(int64_t rows, int64_t nodes, int64_t longest, int64_t vocab,
                 int64_t stride, float least, float stretch, const int64_t *parents,
                 const int64_t *depth, const int64_t *length, const int64_t *tokens, int64_t *out) {
    struct Voter { int64_t says, end; };             // a match: its vote, and where it ends
    struct Party { int64_t from, to; float trust; }; // voters of one token, its probability
    for (; rows--; tokens += stride, out += nodes) {
        const int64_t last = *length++ - 1;
        int64_t most = 1;
        std::vector<Voter> voters;
        for (int64_t end = 0; end < last; end++) {
            const int64_t agrees = match_length(tokens, last, end, longest);
            if (agrees > most) voters.clear(), most = agrees;
            if (agrees == most) voters.push_back({0, end});
        }
        const auto bigger = [&](const Party &a, const Party &b) { // at a tie, the later one
            const int64_t more = (a.to - a.from) - (b.to - b.from);
            return more > 0 || (!more && voters[a.to - 1].end > voters[b.to - 1].end);
        };
        std::vector<Party> of(nodes);
        of[0] = {0, (int64_t)voters.size(), 1.0f};
        out[0] = tokens[last];
        for (int64_t parent = 0, i = 1; i < nodes; parent++) {
            const Party all = of[parent];
            for (int64_t v = all.from; v < all.to; v++) {
                const int64_t at = voters[v].end + 1 + depth[parent];
                int64_t node = parent; // past the end of the text, the draft tokens follow
                while (at > last && depth[node] > at - last) node = parents[node];
                voters[v].says = at > last ? out[node] : tokens[at];
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
                out[i] = -1;
                if (next == parties.end()) continue;
                if (next->trust >= least && depth[i] <= stretch * most)
                    of[i] = *next, out[i] = voters[next->from].says;
                next++;
            }
        }
    }
}

// Table.read of tokens [rows, n] with strides `down` and `right`. owner [rows, places + 1], notes
// [rows, places + 1, size]: only the reference uses the last place of a row.
static void recall(int64_t rows, int64_t n, int64_t places, int64_t size, int64_t down, int64_t right,
                   const int64_t *tokens, const int64_t *owner, const int64_t *notes, int64_t *out) {
    for (; rows--; tokens += down, owner += places + 1, notes += (places + 1) * size)
        for (int64_t i = 0; i < n; i++) {
            const int64_t token = tokens[i * right], place = token % places;
            const bool known = token >= 0 && owner[place] == token;
            out = known ? std::copy_n(notes + place * size, size, out) : std::fill_n(out, size, -1);
        }
}

// Table.write: the last of equal tokens wins.
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

// Sequences.places, at depth [1 or rows, n].
static void places(int64_t rows, int64_t n, int64_t shared, const int64_t *length,
                   const int64_t *depth, int64_t *out) {
    for (; rows--; length++, depth += shared ? 0 : n)
        for (int64_t i = 0; i < n; i++) *out++ = std::max<int64_t>(*length - 1 + depth[i], 0);
}

// Returns false for a slot outside its row of `stride` slots.
static bool read(int64_t rows, int64_t n, int64_t S, int64_t stride, const int64_t *tokens,
                 const int64_t *slots, int64_t *out) {
    for (; rows--; tokens += stride)
        for (int64_t i = 0; i < n; i++, slots++) {
            if (*slots < 0 || *slots >= S) return false;
            *out++ = tokens[*slots];
        }
    return true;
}

// down, right: the strides of depth.
static void until(int64_t rows, int64_t n, int64_t down, int64_t right, const int64_t *tokens,
                  const int64_t *depth, const int64_t *budget, int64_t *out) {
    for (; rows--; depth += down, budget++)
        for (int64_t i = 0; i < n; i++, tokens++)
            *out++ = depth[i * right] <= *budget ? *tokens : -1;
}

static void columns(int64_t rows, int64_t n, const int64_t *const *parts, const int64_t *strides,
                    int64_t *out) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < n; i++) *out++ = parts[i][row * strides[i]];
}

struct Call { // of a function that CALLED defines (calls.h)
    int64_t (*function)(const int64_t *arguments);
    const int64_t *arguments;
};

// Runs the calls in order until one fails. Returns whether none did.
static bool replay(int64_t count, const Call *calls) {
    for (; count && calls->function(calls->arguments); count--) calls++;
    return !count;
}

// Whether a row has ended in the round of this report [rows, wide]: it gained tokens, and is done.
static bool ends(int64_t rows, int64_t wide, const int64_t *report) {
    for (; rows--; report += wide)
        if (report[1] && !report[2]) return true;
    return false;
}

// Replays rounds until there are `most`, `most_s` seconds have passed, or a row has ended. Every
// round writes its report to `report`, which on entry holds that of the round before. Stores the
// reports, and after how many seconds each was there. Returns the number of rounds, or -1 if a call
// failed.
static int64_t replay_rounds(int64_t count, const Call *calls, int64_t most, double most_s, int64_t rows,
                             int64_t wide, const int64_t *report, int64_t *reports, double *seconds) {
    using namespace std::chrono;
    const auto begin = steady_clock::now();
    double now = 0;
    int64_t out = 0;
    for (; out < most && now < most_s && !ends(rows, wide, report); out++) {
        if (!replay(count, calls)) return -1;
        now = duration<double>(steady_clock::now() - begin).count();
        reports = std::copy_n(report, rows * wide, reports);
        *seconds++ = now;
    }
    return out;
}

CALLED(likeliest, likeliest)
CALLED(ranked, ranked)
CALLED(spoil, spoil)
CALLED(follow, follow)
CALLED(commit, commit)
CALLED(report, report)
CALLED(lookup, lookup)
CALLED(vote, vote)
CALLED(recall, recall)
CALLED(note, note)
CALLED(places, places)
CALLED(read, read)
CALLED(until, until)
CALLED(columns, columns)
CALLED(replay, replay)
CALLED(replay_rounds, replay_rounds)
