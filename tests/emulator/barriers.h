// Barriers: the sixteen named ones of a block, and those in shared memory.
#pragma once
#include "warp.h"

namespace emulator {

// PTX ISA, "bar": a warp arrives as a whole, once its lanes have met.
inline int named_barrier(const char* what, uint32_t number, uint32_t count, bool wait,
                         int vote = 0) {
  struct Mine {
    int vote;
    uint64_t phase;
  } mine{vote, 0};
  Block& block = *self().block;
  if (number >= 16) fail("%s of barrier %u, but there are 16", what, number);
  NamedBarrier& barrier = block.barriers[number];
  if (count % kWarp || !count)
    fail("%s of barrier %u with %u threads, not of whole warps", what, number, count);
  meet(what, ~0u, mine, [&](Mine** lanes) {
    if (barrier.arrived && barrier.count != count)
      fail("%s of barrier %u with %u threads, while others wait there for %u", what, number, count,
           barrier.count);
    barrier.count = count;
    for_lanes(self().warp->lanes, [&](unsigned lane) {
      lanes[lane]->phase = barrier.phase;
      barrier.vote |= lanes[lane]->vote;
    });
    barrier.arrived += kWarp;
    if (barrier.arrived < count) return;
    barrier.result = barrier.vote;
    barrier.vote = 0;
    barrier.arrived = 0;
    ++barrier.phase;
    wake(barrier.waiting);
  });
  while (wait && barrier.phase == mine.phase) wait_in(barrier.waiting, {what, number});
  if (!wait) preempt();
  return barrier.result;
}
inline void bar_sync(uint32_t number, uint32_t count) {
  named_barrier("bar.sync", number, count, true);
}
inline void bar_arrive(uint32_t number, uint32_t count) {
  named_barrier("bar.arrive", number, count, false);
}
inline int sync_threads(int vote = 0) {
  return named_barrier("__syncthreads", 0, static_cast<uint32_t>(self().block->threads.size()),
                       true, vote);
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". The state is kept
// aside; the word in shared memory holds a mark, so that one who overwrites it is noticed.
inline uint64_t mark_of(uint32_t address) { return 0x6d62617272696572ull ^ address; }

inline MBarrier& mbarrier_in(Block& block, uint32_t address, const char* what) {
  const char* word = block.at(address, 8, 8, what);
  auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail("%s of %u, where no mbarrier was made", what, address);
  uint64_t mark;
  std::memcpy(&mark, word, 8);
  if (mark != mark_of(address)) fail("%s of %u, whose mbarrier was overwritten", what, address);
  return found->second;
}

inline void mbarrier_init(uint32_t address, uint32_t count) {
  Block& block = *self().block;
  uint64_t mark = mark_of(address);
  std::memcpy(block.at(address, 8, 8, "mbarrier.init"), &mark, 8);
  if (!count || count >= 1 << 20) fail("mbarrier.init of %u with %u arrivals", address, count);
  MBarrier& barrier = block.mbarriers[address];
  if (!barrier.waiting.empty()) fail("mbarrier.init of %u, where threads wait", address);
  barrier.expected = barrier.pending = count;
  barrier.bytes = 0;
  barrier.phase = 0;
}

// "Phase completion of the mbarrier object": no pending arrivals and no bytes under way.
inline void mbarrier_change(MBarrier& barrier, int64_t arrivals, int64_t bytes, uint32_t address) {
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (barrier.pending < 0)
    fail("more arrivals at mbarrier %u than the %ld of its phase", address,
         static_cast<long>(barrier.expected));
  if (barrier.bytes >= 1 << 20 || barrier.bytes <= -(1 << 20))
    fail("mbarrier %u waits for %ld bytes, more than 2^20 - 1", address,
         static_cast<long>(barrier.bytes));
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  wake(barrier.waiting);
}

inline void mbarrier_arrive(uint32_t address, uint32_t count) {
  preempt();
  mbarrier_change(mbarrier_in(*self().block, address, "mbarrier.arrive"), count, 0, address);
  preempt();
}
inline void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes) {
  preempt();
  MBarrier& barrier = mbarrier_in(*self().block, address, "mbarrier.arrive.expect_tx");
  barrier.bytes += bytes;
  mbarrier_change(barrier, 1, 0, address);
  preempt();
}
// True once the phase of that parity is over: the one under way has the other parity.
inline void mbarrier_try_wait_parity(bool& over, uint32_t address, uint32_t parity, uint32_t = 0) {
  const char* what = "mbarrier.try_wait";
  MBarrier& barrier = mbarrier_in(*self().block, address, what);
  if (parity > 1) fail("%s of %u with parity %u", what, address, parity);
  over = (barrier.phase & 1) != parity;
  if (!over) wait_in(barrier.waiting, {what, address});
}

}  // namespace emulator
