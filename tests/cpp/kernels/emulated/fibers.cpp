#include "tests/cpp/kernels/emulated/fibers.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/kernels/emulated/races.h"
#include "tests/cpp/kernels/emulated/stack_switch.h"

#if defined(__SANITIZE_ADDRESS__)
#define SMP_HAS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SMP_HAS_ASAN 1
#endif
#endif
#ifdef SMP_HAS_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__) && !defined(SMP_FIBERS_OF_UCONTEXT)
// Saves what a called function must keep.
asm(R"(
.text
.globl smp_switch_stack
.type smp_switch_stack, @function
smp_switch_stack:
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
.size smp_switch_stack, .-smp_switch_stack
)");
#endif

namespace smp::kernels::emulated {

dim3 threadIdx;
dim3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int64_t kMaxThreads = 1024;
// A kernel's parameters may lie on it, and frames of a sanitizer are large.
constexpr size_t kStackBytes = 256 * 1024;

enum class State { kReady, kAtBarrier, kInWarp, kEnded };

using Stack = std::unique_ptr<char[]>;

struct Fiber {
  State state = State::kReady;
  Site site = {"", 0};
  unsigned mask = 0;
  dim3 thread_idx;
  // Values of the last two exchanges: a lane may be one ahead of its warp.
  uint64_t given[2] = {};
  int num_exchanges = 0;
  bool has_begun = false;
  Stack stack;
  Place place;
  void* fake_stack = nullptr;  // of the address sanitizer
};

// Stacks that no fiber has. A thread that meets no barrier leaves its stack to
// the next one, so most launches need a single one.
class StackPool {
 public:
  Stack take() {
    if (stacks_.empty()) return Stack(new char[kStackBytes]);
    Stack stack = std::move(stacks_.back());
    stacks_.pop_back();
    return stack;
  }
  void give(Stack stack) { stacks_.push_back(std::move(stack)); }

 private:
  std::vector<Stack> stacks_;
};

constexpr Site kNowhere = {"", 0};

Order launch_order = Order::kForward;
std::mt19937 random_numbers;
Site removed_barrier = kNowhere;
Site last_barrier = kNowhere;  // of the block that runs
std::vector<Site> passed_barriers;
const char* launch_name = "";
std::string last_error;
bool is_error_of_read = false;  // of memory that no thread has written
std::string given_error;

StackPool stacks;
std::vector<Fiber> fibers;
Fiber* current = nullptr;
Place scheduler_place;
void (*current_kernel)(void*) = nullptr;
void* current_arguments = nullptr;
#ifdef SMP_HAS_ASAN
const void* scheduler_stack = nullptr;
size_t scheduler_bytes = 0;
void* scheduler_fake_stack = nullptr;
#endif

void to_scheduler([[maybe_unused]] bool has_ended) {
  Fiber* fiber = current;
#ifdef SMP_HAS_ASAN
  __sanitizer_start_switch_fiber(has_ended ? nullptr : &fiber->fake_stack,
                                 scheduler_stack, scheduler_bytes);
#endif
  switch_to(&fiber->place, &scheduler_place);
#ifdef SMP_HAS_ASAN
  __sanitizer_finish_switch_fiber(fiber->fake_stack, &scheduler_stack,
                                  &scheduler_bytes);
#endif
}

void fiber_main() {
#ifdef SMP_HAS_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
  current_kernel(current_arguments);
  current->state = State::kEnded;
  to_scheduler(true);
  std::abort();  // nobody goes on with a fiber that has ended
}

// Runs a fiber until it waits or ends.
void resume(Fiber& fiber) {
  if (!fiber.has_begun) {
    fiber.has_begun = true;
    fiber.stack = stacks.take();
    begin_at(&fiber.place, fiber.stack.get(), kStackBytes, &fiber_main);
  }
  current = &fiber;
  threadIdx = fiber.thread_idx;
#ifdef SMP_HAS_ASAN
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack.get(),
                                 kStackBytes);
#endif
  watch_thread(static_cast<int>(&fiber - fibers.data()), fiber.stack.get(),
               kStackBytes);
  switch_to(&scheduler_place, &fiber.place);
  unwatch();
#ifdef SMP_HAS_ASAN
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
  if (fiber.state == State::kEnded) stacks.give(std::move(fiber.stack));
}

std::string text_of(const dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " +
         std::to_string(d.z) + ")";
}

