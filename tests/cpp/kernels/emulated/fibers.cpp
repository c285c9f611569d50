#include "tests/cpp/kernels/emulated/fibers.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

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

Order launch_order = Order::kForward;
std::string last_error;
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
  switch_to(&scheduler_place, &fiber.place);
#ifdef SMP_HAS_ASAN
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
  if (fiber.state == State::kEnded) stacks.give(std::move(fiber.stack));
}

std::string text_of(const Fiber& fiber) {
  const dim3& t = fiber.thread_idx;
  std::string text = "thread (" + std::to_string(t.x) + ", " +
                     std::to_string(t.y) + ", " + std::to_string(t.z) + ")";
  if (fiber.state == State::kEnded) return text + " has ended";
  return text + " waits at " + fiber.site.file + ":" +
         std::to_string(fiber.site.line);
}

void fail(const std::string& text) {
  if (last_error.empty()) last_error = text;
}

bool is_together(const Fiber& a, const Fiber& b) {
  if (a.state != b.state) return false;
  return a.state == State::kEnded ||
         (a.site.file == b.site.file && a.site.line == b.site.line);
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
    for (int i = 0; i < lanes; ++i) {
      Fiber& fiber = warp[launch_order == Order::kForward ? i : lanes - 1 - i];
      if (fiber.state == State::kReady) resume(fiber);
    }
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

// False if a thread waits for what will not come.
bool run_threads() {
  const auto count = static_cast<int>(fibers.size());
  const int num_warps = (count + kWarp - 1) / kWarp;
  for (;;) {
    for (int i = 0; i < num_warps; ++i) {
      const int warp = launch_order == Order::kForward ? i : num_warps - 1 - i;
      const int first = warp * kWarp;
      if (!run_warp(first, std::min(kWarp, count - first))) return false;
    }
    if (!are_together(fibers.data(), count, "a barrier")) return false;
    if (fibers[0].state == State::kEnded) return true;
    for (Fiber& fiber : fibers) fiber.state = State::kReady;
  }
}

bool run_block() {
  for (Fiber& fiber : fibers) {
    fiber.state = State::kReady;
    fiber.has_begun = false;
  }
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
  const auto text = [](dim3 d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " +
           std::to_string(d.z) + ")";
  };
  fail("invalid launch: blocks " + text(blocks) + ", threads " + text(threads) +
       ", bytes of dynamic shared memory " + std::to_string(shared_bytes) +
       " (emulated: 0)");
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

InOrder::InOrder(Order order) : before_(launch_order) { launch_order = order; }

InOrder::~InOrder() { launch_order = before_; }

const char* take_error() {
  if (last_error.empty()) return nullptr;
  given_error = std::move(last_error);
  last_error.clear();
  return given_error.c_str();
}

int lane() { return static_cast<int>(current - fibers.data()) % kWarp; }

void wait_for_block(Site site) {
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

void run(dim3 blocks, dim3 threads, size_t shared_bytes, void (*kernel)(void*),
         void* arguments) {
  if (!is_permitted(blocks, threads, shared_bytes)) return;
  current_kernel = kernel;
  current_arguments = arguments;
  blockDim = threads;
  gridDim = blocks;
  make_fibers();
  const int64_t count = int64_t{blocks.x} * blocks.y * blocks.z;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t number = launch_order == Order::kForward ? i : count - 1 - i;
    blockIdx = {static_cast<unsigned>(number % blocks.x),
                static_cast<unsigned>(number / blocks.x % blocks.y),
                static_cast<unsigned>(number / blocks.x / blocks.y)};
    if (!run_block()) return;
  }
}

}  // namespace smp::kernels::emulated
