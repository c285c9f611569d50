#include "tests/cpp/kernels/emulated/races.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

namespace smp::kernels::emulated {

namespace {

// Moments in codes are written byte by byte.
constexpr uintptr_t kGrain = 1;
constexpr uintptr_t kPage = 4096;
constexpr uint16_t kNone = 0xffff;

// The last accesses to a grain. Times are numbers of barriers.
struct Cell {
  uint32_t written = 0;
  uint32_t read = 0;
  uint16_t writer = kNone;
  uint16_t reader = kNone;
  uint16_t other_reader = kNone;  // in the same time as `reader`
  uint16_t variable = 0;          // index into `variables`; 0: of the device
};

struct Variable {
  const char* name;
  uintptr_t begin;
};

using Page = std::unique_ptr<Cell[]>;

struct CachedPage {
  uintptr_t number = 0;
  Cell* cells = nullptr;
};

struct Watch {
  bool is_on = false;
  uint32_t now = 1;
  uint32_t launch_begin = 1;
  uint32_t block_begin = 1;
  uint16_t thread = 0;
  uintptr_t stack = 0;
  size_t stack_bytes = 0;
  CachedPage cache[1024];
};

Watch watch;

// Functions of this file may share their instances of templates with the
// kernels, whose accesses are watched.
class Unwatched {
 public:
  Unwatched() : was_on_(watch.is_on) { watch.is_on = false; }
  ~Unwatched() { watch.is_on = was_on_; }
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;

 private:
  bool was_on_;
};

std::vector<Variable>& variables() {
  static std::vector<Variable> all = {{nullptr, 0}};
  return all;
}

Cell* page_of(uintptr_t number) {
  static std::unordered_map<uintptr_t, Page> pages;
  const Unwatched unwatched;
  Page& page = pages[number];
  if (page == nullptr) page = std::make_unique<Cell[]>(kPage / kGrain);
  return page.get();
}

// Calls touch(cell, address) for each grain of [begin, begin + bytes).
template <typename Touch>
void for_cells(uintptr_t begin, size_t bytes, Touch&& touch) {
  const uintptr_t end = begin + bytes;
  for (uintptr_t a = begin / kGrain * kGrain; a < end;) {
    const uintptr_t number = a / kPage;
    CachedPage& cached = watch.cache[number % std::size(watch.cache)];
    if (cached.cells == nullptr || cached.number != number) {
      cached = {number, page_of(number)};
    }
    Cell* cell = cached.cells + a % kPage / kGrain;
    const uintptr_t end_here = std::min(end, (number + 1) * kPage);
    for (; a < end_here; a += kGrain) touch(*cell++, a);
  }
}

bool is_of_other_block(const Cell& cell, uint32_t time) {
  return cell.variable == 0 && time >= watch.launch_begin &&
         time < watch.block_begin;
}

// Returns the thread whose access at `time` nothing orders before this one.
uint16_t unordered(const Cell& cell, uint32_t time, uint16_t thread) {
  if (time == watch.now) return thread == watch.thread ? kNone : thread;
  return is_of_other_block(cell, time) ? thread : kNone;
}

void report(const Cell& cell, uintptr_t address, bool is_write, uint16_t other,
            uint32_t other_time, bool is_other_write) {
  const Unwatched unwatched;
  Race::Kind kind = Race::kInBlock;
  if (other == kNone) kind = Race::kUnwritten;
  if (is_of_other_block(cell, other_time)) kind = Race::kBetweenBlocks;
  const Variable& variable = variables()[cell.variable];
  report_race({kind, variable.name, address, address - variable.begin,
               watch.thread, is_write, other, is_other_write});
}

inline void read(Cell& cell, uintptr_t address) {
  if (cell.read == watch.now && cell.written < watch.launch_begin &&
      cell.reader == watch.thread && cell.variable == 0) {
    return;  // most accesses are to the parameters of the kernel
  }
  const uint16_t writer = unordered(cell, cell.written, cell.writer);
  const bool is_unwritten =
      cell.variable != 0 && cell.written < watch.block_begin;
  if (writer != kNone || is_unwritten) {
    report(cell, address, false, writer, cell.written, true);
  }
  if (cell.read != watch.now) {
    cell.read = watch.now;
    cell.reader = watch.thread;
    cell.other_reader = kNone;
  } else if (cell.reader != watch.thread) {
    cell.other_reader = watch.thread;
  }
}

inline void write(Cell& cell, uintptr_t address) {
  const uint16_t writer = unordered(cell, cell.written, cell.writer);
  uint16_t reader = unordered(cell, cell.read, cell.reader);
  if (reader == kNone && cell.read == watch.now) reader = cell.other_reader;
  if (writer != kNone) {
    report(cell, address, true, writer, cell.written, true);
  } else if (reader != kNone) {
    report(cell, address, true, reader, cell.read, false);
  }
  cell.written = watch.now;
  cell.writer = watch.thread;
}

bool is_watched(uintptr_t address) {
  return watch.is_on && address - watch.stack >= watch.stack_bytes;
}

void read_all(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (!is_watched(begin)) return;
  for_cells(begin, bytes, [](Cell& cell, uintptr_t a) { read(cell, a); });
}

void write_all(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (!is_watched(begin)) return;
  for_cells(begin, bytes, [](Cell& cell, uintptr_t a) { write(cell, a); });
}

}  // namespace

Shared::Shared(const char* name, const void* data, size_t bytes) {
  const Unwatched unwatched;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto index = static_cast<uint16_t>(variables().size());
  variables().push_back({name, begin});
  for_cells(begin, bytes,
            [index](Cell& cell, uintptr_t) { cell.variable = index; });
}

void watch_launch() { watch.launch_begin = ++watch.now; }
void watch_block() { watch.block_begin = ++watch.now; }
void watch_barrier() { ++watch.now; }

void watch_thread(int thread, const char* stack, size_t stack_bytes) {
  watch.thread = static_cast<uint16_t>(thread);
  watch.stack = reinterpret_cast<uintptr_t>(stack);
  watch.stack_bytes = stack_bytes;
  watch.is_on = true;
}

void unwatch() { watch.is_on = false; }

}  // namespace smp::kernels::emulated

// Calls that the compiler makes. Names are those of the thread sanitizer.

using smp::kernels::emulated::read_all;
using smp::kernels::emulated::write_all;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define SMP_ACCESSES(bytes)                                          \
  void __tsan_read##bytes(void* p) { read_all(p, bytes); }           \
  void __tsan_write##bytes(void* p) { write_all(p, bytes); }         \
  void __tsan_unaligned_read##bytes(void* p) { read_all(p, bytes); } \
  void __tsan_unaligned_write##bytes(void* p) { write_all(p, bytes); }
SMP_ACCESSES(1)
SMP_ACCESSES(2)
SMP_ACCESSES(4)
SMP_ACCESSES(8)
SMP_ACCESSES(16)
#undef SMP_ACCESSES

void __tsan_read_range(void* p, size_t bytes) { read_all(p, bytes); }
void __tsan_write_range(void* p, size_t bytes) { write_all(p, bytes); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Guards of static variables.
unsigned char __tsan_atomic8_load(const volatile unsigned char* p, int) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  read_all(from, bytes);
  write_all(to, bytes);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  write_all(to, bytes);
  return std::memset(to, value, bytes);
}
}
