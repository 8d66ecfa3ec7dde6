#include "linear.h"

#include <cmath>
#include <cstring>

#include "simd.h"

namespace tandem {

namespace {

// How far ahead weights are asked for: far into the second cache, near into the first, whose few open requests are then
// short ones. Measured over weights that no cache holds, two threads: 32 GB/s for 1 row and 23 for 8, with 8 KiB ahead
// into the first cache alone 27 and 21; the CPU's own prefetcher stops at the end of each 4 KiB.
constexpr int kFarAhead = 16384, kNearAhead = 1024;

template <int bytes>
inline void ask_ahead(const uint8_t* from) {
    for (int i = 0; i < bytes; i += 64) {
        __builtin_prefetch(from + kFarAhead + i, 0, 2);
        __builtin_prefetch(from + kNearAhead + i);
    }
}

void finish(float* y, Floats value, bool add) { store(y, add ? load<Floats>(y) + value : value); }

// In fp32: where there is a product of bf16 pairs it takes four times as long as a multiply-add (measured on a Xeon with
// AVX512_BF16), for twice the columns.
template <int rows, int blocks>
void multiply_bf16(const Matrix& w, int block, const Activations& x, int row, float* y, size_t stride, bool add) {
    Floats sums[rows][blocks];
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) sums[r][b] = Floats{};
    const uint8_t* from = w.block(block);
    const float* xs[rows];
    for (int r = 0; r < rows; r++) xs[r] = x.floats(row + r);
    for (int column = 0; column < w.in(); column += 2, from += 64 * blocks) {
        Floats even[blocks], odd[blocks];
        ask_ahead<64 * blocks>(from);
        for (int b = 0; b < blocks; b++) {
            Words two = load<Words>(from + 64 * b);
            even[b] = (Floats)(two << 16), odd[b] = (Floats)(two & 0xffff0000u);
        }
        for (int r = 0; r < rows; r++) {
            Floats first = all(xs[r][column]), second = all(xs[r][column + 1]);
            for (int b = 0; b < blocks; b++) sums[r][b] = fma(odd[b], second, fma(even[b], first, sums[r][b]));
        }
    }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) finish(y + (size_t)r * stride + b * kBlock, sums[r][b], add);
}

// Rows whose dot products go side by side: one alone waits for each of its steps. 16 registers are too few for more.
#if defined(__AVX512F__)
constexpr int kSide = kRowTile;
#else
constexpr int kSide = 1;
#endif

// dots[r] = the sum over a group's columns of w times row r's values.
template <bool small, int rows>
inline void dot_rows(const Words (&w)[8], const int8_t (*values)[kGroup], Ints* dots) {
    constexpr int side = rows < kSide ? rows : kSide;
#pragma GCC unroll 8
    for (int r = 0; r < side; r++) dots[r] = Ints{};
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 8
        for (int r = 0; r < side; r++) dots[r] = dot4<small>(dots[r], w[i], values[r] + 4 * i);
    if constexpr (rows > side) dot_rows<small, rows - side>(w, values + side, dots + side);
}

// Rows are 8-bit integers with a scale per group: whole numbers inside a group are exact, and only the groups' sums round.
template <int rows>
void multiply_q4(const Matrix& w, int block, const Activations& x, int row, float* y, size_t stride, bool add) {
    Floats sums[rows];
    for (int r = 0; r < rows; r++) sums[r] = Floats{};
    const uint8_t* from = w.block(block);
    const Activations::Group* xs = x.int8(row);
    for (int group = 0; group < w.in() / kGroup; group++, from += 320, xs++) {
        ask_ahead<320>(from);
        Words values[8];
        for (int i = 0; i < 4; i++) {
            Words both = load<Words>(from + 64 * i);
            values[i] = both & 0x0f0f0f0fu;
            values[i + 4] = both >> 4 & 0x0f0f0f0fu;
        }
        Floats scale = load_halves(reinterpret_cast<const uint16_t*>(from + 256));
        Floats minimum = load_halves(reinterpret_cast<const uint16_t*>(from + 288));
        Ints dots[rows];
        dot_rows<true, rows>(values, xs->values, dots);
        for (int r = 0; r < rows; r++) {
            Floats part = fma(scale, to_floats(dots[r]), minimum * xs->sums[r]);
            sums[r] = fma(part, all(xs->scales[r]), sums[r]);
        }
    }
    for (int r = 0; r < rows; r++) finish(y + (size_t)r * stride, sums[r], add);
}

