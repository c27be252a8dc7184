// Products of a warpgroup. Its four warps run on their own: each makes its 16 of the 64 rows, as
// late or as early as its waits allow. (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions")
#pragma once
#include <limits>

#include "matrix.h"

namespace emulator {

// PTX ISA, "Matrix Descriptor Format".
struct Descriptor {
  uint64_t bits;
  uint32_t field(int first, int count) const {
    return static_cast<uint32_t>(bits >> first & ((1u << count) - 1));
  }
  uint32_t start() const { return field(0, 14) << 4; }
  uint32_t leading() const { return field(16, 14) << 4; }
  uint32_t stride() const { return field(32, 14) << 4; }
  uint32_t base_offset() const { return field(49, 3); }
  // Chunks of 16 bytes that a row of the swizzle pattern has: 1 (none), 8, 4 or 2.
  uint32_t chunks() const { return field(62, 2) ? 16u >> field(62, 2) : 1; }

  // PTX ISA, "Shared Memory Matrix Layout" and "Strides". Where eight neighbours lie that start at
  // column k (K-major), or at row or column mn (MN-major); both in elements of two bytes.
  uint32_t k_major(uint32_t mn, uint32_t k) const {
    uint32_t pitch = 16 * chunks(), next = chunks() == 1 ? leading() : 16;
    return swizzled(start() + mn / 8 * stride() + mn % 8 * pitch + k / 8 * next);
  }
  uint32_t mn_major(uint32_t mn, uint32_t k) const {
    uint32_t chunk = mn / 8, c = chunks();
    uint32_t along_k = c == 1 ? leading() : stride(), along_mn = c == 1 ? stride() : leading();
    return swizzled(start() + chunk / c * along_mn + chunk % c * 16 + k % 8 * 16 * c +
                    k / 8 * along_k);
  }
  // The pattern repeats with the address, as that of TMA does.
  uint32_t swizzled(uint32_t address) const {
    return address ^ ((address >> 7 & (chunks() - 1)) << 4);
  }
};

struct Product {
  unsigned columns;
  bool a_in_registers, accumulate;
  Descriptor a, b;
  int scale_a, scale_b, mn_major_a, mn_major_b;
  // What the four warps of a warpgroup must agree on.
  uint64_t digest() const {
    Random hash{a.bits ^ b.bits * 0x9e3779b97f4a7c15};
    return hash.next() ^ (columns * 64ull + accumulate * 32u + a_in_registers * 16u);
  }
};

// A warp's part of one wgmma.mma_async.
struct AnyProduct : Async {
  using Async::Async;
  Product product;
  Warp* warp;
  float* d[kWarp];
  std::vector<float> accumulators;  // of each lane, once what comes before has put them there
  uint32_t a[kWarp][4];
  float* of(size_t lane) { return accumulators.data() + lane * product.columns / 2; }
  bool same_registers(const AnyProduct& other) const {
    const float *begin = d[0], *end = begin + product.columns / 2;
    const float *theirs = other.d[0], *their_end = theirs + other.product.columns / 2;
    if (begin == theirs && end == their_end) return true;
    if (begin < their_end && theirs < end)
      fail("wgmma.mma_async whose accumulators overlap those of one under way are not emulated");
    return false;
  }
};

struct WgmmaQueue {
  std::vector<std::shared_ptr<AnyProduct>> open;                 // not committed
  std::vector<std::vector<std::shared_ptr<AnyProduct>>> groups;  // committed, not waited for
  std::shared_ptr<AnyProduct> last;
  size_t issued = 0;
  bool fenced = false;

  // In the order of issue.
  template <typename Visit>
  void each(Visit visit) {
    for (auto& group : groups)
      for (auto& product : group) visit(product);
    for (auto& product : open) visit(product);
  }
};

template <typename Half>
struct WarpProduct : AnyProduct {
  using AnyProduct::AnyProduct;

  static void widen(float* to, const char* from, float scale) {
    __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    _mm256_storeu_ps(to, _mm256_mul_ps(Half::widen(eight), _mm256_set1_ps(scale)));
  }

  // An operand of shared memory as [k][mn].
  template <size_t n>
  void gather(float (&to)[16][n], const Descriptor& from, bool mn_major, uint32_t first,
              uint32_t count, int scale) const {
    if (mn_major) {
      for (uint32_t k = 0; k < 16; ++k)
        for (uint32_t mn = 0; mn < count; mn += 8)
          widen(&to[k][mn], read_asynchronously(*block, from.mn_major(first + mn, k), 16, what),
                scale);
      return;
    }
    float eight[8];
    for (uint32_t mn = 0; mn < count; ++mn)
      for (uint32_t k = 0; k < 16; k += 8) {
        widen(eight, read_asynchronously(*block, from.k_major(first + mn, k), 16, what), scale);
        for (uint32_t each = 0; each < 8; ++each) to[k + each][mn] = eight[each];
      }
  }

