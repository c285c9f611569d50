#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "csrc/health/fault_board.h"
#include "csrc/mailbox/message.h"
#include "csrc/mailbox/substitutes.h"

namespace smp::lanes {
class LaneTable;
}

namespace smp::mailbox {

/// Counts of a link so far; bytes are headers, structure and tensors.
struct Traffic {
  int64_t messages_sent = 0;
  int64_t bytes_sent = 0;
  int64_t messages_received = 0;
  int64_t bytes_received = 0;
};

/// The mailbox's parts that a link needs.
struct LinkOwner {
  int global_rank = -1;
  std::shared_ptr<health::FaultBoard> faults;
  /// Runs the handler of the message's channel; any thread.
  std::function<void(Message&&)> deliver;
  Pause pause = {};
  /// Device of this rank, used by all threads of the link.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  /// Lanes by which tensors come; they outlive the link. Null: there are none.
  lanes::LaneTable* lanes = nullptr;
};

/// A way to reach some of the ranks. A peer is served by one link only, so its
/// messages keep their order. `post` has the contract of Mailbox.
class Link {
 public:
  explicit Link(LinkOwner owner) : owner_(std::move(owner)) {}
  virtual ~Link() = default;  // after `stop`

  virtual void post(int dst, Message message) = 0;

  /// Waits as Mailbox does. A link without this returns false.
  virtual bool help_until(const std::function<bool()>& /*done*/,
                          const std::function<bool()>& /*is_alone*/) {
    return false;
  }
  virtual void wake_helper() {}

  /// Called when no post follows; posted messages are sent as fast as possible.
  virtual void begin_close() {}
  /// Gives up unsent messages and ends all threads. Called once.
  virtual void stop() = 0;

  /// Returns how many messages the transport has not taken over yet.
  int64_t num_unsent() const { return num_unsent_.load(); }
  Traffic traffic() const;

 protected:
  void count_sent(int64_t num_bytes);
  void count_received(int64_t num_bytes);
  void add_unsent(int64_t delta);
  /// Sets the number of unsent messages to 0.
  void forget_unsent();
  void report_corrupt(const std::string& text);
  /// Prepares a thread of the link; each thread calls it first.
  void begin_thread(const std::string& name) const;

  const LinkOwner owner_;

 private:
  std::atomic<int64_t> num_unsent_{0};
  std::atomic<int64_t> messages_sent_{0};
  std::atomic<int64_t> bytes_sent_{0};
  std::atomic<int64_t> messages_received_{0};
  std::atomic<int64_t> bytes_received_{0};
};

}  // namespace smp::mailbox
