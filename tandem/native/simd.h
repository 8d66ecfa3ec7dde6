// Sixteen lanes at once. GCC's and Clang's vector types do the plain arithmetic on any machine; what they cannot say is
// chosen here by the target's macros. No operation's result depends on anything but its arguments.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tandem {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

template <class Vector>
inline Vector load(const void* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class Vector>
inline void store(void* to, Vector v) {
    std::memcpy(to, &v, sizeof v);
}

// Not Floats{} + x, which is an addition: x may be -0.
inline Floats all(float x) { return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// a * b + c, in one rounding where the machine can.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, sizeof a);
    std::memcpy(y, &b, sizeof b);
    std::memcpy(z, &c, sizeof c);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    return load<Floats>(z);
#else
    return a * b + c;
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// The lanes from `width` on in the place of the first ones.
template <class Vector>
inline Vector upper_half(Vector v, int width) {
    switch (width) {
        case 8: return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
        case 4: return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
        case 2: return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
        default: return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    }
}

inline float largest(Floats v) {
    for (int width = kLanes / 2; width; width /= 2) v = larger(v, upper_half(v, width));
    return v[0];
}

// Halves are added until one lane is left: always in the same order.
template <class Vector>
inline auto sum(Vector v) {
    for (int width = kLanes / 2; width; width /= 2) v += upper_half(v, width);
    return v[0];
}

// acc + the sum over four neighbours of w (unsigned, 64 of them) times x (signed, four of them), per lane.
// small: w stays below 128.
template <bool small>
inline Ints dot4(Ints acc, Words w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
    __m256i a[2], b[2], y = _mm256_set1_epi32(four), one = _mm256_set1_epi16(1);
    std::memcpy(a, &acc, sizeof acc);
    std::memcpy(b, &w, sizeof w);
    for (int i = 0; i < 2; i++) {
#if defined(__AVXVNNI__)
        a[i] = _mm256_dpbusd_avx_epi32(a[i], b[i], y);
#else
        // The products of two neighbours are added in 16 bits: the top bit of w goes apart, so that they fit.
        __m256i low = small ? b[i] : _mm256_and_si256(b[i], _mm256_set1_epi8(0x7f));
        a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_maddubs_epi16(low, y), one));
        if (!small) {
            __m256i top = _mm256_and_si256(_mm256_srli_epi16(b[i], 7), _mm256_set1_epi8(1));
            __m256i part = _mm256_madd_epi16(_mm256_maddubs_epi16(top, y), one);
            a[i] = _mm256_add_epi32(a[i], _mm256_slli_epi32(part, 7));
        }
#endif
    }
    return load<Ints>(a);
#else
    for (int j = 0; j < 4; j++) acc += (Ints)(w >> (8 * j) & 0xffu) * (int32_t)x[j];
    return acc;
#endif
}

inline float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 0x1f, fraction = h & 0x3ff;
    float value;
    if (exponent == 0) {
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline Floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    __m256 parts[2];
    for (int i = 0; i < 2; i++) parts[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + i));
    return load<Floats>(parts);
#else
    Floats v;
    for (int i = 0; i < kLanes; i++) v[i] = from_half(from[i]);
    return v;
#endif
}

typedef uint16_t Shorts __attribute__((vector_size(32)));

inline Floats load_bf16(const uint16_t* from) {
    Shorts half;
    std::memcpy(&half, from, sizeof half);
    return (Floats)(__builtin_convertvector(half, Words) << 16);
}

// count: a multiple of 16.
inline void widen(const uint16_t* from, size_t count, float* to) {
    for (size_t i = 0; i < count; i += kLanes) store(to + i, load_bf16(from + i));
}

// To the nearest, ties to even.
inline void store_bf16(uint16_t* to, Floats v) {
    Words bits = (Words)v;
    Shorts half = __builtin_convertvector((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, Shorts);
    std::memcpy(to, &half, sizeof half);
}

// Nearest whole number, for values below 2^22.
inline Floats rounded(Floats v) {
    const float magic = 12582912.0f;
    return (v + magic) - magic;
}

// e^x for x <= 0, within 2 units in the last place; what would be below the smallest normal float is that.
inline Floats exp_of_negative(Floats x) {
    x = larger(x, all(-87.33f));
    Floats n = rounded(x * 1.44269504088896341f);
    Floats r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, all(c));
    p = fma(p * r, r, r) + 1.0f;
    return p * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
}

// x / (1 + e^-x)
inline Floats silu(Floats x) {
    Floats magnitude = x < 0.0f ? -x : x;
    Floats e = exp_of_negative(-magnitude);
    return x * (x < 0.0f ? e : all(1.0f)) / (e + 1.0f);
}

}  // namespace tandem
