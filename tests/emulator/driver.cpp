// Stand-ins for libcuda.so.1 and libcudart.so.13: one device, whose memory is the host's and whose
// kernels are functions of emulated modules. A launch has ended when it returns.
//
// A module's image is "fa2tvm-emulated:" and the path of a library with the functions of
// interface.h. What goes wrong is a CUDA error whose name is a sentence.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "interface.h"
#include "tensor_map.h"

using emulator::TensorMap;

namespace {

constexpr int SUCCESS = 0, INVALID_VALUE = 1, NOT_SUPPORTED = 801, FAILED = 999;
constexpr unsigned STATIC_SHARED_LIMIT = 48 << 10;
constexpr int MAX_DYNAMIC_SHARED = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr const char *IMAGE = "fa2tvm-emulated:";

struct Memory {
  std::string name;
  const void *address;
  size_t bytes;
  int writable;
};

struct Module {
  void *library;
  decltype(&fa2tvm_emulate) emulate;
  decltype(&fa2tvm_emulate_order) order;
  decltype(&fa2tvm_emulate_memory) memory;
};

struct Function {
  Module *module;
  std::string name;
  unsigned shared_limit = STATIC_SHARED_LIMIT;
};

// The head of CUDA's CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
};

std::string last_error;
std::vector<Memory> memories;
uint64_t order_seed = 0;
unsigned multiprocessors = 1;
unsigned shared_bytes_of_a_block = 0;
int mutant = -1;

int fail(int code, std::string sentence) {
  last_error = std::move(sentence);
  return code;
}

template <typename... Values>
std::string text(const char *format, Values... values) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, format, values...);
  return buffer;
}

std::string why_no_launch(const Function &function, const LaunchConfig &config) {
  const unsigned *grid = config.grid, *block = config.block;
  unsigned threads = block[0] * block[1] * block[2];
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffffu || grid[1] > 65535 ||
      grid[2] > 65535)
    return text("the grid of %s is (%u, %u, %u), but its sides are 1 to (2147483647, 65535, 65535)",
                function.name.c_str(), grid[0], grid[1], grid[2]);
  if (!threads || threads > 1024 || block[2] > 64)
    return text("a block of %s has (%u, %u, %u) threads, but 1 to 1024 are possible",
                function.name.c_str(), block[0], block[1], block[2]);
  if (config.shared_bytes > function.shared_limit)
    return text("%s asks for %u bytes of shared memory, but its attribute allows %u",
                function.name.c_str(), config.shared_bytes, function.shared_limit);
  if (config.attribute_count)
    return text("%s is launched with %u attributes (a cluster?), but the emulator knows none",
                function.name.c_str(), config.attribute_count);
  return "";
}

std::string why_no_map(int type, unsigned rank, const void *base, const uint64_t *sizes,
                       const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                       int interleave, int swizzle, unsigned element_bytes) {
  if (!element_bytes) return text("tensor map: data type %d is unknown to the emulator", type);
  if (rank < 1 || rank > 5) return text("tensor map: rank is %u, but it must be 1 to 5", rank);
  if (interleave) return text("tensor map: interleave %d is unknown to the emulator", interleave);
  if (swizzle < 0 || swizzle > 3)
    return text("tensor map: swizzle is %d, but it must be 0 to 3", swizzle);
  if (!base || reinterpret_cast<uintptr_t>(base) % 16)
    return text("tensor map: the base %p is not a multiple of 16 bytes", base);
  for (unsigned i = 0; i < rank; ++i) {
    if (!sizes[i] || sizes[i] >= (1ull << 32))
      return text("tensor map: size %u is %llu, but it must be 1 to 2^32 - 1 here", i,
                  static_cast<unsigned long long>(sizes[i]));
    if (!box[i] || box[i] > 256)
      return text("tensor map: box %u is %u, but it must be 1 to 256", i, box[i]);
    if (!steps[i] || steps[i] > 8)
      return text("tensor map: element stride %u is %u, but it must be 1 to 8", i, steps[i]);
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= (1ull << 40)))
      return text("tensor map: stride %u is %llu bytes, but it must be a multiple of 16 below 2^40",
                  i + 1, static_cast<unsigned long long>(strides[i]));
  }
  unsigned row = box[0] * element_bytes, span = swizzle ? 16u << swizzle : row;
  if (row % 16 || row > span)
    return text("tensor map: a row of the box is %u bytes, but it must be a multiple of 16 of at "
                "most %u for swizzle %d", row, span, swizzle);
  return "";
}

unsigned bytes_of(int type) {
  // CUtensorMapDataType: 8-bit, 16-bit, 32-bit, 32, 64, 64 integers; f16, f32, f64, bf16, ...
  static const unsigned table[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  return type >= 0 && type < 13 ? table[type] : 0;
}

}  // namespace

