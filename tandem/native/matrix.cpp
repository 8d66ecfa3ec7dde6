#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "linear.h"
#include "simd.h"

namespace tandem {

namespace {

constexpr size_t kHugePage = 2u << 20;

size_t group_bytes(Form form) {
    switch (form) {
        case Form::q4: return kBlock * (kGroup / 2 + 4);
        case Form::q8: return kBlock * (kGroup + 2);
        default: return kBlock * kGroup * 2;
    }
}

// Weights are read once per step from end to end: large pages save one address lookup per 4 KiB.
uint8_t* allocate(size_t bytes) {
    size_t alignment = bytes < kHugePage ? 64 : kHugePage;
    size_t size = (bytes + alignment - 1) / alignment * alignment;
    void* data = std::aligned_alloc(alignment, size);
    if (!data) throw std::bad_alloc();
#if defined(__linux__)
    if (alignment == kHugePage) madvise(data, size, MADV_HUGEPAGE);
#endif
    return static_cast<uint8_t*>(data);
}

}  // namespace

Matrix::Matrix(Form form, int out, int in, const void* values, const uint16_t* scales, const uint16_t* minima)
    : form_(form), out_(out), in_(in), block_bytes_(group_bytes(form) * (size_t)(in / kGroup)) {
    data_ = allocate(bytes());
    int groups = in / kGroup;
    for (int o = 0; o < out; o++) {
        const int block = o / kBlock, lane = o % kBlock, turns = together(block);
        uint8_t* start = data_ + (size_t)(block / turns * turns) * block_bytes_ + 64 * (block % turns);
        for (int g = 0; g < groups; g++) {
            uint8_t* to = start + (size_t)g * group_bytes(form) * turns;
            size_t index = (size_t)o * groups + g;
            if (form == Form::bf16) {
                const uint16_t* from = static_cast<const uint16_t*>(values) + index * kGroup;
                for (int pair = 0; pair < kGroup / 2; pair++)
                    std::memcpy(to + 64 * pair * turns + 4 * lane, from + 2 * pair, 4);
            } else if (form == Form::q4) {
                // Nibbles of columns i and i + 16 share a byte, so the four bytes of a lane keep their order.
                const uint8_t* from = static_cast<const uint8_t*>(values) + index * (kGroup / 2);
                for (int i = 0; i < kGroup / 2; i += 4) std::memcpy(to + 16 * i + 4 * lane, from + i, 4);
                std::memcpy(to + 256 + 2 * lane, scales + index, 2);
                std::memcpy(to + 288 + 2 * lane, minima + index, 2);
            } else {
                const uint8_t* from = static_cast<const uint8_t*>(values) + index * kGroup;
                for (int i = 0; i < kGroup; i++) to[16 * (i & ~3) + 4 * lane + i % 4] = from[i] ^ 0x80;
                std::memcpy(to + 512 + 2 * lane, scales + index, 2);
            }
        }
    }
}

Matrix::~Matrix() { std::free(data_); }

void Matrix::row(int index, float* to) const {
    const int at = index / kBlock, lane = index % kBlock, turns = together(at);
    const uint8_t* from = block(at / turns * turns) + 64 * (at % turns);
    for (int column = 0; column < in_; column += kGroup, to += kGroup, from += group_bytes(form_) * turns) {
        uint16_t scale, minimum;
        for (int i = 0; i < kGroup; i++) {
            if (form_ == Form::bf16) {
                uint16_t value;
                std::memcpy(&value, from + 64 * (i / 2) * turns + 4 * lane + 2 * (i % 2), 2);
                uint32_t bits = (uint32_t)value << 16;
                std::memcpy(to + i, &bits, 4);
            } else if (form_ == Form::q4) {
                std::memcpy(&scale, from + 256 + 2 * lane, 2);
                std::memcpy(&minimum, from + 288 + 2 * lane, 2);
                int j = i % 16;
                int value = from[16 * (j & ~3) + 4 * lane + j % 4] >> (i < 16 ? 0 : 4) & 15;
                to[i] = from_half(scale) * (float)value + from_half(minimum);
            } else {
                std::memcpy(&scale, from + 512 + 2 * lane, 2);
                to[i] = from_half(scale) * (float)(int8_t)(from[16 * (i & ~3) + 4 * lane + i % 4] ^ 0x80);
            }
        }
    }
}

}  // namespace tandem
