// What the lanes of a warp do together: they meet, the last one does it for all.
#pragma once
#include "memory.h"

namespace emulator {

// One meeting under way; `mine` of each lane is its arguments and results.
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  const char* what = nullptr;
  void* mine[kWarp] = {};
  WaitQueue waiting;
};

// Calls perform(lanes' arguments) once all lanes of the mask are here.
template <typename Mine, typename Perform>
void meet(const char* what, uint32_t mask, Mine& mine, Perform perform) {
  Thread& thread = self();
  Warp& warp = *thread.warp;
  uint32_t bit = 1u << thread.lane;
  mask &= warp.lanes;
  if (!(mask & bit)) fail("%s with mask 0x%x, in which the lane itself is not", what, mask);
  Meeting* meeting = nullptr;
  Meeting* unused = nullptr;
  for (auto& open : warp.meetings) {
    if (!open->arrived) {
      unused = open.get();
    } else if (open->mask & mask) {
      meeting = open.get();
    }
  }
  if (!meeting) {
    if (!unused) {
      warp.meetings.push_back(std::make_unique<Meeting>());
      unused = warp.meetings.back().get();
    }
    meeting = unused;
    meeting->mask = mask;
    meeting->what = what;
  }
  if (meeting->mask != mask || std::strcmp(meeting->what, what) != 0)
    fail("%s with mask 0x%x, while other lanes of the warp wait at %s with mask 0x%x", what, mask,
         meeting->what, meeting->mask);
  meeting->mine[thread.lane] = &mine;
  meeting->arrived |= bit;
  if (meeting->arrived != mask) {
    wait_in(meeting->waiting, {what, mask});
    return;
  }
  Mine* lanes[kWarp];
  for (unsigned lane = 0; lane < kWarp; ++lane)
    lanes[lane] = static_cast<Mine*>(meeting->mine[lane]);
  meeting->arrived = 0;
  perform(lanes);
  // All are together, so other warps may go first.
  bool next = mask == warp.lanes && machine.random.one_in(machine.drift);
  wake(meeting->waiting, next);
  if (next) {
    enlist(&thread, true);
    suspend();
  }
}

template <typename Perform>
void for_lanes(uint32_t mask, Perform perform) {
  for (unsigned lane = 0; lane < kWarp; ++lane)
    if (mask >> lane & 1) perform(lane);
}

// PTX ISA, "bar.warp.sync".
inline void sync_warp(uint32_t mask = ~0u) {
  int nothing = 0;
  meet("__syncwarp", mask, nothing, [](int**) {});
}

// PTX ISA, "shfl.sync", within segments of `width` lanes; `from` of the segment's lanes.
template <typename T>
T shuffle(const char* what, uint32_t mask, T value, unsigned from, int width) {
  struct Mine {
    T give, get;
    unsigned from;
  };
  unsigned segment = self().lane & ~(static_cast<unsigned>(width) - 1);
  Mine mine{value, value, segment | (from & (static_cast<unsigned>(width) - 1))};
  meet(what, mask, mine, [&](Mine** lanes) {
    for_lanes(mask, [&](unsigned lane) {
      if (!(mask >> lanes[lane]->from & 1))
        fail("%s from lane %u, which is not in mask 0x%x", what, lanes[lane]->from, mask);
      lanes[lane]->get = lanes[lanes[lane]->from]->give;
    });
  });
  return mine.get;
}

// PTX ISA, "vote.sync" and "redux.sync": `combine` over the lanes of the mask.
template <typename T, typename Combine>
T reduce_lanes(const char* what, uint32_t mask, T value, Combine combine) {
  T mine = value;
  meet(what, mask, mine, [&](T** lanes) {
    T all = value;  // of this lane; to combine it twice changes no vote and no maximum
    for_lanes(mask, [&](unsigned lane) { all = combine(all, *lanes[lane]); });
    for_lanes(mask, [&](unsigned lane) { *lanes[lane] = all; });
  });
  return mine;
}

// PTX ISA, "elect.sync": which lane is leader is up to the machine, but it is always the same one.
inline void elect(bool& leader, uint32_t mask) {
  unsigned wanted = static_cast<unsigned>(machine.leader);
  bool mine = false;
  meet("elect.sync", mask, mine, [&](bool** lanes) {
    for_lanes(mask, [&](unsigned lane) { *lanes[lane] = false; });
    while (!(mask >> wanted & 1)) wanted = (wanted + 1) % kWarp;
    *lanes[wanted] = true;
  });
  leader = mine;
}

// PTX ISA, "setmaxnreg": a warp gives registers back, or waits until the block has as many.
inline void set_max_registers(const char* what, bool more, uint32_t registers) {
  Block& block = *self().block;
  Warp& warp = *self().warp;
  if (registers < 24 || registers > 256 || registers % 8)
    fail("%s to %u, but it must be a multiple of 8 from 24 to 256", what, registers);
  auto enough = [&] {
    return !more || (registers - warp.registers) * kWarp <= block.free_registers;
  };
  for (bool done = false; !done;) {
    while (!enough()) wait_in(block.waiting_for_registers, {what, registers});
    meet(what, ~0u, done, [&](bool** lanes) {
      if (more ? registers < warp.registers : registers > warp.registers)
        fail("%s to %u of a warp that has %u registers a thread", what, registers, warp.registers);
      bool taken = enough();
      if (taken) {
        block.free_registers += (warp.registers - registers) * kWarp;
        warp.registers = registers;
        wake(block.waiting_for_registers);
      }
      for_lanes(warp.lanes, [&](unsigned lane) { *lanes[lane] = taken; });
    });
  }
}

}  // namespace emulator
