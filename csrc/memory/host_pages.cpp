#include "csrc/memory/host_pages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "csrc/common/check.h"

namespace smp::memory {
namespace {

constexpr uintptr_t kPage = 4096;
constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

uintptr_t round_up(uintptr_t value, uintptr_t unit) {
  return (value + unit - 1) / unit * unit;
}

void* map(size_t size) {
  void* const begin = ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  SMP_CHECK(
      begin != MAP_FAILED, "expected ", size,
      " bytes of host memory, the system has none: ", std::strerror(errno));
  return begin;
}

// Maps memory for huge pages, which begin at multiples of their size. Unmaps
// the rest before and after them at once.
void* map_for_huge_pages(size_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(map(size + kHugePage));
  const uintptr_t used = round_up(begin, kHugePage);
  if (used > begin) ::munmap(reinterpret_cast<void*>(begin), used - begin);
  const uintptr_t end = begin + size + kHugePage;
  if (end > used + size) {
    ::munmap(reinterpret_cast<void*>(used + size), end - used - size);
  }
  auto* const result = reinterpret_cast<void*>(used);
  ::madvise(result, size, MADV_HUGEPAGE);  // without them it is slower only
  return result;
}

struct Mapping {
  void* begin;
  int64_t num_bytes;
};

void delete_mapping(void* mapping) {
  const std::unique_ptr<Mapping> owned(static_cast<Mapping*>(mapping));
  unmap_pages(owned->begin, owned->num_bytes);
}

int64_t bytes_of(int64_t numel, const at::TensorOptions& options) {
  return numel * static_cast<int64_t>(options.dtype().itemsize());
}

bool has_own_pages(int64_t numel, const at::TensorOptions& options) {
  return options.device().is_cpu() &&
         bytes_of(numel, options) >= kOwnPagesBytes;
}

// Returns a tensor in new pages, which are zeros.
at::Tensor in_pages(int64_t numel, const at::TensorOptions& options) {
  const int64_t num_bytes = bytes_of(numel, options);
  at::Storage storage(at::Storage::use_byte_size_t(), num_bytes,
                      take_pages(num_bytes), c10::GetAllocator(at::kCPU),
                      /*resizable=*/true);
  return at::empty({0}, options).set_(std::move(storage), 0, {numel});
}

}  // namespace

void* map_pages(int64_t num_bytes) {
  SMP_ASSERT(num_bytes > 0, num_bytes, " bytes of pages");
  const size_t size = round_up(static_cast<uintptr_t>(num_bytes), kPage);
  return size < kHugePage ? map(size) : map_for_huge_pages(size);
}

void unmap_pages(void* begin, int64_t num_bytes) {
  ::munmap(begin, round_up(static_cast<uintptr_t>(num_bytes), kPage));
}

at::DataPtr take_pages(int64_t num_bytes) {
  void* const begin = map_pages(num_bytes);
  return {begin, new Mapping{begin, num_bytes}, &delete_mapping,
          at::Device(at::kCPU)};
}

at::Tensor empty_in_pages(int64_t numel, const at::TensorOptions& options) {
  return has_own_pages(numel, options) ? in_pages(numel, options)
                                       : at::empty({numel}, options);
}

at::Tensor zeros_in_pages(int64_t numel, const at::TensorOptions& options) {
  return has_own_pages(numel, options) ? in_pages(numel, options)
                                       : at::zeros({numel}, options);
}

}  // namespace smp::memory