extern "C" {

// What the process that calls the module says beforehand.

void fa2tvm_driver_order(uint64_t seed, unsigned resident) {
  order_seed = seed;
  multiprocessors = resident;
}

void fa2tvm_driver_mutant(int site) { mutant = site; }

void fa2tvm_driver_shared_bytes(unsigned bytes) { shared_bytes_of_a_block = bytes; }

void fa2tvm_driver_memory(const char *name, const void *address, size_t bytes, int writable) {
  if (bytes)
    memories.push_back({name, address, bytes, writable});
  else
    memories.clear();
}

// libcuda.so.1

int cuGetErrorName(int code, const char **name) {
  *name = code == SUCCESS ? "success" : last_error.c_str();
  return SUCCESS;
}

int cuGetErrorString(int code, const char **sentence) { return cuGetErrorName(code, sentence); }

int cuDeviceGetName(char *name, int length, int) {
  std::snprintf(name, length, "emulated");
  return SUCCESS;
}

int cuModuleLoadData(Module **module, const char *image) {
  if (std::strncmp(image, IMAGE, std::strlen(IMAGE)))
    return fail(INVALID_VALUE, "the module holds machine code, but only emulated modules run here");
  void *library = dlopen(image + std::strlen(IMAGE), RTLD_NOW | RTLD_LOCAL);
  if (!library) return fail(INVALID_VALUE, dlerror());
  auto found = new Module{library, nullptr, nullptr, nullptr};
  found->emulate = reinterpret_cast<decltype(found->emulate)>(dlsym(library, "fa2tvm_emulate"));
  found->order = reinterpret_cast<decltype(found->order)>(dlsym(library, "fa2tvm_emulate_order"));
  found->memory =
      reinterpret_cast<decltype(found->memory)>(dlsym(library, "fa2tvm_emulate_memory"));
  *module = found;
  if (!found->emulate || !found->order || !found->memory) return fail(INVALID_VALUE, dlerror());
  return SUCCESS;
}

int cuModuleUnload(Module *module) {
  dlclose(module->library);
  delete module;
  return SUCCESS;
}

int cuModuleGetFunction(Function **function, Module *module, const char *name) {
  *function = new Function{module, name};
  return SUCCESS;
}

int cuFuncSetAttribute(Function *function, int attribute, int value) {
  if (attribute != MAX_DYNAMIC_SHARED)
    return fail(NOT_SUPPORTED, text("function attribute %d is unknown to the emulator", attribute));
  if (static_cast<unsigned>(value) > shared_bytes_of_a_block)
    return fail(INVALID_VALUE, text("%s asks for %d bytes of shared memory, but a block of this "
                                    "device has %u", function->name.c_str(), value,
                                    shared_bytes_of_a_block));
  function->shared_limit = value;
  return SUCCESS;
}

int cuLaunchKernelEx(const LaunchConfig *config, Function *function, void **arguments, void **) {
  std::string reason = why_no_launch(*function, *config);
  if (!reason.empty()) return fail(INVALID_VALUE, reason);
  Module *module = function->module;
  module->order(order_seed, multiprocessors);
  module->memory("", nullptr, 0, 0);
  for (const Memory &m : memories) module->memory(m.name.c_str(), m.address, m.bytes, m.writable);
  if (auto site = static_cast<int *>(dlsym(module->library, "fa2tvm_mutant"))) *site = mutant;
  char message[4096] = "";
  if (module->emulate(function->name.c_str(), config->grid, config->block, config->shared_bytes,
                      arguments, message, sizeof message))
    return fail(FAILED, message);
  return SUCCESS;
}

int cuTensorMapEncodeTiled(TensorMap *map, int type, unsigned rank, void *base,
                           const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                           const uint32_t *element_strides, int interleave, int swizzle, int,
                           int fill) {
  unsigned bytes = bytes_of(type);
  std::string reason = why_no_map(type, rank, base, sizes, strides, box, element_strides,
                                  interleave, swizzle, bytes);
  if (!reason.empty()) return fail(INVALID_VALUE, reason);
  TensorMap made{};
  made.base = reinterpret_cast<uint64_t>(base);
  made.magic = TensorMap::kMagic;
  made.element_bytes = bytes;
  made.element_type = type;
  made.rank = rank;
  made.swizzle_bytes = swizzle ? 16 << swizzle : 0;
  made.interleave = interleave;
  made.fill = fill;
  for (unsigned i = 0; i < 5; ++i) {
    bool there = i < rank;
    made.sizes[i] = there ? sizes[i] : 1;
    made.box[i] = there ? box[i] : 1;
    made.element_strides[i] = there ? element_strides[i] : 1;
    if (i > 0 && there) made.strides_bytes[i - 1] = strides[i - 1];
  }
  std::memcpy(map, &made, sizeof made);
  return SUCCESS;
}

// libcudart.so.13

int cudaGetDevice(int *device) { return *device = 0, SUCCESS; }
int cudaGetDeviceCount(int *count) { return *count = 1, SUCCESS; }
int cudaSetDevice(int) { return SUCCESS; }
int cudaStreamSynchronize(void *) { return SUCCESS; }
int cudaGetLastError() { return SUCCESS; }
int cudaPeekAtLastError() { return SUCCESS; }
const char *cudaGetErrorName(int) { return last_error.c_str(); }
const char *cudaGetErrorString(int) { return last_error.c_str(); }

// Nothing that a call of a module needs.
#define ABSENT(name) \
  int name() { return fail(NOT_SUPPORTED, #name " is not part of the emulator"); }
ABSENT(cudaDeviceGetAttribute)
ABSENT(cudaEventCreate)
ABSENT(cudaEventDestroy)
ABSENT(cudaEventElapsedTime)
ABSENT(cudaEventRecord)
ABSENT(cudaEventSynchronize)
ABSENT(cudaFree)
ABSENT(cudaFreeHost)
ABSENT(cudaGetDeviceProperties)
ABSENT(cudaGraphDestroy)
ABSENT(cudaGraphExecDestroy)
ABSENT(cudaGraphInstantiate)
ABSENT(cudaGraphLaunch)
ABSENT(cudaMalloc)
ABSENT(cudaMallocHost)
ABSENT(cudaMemGetInfo)
ABSENT(cudaMemcpyAsync)
ABSENT(cudaMemcpyPeerAsync)
ABSENT(cudaStreamBeginCapture)
ABSENT(cudaStreamCreate)
ABSENT(cudaStreamCreateWithFlags)
ABSENT(cudaStreamDestroy)
ABSENT(cudaStreamEndCapture)
ABSENT(cudaStreamWaitEvent)
}
