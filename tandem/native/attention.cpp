#include "attention.h"

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace tandem {

namespace {

constexpr int kTileQueries = 24;   // about so many queries share a load of the keys
constexpr int kTogether = 4;       // of which so many share a register load
constexpr int kPieceLanes = 4;     // vectors of a head that are summed at once: 64 dimensions

constexpr int kAhead = 32;         // positions that keys and values are asked for in advance

// A query row's part of a tile.
struct Reader {
    int prefix;
    std::vector<int32_t> tail;
    int seen() const { return prefix + (int)tail.size(); }
};

// Buffers of a thread, kept from call to call.
struct Scratch {
    std::vector<Reader> readers;
    std::vector<float> queries;  // [queries, dim]
    std::vector<float> scores;   // [queries, stride]
    std::vector<uint32_t> keys;  // 16 keys, two dimensions of each side by side: [dim / 2, 16]
    std::vector<float> values;   // [queries, dim]
    std::vector<float> inverse;  // per query 1 / sum
};
thread_local Scratch scratch;

// The rows of a 16 x 16 square become its columns: four rounds that deal two halves into one another.
void transpose(Words (&rows)[kLanes]) {
    for (int round = 0; round < 4; round++) {
        Words dealt[kLanes];
        for (int i = 0; i < kLanes / 2; i++) {
            Words a = rows[i], b = rows[i + kLanes / 2];
            dealt[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            dealt[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        for (int i = 0; i < kLanes; i++) rows[i] = dealt[i];
    }
}

// keys[pair][lane] for positions [first, first + 16); those from `end` on are zero.
void transpose_keys(
    const uint16_t* kv, const int32_t* slots, int first, int end, size_t slot_size, int dim, uint32_t* keys) {
    for (int pair = 0; pair < dim / 2; pair += kLanes) {
        Words square[kLanes];
        int count = std::min(kLanes, dim / 2 - pair);
        for (int lane = 0; lane < kLanes; lane++) {
            square[lane] = Words{};
            if (first + lane < end)
                std::memcpy(&square[lane], kv + (size_t)slots[first + lane] * slot_size + 2 * pair, count * 4);
            if (first + lane + kAhead < end)
                __builtin_prefetch(kv + (size_t)slots[first + lane + kAhead] * slot_size + 2 * pair);
        }
        transpose(square);
        for (int i = 0; i < count; i++) store(keys + (pair + i) * kLanes, square[i]);
    }
}

template <int count>
void score(const uint32_t* keys, const float* const* q, int dim, float scale, float* const* to) {
    Floats sums[count][2] = {};
    for (int pair = 0; pair < dim / 2; pair++) {
        Words two = load<Words>(keys + pair * kLanes);
        Floats even = (Floats)(two << 16), odd = (Floats)(two & 0xffff0000u);
        for (int i = 0; i < count; i++) {
            sums[i][0] = fma(even, all(q[i][2 * pair]), sums[i][0]);
            sums[i][1] = fma(odd, all(q[i][2 * pair + 1]), sums[i][1]);
        }
    }
    for (int i = 0; i < count; i++) store(to[i], (sums[i][0] + sums[i][1]) * scale);
}

// Scores to weights, in place; returns 1 / their sum. Room behind `count` up to a full vector is overwritten.
float softmax(float* scores, int count) {
    int padded = (count + kLanes - 1) / kLanes * kLanes;
    std::fill(scores + count, scores + padded, scores[0]);
    Floats top = load<Floats>(scores);
    for (int i = kLanes; i < padded; i += kLanes) top = larger(top, load<Floats>(scores + i));
    Floats most = all(largest(top));
    for (int i = 0; i < padded; i += kLanes) store(scores + i, exp_of_negative(load<Floats>(scores + i) - most));
    std::fill(scores + count, scores + padded, 0.0f);
    Floats total = {};
    for (int i = 0; i < padded; i += kLanes) total += load<Floats>(scores + i);
    return 1.0f / sum(total);
}

// to[i] += sum of weights[i][n] * value at slot[n] for n in [0, count): `pieces` vectors of a head, `queries` at once.
template <int queries, int pieces>
void add_values(
    const uint16_t* kv, size_t slot_size, const int32_t* slots, int count, const float* const* weights, float* const* to) {
    Floats sums[queries][pieces];
    for (int i = 0; i < queries; i++)
        for (int d = 0; d < pieces; d++) sums[i][d] = load<Floats>(to[i] + d * kLanes);
    for (int n = 0; n < count; n++) {
        const uint16_t* value = kv + (size_t)slots[n] * slot_size;
        Floats parts[pieces];
        for (int d = 0; d < pieces; d++) parts[d] = load_bf16(value + d * kLanes);
        if (n + kAhead < count)
            for (int d = 0; d < pieces; d += 2) __builtin_prefetch(kv + (size_t)slots[n + kAhead] * slot_size + d * kLanes);
        for (int i = 0; i < queries; i++) {
            Floats weight = all(weights[i][n]);
            for (int d = 0; d < pieces; d++) sums[i][d] = fma(weight, parts[d], sums[i][d]);
        }
    }
    for (int i = 0; i < queries; i++)
        for (int d = 0; d < pieces; d++) store(to[i] + d * kLanes, sums[i][d]);
}

template <int queries>
void add_values(
    const uint16_t* kv, size_t slot_size, const int32_t* slots, int count, int dim, const float* const* weights,
    float* const* to) {
    float* at[queries];
    int d = 0;
    for (; d + kPieceLanes * kLanes <= dim; d += kPieceLanes * kLanes) {
        for (int i = 0; i < queries; i++) at[i] = to[i] + d;
        add_values<queries, kPieceLanes>(kv + d, slot_size, slots, count, weights, at);
    }
    for (; d < dim; d += kLanes) {
        for (int i = 0; i < queries; i++) at[i] = to[i] + d;
        add_values<queries, 1>(kv + d, slot_size, slots, count, weights, at);
    }
}

}  // namespace

void AttentionPlan::make(const Tables& tables, int rows, const HeadShape& shape) {
    tables_ = tables;
    shape_ = shape;
    tiles_.clear();
    slots_.resize(tables.sequences);
    int rows_per_tile = std::max(1, kTileQueries / shape.group());
    real_rows_ = std::min(rows, (int)tables.first_rows[tables.sequences]);
    std::vector<int32_t> tail;
    for (int s = 0; s < tables.sequences; s++) {
        int first = tables.first_rows[s], end = tables.first_rows[s + 1];
        int longest = 0;
        for (int row = first; row < end; row++) {
            tail_of(row, s, tail);
            longest = std::max(longest, tail.empty() ? (int)tables.prefixes[row] : tail.back() + 1);
        }
        for (int row = first; row < end; row += rows_per_tile) tiles_.push_back({s, row, std::min(rows_per_tile, end - row)});
        slots_[s].resize(longest);
        const int32_t* blocks = tables.block_tables + (size_t)s * tables.blocks;
        for (int p = 0; p < longest; p++) slots_[s][p] = blocks[p / tables.block_tokens] * tables.block_tokens + p % tables.block_tokens;
    }
}

void AttentionPlan::tail_of(int row, int sequence, std::vector<int32_t>& positions) const {
    positions.clear();
    const int32_t* words = tables_.ancestors + (size_t)row * tables_.words;
    for (int w = 0; w < tables_.words; w++)
        for (uint32_t left = (uint32_t)words[w]; left; left &= left - 1)
            positions.push_back(tables_.tree_starts[sequence] + 32 * w + __builtin_ctz(left));
}

void AttentionPlan::attend(int index, int kv_head, const uint16_t* q, const uint16_t* kv, Activations& out) const {
    const Tile& tile = tiles_[index];
    const int group = shape_.group(), dim = shape_.dim, queries = tile.rows * group;
    const size_t slot_size = (size_t)2 * shape_.kv_heads * dim, row_size = (size_t)shape_.heads * dim;
    const uint16_t* keys = kv + (size_t)kv_head * dim;
    const uint16_t* values = keys + (size_t)shape_.kv_heads * dim;
    const int32_t* slots = slots_[tile.sequence].data();
    Scratch& s = scratch;

    if ((int)s.readers.size() < tile.rows) s.readers.resize(tile.rows);
    int end = 0;
    for (int r = 0; r < tile.rows; r++) {
        Reader& reader = s.readers[r];
        reader.prefix = tables_.prefixes[tile.first_row + r];
        tail_of(tile.first_row + r, tile.sequence, reader.tail);
        end = std::max(end, reader.tail.empty() ? reader.prefix : reader.tail.back() + 1);
    }
    const int stride = (end + kLanes - 1) / kLanes * kLanes;
    s.scores.resize(std::max(s.scores.size(), (size_t)queries * stride));
    s.keys.resize(dim / 2 * kLanes);
    s.values.assign((size_t)queries * dim, 0.0f);
    s.inverse.resize(queries);
    s.queries.resize((size_t)queries * dim);
    for (int i = 0; i < queries; i++) {
        const uint16_t* from = q + (size_t)(tile.first_row + i / group) * row_size + (size_t)(kv_head * group + i % group) * dim;
        for (int d = 0; d < dim; d += kLanes) store(&s.queries[(size_t)i * dim + d], load_bf16(from + d));
    }
    auto scores = [&](int i) { return s.scores.data() + (size_t)i * stride; };
    auto result = [&](int i) { return s.values.data() + (size_t)i * dim; };

    for (int first = 0; first < end; first += kLanes) {
        transpose_keys(keys, slots, first, end, slot_size, dim, s.keys.data());
        for (int i = 0; i < queries; i += kTogether) {
            const float* from[kTogether];
            float* to[kTogether];
            int count = std::min(kTogether, queries - i);
            for (int j = 0; j < count; j++) from[j] = s.queries.data() + (size_t)(i + j) * dim, to[j] = scores(i + j) + first;
            switch (count) {
                case 4: score<4>(s.keys.data(), from, dim, shape_.scale, to); break;
                case 3: score<3>(s.keys.data(), from, dim, shape_.scale, to); break;
                case 2: score<2>(s.keys.data(), from, dim, shape_.scale, to); break;
                default: score<1>(s.keys.data(), from, dim, shape_.scale, to);
            }
        }
    }
    for (int i = 0; i < queries; i++) {
        const Reader& reader = s.readers[i / group];
        float* mine = scores(i);
        for (size_t n = 0; n < reader.tail.size(); n++) mine[reader.prefix + n] = mine[reader.tail[n]];
        s.inverse[i] = reader.seen() ? softmax(mine, reader.seen()) : 0.0f;
    }
    for (int i = 0; i < queries; i += kTogether) {
        const float* weights[kTogether];
        float* to[kTogether];
        int count = std::min(kTogether, queries - i), common = end;
        for (int j = 0; j < count; j++) {
            weights[j] = scores(i + j), to[j] = result(i + j);
            common = std::min(common, s.readers[(i + j) / group].prefix);
        }
        switch (count) {
            case 4: add_values<4>(values, slot_size, slots, common, dim, weights, to); break;
            case 3: add_values<3>(values, slot_size, slots, common, dim, weights, to); break;
            case 2: add_values<2>(values, slot_size, slots, common, dim, weights, to); break;
            default: add_values<1>(values, slot_size, slots, common, dim, weights, to);
        }
        for (int j = 0; j < count; j++) {
            const Reader& reader = s.readers[(i + j) / group];
            const float* rest = weights[j] + common;
            add_values<1>(values, slot_size, slots + common, reader.prefix - common, dim, &rest, to + j);
            for (size_t n = 0; n < reader.tail.size(); n++) {
                const float* weight = weights[j] + reader.prefix + n;
                add_values<1>(values, slot_size, slots + reader.tail[n], 1, dim, &weight, to + j);
            }
        }
    }
    for (int i = 0; i < queries; i++)
        for (int d = 0; d < dim; d++) result(i)[d] *= s.inverse[i];
    for (int r = 0; r < tile.rows; r++)
        out.set(tile.first_row + r, kv_head * group * dim, group * dim, result(r * group));
}

}  // namespace tandem
