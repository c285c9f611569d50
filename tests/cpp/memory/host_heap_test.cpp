#include "csrc/memory/host_heap.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

namespace smp::memory {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  statm >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

// Blocks that are used and freed in turn with small ones that stay.
struct Mixed {
  explicit Mixed(size_t block_bytes) {
    for (int i = 0; i < 16; ++i) {
      void* const block = std::malloc(block_bytes);
      std::memset(block, 1, block_bytes);
      small.push_back(std::malloc(5000));
      blocks.push_back(block);
    }
    for (void* block : blocks) std::free(block);
  }
  ~Mixed() {
    for (void* block : small) std::free(block);
  }

  std::vector<void*> blocks, small;
};

TEST(HostHeap, trimming_gives_free_memory_below_a_block_back) {
  std::vector<void*> blocks;
  for (int i = 0; i < 512; ++i) {
    blocks.push_back(std::malloc(100 << 10));  // below each mmap threshold
    std::memset(blocks.back(), 1, 100 << 10);
  }
  void* const last = std::malloc(100 << 10);
  const int64_t full = resident_bytes();
  for (void* block : blocks) std::free(block);
  trim_heap();
  EXPECT_LT(resident_bytes(), full - 40 * kMiB);
  std::free(last);
}

size_t heap_bytes() { return ::mallinfo2().arena; }

TEST(HostHeap, large_blocks_leave_no_holes_while_they_are_mapped) {
  {
    const MappedBlocks outer;
    {
      const MappedBlocks inner;
    }
    const int64_t before = resident_bytes();
    const size_t heap = heap_bytes();
    const Mixed mixed(4 * kMiB);
    EXPECT_LT(resident_bytes() - before, 2 * kMiB);
    EXPECT_LT(heap_bytes(), heap + 2 * kMiB);
  }
  const size_t heap = heap_bytes();
  const Mixed mixed(4 * kMiB);
  EXPECT_GT(heap_bytes(), heap + 40 * kMiB) << "the heap as it always is";
}

}  // namespace
}  // namespace smp::memory
