// Threads, what they wait for, and what happens later than its instruction: all in the order that
// a seed draws.
#pragma once
#include <setjmp.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fibers.h"

namespace emulator {

constexpr unsigned kWarp = 32;

// splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
struct Random {
  uint64_t state = 0;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  size_t below(size_t n) { return static_cast<size_t>((next() >> 32) * n >> 32); }
  bool one_in(size_t n) { return below(n) == 0; }
};

struct Thread;
struct Block;
struct Warp;

// Threads that sleep until something changes.
using WaitQueue = std::vector<Thread*>;

// What a thread waits for, for the message of a deadlock.
struct Reason {
  const char* what = nullptr;
  uint64_t which = 0;
};

// What happens later than the instruction that asked for it.
struct Async {
  enum class Fate { early, random, late };

  const char* what;
  Block* block;
  Fate fate = Fate::late;
  bool must_end = true;  // before its block does
  bool done = false;
  std::shared_ptr<Async> before;  // happens first

  Async(const char* name, Block* owner) : what(name), block(owner) {}
  virtual ~Async() = default;
  virtual bool ready() const { return !before || before->done || before->ready(); }
  virtual void perform() = 0;

  void land() {
    if (done) return;
    if (before) before->land();
    before.reset();
    done = true;
    perform();
  }
};

// The lanes of a warp that can run, now and at the warp's next turn. A warp runs until no lane can:
// between two meetings its lanes see one state of what other warps change, as those of a real warp
// do, which stay together (generated code has branches that must be uniform, `bra.uni`).
struct Turns {
  std::vector<Thread*> now, next;
  bool listed = false;
};

struct Machine {
  Random random;
  std::string kernel;
  Thread* current = nullptr;
  std::vector<Turns*> runnable;
  std::vector<std::shared_ptr<Async>> pending;
  void* scheduler = nullptr;  // where the scheduler stopped
  std::string message;
  sigjmp_buf exit;
  unsigned leader = 0;  // the lane that elect.sync prefers
  size_t drift = 8;     // meetings of a warp, on average, between turns of others
  uint64_t idle = 0;    // turns in a row in which threads only looked whether something changed
};

inline Machine machine;

inline std::string describe(const Thread& thread);

// Ends the launch with a sentence, from wherever it is called.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  char text[3000];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  machine.message = machine.kernel + ": ";
  if (machine.current) machine.message += describe(*machine.current) + ": ";
  machine.message += text;
  siglongjmp(machine.exit, 1);
}

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  Turns* turns = nullptr;
  unsigned number = 0, lane = 0;
  Index index;
  Reason reason;
  // Of its cp.async and bulk copies: those since the last commit, and the committed groups.
  struct Group {
    std::vector<std::shared_ptr<Async>> copies;
  };
  Group open, open_bulk;
  std::vector<Group> groups, bulk_groups;
};

inline std::string describe(const Thread& thread);

inline void enlist(Thread* thread, bool next) {
  Turns& turns = *thread->turns;
  (next ? turns.next : turns.now).push_back(thread);
  if (!turns.listed) machine.runnable.push_back(&turns);
  turns.listed = true;
}

inline void suspend() { machine.current->fiber.suspend(machine.scheduler); }

inline void wait_in(WaitQueue& queue, Reason reason) {
  Thread* thread = machine.current;
  thread->reason = reason;
  queue.push_back(thread);
  suspend();
  thread->reason = {};
}

// With `next`, not before other warps had a turn.
inline void wake(WaitQueue& queue, bool next = false) {
  machine.idle = 0;
  for (Thread* thread : queue) enlist(thread, next);
  queue.clear();
}

// Now and then other lanes of the warp go first.
inline void preempt() {
  if (!machine.random.one_in(16)) return;
  enlist(machine.current, false);
  suspend();
}

// A thread that looks at memory which another one changes lets other warps go on.
inline void spin(Reason reason) {
  Thread* thread = machine.current;
  ++machine.idle;
  thread->reason = reason;
  enlist(thread, true);
  suspend();
  thread->reason = {};
}

// Either at once, or when a draw says so, or not before somebody has to wait for it.
inline void happen(const std::shared_ptr<Async>& async) {
  async->fate = static_cast<Async::Fate>(machine.random.below(3));
  if (async->fate == Async::Fate::early && async->ready()) {
    async->land();
  } else {
    machine.pending.push_back(async);
  }
}

// One of the things under way happens; with `stuck`, nothing else can go on. False if none can.
inline bool land_one(bool stuck) {
  auto& pending = machine.pending;
  pending.erase(std::remove_if(pending.begin(), pending.end(), [](auto& x) { return x->done; }),
                pending.end());
  size_t start = pending.empty() ? 0 : machine.random.below(pending.size());
  for (size_t tried = 0; tried < (stuck ? pending.size() : std::min<size_t>(1, pending.size()));
       ++tried) {
    std::shared_ptr<Async> async = pending[(start + tried) % pending.size()];
    if ((!stuck && async->fate == Async::Fate::late) || !async->ready()) continue;
    machine.idle = 0;
    async->land();
    return true;
  }
  return false;
}

}  // namespace emulator
