#include "tests/cpp/device/memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/cpp/device/streams.h"

namespace smp::late {
namespace {

constexpr int kFill = 0xFF;
constexpr size_t kSmallest = 512;

size_t bytes_of_device() {
  static const size_t bytes = [] {
    const char* text = std::getenv("SMP_LATE_MEMORY_MB");
    const int64_t megabytes = text == nullptr ? 4096 : std::atoll(text);
    TORCH_CHECK(megabytes > 0, "SMP_LATE_MEMORY_MB must be positive; got ",
                text);
    return static_cast<size_t>(megabytes) << 20;
  }();
  return bytes;
}

// Pages of all devices, side by side. The system gives a page when it is first
// used, so large devices cost nothing.
struct Pages {
  int file = -1;
  size_t size = 0;
  char* forbidden = nullptr;  // addresses of tensors
  char* usable = nullptr;     // addresses for streams

  Pages() : size(bytes_of_device() * num_devices()) {
    file = memfd_create("late_device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0,
                "late device: no memory: ", std::strerror(errno));
    forbidden = map(PROT_NONE);
    usable = map(PROT_READ | PROT_WRITE);
  }

  char* map(int protection) const {
    void* begin =
        mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(begin != MAP_FAILED,
                "late device: cannot map memory: ", std::strerror(errno));
    return static_cast<char*>(begin);
  }

  bool holds(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    return at >= forbidden && at < forbidden + size;
  }
};

const Pages& pages() {
  static const Pages& once = *new Pages;
  return once;
}

struct Block {
  char* begin;
  size_t size;
  c10::Stream owner;
  std::vector<c10::Stream> users;  // other streams
};

// A freed block that other streams may still use.
struct Waiting {
  Block block;
  std::vector<MarkPtr> marks;
};

// Rounds up, so that tensors of similar sizes share blocks; by an eighth at
// most.
size_t rounded(size_t num_bytes) {
  size_t step = kSmallest;
  while (step * 8 < num_bytes) step *= 2;
  return (num_bytes + step - 1) / step * step;
}

void fill(const Block& block) {
  enqueue_always(block.owner, [to = touchable(block.begin), size = block.size] {
    std::memset(to, kFill, size);
  });
}

class CachingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::DeviceIndex index = current_device();
    if (num_bytes == 0) return {nullptr, device(index)};
    const c10::Stream stream = current_stream(index);
    const size_t size = rounded(num_bytes);
    std::unique_lock lock(mutex_);
    look_at_waiting();
    char* begin = take(stream, size);
    if (begin == nullptr) {
      lock.unlock();
      empty_cache();
      lock.lock();
      begin = take(stream, size);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, begin != nullptr,
                     "late device out of memory: ", num_bytes,
                     " bytes asked for, ", stats_.at(index).reserved_bytes,
                     " of ", bytes_of_device(), " in use");
    used_.emplace(begin, Block{begin, size, stream, {}});
    MemoryStats& stats = stats_.at(index);
    stats.allocated_bytes += static_cast<int64_t>(size);
    stats.peak_bytes = std::max(stats.peak_bytes, stats.allocated_bytes);
    return {begin, begin, &free_block, device(index)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    run_now(current_stream(current_device()),
            [=] { std::memcpy(touchable(to), touchable(from), num_bytes); });
  }

  void give(void* begin) {
    const std::lock_guard lock(mutex_);
    const auto found = used_.find(static_cast<char*>(begin));
    Block block = std::move(found->second);
    used_.erase(found);
    stats_.at(block.owner.device_index()).allocated_bytes -=
        static_cast<int64_t>(block.size);
    std::vector<MarkPtr> marks;
    for (const c10::Stream& user : block.users) marks.push_back(mark_end(user));
    waiting_.push_back({std::move(block), std::move(marks)});
    look_at_waiting();
  }

  void record(void* begin, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    const auto found = used_.find(static_cast<char*>(begin));
    if (found == used_.end()) return;
    Block& block = found->second;
    const bool is_known = std::find(block.users.begin(), block.users.end(),
                                    stream) != block.users.end();
    if (stream != block.owner && !is_known) block.users.push_back(stream);
  }