std::string text_of(const Site& site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

std::string text_of(const Fiber& fiber) {
  const std::string text = "thread " + text_of(fiber.thread_idx);
  if (fiber.state == State::kEnded) return text + " has ended";
  return text + " waits at " + text_of(fiber.site);
}

void fail(const std::string& text) {
  if (!last_error.empty()) return;
  last_error = std::string(launch_name) + ": " + text;
}

// Calls body(i) for each i below `count` in the order of the launch, until it
// returns false. Returns whether it never did.
template <typename Body>
bool in_launch_order(int64_t count, Body&& body) {
  std::vector<int64_t> numbers;
  if (launch_order == Order::kRandom) {
    numbers.resize(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), random_numbers);
  }
  for (int64_t i = 0; i < count; ++i) {
    int64_t number = i;
    if (launch_order == Order::kBackward) number = count - 1 - i;
    if (launch_order == Order::kRandom) number = numbers[i];
    if (!body(number)) return false;
  }
  return true;
}

bool is_together(const Fiber& a, const Fiber& b) {
  if (a.state != b.state) return false;
  return a.state == State::kEnded || a.site == b.site;
}

// Returns whether all of these wait at one place; else that is an error.
bool are_together(const Fiber* first, int count, const char* what) {
  for (int i = 1; i < count; ++i) {
    if (!is_together(first[0], first[i])) {
      fail(std::string(what) + " that not all threads reach together: " +
           text_of(first[0]) + ", " + text_of(first[i]));
      return false;
    }
  }
  return true;
}

bool is_in_exchange(const Fiber& fiber) {
  return fiber.state == State::kInWarp;
}

// Runs the `lanes` threads from `first` on as far as barriers let them. So a
// warp is ahead of others by all that a device permits.
bool run_warp(int first, int lanes) {
  Fiber* warp = &fibers[first];
  for (;;) {
    in_launch_order(lanes, [&](int64_t i) {
      if (warp[i].state == State::kReady) resume(warp[i]);
      return true;
    });
    if (std::none_of(warp, warp + lanes, is_in_exchange)) return true;
    if (!are_together(warp, lanes, "an exchange in a warp")) return false;
    for (int i = 0; i < lanes; ++i) {
      if (lanes != kWarp || warp[i].mask != kWholeWarp) {
        fail("only exchanges of whole warps are emulated: " + text_of(warp[i]));
        return false;
      }
      warp[i].state = State::kReady;
    }
  }
}

// Stacks of fibers that will not go on.
void abandon() {
  for (Fiber& fiber : fibers) {
    if (fiber.stack == nullptr) continue;
#ifdef SMP_HAS_ASAN
    __asan_unpoison_memory_region(fiber.stack.get(), kStackBytes);
#endif
    stacks.give(std::move(fiber.stack));
  }
}

// A fiber for each thread of a block.
void make_fibers() {
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  fibers.clear();
  fibers.resize(count);
  for (unsigned i = 0; i < count; ++i) {
    fibers[i].thread_idx = {i % blockDim.x, i / blockDim.x % blockDim.y,
                            i / blockDim.x / blockDim.y};
  }
}

void note_barrier(Site site) {
  watch_barrier();
  last_barrier = site;
  const auto end = passed_barriers.end();
  if (std::find(passed_barriers.begin(), end, site) == end) {
    passed_barriers.push_back(site);
  }
}

// False if a thread waits for what will not come.
bool run_threads() {
  const auto count = static_cast<int>(fibers.size());
  const auto run_warp_number = [count](int64_t warp) {
    const int first = static_cast<int>(warp) * kWarp;
    return run_warp(first, std::min(kWarp, count - first));
  };
  for (;;) {
    if (!in_launch_order((count + kWarp - 1) / kWarp, run_warp_number)) {
      return false;
    }
    if (!are_together(fibers.data(), count, "a barrier")) return false;
    if (fibers[0].state == State::kEnded) return true;
    note_barrier(fibers[0].site);
    for (Fiber& fiber : fibers) fiber.state = State::kReady;
  }
}

bool run_block() {
  for (Fiber& fiber : fibers) {
    fiber.state = State::kReady;
    fiber.has_begun = false;
  }
  last_barrier = kNowhere;
  watch_block();
  const bool has_ended = run_threads();
  if (!has_ended) abandon();
  return has_ended;
}

