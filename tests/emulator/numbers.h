// The two-byte floating types, and the conversions that PTX's cvt makes.
#pragma once
#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace emulator {

template <typename To, typename From>
To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a change of type, not of size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Eight numbers of two bytes each, widened.
struct bf16 {
  static __m256 widen(__m128i eight) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
  }
  static float widen(uint16_t one) { return bits_of<float>(uint32_t{one} << 16); }
  // To nearest, ties to even; every NaN becomes 0x7fff (PTX ISA, "cvt").
  static uint16_t narrow(float x) {
    if (x != x) return 0x7fff;
    uint32_t bits = bits_of<uint32_t>(x);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

struct f16 {
  static __m256 widen(__m128i eight) { return _mm256_cvtph_ps(eight); }
  static float widen(uint16_t one) { return _cvtsh_ss(one); }
  static uint16_t narrow(float x) {
    return x != x ? uint16_t{0x7fff}
                  : static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
  }
};

// PTX ISA, "cvt": of cvt.rn.f16x2.f32 d, a, b, a goes to the upper half of d.
template <typename Half>
void narrow_pair(uint32_t& d, float upper, float lower) {
  d = uint32_t{Half::narrow(upper)} << 16 | Half::narrow(lower);
}

// PTX ISA, "fma" of half precision. Rounded through float32: next to a tie, the last bit may differ.
template <typename Half>
void fma_pair(uint32_t& d, uint32_t a, uint32_t b, uint32_t c) {
  auto one = [&](int shift) {
    auto wide = [&](uint32_t x) { return Half::widen(static_cast<uint16_t>(x >> shift)); };
    // A product of two halves is exact in float64.
    double exact = static_cast<double>(wide(a)) * wide(b) + wide(c);
    return uint32_t{Half::narrow(static_cast<float>(exact))} << shift;
  };
  d = one(16) | one(0);
}

// PTX ISA, "max": with .NaN the result is the canonical NaN if either input is a NaN.
inline void max_nan(float& d, float a, float b) {
  d = a != a || b != b ? bits_of<float>(0x7fffffffu) : a > b ? a : b;
}

// PTX ISA, "setp" and "mov".
inline void not_equal(bool& d, uint32_t a, uint32_t b) { d = a != b; }
template <typename T, typename U>
void move(T& d, U a) {
  d = static_cast<T>(a);
}

// Operands in braces: the values that an instruction reads, and the places it writes to.
template <typename First, typename... Rest>
std::array<First, 1 + sizeof...(Rest)> in(First first, Rest... rest) {
  return {first, static_cast<First>(rest)...};
}
template <typename First, typename... Rest>
std::array<First*, 1 + sizeof...(Rest)> out(First& first, Rest&... rest) {
  return {&first, &rest...};
}

}  // namespace emulator