  void release_free() {
    const std::lock_guard lock(mutex_);
    look_at_waiting();
    for (auto& [key, blocks] : free_) {
      for (char* begin : blocks) return_pages(begin, std::get<2>(key));
    }
    free_.clear();
  }

  MemoryStats stats(c10::DeviceIndex index) {
    const std::lock_guard lock(mutex_);
    look_at_waiting();
    MemoryStats stats = stats_.at(index);
    stats.total_bytes = static_cast<int64_t>(bytes_of_device());
    return stats;
  }

  void reset_peak(c10::DeviceIndex index) {
    const std::lock_guard lock(mutex_);
    stats_.at(index).peak_bytes = stats_.at(index).allocated_bytes;
  }

 private:
  using Key = std::tuple<c10::DeviceIndex, c10::StreamId, size_t>;

  static void free_block(void* begin);

  // Filled, then free for the owner: what it queues next comes behind.
  void look_at_waiting() {
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      const auto& marks = it->marks;
      if (!std::all_of(marks.begin(), marks.end(),
                       [](const MarkPtr& mark) { return mark->is_fired(); })) {
        ++it;
        continue;
      }
      const Block& block = it->block;
      fill(block);
      free_[{block.owner.device_index(), block.owner.id(), block.size}]
          .push_back(block.begin);
      it = waiting_.erase(it);
    }
  }

  char* take(const c10::Stream& stream, size_t size) {
    auto& blocks = free_[{stream.device_index(), stream.id(), size}];
    if (blocks.empty()) return take_pages(stream.device_index(), size);
    char* begin = blocks.back();
    blocks.pop_back();
    return begin;
  }

  // New memory, from the first hole that fits.
  char* take_pages(c10::DeviceIndex index, size_t size) {
    Holes& holes = holes_of(index);
    const auto hole = std::find_if(holes.begin(), holes.end(), [&](auto& one) {
      return one.second >= size;
    });
    if (hole == holes.end()) return nullptr;
    char* begin = hole->first;
    const size_t left = hole->second - size;
    holes.erase(hole);
    if (left > 0) holes[begin + size] = left;
    stats_.at(index).reserved_bytes += static_cast<int64_t>(size);
    std::memset(touchable(begin), kFill, size);
    return begin;
  }

  void return_pages(char* begin, size_t size) {
    const auto index = static_cast<c10::DeviceIndex>(device_of(begin));
    Holes& holes = holes_of(index);
    stats_.at(index).reserved_bytes -= static_cast<int64_t>(size);
    // Whole pages only; the others have another block's bytes as well.
    fallocate(pages().file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              begin - pages().forbidden, static_cast<off_t>(size));
    auto hole = holes.emplace(begin, size).first;
    const auto next = std::next(hole);
    if (next != holes.end() && begin + size == next->first) {
      hole->second += next->second;
      holes.erase(next);
    }
    if (hole == holes.begin()) return;
    const auto before = std::prev(hole);
    if (before->first + before->second != hole->first) return;
    before->second += hole->second;
    holes.erase(hole);
  }

  using Holes = std::map<char*, size_t>;

  Holes& holes_of(c10::DeviceIndex index) {
    const auto [entry, is_new] = holes_.try_emplace(index);
    if (is_new) {
      char* begin = pages().forbidden + bytes_of_device() * index;
      entry->second[begin] = bytes_of_device();
    }
    return entry->second;
  }

  std::mutex mutex_;  // guards all that follows
  std::map<char*, Block> used_;
  std::map<Key, std::vector<char*>> free_;
  std::list<Waiting> waiting_;
  std::map<c10::DeviceIndex, Holes> holes_;
  std::array<MemoryStats, kMostDevices> stats_;
};

CachingAllocator& the_allocator() {
  static CachingAllocator& once = *new CachingAllocator;
  return once;
}

void CachingAllocator::free_block(void* begin) { the_allocator().give(begin); }

// ------------------------------------------------------------------- faults

struct sigaction previous_action;

// Only functions that a signal's handler may call.
void on_fault(int, siginfo_t* info, void*) {
  if (pages().holds(info->si_addr)) {
    std::array<char, 256> text{};
    const int length = std::snprintf(
        text.data(), text.size(),
        "\nsmp late device: the host touched %p, memory of late:%d. A CUDA "
        "device would read or write other numbers, or end the process as "
        "well. Copy the tensor to the host first.\n",
        info->si_addr, device_of(info->si_addr));
    if (write(STDERR_FILENO, text.data(), length) < 0) _exit(139);
  }
  // The access is repeated when this returns, and the handler before is asked.
  sigaction(SIGSEGV, &previous_action, nullptr);
}

}  // namespace

