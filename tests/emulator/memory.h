// Global and shared memory: every access that the generated code spells out is checked.
#pragma once
#include "block.h"
#include "numbers.h"

namespace emulator {

struct Range {
  std::string name;
  uintptr_t begin, end;
  bool writable;
};
inline std::vector<Range> known_memory;

inline void check_global(const void* pointer, size_t bytes, size_t alignment, bool write,
                         const char* what) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address % alignment)
    fail("%s at %p, which is not a multiple of %zu", what, pointer, alignment);
  if (known_memory.empty()) return;
  const Range* nearest = nullptr;
  for (const Range& range : known_memory) {
    if (address >= range.begin && address + bytes <= range.end) {
      if (write && !range.writable) fail("%s writes to %s, an input", what, range.name.c_str());
      return;
    }
    auto away = [&](const Range& r) {
      return address < r.begin ? r.begin - address : address - r.begin;
    };
    if (!nearest || away(range) < away(*nearest)) nearest = &range;
  }
  fail("%s of %zu bytes at byte %td of %s, which has %zu", what, bytes,
       static_cast<ptrdiff_t>(address - nearest->begin), nearest->name.c_str(),
       static_cast<size_t>(nearest->end - nearest->begin));
}

// A pointer among a kernel's parameters.
template <typename T>
class Global {
  struct Element {
    T* place;
    operator T() const {
      check_global(place, sizeof(T), sizeof(T), false, "a load");
      return *place;
    }
    T operator=(T value) const {
      check_global(place, sizeof(T), sizeof(T), true, "a store");
      return *place = value;
    }
    T* operator&() const { return place; }
  };
  T* pointer_;

 public:
  explicit Global(T* pointer) : pointer_(pointer) {}
  Element operator[](int64_t i) const { return {pointer_ + i}; }
  template <typename Other>
  explicit operator Other*() const {
    return reinterpret_cast<Other*>(pointer_);
  }
};

inline char* shared_memory() { return self().block->shared_begin(); }

inline char* shared_at(uint32_t address, size_t bytes, size_t alignment, const char* what) {
  return self().block->at(address, bytes, alignment, what);
}

// PTX ISA, "cvta".
inline uint32_t shared_address(const void* pointer) {
  auto offset = static_cast<const char*>(pointer) - shared_memory();
  if (offset < 0 || offset > static_cast<ptrdiff_t>(self().block->shared_bytes))
    fail("a pointer that is not into shared memory became a shared address");
  return kSharedBase + static_cast<uint32_t>(offset);
}

// PTX ISA, "ld" and "st"; of vectors, the address is a multiple of the vector's size.
template <typename T, typename U, size_t n>
void load_global(std::array<U*, n> d, const void* address) {
  static_assert(sizeof(T) == sizeof(U), "the registers fit the instruction");
  check_global(address, n * sizeof(T), n * sizeof(T), false, "ld.global");
  for (size_t k = 0; k < n; ++k) std::memcpy(d[k], static_cast<const T*>(address) + k, sizeof(T));
}
template <typename T, typename U>
void load_global(U& d, const void* address) {
  load_global<T>(out(d), address);
}
// A load that a loop repeats until somebody has written.
template <typename T, typename U>
void load_acquire(U& d, const void* address) {
  uint64_t byte = 0;
  for (const Range& range : known_memory) {
    auto place = reinterpret_cast<uintptr_t>(address);
    if (place >= range.begin && place < range.end) byte = place - range.begin;
  }
  spin({"another value of global memory at byte", byte});
  load_global<T>(out(d), address);
}
template <typename T, typename U, size_t n>
void store_global(void* address, std::array<U, n> values) {
  static_assert(sizeof(T) == sizeof(U), "the registers fit the instruction");
  check_global(address, n * sizeof(T), n * sizeof(T), true, "st.global");
  std::memcpy(address, values.data(), n * sizeof(T));
}
template <typename T, typename U, size_t n>
void store_global(const void* address, std::array<U, n> values) {
  store_global<T>(const_cast<void*>(address), values);
}
template <typename T, typename U>
void store_global(const void* address, U value) {
  store_global<T>(address, in(value));
}
template <typename T, typename U, size_t n>
void load_shared(std::array<U*, n> d, uint32_t address) {
  const char* from = shared_at(address, n * sizeof(T), n * sizeof(T), "ld.shared");
  for (size_t k = 0; k < n; ++k) std::memcpy(d[k], from + k * sizeof(T), sizeof(T));
}
template <typename T, typename U>
void load_shared(U& d, uint32_t address) {
  load_shared<T>(out(d), address);
}
template <typename T, typename U, size_t n>
void store_shared(uint32_t address, std::array<U, n> values) {
  std::memcpy(shared_at(address, n * sizeof(T), n * sizeof(T), "st.shared"), values.data(),
              n * sizeof(T));
  written(address, n * sizeof(T), *self().block, *self().warp);
}
template <typename T, typename U>
void store_shared(uint32_t address, U value) {
  store_shared<T>(address, in(value));
}

// PTX ISA, "fence.proxy.async".
inline void fence_proxy_async() { fence_proxy(*self().block, *self().warp); }

// PTX ISA, "red": .release and .relaxed make no difference where one thread runs at a time.
template <typename T, typename U, size_t n>
void reduce_add(const void* address, std::array<U, n> values) {
  preempt();
  check_global(address, n * sizeof(T), n * sizeof(T), true, "red.global.add");
  auto* to = static_cast<T*>(const_cast<void*>(address));
  for (size_t k = 0; k < n; ++k) to[k] += values[k];
}
template <typename T, typename U>
void reduce_add(const void* address, U value) {
  reduce_add<T>(address, in(value));
}

}  // namespace emulator
