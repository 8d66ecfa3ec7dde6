#include "attention.h"

#include <algorithm>
#include <limits>

#include "attention_kernels.h"

namespace tandem {

namespace {

constexpr int kTileQueries = 24;    // about so many queries share a load of the keys
constexpr int kTasksPerThread = 2;  // at least, where rows allow it: three kv heads on two threads leave one idle

// A query row's part of a tile.
struct Reader {
    int prefix;
    std::vector<int32_t> tail;
};

// Buffers of a thread, kept from call to call.
struct Scratch {
    std::vector<Reader> readers;
    std::vector<float> queries;  // [queries, dim]
    std::vector<float> scores;   // [queries, stride]
    std::vector<uint32_t> keys;  // two dimensions of a key side by side: [dim / 2, kSpan]
    std::vector<float> values;   // [queries, dim], dimensions in load_values' order
    std::vector<Sums> sums;      // [queries]
    std::vector<int32_t> rest;   // slots of what a row sees behind the chunks that all rows of its tile see
};
thread_local Scratch scratch;

}  // namespace

void AttentionPlan::make(const Tables& tables, int rows, const HeadShape& shape, int threads) {
    tables_ = tables;
    shape_ = shape;
    tiles_.clear();
    slots_.clear();
    starts_.clear();
    real_rows_ = std::min(rows, (int)tables.first_rows[tables.sequences]);
    const int most = std::max(1, kTileQueries / shape.group());
    auto tiles_of = [&](int s) { return (tables.first_rows[s + 1] - tables.first_rows[s] + most - 1) / most; };
    int tiles = 0;
    for (int s = 0; s < tables.sequences; s++) tiles += tiles_of(s);
    const bool few = tiles * shape.kv_heads < kTasksPerThread * threads;
    std::vector<int32_t> tail;
    for (int s = 0; s < tables.sequences; s++) {
        int first = tables.first_rows[s], end = tables.first_rows[s + 1];
        int longest = 0;
        for (int row = first; row < end; row++) {
            tail_of(row, s, tail);
            longest = std::max(longest, tail.empty() ? (int)tables.prefixes[row] : tail.back() + 1);
        }
        const int count = end - first, parts = few ? std::min(count, 2 * tiles_of(s)) : tiles_of(s);
        for (int part = 0; part < parts; part++) {
            const int from = first + count * part / parts;
            tiles_.push_back({s, from, first + count * (part + 1) / parts - from});
        }
        starts_.push_back(slots_.size());
        const int32_t* blocks = tables.block_tables + (size_t)s * tables.blocks;
        for (int p = 0; p < longest; p++)
            slots_.push_back(blocks[p / tables.block_tokens] * tables.block_tokens + p % tables.block_tokens);
        slots_.resize((slots_.size() + kSpan - 1) / kSpan * kSpan, slots_.empty() ? 0 : slots_.back());
    }
    slots_.resize(slots_.size() + kAhead);
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
    const int32_t* slots = slots_.data() + starts_[tile.sequence];
    Scratch& s = scratch;

    if ((int)s.readers.size() < tile.rows) s.readers.resize(tile.rows);
    int end = 0, common = tables_.prefixes[tile.first_row];
    for (int r = 0; r < tile.rows; r++) {
        Reader& reader = s.readers[r];
        reader.prefix = tables_.prefixes[tile.first_row + r];
        tail_of(tile.first_row + r, tile.sequence, reader.tail);
        end = std::max(end, reader.tail.empty() ? reader.prefix : reader.tail.back() + 1);
        common = std::min(common, reader.prefix);
    }
    common = common / kChunk * kChunk;
    const int rest = (end - common + kSpan - 1) / kSpan * kSpan, stride = std::max(rest, kChunk);
    s.scores.resize(std::max(s.scores.size(), (size_t)queries * stride));
    s.keys.resize(dim / 2 * kSpan);
    s.values.assign((size_t)queries * dim, 0.0f);
    s.sums.assign(queries, Sums{-std::numeric_limits<float>::max(), 1, {}});
    s.queries.resize((size_t)queries * dim);
    for (int i = 0; i < queries; i++) {
        const int row = tile.first_row + i / group, head = kv_head * group + i % group;
        widen(q + row * row_size + (size_t)head * dim, dim, &s.queries[(size_t)i * dim]);
    }
    float* const scores = s.scores.data();
    auto score_span = [&](int first, float* to) {
        transpose_keys(keys, slots + first, slot_size, dim, s.keys.data());
        together(queries, [&](int i, auto count) {
            score<count>(s.keys.data(), &s.queries[(size_t)i * dim], dim, shape_.scale, to + (size_t)i * stride,
                         stride);
        });
    };
    const Weighted weighted{keys + (size_t)shape_.kv_heads * dim, slot_size, (size_t)stride, dim};
    // Queries [first, first + count) take in a chunk or what is left of it, whose scores begin with column `column`.
    auto take = [&](int first, int count, const int32_t* slots, int positions, int column, bool ask) {
        for (int i = first; i < first + count; i++) weigh(scores + (size_t)i * stride + column, positions, s.sums[i]);
        together(count, [&](int i, auto at_once) {
            add_values<at_once>(weighted, slots, positions, scores + (size_t)(first + i) * stride + column,
                                &s.sums[first + i], &s.values[(size_t)(first + i) * dim], ask && i == 0);
        });
    };

    for (int first = 0; first < common; first += kChunk) {
        for (int n = 0; n < kChunk; n += kSpan) score_span(first + n, scores + n);
        take(0, queries, slots + first, kChunk, 0, true);
    }
    for (int n = 0; n < rest; n += kSpan) score_span(common + n, scores + n);
    for (int r = 0; r < tile.rows; r++) {
        const Reader& reader = s.readers[r];
        s.rest.assign(slots + common, slots + reader.prefix);
        for (int n : reader.tail) s.rest.push_back(slots[n]);
        const int seen = (int)s.rest.size();
        s.rest.insert(s.rest.end(), slots + common + rest, slots + common + rest + kAhead);
        for (int i = r * group; i < (r + 1) * group; i++) {
            float* mine = scores + (size_t)i * stride;
            for (size_t n = 0; n < reader.tail.size(); n++)
                mine[reader.prefix - common + n] = mine[reader.tail[n] - common];
        }
        for (int n = 0; n < seen; n += kChunk)
            take(r * group, group, s.rest.data() + n, std::min(kChunk, seen - n), n, r == 0);
    }
    float* results = s.queries.data();  // whose queries are read no more
    for (int i = 0; i < queries; i++) {
        float total = sum(s.sums[i].weights);
        store_values(&s.values[(size_t)i * dim], total > 0 ? 1.0f / total : 0.0f, dim, results + (size_t)i * dim);
    }
    for (int r = 0; r < tile.rows; r++)
        out.set(tile.first_row + r, kv_head * group * dim, group * dim, results + (size_t)r * group * dim);
}

}  // namespace tandem
