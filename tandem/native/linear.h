// Matrices in the layout products read them in, and the rows they are multiplied with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem {

constexpr int kGroup = 32;  // columns that share a scale
constexpr int kBlock = 16;  // outputs that lie together, one per lane

enum class Form : int32_t {
    bf16 = 0,
    q4 = 1,  // nibble * scale + minimum, both fp16, per group
    q8 = 2,  // signed byte * scale, fp16, per group
};

// W [out, in], blocks of 16 outputs one after another; in a block columns follow each other in the products' order.
// bf16: per two columns 16 x 2 values, and those of two blocks take turns, so that a product of both reads straight on.
// q4: per group 256 bytes of nibbles, 16 scales, 16 minima. q8: per group 512 bytes, 128 above their value, 16 scales.
class Matrix {
  public:
    // values: bf16 [out, in]; q4 [out, in / 2], in a group's byte i the columns i (low) and i + 16; q8 [out, in].
    // scales, minima: fp16 [out, in / 32]. out must be a multiple of 16, in of 32. Everything is copied.
    Matrix(Form form, int out, int in, const void* values, const uint16_t* scales, const uint16_t* minima);
    ~Matrix();
    Matrix(const Matrix&) = delete;

    Form form() const { return form_; }
    int out() const { return out_; }
    int in() const { return in_; }
    int blocks() const { return out_ / kBlock; }
    // What products take at once: two blocks, at the end perhaps one.
    int pairs() const { return (blocks() + 1) / 2; }
    size_t bytes() const { return block_bytes_ * (size_t)blocks(); }
    const uint8_t* block(int i) const { return data_ + (size_t)i * block_bytes_; }

    // Row `index` of W in fp32: [in].
    void row(int index, float* to) const;

  private:
    // Blocks that take turns with block i.
    int together(int i) const { return form_ == Form::bf16 && (i | 1) < blocks() ? 2 : 1; }

    Form form_;
    int out_, in_;
    size_t block_bytes_;
    uint8_t* data_;
};

constexpr int kRowTile = 8;  // rows that share a load of the weights: their sums fit in 32 registers

// Rows on their way into a product, in the forms that its matrices need: fp32 for bf16, 8 bits for others. These lie in tiles of 8 rows, group
// by group, so that a product reaches all of a tile from one address.
class Activations {
  public:
    void need(Form form) { (form == Form::bf16 ? floats_ : int8_) = true; }
    // Room for so many rows of so many columns; what was there is lost.
    void resize(int rows, int columns);
    // Columns [first, first + count) of a row; first and count are multiples of 32.
    void set(int row, int first, int count, const float* values);

    const float* floats(int row) const { return values_.data() + (size_t)row * columns_; }
    // A group of a row in 8 bits: values * scale.
    struct Group {
        int8_t values[kRowTile][kGroup];
        float scales[kRowTile];
        float sums[kRowTile];  // of the values
    };
    // Of the tile that begins with `row`, all its groups.
    const Group* int8(int row) const { return groups_.data() + (size_t)row / kRowTile * (columns_ / kGroup); }

  private:
    bool floats_ = false, int8_ = false;
    int columns_ = 0;
    std::vector<float> values_;
    std::vector<Group> groups_;
};

// y[row, 16 * block + lane] = x W^T for the blocks of pairs [first, end), or += it. y's rows are `stride` floats apart and
// begin with those of pair `first`. A row's bits do not depend on rows, first and end: each output is summed over its
// columns in ascending order.
void multiply(const Matrix& w, int first, int end, const Activations& x, int rows, float* y, size_t stride, bool add);

}  // namespace tandem
