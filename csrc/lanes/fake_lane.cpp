#include "csrc/lanes/fake_lane.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <array>
#include <charconv>
#include <cstring>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/env.h"
#include "csrc/common/monotonic_clock.h"
#include "csrc/health/thread_name.h"

namespace smp::lanes {
namespace {

using memory::Mark;
using memory::MarkedTensor;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr const char* kLanesVariable = "SMP_TEST_LANES";
// Longer copies look like ranks that hang.
constexpr int64_t kMaxCopyUs = 1'000'000;
constexpr int64_t kMaxSlots = 1'000'000;
constexpr milliseconds kLookForFault{20};
constexpr std::chrono::hours kNever{24};

// Source: splitmix64 (public domain, S. Vigna).
uint64_t next_random(uint64_t& state) {
  state += 0x9e3779b97f4a7c15ull;
  uint64_t value = state;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// NaN in any floating type, and a number that nobody expects in others.
void fill_with_nonsense(const at::Tensor& tensor) {
  const int byte = tensor.scalar_type() == at::kBool ? 1 : 0xff;
  if (tensor.nbytes() > 0) {
    std::memset(tensor.mutable_data_ptr(), byte, tensor.nbytes());
  }
}

}  // namespace

std::optional<FakeOptions> FakeOptions::from_environment() {
  const auto text = env_string(kLanesVariable);
  if (!text) return std::nullopt;
  std::array<int64_t, 3> numbers{-1, -1, -1};
  const char* at = text->data();
  const char* const end = at + text->size();
  bool is_read = true;
  for (size_t i = 0; i < numbers.size() && is_read; ++i) {
    const auto one = std::from_chars(at, end, numbers[i]);
    is_read = one.ec == std::errc() && numbers[i] >= 0;
    at = one.ptr;
    if (i + 1 < numbers.size()) is_read = is_read && at != end && *at++ == ':';
  }
  SMP_CHECK_VALUE(is_read && at == end && numbers[1] <= kMaxCopyUs &&
                      numbers[2] >= 1 && numbers[2] <= kMaxSlots,
                  "environment variable ", kLanesVariable,
                  " must be '<seed>:<max_us>:<slots>', numbers >= 0 with at "
                  "most ",
                  kMaxCopyUs, " us and at least one slot; got '", *text, "'");
  return FakeOptions{.seed = static_cast<uint64_t>(numbers[0]),
                     .max_us = numbers[1],
                     .num_slots = static_cast<int>(numbers[2])};
}

// The end of a copy. It lives as long as somebody may wait for it.
class FakeLane::CopyEvent final : public Mark::Event {
 public:
  explicit CopyEvent(std::shared_ptr<health::FaultBoard> faults)
      : faults_(std::move(faults)) {}

  void block(const c10::Stream& /*stream*/) const override {
    std::unique_lock lock(mutex_);
    while (!is_over_) {
      SMP_CHECK(!is_dropped_,
                "a tensor from another rank will not come any more: its lane "
                "is closed");
      changed_.wait_for(lock, kLookForFault);
      if (!is_over_) faults_->raise_if_faulted();
    }
  }
  bool is_over() const override {
    std::lock_guard lock(mutex_);
    return is_over_;
  }
  int64_t over_ns() const override {
    std::lock_guard lock(mutex_);
    return is_over_ ? over_ns_ : 0;
  }

  void end() {
    over_ns_ = monotonic_ns();
    set(is_over_);
  }
  void drop() { set(is_dropped_); }

 private:
  void set(bool& what) {
    {
      std::lock_guard lock(mutex_);
      what = true;
    }
    changed_.notify_all();
  }

