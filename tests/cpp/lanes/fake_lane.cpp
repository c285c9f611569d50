#include "tests/cpp/lanes/fake_lane.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/health/thread_name.h"

namespace smp::lanes {
namespace {

using memory::Mark;
using memory::MarkedTensor;

constexpr std::chrono::hours kNever{24};
constexpr std::chrono::milliseconds kLookForFaultEvery{20};

}  // namespace

FakeLane::FakeLane(FakeOptions options, int global_rank,
                   std::shared_ptr<health::FaultBoard> faults,
                   SendReceipt receipts)
    : options_(options),
      faults_(std::move(faults)),
      receipts_(std::move(receipts)),
      slots_(options.num_slots),
      times_(options, global_rank),
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
  posted.end = posted.payload.mark;
  return posted;
}

at::Tensor FakeLane::new_payload(const Descriptor& descriptor) const {
  return at::empty(descriptor.sizes, descriptor.dtype);
}

MarkedTensor FakeLane::take(int src, const Descriptor& descriptor,
                            at::Tensor payload) {
  arrivals_.check(src, descriptor);
  if (options_.has_late_takes) block_for_a_while();
  const Receipt receipt{descriptor.lane, descriptor.slot, descriptor.sequence};
  return copy_later(std::move(payload),
                    [this, src, receipt] { receipts_(src, receipt); });
}

void FakeLane::block_for_a_while() {
  std::unique_lock lock(mutex_);
  const auto end = Clock::now() + times_.next().value_or(kNever);
  while (!stopping_ && Clock::now() < end) {
    changed_.wait_until(lock, std::min(end, Clock::now() + kLookForFaultEvery));
    faults_->raise_if_faulted();
  }
}

void FakeLane::acknowledge(int src, const Receipt& receipt) {
  slots_.give_back(src, receipt);
}

// Copies `source`, which must not be written to. The copy ends at a random
// time; `then` runs afterwards.
MarkedTensor FakeLane::copy_later(at::Tensor source,
                                  std::function<void()> then) {
  const auto event = std::make_shared<LateEvent>(faults_);
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
    const auto delay = times_.next();
    if (stopping_) {
      event->drop();
    } else {
      copies_.emplace(Clock::now() + delay.value_or(kNever),
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
