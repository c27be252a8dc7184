// Copies that arrive later: cp.async, bulk copies, TMA, and bulk reductions.
#pragma once
#include "barriers.h"
#include "tensor_map.h"

namespace emulator {

template <typename Copy, typename... Values>
std::shared_ptr<Copy> make_copy(const char* what, Values... values) {
  auto copy = std::make_shared<Copy>(what, self().block);
  copy->set(values...);
  return copy;
}

// Everything but the last `left` groups has happened.
inline void finish_groups(std::vector<Thread::Group>& groups, size_t left) {
  if (groups.size() <= left) return;
  auto end = groups.end() - static_cast<ptrdiff_t>(left);
  for (auto group = groups.begin(); group != end; ++group)
    for (auto& copy : group->copies) copy->land();
  groups.erase(groups.begin(), end);
}
inline void commit_group(Thread::Group& open, std::vector<Thread::Group>& groups) {
  groups.push_back(std::move(open));
  open = {};
}

// PTX ISA, "cp.async": bytes of the source beyond `source_bytes` are zeros, and are not read.
struct SmallCopy : Async {
  using Async::Async;
  const void* from;
  char* to;
  size_t bytes, source_bytes;
  void set(const void* source, char* target, size_t size, size_t source_size) {
    from = source, to = target, bytes = size, source_bytes = source_size;
  }
  void perform() override {
    std::memcpy(to, from, source_bytes);
    std::memset(to + source_bytes, 0, bytes - source_bytes);
  }
};
template <size_t bytes>
void cp_async(uint32_t to, const void* from, size_t, size_t source_bytes = bytes) {
  if (source_bytes > bytes) fail("cp.async of %zu bytes from %zu", bytes, source_bytes);
  if (source_bytes) check_global(from, source_bytes, bytes, false, "cp.async");
  char* target = shared_at(to, bytes, bytes, "cp.async");
  auto copy = make_copy<SmallCopy>("cp.async", from, target, bytes, source_bytes);
  if (machine.random.one_in(3)) {
    copy->land();
  } else {
    std::memset(target, kPoison, bytes);
  }
  self().open.copies.push_back(copy);
}
inline void cp_async_commit() { commit_group(self().open, self().groups); }
inline void cp_async_wait(size_t left) { finish_groups(self().groups, left); }

// PTX ISA, "cp.async.bulk": to shared memory; the mbarrier counts the bytes when they are there.
struct BulkCopy : Async {
  using Async::Async;
  const void* from;
  uint32_t to, bytes, barrier;
  void set(const void* source, uint32_t target, uint32_t size, uint32_t mbarrier) {
    from = source, to = target, bytes = size, barrier = mbarrier;
  }
  void perform() override {
    std::memcpy(block->at(to, bytes, 16, what), from, bytes);
    mbarrier_change(mbarrier_in(*block, barrier, what), 0, -int64_t{bytes}, barrier);
  }
};
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  const char* what = "cp.async.bulk";
  if (bytes % 16) fail("%s of %u bytes, which is not a multiple of 16", what, bytes);
  check_global(from, bytes, 16, false, what);
  std::memset(shared_at(to, bytes, 16, what), kPoison, bytes);
  mbarrier_in(*self().block, barrier, what);
  happen(make_copy<BulkCopy>(what, from, to, bytes, barrier));
  preempt();
}

