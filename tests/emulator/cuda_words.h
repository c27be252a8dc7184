// The words of CUDA C that the generated code uses, as C++.
#pragma once
#include <cmath>
#include <limits>
#include <type_traits>

#include "copies.h"
#include "matrix.h"
#include "wgmma.h"

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#undef __align__
#define __align__(n) alignas(n)
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
#define CUDART_INF_F (std::numeric_limits<float>::infinity())
#define CUDART_NAN_F (emulator::bits_of<float>(0x7fffffffu))
#define threadIdx (emulator::self().index)
#define blockIdx (emulator::self().block->index)

using CUtensorMap = emulator::TensorMap;

template <typename Format>
struct TwoBytes {
  uint16_t bits;
  TwoBytes() = default;
  explicit TwoBytes(float x) : bits(Format::narrow(x)) {}
  operator float() const { return Format::widen(bits); }
};
using nv_bfloat16 = TwoBytes<emulator::bf16>;
using half = TwoBytes<emulator::f16>;

template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmax(static_cast<T>(a), static_cast<T>(b));
  } else {
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
  }
}
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmin(static_cast<T>(a), static_cast<T>(b));
  } else {
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
  }
}

inline half __ushort_as_half(unsigned short bits) {
  half x;
  x.bits = bits;
  return x;
}
inline float __half2float(half x) { return x; }
inline float __uint_as_float(unsigned x) { return emulator::bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits_of<unsigned>(x); }
inline float __int_as_float(int x) { return emulator::bits_of<float>(x); }
inline int __float_as_int(float x) { return emulator::bits_of<int>(x); }
// Not contracted into a fused multiply-add.
__attribute__((noinline)) inline float __fmul_rn(float a, float b) { return a * b; }

inline unsigned __cvta_generic_to_shared(const void* pointer) {
  return emulator::shared_address(pointer);
}

inline void __syncwarp(unsigned mask = ~0u) { emulator::sync_warp(mask); }
inline void __syncthreads() { emulator::sync_threads(); }
// One thread runs at a time, and what it wrote to global memory is there.
inline void __threadfence() {}
inline int __syncthreads_or(int vote) { return emulator::sync_threads(vote != 0); }
inline int __any_sync(unsigned mask, int vote) {
  return emulator::reduce_lanes("vote.any", mask, vote != 0, [](int a, int b) { return a | b; });
}
inline int __reduce_max_sync(unsigned mask, int value) {
  return emulator::reduce_lanes("redux.max", mask, value,
                                [](int a, int b) { return a < b ? b : a; });
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return emulator::shuffle("shfl.idx", mask, value, static_cast<unsigned>(lane), width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return emulator::shuffle("shfl.bfly", mask, value,
                           emulator::self().lane ^ static_cast<unsigned>(lanes), width);
}

// Atomics of global or shared memory; other threads may come in between two of them.
template <typename T>
T* atomic_place(T* place) {
  emulator::preempt();
  auto* bytes = reinterpret_cast<char*>(place);
  const emulator::Block& block = *emulator::self().block;
  if (bytes < block.shared_begin() || bytes + sizeof(T) > block.shared_begin() + block.shared_bytes)
    emulator::check_global(place, sizeof(T), sizeof(T), true, "an atomic");
  return place;
}
template <typename T>
T atomicAdd(T* place, T value) {
  T before = *atomic_place(place);
  *place = before + value;
  return before;
}
template <typename T>
T atomicExch(T* place, T value) {
  T before = *atomic_place(place);
  *place = value;
  return before;
}
