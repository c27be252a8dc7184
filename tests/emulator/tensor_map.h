// The 128 bytes that cuTensorMapEncodeTiled of the stand-in driver writes and TMA copies read.
#pragma once
#include <cstdint>

namespace emulator {

// Sizes, strides, box and element strides are as cuTensorMapEncodeTiled takes them (CUDA driver
// API, "Tensor Map Object Management"): innermost dimension first; strides_bytes[k] is the stride
// of dimension k + 1, that of dimension 0 being element_bytes.
struct TensorMap {
  static constexpr uint32_t kMagic = 0x70616d54;  // "Tmap": a map that nobody encoded is noticed

  uint64_t base;             // address of the tensor
  int64_t strides_bytes[4];  // of dimensions 1 to rank - 1
  uint32_t magic;
  uint8_t element_bytes;
  uint8_t rank;           // 1 to 5
  uint8_t swizzle_bytes;  // 0 (none), 32, 64 or 128
  uint8_t interleave;     // CUtensorMapInterleave; only 0 (none) is emulated
  uint32_t sizes[5];      // elements; 2^32 elements and more are not emulated
  uint16_t box[5];        // elements, at most 256 each
  uint8_t element_strides[5];
  uint8_t fill;          // CUtensorMapFloatOOBfill: 0 zeros, 1 NaN
  uint8_t element_type;  // CUtensorMapDataType, which says what a reduction adds
  uint8_t reserved[42];
};
static_assert(sizeof(TensorMap) <= 128, "a CUtensorMap has 128 bytes");

}  // namespace emulator
