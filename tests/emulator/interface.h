// What a library of an emulated module exports to the driver stand-in.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
// Run a kernel of the module to its end. `arguments[n]` points to the n-th parameter's value.
// Returns 0, or not 0 and one sentence in `message`.
int fa2tvm_emulate(const char *kernel, const unsigned grid[3], const unsigned block[3],
                   unsigned dynamic_shared_bytes, void **arguments, char *message,
                   size_t message_bytes);

// The seed of the adversarial order of the launches from now on, and how many thread blocks at least
// are at work together.
void fa2tvm_emulate_order(uint64_t seed, unsigned resident);

// Memory that kernels may access from now on, beside the arguments; the first call turns checks
// on. `bytes` 0 forgets all.
void fa2tvm_emulate_memory(const char *name, const void *address, size_t bytes, int writable);
}
