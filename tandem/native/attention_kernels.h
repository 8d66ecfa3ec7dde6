// What attention does to keys and values, 16 lanes and a few queries at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace tandem {

constexpr int kTogether = 4;      // of which so many share a register load
constexpr int kSpan = 32;         // keys that are scored at once
constexpr int kChunk = 64;        // positions that a row weighs at once, counted along those that it sees
constexpr int kPiece = 64;        // dimensions of a head that are summed at once
constexpr int kAhead = 32;        // positions that keys and values are asked for in advance

// Of a query: its largest score so far, and per lane the sum of its weights relative to that.
struct Sums {
    float largest;
    float factor;  // what the last chunk's larger score made of the sums before it
    Floats weights;
};

// The rows of a 16 x 16 square become its columns: squares of 4 x 4 by themselves, then the 16 squares change places.
inline void transpose(Words (&rows)[kLanes]) {
    Words small[kLanes];
    for (int i = 0; i < kLanes; i += 4) {
        const Words *r = rows + i, a = r[0], b = r[1], c = r[2], d = r[3];
        Words ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        Words cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        small[i] = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        small[i + 1] = __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        ab = __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
        cd = __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
        small[i + 2] = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        small[i + 3] = __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    auto evens = [](Words a, Words b) {
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    };
    auto odds = [](Words a, Words b) {
        return __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    };
    for (int i = 0; i < 4; i++) {
        Words a = small[i], b = small[i + 4], c = small[i + 8], d = small[i + 12];
        rows[i] = evens(evens(a, b), evens(c, d));
        rows[i + 4] = evens(odds(a, b), odds(c, d));
        rows[i + 8] = odds(evens(a, b), evens(c, d));
        rows[i + 12] = odds(odds(a, b), odds(c, d));
    }
}

// keys[pair][lane] for the kSpan positions from slots on.
inline void transpose_keys(const uint16_t* kv, const int32_t* slots, size_t slot_size, int dim, uint32_t* keys) {
    for (int n = 0; n < kSpan; n += kLanes, slots += kLanes, keys += kLanes)
        for (int pair = 0; pair < dim / 2; pair += kLanes) {
            const int count = std::min(kLanes, dim / 2 - pair);
            Words square[kLanes];
            for (int lane = 0; lane < kLanes; lane++) {
                const uint16_t* from = kv + (size_t)slots[lane] * slot_size + 2 * pair;
                if (count == kLanes)
                    square[lane] = load<Words>(from);
                else
                    square[lane] = Words{}, std::memcpy(&square[lane], from, sizeof(Words) / 2);
                __builtin_prefetch(kv + (size_t)slots[lane + kAhead] * slot_size + 2 * pair);
            }
            transpose(square);
            for (int i = 0; i < count; i++) store(keys + (pair + i) * kSpan, square[i]);
        }
}

template <int count>
void score(const uint32_t* keys, const float* q, int dim, float scale, float* to, size_t stride) {
    constexpr int parts = kSpan / kLanes;
    Floats sums[count][parts][2];
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++) sums[i][p][0] = sums[i][p][1] = Floats{};
    for (int pair = 0; pair < dim / 2; pair++, keys += kSpan, q += 2) {
        Floats even[parts], odd[parts];
        for (int p = 0; p < parts; p++) {
            Words two = load<Words>(keys + p * kLanes);
            even[p] = (Floats)(two << 16), odd[p] = (Floats)(two & 0xffff0000u);
        }
        for (int i = 0; i < count; i++) {
            Floats first = all(q[(size_t)i * dim]), second = all(q[(size_t)i * dim + 1]);
            for (int p = 0; p < parts; p++) {
                sums[i][p][0] = fma(even[p], first, sums[i][p][0]);
                sums[i][p][1] = fma(odd[p], second, sums[i][p][1]);
            }
        }
    }
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++) store(to + i * stride + p * kLanes, (sums[i][p][0] + sums[i][p][1]) * scale);
}

