// A kernel that turns 64 floats round, up to its body, with helpers as TVM writes them. Shared memory
// is 64 floats, then barriers.
#ifndef uint
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
#endif
__forceinline__ __device__ unsigned int address_of(void* p) {
    return __cvta_generic_to_shared(p);
}
__forceinline__ __device__ void mbarrier_init(uint32_t __addr, uint32_t __count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :  : "r"(__addr), "r"(__count) : "memory");
}
__forceinline__ __device__ void mbarrier_arrive(uint32_t __addr, uint32_t __count) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" :  : "r"(__addr), "r"(__count) : "memory");
}
__forceinline__ __device__ void arrive_expect_tx(uint32_t __addr, uint32_t __tx_count) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :  : "r"(__addr), "r"(__tx_count) : "memory");
}
__forceinline__ __device__ void mbarrier_wait(void* barrier, int phase) {
    unsigned int barrier_addr_int = __cvta_generic_to_shared(barrier);
    unsigned int ticks = 0x989680;
    asm volatile(
        "{\n"
        ".reg .pred                P1;\n"
        "LAB_WAIT:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 P1, [%0], %1, %2;\n"
        "@P1                       bra.uni DONE;\n"
        "bra.uni                   LAB_WAIT;\n"
        "DONE:\n"
        "}\n"
        :: "r"(barrier_addr_int), "r"(phase), "r"(ticks) : "memory");
}
__forceinline__ __device__ void bulk_load(uint32_t __dst, const void* __src, uint32_t __size, uint32_t __bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :  : "r"(__dst), "l"(__src), "r"(__size), "r"(__bar) : "memory");
}
__forceinline__ __device__ void bar_sync(uint32_t __a, uint32_t __b) {
  asm volatile("bar.sync %0, %1;" :  : "r"(__a), "r"(__b) : "memory");
}
extern "C" __global__ void __launch_bounds__(64) turn_kernel(float* __restrict__ from_ptr, float* __restrict__ to_ptr);
extern "C" __global__ void __launch_bounds__(64) turn_kernel(float* __restrict__ from_ptr, float* __restrict__ to_ptr) {
  int t = ((int)threadIdx.x);
  extern __shared__ __align__(64) uchar pool_buf_ptr[];
