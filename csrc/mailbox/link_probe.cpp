#include "csrc/mailbox/link_probe.h"

#include <ATen/ops/zeros.h>

#include <string>
#include <thread>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/health/fault_aware_wait.h"

namespace smp::mailbox {
namespace {

// Indices of the fields of a probe message.
constexpr int kIsAnswer = 0;
constexpr int kPosted = 1;
constexpr int kOneWay = 2;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

LinkProbe::LinkProbe(std::shared_ptr<Mailbox> mailbox,
                     std::shared_ptr<health::FaultBoard> faults)
    : mailbox_(std::move(mailbox)), faults_(std::move(faults)) {
  fault_subscription_ = faults_->subscribe([this] {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  });
  mailbox_->set_handler(Channel::kProbe, [this](Message&& message) {
    handle(std::move(message));
  });
}

LinkProbe::~LinkProbe() {
  mailbox_->set_handler(Channel::kProbe, {});
  faults_->unsubscribe(fault_subscription_);
}

void LinkProbe::handle(Message&& message) {
  const int64_t now = now_ns();
  auto& fields = message.fields;
  if (fields[kIsAnswer] == 0) {
    fields[kIsAnswer] = 1;
    fields[kOneWay] = now - fields[kPosted];
    for (MessageTensor& tensor : message.tensors) tensor.is_stable = true;
    mailbox_->post(message.source_rank, std::move(message));
    return;
  }
  memory::Mark mark;
  if (!message.tensors.empty()) mark = message.tensors[0].mark;
  std::lock_guard lock(mutex_);
  answers_.push_back({{fields[kOneWay], now - fields[kPosted]},
                      std::move(mark),
                      fields[kPosted]});
  changed_.notify_all();
}

// Polls the device from the host: there is no compute meanwhile.
LinkProbe::Sample LinkProbe::end_of(const Answer& answer) const {
  Sample sample = answer.sample;
  if (!answer.mark) return sample;
  while (!answer.mark.is_over()) {
    faults_->raise_if_faulted();
    std::this_thread::yield();
  }
  sample.round_trip_ns = now_ns() - answer.posted_ns;
  return sample;
}

std::vector<LinkProbe::Sample> LinkProbe::measure(
    int peer, int64_t num_bytes, int64_t repeats,
    std::chrono::milliseconds timeout, c10::Device device) {
  SMP_CHECK_VALUE(num_bytes >= 0 && repeats >= 0,
                  "expected a number of bytes and of repeats >= 0, got ",
                  num_bytes, " and ", repeats);
  const at::Tensor data =
      at::zeros({num_bytes}, at::TensorOptions(at::kByte).device(device));
  std::vector<Sample> samples;
  {
    std::lock_guard lock(mutex_);
    answers_.clear();
  }
  for (int64_t i = 0; i < repeats; ++i) {
    health::WaitSpec spec{
        "a probe of the way to global_rank " + std::to_string(peer), timeout};
    spec.missing = [peer] { return std::vector<int>{peer}; };
    health::FaultAwareWait wait(*faults_, std::move(spec));
    Message message;
    message.channel = Channel::kProbe;
    message.tensors.push_back({.data = data});
    message.fields[kPosted] = now_ns();
    mailbox_->post(peer, std::move(message));
    std::unique_lock lock(mutex_);
    wait.until(lock, changed_,
               [&] { return static_cast<int64_t>(answers_.size()) > i; });
    const Answer answer = answers_.back();
    lock.unlock();
    samples.push_back(end_of(answer));
  }
  return samples;
}

}  // namespace smp::mailbox