// A chunk's scores to weights, in place. Room behind `count` up to a full vector is overwritten.
inline void weigh(float* scores, int count, Sums& sums) {
    int padded = (count + kLanes - 1) / kLanes * kLanes;
    std::fill(scores + count, scores + padded, scores[0]);
    Floats top = load<Floats>(scores);
    for (int i = kLanes; i < padded; i += kLanes) top = larger(top, load<Floats>(scores + i));
    float most = std::max(sums.largest, largest(top));
    for (int i = 0; i < padded; i += kLanes) store(scores + i, exp_of_negative(load<Floats>(scores + i) - most));
    std::fill(scores + count, scores + padded, 0.0f);
    Floats factor = exp_of_negative(all(sums.largest - most)), total = sums.weights * factor;
    for (int i = 0; i < padded; i += kLanes) total += load<Floats>(scores + i);
    sums = {most, factor[0], total};
}

// Dimensions [0, 16 * vectors): of each 32 the even ones, then the odd ones, which takes half the work of keeping their
// order; 16 stay as they are.
template <int vectors>
void load_values(const uint16_t* from, Floats (&to)[vectors]) {
    if (vectors == 1) {
        to[0] = load_bf16(from);
        return;
    }
    for (int i = 0; i + 1 < vectors; i += 2) {
        Words two = load<Words>(from + i * kLanes);
        to[i] = (Floats)(two << 16), to[i + 1] = (Floats)(two & 0xffff0000u);
    }
}

inline void store_values(const float* sums, float factor, int dim, float* to) {
    int d = 0;
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
        Floats even = load<Floats>(sums + d) * factor, odd = load<Floats>(sums + d + kLanes) * factor;
        store(to + d, __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
        store(to + d + kLanes,
              __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
    }
    if (d < dim) store(to + d, load<Floats>(sums + d) * factor);
}

// What queries make of values: weights are `stride` apart, sums and results a head.
struct Weighted {
    const uint16_t* values;
    size_t slot_size, stride;
    int dim;
};

// to[i] = to[i] * its factor + the sum over n in [0, count) of weights[i][n] * value at slots[n], for dimensions
// [first, first + 16 * vectors). ask: also for those at slots[n + kAhead].
template <int queries, int vectors>
void add_piece(
    const Weighted& w, int first, const int32_t* slots, int count, const float* weights, const Sums* sums, float* to,
    bool ask) {
    Floats total[queries][vectors];
    for (int i = 0; i < queries; i++)
        for (int d = 0; d < vectors; d++)
            total[i][d] = load<Floats>(to + (size_t)i * w.dim + first + d * kLanes) * sums[i].factor;
    for (int n = 0; n < count; n++) {
        Floats parts[vectors];
        load_values(w.values + slots[n] * w.slot_size + first, parts);
        if (ask)
            for (int d = 0; d < vectors; d += 2)
                __builtin_prefetch(w.values + slots[n + kAhead] * w.slot_size + first + d * kLanes);
        for (int i = 0; i < queries; i++) {
            Floats weight = all(weights[i * w.stride + n]);
            for (int d = 0; d < vectors; d++) total[i][d] = fma(weight, parts[d], total[i][d]);
        }
    }
    for (int i = 0; i < queries; i++)
        for (int d = 0; d < vectors; d++) store(to + (size_t)i * w.dim + first + d * kLanes, total[i][d]);
}

template <int queries>
void add_values(
    const Weighted& w, const int32_t* slots, int count, const float* weights, const Sums* sums, float* to, bool ask) {
    int d = 0;
    for (; d + kPiece <= w.dim; d += kPiece)
        add_piece<queries, kPiece / kLanes>(w, d, slots, count, weights, sums, to, ask);
    for (; d + 2 * kLanes <= w.dim; d += 2 * kLanes) add_piece<queries, 2>(w, d, slots, count, weights, sums, to, ask);
    if (d < w.dim) add_piece<queries, 1>(w, d, slots, count, weights, sums, to, ask);
}

// call(n) for as many queries at once as fit, as a constant.
template <class Call>
void together(int queries, Call&& call) {
    int i = 0;
    for (; i + kTogether <= queries; i += kTogether) call(i, std::integral_constant<int, kTogether>{});
    switch (queries - i) {
        case 3: call(i, std::integral_constant<int, 3>{}); break;
        case 2: call(i, std::integral_constant<int, 2>{}); break;
        case 1: call(i, std::integral_constant<int, 1>{}); break;
    }
}

}  // namespace tandem