template <int rows>
void multiply_q8(const Matrix& w, int block, const Activations& x, int row, float* y, size_t stride, bool add) {
    Floats sums[rows];
    for (int r = 0; r < rows; r++) sums[r] = Floats{};
    const uint8_t* from = w.block(block);
    const Activations::Group* xs = x.int8(row);
    for (int group = 0; group < w.in() / kGroup; group++, from += 544, xs++) {
        ask_ahead<544>(from);
        Words values[8];
        for (int i = 0; i < 8; i++) values[i] = load<Words>(from + 64 * i);
        Floats scale = load_halves(reinterpret_cast<const uint16_t*>(from + 512));
        Ints dots[rows];
        dot_rows<false, rows>(values, xs->values, dots);
        for (int r = 0; r < rows; r++) {
            Floats dot = to_floats(dots[r]) - 128.0f * xs->sums[r];
            sums[r] = fma(scale * dot, all(xs->scales[r]), sums[r]);
        }
    }
    for (int r = 0; r < rows; r++) finish(y + (size_t)r * stride, sums[r], add);
}

// One row tile over all blocks.
template <int rows>
void multiply_tile(
    const Matrix& w, int first, int count, const Activations& x, int row, float* y, size_t stride, bool add) {
    int done = 0;
    if (w.form() == Form::bf16)
        for (; done + 2 <= count; done += 2)
            multiply_bf16<rows, 2>(w, first + done, x, row, y + done * kBlock, stride, add);
    for (; done < count; done++) {
        float* to = y + done * kBlock;
        switch (w.form()) {
            case Form::bf16: multiply_bf16<rows, 1>(w, first + done, x, row, to, stride, add); break;
            case Form::q4: multiply_q4<rows>(w, first + done, x, row, to, stride, add); break;
            case Form::q8: multiply_q8<rows>(w, first + done, x, row, to, stride, add); break;
        }
    }
}

using Tile = void (*)(const Matrix&, int, int, const Activations&, int, float*, size_t, bool);
constexpr Tile kTiles[kRowTile + 1] = {nullptr,          multiply_tile<1>, multiply_tile<2>,
                                       multiply_tile<3>, multiply_tile<4>, multiply_tile<5>,
                                       multiply_tile<6>, multiply_tile<7>, multiply_tile<8>};

}  // namespace

void multiply(const Matrix& w, int first, int end, const Activations& x, int rows, float* y, size_t stride, bool add) {
    // A pair stays in the cache while all rows pass.
    for (int pair = first; pair < end; pair++, y += 2 * kBlock) {
        int blocks = w.blocks() - 2 * pair < 2 ? 1 : 2;
        for (int row = 0; row < rows; row += kRowTile) {
            int tile = rows - row < kRowTile ? rows - row : kRowTile;
            kTiles[tile](w, 2 * pair, blocks, x, row, y + (size_t)row * stride, stride, add);
        }
    }
}

void Activations::resize(int rows, int columns) {
    columns_ = columns;
    size_t values = (size_t)rows * columns, groups = (size_t)(rows + kRowTile - 1) / kRowTile * (columns / kGroup);
    if (floats_ && values_.size() < values) values_.resize(values);
    if (int8_ && groups_.size() < groups) groups_.resize(groups);
}

void Activations::set(int row, int first, int count, const float* values) {
    if (floats_) std::memcpy(&values_[(size_t)row * columns_ + first], values, count * sizeof(float));
    if (!int8_) return;
    Group* group = groups_.data() + ((size_t)row / kRowTile * columns_ + first) / kGroup;
    row %= kRowTile;
    for (int i = 0; i < count; i += kGroup, group++) {
        Floats half[2] = {load<Floats>(values + i), load<Floats>(values + i + kLanes)};
        Floats a = half[0] < 0.0f ? -half[0] : half[0], b = half[1] < 0.0f ? -half[1] : half[1];
        float most = largest(larger(a, b));
        float inverse = most > 0 ? 127.0f / most : 0.0f;
        Ints total = {};
        for (int h = 0; h < 2; h++) {
            Ints whole = __builtin_convertvector(rounded(half[h] * inverse), Ints);
            typedef int8_t Small __attribute__((vector_size(16)));
            Small small = __builtin_convertvector(whole, Small);
            std::memcpy(group->values[row] + h * kLanes, &small, sizeof small);
            total += whole;
        }
        group->scales[row] = most / 127.0f;
        group->sums[row] = (float)sum(total);
    }
}

}  // namespace tandem
