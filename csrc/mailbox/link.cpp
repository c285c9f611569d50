#include "csrc/mailbox/link.h"

#include "csrc/health/thread_name.h"
#include "csrc/memory/device_scope.h"

namespace smp::mailbox {

// The thread needs the device: handlers in it may allocate there.
void Link::begin_thread(const std::string& name) const {
  health::name_this_thread(name);
  memory::enter_device(owner_.device);
}

Traffic Link::traffic() const {
  return {messages_sent_, bytes_sent_, messages_received_, bytes_received_};
}

void Link::count_sent(int64_t num_bytes) {
  messages_sent_.fetch_add(1);
  bytes_sent_.fetch_add(num_bytes);
  owner_.faults->waits().add_progress();
}

void Link::count_received(int64_t num_bytes) {
  messages_received_.fetch_add(1);
  bytes_received_.fetch_add(num_bytes);
  owner_.faults->waits().add_progress();
}

void Link::add_unsent(int64_t delta) {
  num_unsent_.fetch_add(delta);
  owner_.faults->waits().add_unsent(delta);
}

void Link::forget_unsent() { add_unsent(-num_unsent_.load()); }

void Link::report_corrupt(const std::string& text) {
  owner_.faults->report({.kind = health::Fault::Kind::kRaised,
                         .global_rank = owner_.global_rank,
                         .where = "the receiving thread of the mailbox",
                         .text = text});
}

}  // namespace smp::mailbox
