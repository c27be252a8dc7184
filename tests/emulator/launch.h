// Runs a kernel's thread blocks, and says what went wrong.
#pragma once
#include <algorithm>
#include <deque>

#include "faults.h"
#include "interface.h"
#include "wgmma.h"

namespace emulator {

struct Kernel {
  const char* name;
  void (*call)(void** arguments);
  unsigned max_threads;
};

struct Launch {
  const Kernel* kernel;
  void** arguments;
  Index grid, block;
  unsigned shared_bytes;
  uint64_t started = 0;
  std::deque<std::unique_ptr<Block>> resident;
  std::vector<std::unique_ptr<Thread>>
      unused;  // threads of blocks that have ended, for their stacks
};
inline Launch launch;
inline uint64_t seed;
inline unsigned least_resident = 1;

constexpr uint32_t kRegisters = 64 << 10;
constexpr unsigned char kUnused = 0xa5;  // shared memory that was not asked for

inline void end_block(Block& block) {
  for (auto& async : machine.pending)
    if (async->block == &block && !async->done && async->must_end)
      fail("block (%u, %u, %u) ended while its %s was under way", block.index.x, block.index.y,
           block.index.z, async->what);
  for (size_t place = 0; place < machine.pending.size();) {
    if (machine.pending[place]->block == &block) {
      machine.pending[place]->land();
      machine.pending[place] = machine.pending.back();
      machine.pending.pop_back();
    } else {
      ++place;
    }
  }
  check_products(block);
  for (const char* byte = block.shared_begin() + block.shared_bytes; byte < block.shared->end();
       ++byte)
    if (static_cast<unsigned char>(*byte) != kUnused)
      fail("byte %td of shared memory was written to, but there are %u",
           byte - block.shared_begin(), block.shared_bytes);
  for (auto& thread : block.threads) launch.unused.push_back(std::move(thread));
  for (auto& owned : launch.resident)
    if (owned.get() == &block) {
      std::swap(owned, launch.resident.back());
      launch.resident.pop_back();
      return;
    }
}

// Where a fiber starts; it never returns.
inline void thread_main() {
  launch.kernel->call(launch.arguments);
  Thread& thread = self();
  machine.idle = 0;
  --thread.block->live;
  thread.fiber.suspend(machine.scheduler);
}

inline void start_block() {
  uint64_t number = launch.started++;
  auto block = std::make_unique<Block>();
  block->index.x = static_cast<unsigned>(number % launch.grid.x);
  block->index.y = static_cast<unsigned>(number / launch.grid.x % launch.grid.y);
  block->index.z = static_cast<unsigned>(number / launch.grid.x / launch.grid.y);
  block->shared_bytes = launch.shared_bytes;
  block->shared = std::make_unique<Guarded>((launch.shared_bytes + 1023) / 1024 * 1024 + 1024);
  std::memset(block->shared->begin(), kUnused,
              static_cast<size_t>(block->shared->end() - block->shared->begin()));
  std::memset(block->shared_begin(), kPoison, launch.shared_bytes);
  unsigned threads = launch.block.x * launch.block.y * launch.block.z;
  block->live = threads;
  // A multiprocessor's registers, handed out in eights to the threads of one block.
  uint32_t registers = std::min(kRegisters / threads / 8 * 8, 255u);
  block->free_registers = kRegisters - threads * registers;
  block->writers.resize(launch.shared_bytes / 16 + 1);
  block->products.resize((threads + 4 * kWarp - 1) / (4 * kWarp));
  for (unsigned number_in_block = 0; number_in_block < threads; ++number_in_block) {
    if (number_in_block % kWarp == 0) {
      block->warps.push_back(std::make_unique<Warp>());
      block->warps.back()->number = number_in_block / kWarp;
      block->warps.back()->registers = registers;
      block->warps.back()->wgmma = std::make_unique<WgmmaQueue>();
    }
    std::unique_ptr<Thread> thread;
    if (launch.unused.empty()) {
      thread = std::make_unique<Thread>();
    } else {
      thread = std::move(launch.unused.back());
      launch.unused.pop_back();
    }
    thread->open = thread->open_bulk = {};
    thread->groups.clear();
    thread->bulk_groups.clear();
    thread->block = block.get();
    thread->warp = block->warps.back().get();
    thread->turns = thread->warp;
    thread->number = number_in_block;
    thread->lane = number_in_block % kWarp;
    thread->warp->lanes |= 1u << thread->lane;
    thread->index.x = number_in_block % launch.block.x;
    thread->index.y = number_in_block / launch.block.x % launch.block.y;
    thread->index.z = number_in_block / launch.block.x / launch.block.y;
    thread->reason = {};
    thread->fiber.start(thread_main);
    enlist(thread.get(), false);
    block->threads.push_back(std::move(thread));
  }
  launch.resident.push_back(std::move(block));
}

// Who waits for what: "block 0: warps 4 5 6 7 for bar.sync 1 (192 of 256 threads are there)".
[[noreturn]] inline void fail_deadlock() {
  std::string all;
  for (auto& block : launch.resident) {
    std::map<std::pair<std::string, uint64_t>, std::map<unsigned, unsigned>> waiting;
    for (auto& thread : block->threads)
      if (thread->reason.what)
        ++waiting[{thread->reason.what, thread->reason.which}][thread->warp->number];
    all += "; block " + std::to_string(block->index.x) + ":";
    for (auto& [what, warps] : waiting) {
      all += " warps";
      for (auto& [warp, lanes] : warps) {
        all += " " + std::to_string(warp);
        if (lanes != kWarp) all += " (" + std::to_string(lanes) + " lanes)";
      }
      all += " for " + what.first + " " + std::to_string(what.second) +
             block->state_of(what.first, what.second) + ",";
    }
    all.pop_back();
  }
  fail("deadlock%s", all.c_str());
}

// A random element leaves.
template <typename T>
T take(std::vector<T>& from) {
  std::swap(from[machine.random.below(from.size())], from.back());
  T taken = from.back();
  from.pop_back();
  return taken;
}

// A warp's turn: until none of its lanes can go on.
inline void run_warp(Turns& turns) {
  turns.now.insert(turns.now.end(), turns.next.begin(), turns.next.end());
  turns.next.clear();
  Block* block = turns.now.front()->block;
  turns.listed = true;  // lanes that it wakes itself belong to this turn
  while (!turns.now.empty()) {
    machine.current = take(turns.now);
    machine.current->fiber.resume(&machine.scheduler);
    machine.current = nullptr;
  }
  turns.listed = !turns.next.empty();
  if (turns.listed) machine.runnable.push_back(&turns);
  if (!block->live) end_block(*block);
}

constexpr uint64_t kPatience = 1'000, kMaxIdle = 1'000'000;

inline void run_blocks(size_t most_resident) {
  uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  while (true) {
    while (launch.started < blocks && launch.resident.size() < most_resident) start_block();
    if (launch.resident.empty()) return;
    if (machine.runnable.empty()) {
      if (!land_one(true)) fail_deadlock();
      continue;
    }
    if (machine.random.one_in(4)) land_one(false);
    // Threads that only look on leave others waiting for what is late.
    if (machine.idle > kPatience && !land_one(true) && machine.idle > kMaxIdle) fail_deadlock();
    run_warp(*take(machine.runnable));
  }
}

inline int emulate(const Kernel* kernels, size_t count, const char* name, const unsigned grid[3],
                   const unsigned block[3], unsigned shared_bytes, void** arguments, char* message,
                   size_t message_bytes) {
  FaultHandler handler;
  const Kernel* kernel = nullptr;
  for (size_t k = 0; k < count; ++k)
    if (!std::strcmp(kernels[k].name, name)) kernel = &kernels[k];
  machine.kernel = name;
  machine.current = nullptr;
  machine.runnable.clear();
  machine.pending.clear();
  machine.idle = 0;
  machine.random.state = seed;
  machine.leader = static_cast<unsigned>(machine.random.below(kWarp));
  // Warps that go on side by side, or one that runs far ahead of the others.
  machine.drift = size_t{8} << 3 * machine.random.below(3);
  launch.resident.clear();
  launch.started = 0;
  launch.kernel = kernel;
  launch.arguments = arguments;
  launch.grid = {grid[0], grid[1], grid[2]};
  launch.block = {block[0], block[1], block[2]};
  launch.shared_bytes = shared_bytes;
  bool failed = sigsetjmp(machine.exit, 1) != 0;
  if (!failed) {
    if (!kernel) fail("the module has no such kernel");
    if (block[0] * block[1] * block[2] > kernel->max_threads)
      fail("%u threads, but its launch bounds are %u", block[0] * block[1] * block[2],
           kernel->max_threads);
    run_blocks(least_resident + machine.random.below(3));
  }
  if (failed) std::snprintf(message, message_bytes, "%s", machine.message.c_str());
  return failed ? 1 : 0;
}

}  // namespace emulator

#define EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))
EMULATOR_EXPORT void fa2tvm_emulate_order(uint64_t seed, unsigned resident) {
  emulator::seed = seed;
  emulator::least_resident = resident;
}
EMULATOR_EXPORT void fa2tvm_emulate_memory(const char* name, const void* address, size_t bytes,
                                           int writable) {
  auto begin = reinterpret_cast<uintptr_t>(address);
  if (bytes) {
    emulator::known_memory.push_back({name, begin, begin + bytes, writable != 0});
  } else {
    emulator::known_memory.clear();
  }
}

// The table of the module's kernels becomes its entry.
#define EMULATOR_MODULE(kernels)                                                              \
  EMULATOR_EXPORT int fa2tvm_emulate(const char* kernel, const unsigned grid[3],              \
                                     const unsigned block[3], unsigned dynamic_shared_bytes,  \
                                     void** arguments, char* message, size_t message_bytes) { \
    return emulator::emulate(kernels, sizeof kernels / sizeof *kernels, kernel, grid, block,  \
                             dynamic_shared_bytes, arguments, message, message_bytes);        \
  }
