#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/lanes/copy_log.h"
#include "csrc/lanes/lane_table.h"
#include "csrc/mailbox/held_arrivals.h"
#include "csrc/mailbox/link.h"
#include "csrc/mailbox/message.h"

namespace smp::mailbox {

/// Sends and receives the messages of a rank whose tensors travel over lanes.
/// When sending, it replaces tensors by descriptors. A lane's payload for the
/// message may not be ready yet. The message then waits, as do later ones to
/// the same rank, but no thread that posts. When receiving, it gives tensors
/// their data and marks. If a lane's `take` may block, the message is held, as
/// are later ones of the same rank. Only ranks that have lanes have this
/// object.
class LanePosts {
 public:
  /// Passes a message to its link.
  using Send = std::function<void(int dst, Message message)>;

  /// @param owner  its `deliver` gets held messages with their data
  LanePosts(const lanes::LaneOptions& options, const LinkOwner& owner,
            int world_size, Send send);
  ~LanePosts();

  /// Posts as Mailbox does; in the order of posts to each rank.
  void post(int dst, Message message);
  /// Takes each message of another rank, in the order in which they come.
  /// @return whether to `take` and handle it now; otherwise it was for the
  ///         lanes only, or it is held
  /// @throws Error when it does not fit earlier messages
  bool receive(Message& message);
  /// Gives tensors of a message their data and marks. May block if the message
  /// was held.
  /// @throws Error when it does not fit earlier messages
  void take(Message& message);

  lanes::LaneTable& table() { return table_; }
  /// Returns the recorder of the lanes' copies.
  const std::shared_ptr<lanes::CopyLog>& copies() const { return copies_; }
  /// Returns how many messages wait for copies.
  int64_t num_unsent() const { return num_unsent_; }

  /// Called when no post follows: no receipts of free slots are sent any more,
  /// only those for which copies wait.
  void begin_close() { closing_ = true; }
  /// Gives up waiting messages and ends all threads. Called once, before the
  /// links end.
  void stop();

 private:
  struct Waiting {
    Message message;
    std::vector<memory::Mark> marks = {};  // for which the message waits
    bool has_asked = false;                // for its turn

    bool is_ready() const;
  };
  struct Peer {
    // Gives tensors on lanes the order of their messages.
    std::mutex order;
    std::deque<Waiting> waiting;  // with `mutex_`
  };

  void keep(int dst, Waiting waiting);
  void send_waiting();
  bool may_leave(int dst, Waiting& first);
  bool send_first(std::unique_lock<std::mutex>& lock, int dst);
  void send_receipt(int dst, const lanes::Receipt& receipt);
  bool may_block(const Message& message);

  const LinkOwner owner_;
  const Send send_;
  const std::shared_ptr<lanes::CopyLog> copies_;
  std::vector<Peer> peers_;  // by global rank
  std::atomic<bool> closing_{false};
  std::atomic<int64_t> num_unsent_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  lanes::LaneTable table_;
  HeldArrivals held_;
  std::thread sender_;
};

}  // namespace smp::mailbox
