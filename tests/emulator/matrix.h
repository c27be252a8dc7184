// Matrices of a warp: ldmatrix, stmatrix and mma.
#pragma once
#include "warp.h"

namespace emulator {

// PTX ISA, "ldmatrix": lane 8 * m + r has the address of row r of the m-th 8x8 matrix; a lane gets
// row lane / 4, columns 2 * (lane % 4) and the next, or, transposed, a column's two elements.
template <size_t n, bool transposed>
void load_matrix(std::array<uint32_t*, n> d, uint32_t address) {
  struct Mine {
    uint32_t address;
    uint32_t words[n];
  } mine{address, {}};
  meet("ldmatrix", ~0u, mine, [](Mine** lanes) {
    for (size_t m = 0; m < n; ++m) {
      uint16_t matrix[8][8];
      for (size_t r = 0; r < 8; ++r)
        std::memcpy(matrix[r], shared_at(lanes[8 * m + r]->address, 16, 16, "ldmatrix"), 16);
      for (size_t lane = 0; lane < kWarp; ++lane) {
        size_t a = lane / 4, b = 2 * (lane % 4);
        uint16_t low = transposed ? matrix[b][a] : matrix[a][b];
        uint16_t high = transposed ? matrix[b + 1][a] : matrix[a][b + 1];
        lanes[lane]->words[m] = uint32_t{high} << 16 | low;
      }
    }
  });
  for (size_t m = 0; m < n; ++m) *d[m] = mine.words[m];
}

// PTX ISA, "stmatrix": the way back.
template <size_t n, bool transposed>
void store_matrix(uint32_t address, std::array<uint32_t, n> words) {
  struct Mine {
    uint32_t address;
    std::array<uint32_t, n> words;
  } mine{address, words};
  meet("stmatrix", ~0u, mine, [](Mine** lanes) {
    for (size_t m = 0; m < n; ++m) {
      uint16_t matrix[8][8];
      for (size_t lane = 0; lane < kWarp; ++lane) {
        size_t a = lane / 4, b = 2 * (lane % 4);
        uint32_t word = lanes[lane]->words[m];
        (transposed ? matrix[b][a] : matrix[a][b]) = static_cast<uint16_t>(word);
        (transposed ? matrix[b + 1][a] : matrix[a][b + 1]) = static_cast<uint16_t>(word >> 16);
      }
      for (size_t r = 0; r < 8; ++r) {
        uint32_t to = lanes[8 * m + r]->address;
        std::memcpy(shared_at(to, 16, 16, "stmatrix"), matrix[r], 16);
        written(to, 16, *self().block, *self().warp);
      }
    }
  });
}

// The fragments of 16 rows and 16 columns of A, of which a lane has four words: row lane / 4 and
// that plus 8, columns 2 * (lane % 4) and that plus 8 (PTX ISA, "Matrix Fragments for
// mma.m16n8k16"; wgmma's A has the same in each warp).
template <typename Half>
void widen_a(float (&a)[16][16], const uint32_t* (&words)[kWarp]) {
  for (size_t lane = 0; lane < kWarp; ++lane)
    for (size_t k = 0; k < 4; ++k)
      for (size_t half = 0; half < 2; ++half)
        a[lane / 4 + 8 * (k % 2)][2 * (lane % 4) + 8 * (k / 2) + half] =
            Half::widen(static_cast<uint16_t>(words[lane][k] >> 16 * half));
}

// d = a b + c in float32: the products of one instruction are summed, then added.
template <size_t n>
void multiply_add(float (&d)[16][n], const float (&a)[16][16], const float (&b)[16][n],
                  size_t columns) {
  for (size_t row = 0; row < 16; ++row) {
    for (size_t first = 0; first < columns; first += 8) {
      __m256 sum = _mm256_setzero_ps();
      for (size_t k = 0; k < 16; ++k)
        sum = _mm256_fmadd_ps(_mm256_set1_ps(a[row][k]), _mm256_loadu_ps(&b[k][first]), sum);
      _mm256_storeu_ps(&d[row][first], _mm256_add_ps(_mm256_loadu_ps(&d[row][first]), sum));
    }
  }
}

// PTX ISA, "mma" and "Matrix Fragments for mma.m16n8k16 with floating point type".
template <typename Half>
void mma_m16n8k16(std::array<float*, 4> d, std::array<uint32_t, 4> a, std::array<uint32_t, 2> b,
                  std::array<float, 4> c) {
  struct Mine {
    std::array<uint32_t, 4> a;
    std::array<uint32_t, 2> b;
    std::array<float, 4> c;
  } mine{a, b, c};
  meet("mma.m16n8k16", ~0u, mine, [](Mine** lanes) {
    float left[16][16], right[16][8], result[16][8];
    const uint32_t* words[kWarp];
    auto place = [&](size_t lane, size_t k) -> float& {
      return result[lane / 4 + 8 * (k / 2)][2 * (lane % 4) + k % 2];
    };
    for (size_t lane = 0; lane < kWarp; ++lane) {
      words[lane] = lanes[lane]->a.data();
      for (size_t k = 0; k < 4; ++k) {
        place(lane, k) = lanes[lane]->c[k];
        right[2 * (lane % 4) + k % 2 + 8 * (k / 2)][lane / 4] =
            Half::widen(static_cast<uint16_t>(lanes[lane]->b[k / 2] >> 16 * (k % 2)));
      }
    }
    widen_a<Half>(left, words);
    multiply_add(result, left, right, 8);
    for (size_t lane = 0; lane < kWarp; ++lane)
      for (size_t k = 0; k < 4; ++k) lanes[lane]->c[k] = place(lane, k);
  });
  for (size_t k = 0; k < 4; ++k) *d[k] = mine.c[k];
}

}  // namespace emulator
