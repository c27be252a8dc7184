// A thread block: its warps, its shared memory and its barriers.
#pragma once
#include "scheduler.h"

namespace emulator {

// Shared memory starts behind what Hopper keeps for the system, so 0 is nobody's address.
constexpr uint32_t kSharedBase = 1024;
constexpr unsigned char kPoison = 0xff;  // NaN in every floating type

struct Meeting;
struct NamedBarrier {
  unsigned arrived = 0, count = 0;
  uint64_t phase = 0;
  int vote = 0, result = 0;
  WaitQueue waiting;
};
struct MBarrier {
  int64_t expected = 0, pending = 0, bytes = 0;
  uint32_t phase = 0;
  WaitQueue waiting;
};

struct WgmmaQueue;

// A warp: where its lanes meet, and its asynchronous products.
struct Warp : Turns {
  unsigned number = 0;
  uint32_t lanes = 0;              // those that exist
  uint32_t registers = 0;          // of a thread
  std::vector<uint32_t> unfenced;  // places of Block::writers that hold this warp
  std::vector<std::unique_ptr<Meeting>> meetings;
  std::unique_ptr<WgmmaQueue> wgmma;
};

struct Block {
  Index index;
  unsigned shared_bytes = 0, live = 0;
  uint32_t free_registers = 0;
  WaitQueue waiting_for_registers;
  std::unique_ptr<Guarded> shared;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  NamedBarrier barriers[16];
  std::unordered_map<uint32_t, MBarrier> mbarriers;
  // Of each 16 bytes of shared memory, which warp's instructions wrote them since its last
  // fence.proxy.async: its number plus 1. The asynchronous proxy (wgmma, bulk copies) may not see
  // them yet (PTX ISA, "Async proxy"). Stores that are no instructions of their own, those through
  // C++ pointers, are not followed.
  std::vector<uint32_t> writers;
  // Descriptors of the products of each warpgroup, which its four warps have to agree on.
  std::vector<std::vector<uint64_t>> products;

  // For the message of a deadlock.
  std::string state_of(const std::string& what, uint64_t which) const {
    auto mbarrier = mbarriers.find(static_cast<uint32_t>(which));
    if (what.rfind("mbarrier", 0) == 0 && mbarrier != mbarriers.end())
      return " (phase " + std::to_string(mbarrier->second.phase) + ", " +
             std::to_string(mbarrier->second.pending) + " arrivals and " +
             std::to_string(mbarrier->second.bytes) + " bytes are missing)";
    if ((what == "bar.sync" || what == "__syncthreads") && which < 16)
      return " (" + std::to_string(barriers[which].arrived) + " of " +
             std::to_string(barriers[which].count) + " threads are there)";
    return "";
  }

  // Whole 1024 bytes, behind which the guard page begins.
  char* shared_begin() const { return shared->end() - (shared_bytes + 1023) / 1024 * 1024; }
  char* at(uint32_t address, size_t bytes, size_t alignment, const char* what) const {
    if (address % alignment)
      fail("%s at shared address %u, which is not a multiple of %zu", what, address, alignment);
    if (address < kSharedBase || address + bytes > kSharedBase + uint64_t{shared_bytes})
      fail("%s of %zu bytes at shared address %u, but shared memory is %u to %u", what, bytes,
           address, kSharedBase, kSharedBase + shared_bytes);
    return shared_begin() + (address - kSharedBase);
  }
};

inline std::string describe(const Thread& thread) {
  char text[120];
  std::snprintf(text, sizeof text, "block (%u, %u, %u), thread %u (warp %u, lane %u)",
                thread.block->index.x, thread.block->index.y, thread.block->index.z, thread.number,
                thread.warp->number, thread.lane);
  return text;
}

inline void written(uint32_t address, size_t bytes, Block& block, Warp& warp) {
  size_t end = (address - kSharedBase + bytes + 15) / 16;
  for (size_t place = (address - kSharedBase) / 16; place < end; ++place) {
    if (block.writers[place] == warp.number + 1) continue;
    block.writers[place] = warp.number + 1;
    warp.unfenced.push_back(static_cast<uint32_t>(place));
  }
}
inline void fence_proxy(Block& block, Warp& warp) {
  for (uint32_t place : warp.unfenced)
    if (block.writers[place] == warp.number + 1) block.writers[place] = 0;
  warp.unfenced.clear();
}

// `Block::at` for what the asynchronous proxy reads.
inline const char* read_asynchronously(const Block& block, uint32_t address, size_t bytes,
                                       const char* what) {
  const char* found = block.at(address, bytes, 16, what);
  for (size_t place = (address - kSharedBase) / 16; place < (address - kSharedBase + bytes) / 16;
       ++place)
    if (uint32_t writer = block.writers[place])
      fail("%s reads shared address %zu, which warp %u wrote without fence.proxy.async since", what,
           place * 16 + kSharedBase, writer - 1);
  return found;
}

inline Thread& self() { return *machine.current; }

}  // namespace emulator
