#include "csrc/mailbox/self_link.h"

#include <ATen/core/grad_mode.h>

#include <utility>

namespace smp::mailbox {

void SelfLink::post(int /*dst*/, Message message) {
  at::NoGradGuard no_grad;
  for (MessageTensor& tensor : message.tensors) {
    if (!tensor.data.defined()) continue;
    tensor.data = memory::MarkedTensor{std::move(tensor.data),
                                       std::exchange(tensor.mark, {})}
                      .use()
                      .detach();
    if (!tensor.is_stable) tensor.data = tensor.data.clone();
    tensor.mark = memory::MarkedTensor::of_current_stream(tensor.data).mark;
  }
  {
    std::lock_guard lock(mutex_);
    messages_.push_back(std::move(message));
    add_unsent(1);
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { deliver_all(); });
    }
  }
  changed_.notify_one();
  count_sent(0);
}

void SelfLink::deliver_all() {
  begin_thread("smp-self");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !messages_.empty(); });
    if (stopping_) return;
    Message message = std::move(messages_.front());
    messages_.pop_front();
    lock.unlock();
    count_received(0);
    owner_.deliver(std::move(message));
    add_unsent(-1);
    lock.lock();
  }
}

void SelfLink::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
  forget_unsent();
}

}  // namespace smp::mailbox