// PTX ISA, "cp.async.bulk.tensor" and "Tensors": tiled mode. A box lies densely in shared memory,
// its innermost dimension first; elements outside the tensor arrive as the map's fill, and count.
struct TensorCopy : Async {
  using Async::Async;
  TensorMap map;
  std::array<int32_t, 5> first;
  uint32_t to, barrier;
  void set(TensorMap tensor, std::array<int32_t, 5> coordinates, uint32_t target,
           uint32_t mbarrier) {
    map = tensor, first = coordinates, to = target, barrier = mbarrier;
  }
  uint32_t elements() const {
    uint32_t all = 1;
    for (int d = 0; d < map.rank; ++d) all *= map.box[d];
    return all;
  }
  // Address bits 4 to 6 are xored with bits 7 to 9 (128 bytes), 4 to 5 with 7 to 8 (64), 4 with 7.
  uint32_t swizzled(uint32_t address) const {
    uint32_t chunks = map.swizzle_bytes ? map.swizzle_bytes / 16u : 1;
    return address ^ ((address >> 7 & (chunks - 1)) << 4);
  }
  void perform() override {
    uint32_t count = elements(), size = map.element_bytes;
    for (uint32_t element = 0; element < count; ++element) {
      const char* from = reinterpret_cast<const char*>(map.base);
      uint32_t rest = element;
      bool inside = true;
      for (int d = 0; d < map.rank; ++d) {
        int64_t place =
            first[static_cast<size_t>(d)] + int64_t{rest % map.box[d]} * map.element_strides[d];
        rest /= map.box[d];
        inside = inside && place >= 0 && place < int64_t{map.sizes[d]};
        from += place * (d ? map.strides_bytes[d - 1] : int64_t{size});
      }
      char* target = block->at(swizzled(to + element * size), size, size, what);
      if (inside) {
        check_global(from, size, size, false, what);
        std::memcpy(target, from, size);
      } else {
        std::memset(target, map.fill ? kPoison : 0, size);
      }
    }
    mbarrier_change(mbarrier_in(*block, barrier, what), 0, -int64_t{count} * size, barrier);
  }
};
template <size_t rank>
void tensor_load(uint32_t to, const void* tensor_map, std::array<int32_t, rank> first,
                 uint32_t barrier) {
  const char* what = "cp.async.bulk.tensor";
  TensorMap map;
  std::memcpy(&map, tensor_map, sizeof map);
  if (map.magic != TensorMap::kMagic) fail("%s through a tensor map that was not encoded", what);
  if (map.rank != rank) fail("%s of rank %zu through a map of rank %u", what, rank, map.rank);
  if (map.interleave) fail("%s of an interleaved tensor is not emulated", what);
  std::array<int32_t, 5> coordinates = {};
  std::copy(first.begin(), first.end(), coordinates.begin());
  auto copy = make_copy<TensorCopy>(what, map, coordinates, to, barrier);
  uint32_t bytes = copy->elements() * map.element_bytes;
  std::memset(shared_at(to, bytes, 128, what), kPoison, bytes);
  mbarrier_in(*self().block, barrier, what);
  happen(copy);
  preempt();
}

// PTX ISA, "cp.reduce.async.bulk": from shared memory, added to global memory. Its source is read
// first (wait_group.read), its result is there later (wait_group).
struct BulkRead : Async {
  using Async::Async;
  uint32_t from, bytes;
  std::vector<float> read;
  void set(uint32_t source, uint32_t size) { from = source, bytes = size; }
  void perform() override {
    read.resize(bytes / sizeof(float));
    std::memcpy(read.data(), read_asynchronously(*block, from, bytes, what), bytes);
  }
};
struct BulkAdd : Async {
  using Async::Async;
  std::shared_ptr<BulkRead> source;
  float* to;
  void set(std::shared_ptr<BulkRead> reads, float* target) { before = source = reads, to = target; }
  void perform() override {
    for (float value : source->read) *to++ += value;
    source.reset();
  }
};
inline void bulk_add(const void* to, uint32_t from, uint32_t bytes) {
  const char* what = "cp.reduce.async.bulk";
  if (bytes % 16) fail("%s of %u bytes, which is not a multiple of 16", what, bytes);
  check_global(to, bytes, 16, true, what);
  shared_at(from, bytes, 16, what);
  auto read = make_copy<BulkRead>(what, from, bytes);
  auto add = make_copy<BulkAdd>(what, read, static_cast<float*>(const_cast<void*>(to)));
  self().open_bulk.copies.push_back(read);
  self().open_bulk.copies.push_back(add);
  happen(read);
  happen(add);
  preempt();
}
inline void bulk_commit() { commit_group(self().open_bulk, self().bulk_groups); }
inline void bulk_wait(size_t left) { finish_groups(self().bulk_groups, left); }
inline void bulk_wait_read(size_t left) {
  auto& groups = self().bulk_groups;
  for (size_t g = 0; g + left < groups.size(); ++g)
    for (auto& copy : groups[g].copies)
      if (dynamic_cast<BulkRead*>(copy.get())) copy->land();
}

}  // namespace emulator