c10::Allocator& allocator() { return the_allocator(); }

void record_use(const c10::DataPtr& data, const c10::Stream& stream) {
  the_allocator().record(data.get(), stream);
}

void* touchable(const void* address) {
  if (address == nullptr) return nullptr;
  TORCH_INTERNAL_ASSERT(pages().holds(address), "late device: ", address,
                        " is not device memory");
  return pages().usable +
         (static_cast<const char*>(address) - pages().forbidden);
}

int device_of(const void* address) {
  if (!pages().holds(address)) return -1;
  const size_t offset = static_cast<const char*>(address) - pages().forbidden;
  return static_cast<int>(offset / bytes_of_device());
}

MemoryStats memory_stats(c10::DeviceIndex index) {
  return the_allocator().stats(index);
}

void reset_peak(c10::DeviceIndex index) { the_allocator().reset_peak(index); }

void empty_cache() {
  for (int i = 0; i < num_devices(); ++i) {
    drain_device(static_cast<c10::DeviceIndex>(i));
  }
  // Once more, because blocks that waited for streams are filled only now.
  memory_stats(0);
  for (int i = 0; i < num_devices(); ++i) {
    drain_device(static_cast<c10::DeviceIndex>(i));
  }
  the_allocator().release_free();
}

void explain_faults() {
  pages();
  struct sigaction action{};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &previous_action);
}

// ------------------------------------------------------------ pinned memory

namespace {

struct Pinned {
  char* begin;
  size_t size;
  std::vector<MarkPtr> marks;

  bool is_over() const {
    return std::all_of(marks.begin(), marks.end(),
                       [](const MarkPtr& mark) { return mark->is_fired(); });
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    const std::lock_guard lock(mutex_);
    free_waiting();
    auto* begin =
        static_cast<char*>(std::aligned_alloc(64, (num_bytes + 63) / 64 * 64));
    TORCH_CHECK_WITH(OutOfMemoryError, begin != nullptr,
                     "no pinned memory for ", num_bytes, " bytes");
    std::memset(begin, kFill, num_bytes);
    used_[begin] = {begin, num_bytes, {}};
    return {begin, begin, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

  bool holds(const void* address) {
    const std::lock_guard lock(mutex_);
    return find(address) != nullptr;
  }

  void record(const void* address, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    if (Pinned* block = find(address)) block->marks.push_back(mark_end(stream));
  }

  void give(void* begin) {
    const std::lock_guard lock(mutex_);
    const auto found = used_.find(static_cast<char*>(begin));
    waiting_.push_back(std::move(found->second));
    used_.erase(found);
    free_waiting();
  }

 private:
  static void free_block(void* begin);

  Pinned* find(const void* address) {
    const auto* at = static_cast<const char*>(address);
    auto next = used_.upper_bound(const_cast<char*>(at));
    if (next == used_.begin()) return nullptr;
    Pinned& block = std::prev(next)->second;
    return at < block.begin + block.size ? &block : nullptr;
  }

  void free_waiting() {
    waiting_.remove_if([](const Pinned& block) {
      if (!block.is_over()) return false;
      std::memset(block.begin, kFill, block.size);
      std::free(block.begin);
      return true;
    });
  }

  std::mutex mutex_;  // guards what follows
  std::map<char*, Pinned> used_;
  std::list<Pinned> waiting_;
};

PinnedAllocator& the_pinned_allocator() {
  static PinnedAllocator& once = *new PinnedAllocator;
  return once;
}

void PinnedAllocator::free_block(void* begin) {
  the_pinned_allocator().give(begin);
}

}  // namespace

c10::Allocator& pinned_allocator() { return the_pinned_allocator(); }

bool is_pinned(const void* address) {
  return the_pinned_allocator().holds(address);
}

void record_pinned_use(const void* address, const c10::Stream& stream) {
  the_pinned_allocator().record(address, stream);
}

}  // namespace smp::late