  void perform() override {
    static float left[16][16], turned[16][16], right[16][256], result[16][256];
    auto each_register = [&](auto visit) {
      // PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16": accumulator D.
      for (size_t lane = 0; lane < kWarp; ++lane)
        for (size_t i = 0; i < product.columns / 2; ++i)
          visit(lane, i, result[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]);
    };
    if (product.a_in_registers) {
      const uint32_t* words[kWarp];
      for (size_t lane = 0; lane < kWarp; ++lane) words[lane] = a[lane];
      widen_a<Half>(left, words);
      for (auto& row : left)
        for (float& x : row) x *= static_cast<float>(product.scale_a);
    } else {
      gather(turned, product.a, product.mn_major_a, warp->number % 4 * 16, 16, product.scale_a);
      for (size_t row = 0; row < 16; ++row)
        for (size_t k = 0; k < 16; ++k) left[row][k] = turned[k][row];
    }
    gather(right, product.b, product.mn_major_b, 0, product.columns, product.scale_b);
    each_register(
        [&](size_t lane, size_t i, float& x) { x = product.accumulate ? of(lane)[i] : 0; });
    multiply_add(result, left, right, product.columns);
    // To the next product on the same registers; to the registers themselves if there is none.
    AnyProduct* next = nullptr;
    bool behind = false;
    warp->wgmma->each([&](auto& other) {
      if (behind && !next && !other->done && same_registers(*other)) next = other.get();
      behind = behind || other.get() == this;
    });
    each_register(
        [&](size_t lane, size_t i, float& x) { (next ? next->of(lane) : d[lane])[i] = x; });
  }
};

// What a lane brings along.
struct LaneOperands {
  float* d;
  std::array<uint32_t, 4> a;
};

template <typename Half>
void issue(const Product& product, LaneOperands mine) {
  meet("wgmma.mma_async", ~0u, mine, [&](LaneOperands** lanes) {
    Block& block = *self().block;
    Warp& warp = *self().warp;
    WgmmaQueue& queue = *warp.wgmma;
    for (const Descriptor& operand : {product.a, product.b})
      if (operand.base_offset()) fail("wgmma.mma_async with a base offset is not emulated");
    auto& products = block.products[warp.number / 4];
    if (queue.issued == products.size()) products.push_back(product.digest());
    if (products[queue.issued++] != product.digest())
      fail("wgmma.mma_async number %zu differs from that of another warp of the warpgroup",
           queue.issued);
    auto made = std::make_shared<WarpProduct<Half>>("wgmma.mma_async", &block);
    made->product = product;
    made->warp = &warp;
    made->before = queue.last && !queue.last->done ? queue.last : nullptr;
    made->accumulators.resize(kWarp * product.columns / 2);
    for (size_t lane = 0; lane < kWarp; ++lane) {
      made->d[lane] = lanes[lane]->d;
      std::copy(lanes[lane]->a.begin(), lanes[lane]->a.end(), made->a[lane]);
    }
    bool chained = false;
    queue.each(
        [&](auto& other) { chained = chained || (!other->done && made->same_registers(*other)); });
    if (!chained && !queue.fenced)
      fail("wgmma.mma_async on registers that no wgmma.fence has handed over since the last wait");
    // Until the product is waited for, its registers hold what nobody may read.
    for (size_t lane = 0; !chained && lane < kWarp; ++lane)
      for (size_t i = 0; i < product.columns / 2; ++i) {
        made->of(lane)[i] = made->d[lane][i];
        made->d[lane][i] = std::numeric_limits<float>::signaling_NaN();
      }
    queue.open.push_back(made);
    queue.last = made;
    happen(made);
  });
}

template <size_t n>
float* contiguous(const std::array<float*, n>& registers) {
  for (size_t i = 0; i < n; ++i)
    if (registers[i] != registers[0] + i)
      fail("wgmma.mma_async with accumulators that are not one after another is not emulated");
  return registers[0];
}

// PTX ISA, "wgmma.mma_async": A from registers, or from shared memory.
template <unsigned columns, typename Half>
void wgmma(std::array<float*, columns / 2> d, std::array<uint32_t, 4> a, uint64_t b,
           bool accumulate, int scale_a, int scale_b, int mn_major_b) {
  issue<Half>({columns, true, accumulate, {0}, {b}, scale_a, scale_b, 0, mn_major_b},
              {contiguous(d), a});
}
template <unsigned columns, typename Half>
void wgmma(std::array<float*, columns / 2> d, uint64_t a, uint64_t b, bool accumulate, int scale_a,
           int scale_b, int mn_major_a, int mn_major_b) {
  issue<Half>({columns, false, accumulate, {a}, {b}, scale_a, scale_b, mn_major_a, mn_major_b},
              {contiguous(d), {}});
}

// PTX ISA, "wgmma.fence", "wgmma.commit_group" and "wgmma.wait_group".
template <typename Do>
void wgmma_together(const char* what, Do act) {
  int nothing = 0;
  meet(what, ~0u, nothing, [&](int**) { act(*self().warp->wgmma); });
}
inline void wgmma_fence() {
  wgmma_together("wgmma.fence", [](WgmmaQueue& queue) { queue.fenced = true; });
}
inline void wgmma_commit() {
  wgmma_together("wgmma.commit_group", [](WgmmaQueue& queue) {
    queue.groups.push_back(std::move(queue.open));
    queue.open.clear();
  });
}
inline void wgmma_wait(size_t left) {
  wgmma_together("wgmma.wait_group", [&](WgmmaQueue& queue) {
    if (queue.groups.size() > left) {
      auto end = queue.groups.end() - static_cast<ptrdiff_t>(left);
      for (auto group = queue.groups.begin(); group != end; ++group)
        for (auto& product : *group) product->land();
      queue.groups.erase(queue.groups.begin(), end);
    }
    queue.fenced = false;
  });
}

inline void check_products(const Block& block) {
  for (auto& warp : block.warps)
    if (warp->wgmma->issued != block.products[warp->number / 4].size())
      fail("warp %u issued %zu wgmma.mma_async, another one of its warpgroup %zu", warp->number,
           warp->wgmma->issued, block.products[warp->number / 4].size());
}

}  // namespace emulator
