// What the processor refuses: accesses beyond all memory, which fail the launch, and integer
// divisions by zero, which on a GPU have an unspecified result.
#pragma once
#include <signal.h>
#include <ucontext.h>

#include "block.h"

namespace emulator {

// Bytes of the idiv or div at `code` (Intel's manual, volume 2: REX prefix, F7 /6 or /7, ModRM,
// SIB, displacement); 0 if it is something else.
inline size_t division_bytes(const unsigned char* code) {
  size_t bytes = (*code & 0xf0) == 0x40 ? 1 : 0;
  if (code[bytes] != 0xf7) return 0;
  unsigned mode = code[bytes + 1] >> 6, operation = code[bytes + 1] >> 3 & 7,
           base = code[bytes + 1] & 7;
  if (operation < 6) return 0;
  bytes += 2;
  if (mode == 3) return bytes;
  unsigned address = base;
  if (base == 4) address = code[bytes++] & 7;
  if (mode == 1) return bytes + 1;
  return bytes + (mode == 2 || address == 5 ? 4 : 0);
}

inline void on_fault(int signal, siginfo_t* about, void* context) {
  mcontext_t& machine_state = static_cast<ucontext_t*>(context)->uc_mcontext;
  auto* code = reinterpret_cast<const unsigned char*>(machine_state.gregs[REG_RIP]);
  if (signal == SIGFPE && machine.current && division_bytes(code)) {
    uint64_t any = machine.random.next();
    machine_state.gregs[REG_RAX] = static_cast<greg_t>(any & 0xffffffff);
    machine_state.gregs[REG_RDX] = static_cast<greg_t>(any >> 32);
    machine_state.gregs[REG_RIP] += static_cast<greg_t>(division_bytes(code));
    return;
  }
  char text[300];
  std::snprintf(text, sizeof text, "%s%s%s: signal %d, access to %p outside of all memory",
                machine.kernel.c_str(), machine.current ? ": " : "",
                machine.current ? describe(*machine.current).c_str() : "", signal, about->si_addr);
  machine.message = text;
  siglongjmp(machine.exit, 1);
}

class FaultHandler {
 public:
  FaultHandler() {
    stack_t stack = {};
    stack.ss_sp = stack_.begin();
    stack.ss_size = static_cast<size_t>(stack_.end() - stack_.begin());
    sigaltstack(&stack, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &old_[0]);
    sigaction(SIGBUS, &action, &old_[1]);
    sigaction(SIGFPE, &action, &old_[2]);
  }
  ~FaultHandler() {
    sigaction(SIGSEGV, &old_[0], nullptr);
    sigaction(SIGBUS, &old_[1], nullptr);
    sigaction(SIGFPE, &old_[2], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  Guarded stack_{64 << 10};
  stack_t old_stack_;
  struct sigaction old_[3];
};

}  // namespace emulator
