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

/// Messages of a rank whose tensors travel over lanes. On the way out it puts
/// descriptors in their place; what a lane gives the message to carry may not
/// be there yet, and then the message waits, and those behind it for the same
/// rank, but no thread that posts. On the way in it gives tensors their data
/// and marks; where asking a lane for them may block, the message is held, and
/// those behind it of the same rank. Only ranks that have lanes have one.
class LanePosts {
 public:
  /// Hands a message to its link.
  using Send = std::function<void(int dst, Message message)>;

  /// @param owner  its `deliver` gets messages that were held, with their data
  LanePosts(const lanes::LaneOptions& options, const LinkOwner& owner,
            int world_size, Send send);
  ~LanePosts();

  /// Mailbox's contract; in the order of posts to each rank.
  void post(int dst, Message message);
  /// For each message of another rank, in the order in which they come.
  /// @return whether to `take` and handle it now; else it was for the lanes
  ///     only, or it is held
  /// @throws Error when it does not fit what came before
  bool receive(Message& message);
  /// Gives tensors of a message their data and marks. May block where the
  /// message was held.
  /// @throws Error when it does not fit what came before
  void take(Message& message);

  lanes::LaneTable& table() { return table_; }
  /// What lanes carry while somebody records it.
  const std::shared_ptr<lanes::CopyLog>& copies() const { return copies_; }
  /// Messages that wait for copies.
  int64_t num_unsent() const { return num_unsent_; }

  /// No post follows, and what becomes free is told nobody.
  void begin_close() { closing_ = true; }
  /// Gives up what waits, ends all threads. Called once, before the links end.
  void stop();

 private:
  struct Waiting {
    Message message;
    std::vector<memory::Mark> copies;

    bool is_ready() const;
  };
  struct Peer {
    // So that the order of lanes is that of messages.
    std::mutex order;
    std::deque<Waiting> waiting;  // with `mutex_`
  };

  void keep(int dst, Waiting waiting);
  void send_waiting();
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
