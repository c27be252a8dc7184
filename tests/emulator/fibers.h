// Fibers: one stack for each GPU thread, switched between in a few nanoseconds (x86-64, System V).
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

// Saves the registers that a callee must keep, stores the stack pointer in *save, goes on where
// `load` was saved.
extern "C" __attribute__((visibility("hidden"))) void fa2tvm_emulator_switch(void** save,
                                                                             void* load);
asm(R"(
.pushsection .text
.globl fa2tvm_emulator_switch
.hidden fa2tvm_emulator_switch
.type fa2tvm_emulator_switch, @function
fa2tvm_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fa2tvm_emulator_switch, .-fa2tvm_emulator_switch
.popsection
)");

namespace emulator {

constexpr size_t kPage = 4096;

// Memory with a page behind it that nobody may touch.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_((bytes + kPage - 1) / kPage * kPage) {
    void* got = mmap(nullptr, bytes_ + 2 * kPage, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) throw std::runtime_error("no memory for the emulator");
    base_ = static_cast<char*>(got) + kPage;
    mprotect(base_, bytes_, PROT_READ | PROT_WRITE);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_ - kPage, bytes_ + 2 * kPage); }

  char* begin() const { return base_; }
  char* end() const { return base_ + bytes_; }

 private:
  size_t bytes_;
  char* base_;
};

// A stack and where on it its function stopped.
class Fiber {
 public:
  void start(void (*entry)()) {
    auto* top = reinterpret_cast<void**>(stack_.end());
    *--top = nullptr;  // what entry would return to; keeps the alignment of a call
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    pointer_ = top;
  }
  void resume(void** caller) { fa2tvm_emulator_switch(caller, pointer_); }
  void suspend(void* caller) { fa2tvm_emulator_switch(&pointer_, caller); }

 private:
  static constexpr size_t kStackBytes = 128 << 10;
  Guarded stack_{kStackBytes};
  void* pointer_ = nullptr;
};

}  // namespace emulator
