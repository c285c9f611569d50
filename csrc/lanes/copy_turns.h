#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <utility>

#include "csrc/common/check.h"

namespace smp::lanes {

/// The order in which a rank enqueues its parts of copies that need two ranks.
/// No two ranks enqueue two copies in opposite orders, although no rank knows
/// all copies.
///
/// A copy has a turn at both of its ranks. The receiver enqueues its part
/// first, and a receipt makes the sender enqueue the other one. At the lower
/// rank the turn lasts from before the first part is enqueued until both parts
/// are. At the higher rank it lasts while that rank enqueues its part. Turns of
/// a rank begin in the order of calls and do not overlap, apart from turns in a
/// row with one peer in one direction, whose copies have one order at both
/// ranks. Thus ranks wait for higher ranks only, never in a circle.
///
/// Functions that begin a turn are called within calls of this object, and do
/// not call it themselves. Not thread-safe.
class CopyTurns {
 public:
  using Begin = std::function<void()>;

  explicit CopyTurns(int global_rank) : global_rank_(global_rank) {}

  /// Calls `leave` when a message with `num_copies` copies may leave. The rest
  /// of the message must be ready, since other copies wait for its turn.
  void add_message(int dst, int num_copies, Begin leave) {
    if (dst < global_rank_) {
      leave();  // its copies get their turns when the receiver has its own
    } else {
      add({dst, true, num_copies, std::move(leave)});
    }
  }
  /// Calls `receive` when this rank may enqueue its receive.
  void add_receive(int src, Begin receive) {
    add({src, false, 1, std::move(receive)});
  }
  /// Notes that the receive is enqueued. A receipt then leaves.
  void received(int src) {
    if (src < global_rank_) end();
  }
  /// Takes a receipt. If it is a receiver's, calls `send` when this rank may
  /// enqueue its send.
  void add_receipt(int peer, Begin send) {
    if (is_sent_receipt(peer)) {
      end();
    } else if (peer > global_rank_) {
      send();  // in the turn of its message
    } else {
      add({peer, true, 1, std::move(send)});
    }
  }
  /// Notes that the send is enqueued. A receipt for a lower rank leaves before.
  void sent() { end(); }

  /// Returns whether a receipt of `peer` is that of a sender. Of higher ranks
  /// only senders answer in the turn of a receive.
  bool is_sent_receipt(int peer) const {
    return peer > global_rank_ && num_begun_ > 0 && peer_ == peer && !is_send_;
  }
  /// Removes turns that have not begun, apart from sends for which receivers
  /// wait.
  void drop_own() {
    std::erase_if(waiting_, [this](const Turn& turn) {
      return !turn.is_send || turn.peer > global_rank_;
    });
    begin_waiting();
  }

 private:
  struct Turn {
    int peer;
    bool is_send;
    int num_copies;
    Begin begin;
  };

  void add(Turn turn) {
    waiting_.push_back(std::move(turn));
    begin_waiting();
  }
  void end() {
    SMP_ASSERT(num_begun_ > 0, "the end of a copy that has no turn");
    --num_begun_;
    begin_waiting();
  }
  bool may_begin(const Turn& turn) const {
    return num_begun_ == 0 || (turn.peer == peer_ && turn.is_send == is_send_);
  }
  void begin_waiting() {
    while (!waiting_.empty() && may_begin(waiting_.front())) {
      const Turn turn = std::move(waiting_.front());
      waiting_.pop_front();
      peer_ = turn.peer;
      is_send_ = turn.is_send;
      num_begun_ += turn.num_copies;
      turn.begin();
    }
  }

  const int global_rank_;
  std::deque<Turn> waiting_;
  int num_begun_ = 0;  // copies
  // The other rank and the direction of the turns that have begun.
  int peer_ = -1;
  bool is_send_ = false;
};

}  // namespace smp::lanes