bool is_permitted(dim3 blocks, dim3 threads, size_t shared_bytes) {
  const int64_t num_threads = int64_t{threads.x} * threads.y * threads.z;
  const bool has_blocks = blocks.x >= 1 && blocks.x <= 0x7fffffffu &&
                          blocks.y >= 1 && blocks.y <= 65535 && blocks.z >= 1 &&
                          blocks.z <= 65535;
  const bool has_threads =
      num_threads >= 1 && num_threads <= kMaxThreads && threads.z <= 64;
  if (has_blocks && has_threads && shared_bytes == 0) return true;
  fail("invalid launch: blocks " + text_of(blocks) + ", threads " +
       text_of(threads) + ", bytes of dynamic shared memory " +
       std::to_string(shared_bytes) + " (emulated: 0)");
  return false;
}

// Meets the warp; returns the number of the exchange.
int meet_warp(unsigned mask, uint64_t bits, Site site) {
  Fiber& fiber = *current;
  const int number = fiber.num_exchanges++ % 2;
  fiber.given[number] = bits;
  fiber.mask = mask;
  fiber.site = site;
  fiber.state = State::kInWarp;
  to_scheduler(false);
  return number;
}

const Fiber& lane_of_warp(int lane) {
  const auto own = static_cast<int>(current - fibers.data());
  return fibers[own / kWarp * kWarp + lane];
}

}  // namespace

bool operator==(const Site& a, const Site& b) {
  return a.line == b.line && std::strcmp(a.file, b.file) == 0;
}

InOrder::InOrder(Order order, unsigned seed) : before_(launch_order) {
  launch_order = order;
  random_numbers.seed(seed);
}

InOrder::~InOrder() { launch_order = before_; }

WithoutBarrier::WithoutBarrier(Site site) { removed_barrier = site; }

WithoutBarrier::~WithoutBarrier() { removed_barrier = kNowhere; }

std::vector<Site> take_barriers() { return std::exchange(passed_barriers, {}); }

void report_race(const Race& race) {
  // The write that a read has missed may follow, and says more.
  const bool says_more = is_error_of_read && race.kind != Race::kUnwritten;
  if (!last_error.empty() && !says_more) return;
  last_error.clear();
  is_error_of_read = race.kind == Race::kUnwritten;
  std::string place = "memory of the device at ";
  if (race.name != nullptr) place = std::string("shared ") + race.name + " + ";
  place += std::to_string(race.offset);
  const std::string since =
      last_barrier == kNowhere ? "" : " since that at " + text_of(last_barrier);
  std::string text = "block " + text_of(blockIdx) + ", thread " +
                     text_of(fibers[race.thread].thread_idx) +
                     (race.is_write ? " writes " : " reads ") + place;
  if (race.kind == Race::kUnwritten) {
    fail(text + ", which no thread of the block has written");
    return;
  }
  text += ", which thread " + text_of(fibers[race.other_thread].thread_idx) +
          (race.is_other_write ? " writes" : " reads");
  text += race.kind == Race::kInBlock ? ": a race, no barrier between" + since
                                      : " in another block: a race";
  fail(text);
}

const char* take_error() {
  if (last_error.empty()) return nullptr;
  given_error = std::move(last_error);
  last_error.clear();
  is_error_of_read = false;
  return given_error.c_str();
}

int lane() { return static_cast<int>(current - fibers.data()) % kWarp; }

void wait_for_block(Site site) {
  if (site == removed_barrier) return;
  current->site = site;
  current->state = State::kAtBarrier;
  to_scheduler(false);
}

uint64_t exchange_in_warp(unsigned mask, uint64_t bits, int source, Site site) {
  const int number = meet_warp(mask, bits, site);
  return lane_of_warp(source % kWarp).given[number];
}

unsigned vote_in_warp(unsigned mask, bool vote, Site site) {
  const int number = meet_warp(mask, vote ? 1 : 0, site);
  unsigned votes = 0;
  for (int i = 0; i < kWarp; ++i) {
    votes |= static_cast<unsigned>(lane_of_warp(i).given[number]) << i;
  }
  return votes;
}

void run(const char* name, dim3 blocks, dim3 threads, size_t shared_bytes,
         void (*kernel)(void*), void* arguments) {
  launch_name = name;
  if (!is_permitted(blocks, threads, shared_bytes)) return;
  current_kernel = kernel;
  current_arguments = arguments;
  blockDim = threads;
  gridDim = blocks;
  make_fibers();
  watch_launch();
  in_launch_order(int64_t{blocks.x} * blocks.y * blocks.z, [&](int64_t number) {
    blockIdx = {static_cast<unsigned>(number % blocks.x),
                static_cast<unsigned>(number / blocks.x % blocks.y),
                static_cast<unsigned>(number / blocks.x / blocks.y)};
    return run_block();
  });
}

}  // namespace smp::kernels::emulated