  const std::shared_ptr<health::FaultBoard> faults_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  int64_t over_ns_ = 0;  // written before `is_over_`
  bool is_over_ = false;
  bool is_dropped_ = false;
};

FakeLane::FakeLane(FakeOptions options, int global_rank,
                   std::shared_ptr<health::FaultBoard> faults,
                   SendReceipt receipts)
    : options_(options),
      faults_(std::move(faults)),
      receipts_(std::move(receipts)),
      slots_(options.num_slots),
      random_(options.seed * 1'000'003 + static_cast<uint64_t>(global_rank)),
      thread_([this] { run_copies(); }) {}

FakeLane::~FakeLane() { stop(); }

std::optional<Posted> FakeLane::post(int dst, const at::Tensor& data,
                                     bool /*is_stable*/) {
  const at::AutoGradMode no_grad(false);
  const auto slot = slots_.take(dst);
  if (!slot) return std::nullopt;
  Posted posted;
  posted.descriptor = {.lane = LaneKind::kFake,
                       .slot = slot->index,
                       .sequence = slot->sequence,
                       .num_bytes = static_cast<int64_t>(data.nbytes()),
                       .dtype = data.scalar_type(),
                       .sizes = data.sizes().vec()};
  posted.payload = copy_later(data.detach().resolve_conj().resolve_neg().clone(
                                  at::MemoryFormat::Contiguous),
                              {});
  return posted;
}

at::Tensor FakeLane::new_payload(const Descriptor& descriptor) const {
  return at::empty(descriptor.sizes, descriptor.dtype);
}

MarkedTensor FakeLane::take(int src, const Descriptor& descriptor,
                            at::Tensor payload) {
  arrivals_.check(src, descriptor);
  const Receipt receipt{descriptor.lane, descriptor.slot, descriptor.sequence};
  return copy_later(std::move(payload),
                    [this, src, receipt] { receipts_(src, receipt); });
}

void FakeLane::acknowledge(int src, const Receipt& receipt) {
  slots_.give_back(src, receipt);
}

// A copy of `source`, which nobody writes to, that ends at a random time;
// `then` runs afterwards.
MarkedTensor FakeLane::copy_later(at::Tensor source,
                                  std::function<void()> then) {
  const auto event = std::make_shared<CopyEvent>(faults_);
  MarkedTensor result{at::empty(source.sizes(), source.scalar_type()),
                      Mark(event)};
  fill_with_nonsense(result.data);
  auto copy = [event, source = std::move(source), to = result.data,
               then = std::move(then)] {
    if (source.nbytes() > 0) {
      std::memcpy(to.mutable_data_ptr(), source.const_data_ptr(),
                  source.nbytes());
    }
    event->end();
    if (then) then();
  };
  {
    std::lock_guard lock(mutex_);
    const bool ends =
        options_.num_ending < 0 || num_copies_++ < options_.num_ending;
    const auto limit = static_cast<uint64_t>(options_.max_us) + 1;
    // Half of them at once: uneven times make more orders than uniform ones.
    const uint64_t us =
        next_random(random_) % 2 == 0 ? 0 : next_random(random_) % limit;
    if (stopping_) {
      event->drop();
    } else {
      copies_.emplace(Clock::now() + (ends ? Clock::duration(microseconds(us))
                                           : Clock::duration(kNever)),
                      Copy{event, std::move(copy)});
    }
  }
  changed_.notify_one();
  return result;
}

void FakeLane::run_copies() {
  health::name_this_thread("smp-fake-lane");
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (copies_.empty()) {
      changed_.wait(lock);
    } else if (const auto first = copies_.begin();
               first->first > Clock::now()) {
      changed_.wait_until(lock, Clock::time_point(first->first));
    } else {
      Copy copy = std::move(first->second);
      copies_.erase(first);
      lock.unlock();
      copy.run();
      copy = {};  // frees tensors without the lock
      lock.lock();
    }
  }
}

void FakeLane::stop() {
  decltype(copies_) dropped;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(copies_);
  }
  changed_.notify_all();
  for (const auto& [when, copy] : dropped) copy.end->drop();
  if (thread_.joinable()) thread_.join();
}

}  // namespace smp::lanes
