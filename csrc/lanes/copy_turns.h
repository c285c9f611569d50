#pragma once

#include <deque>
#include <functional>
#include <utility>

namespace smp::lanes {

/// The order in which a rank enqueues its parts of copies that need two ranks.
/// No two ranks enqueue two copies in opposite orders, although no rank knows
/// all copies.
///
/// A copy has a turn at both of its ranks. At the lower rank the turn lasts
/// from before the first part is enqueued until both parts are. At the higher
/// rank it lasts while that rank enqueues its part. Turns of a rank do not
/// overlap, apart from copies with one peer in one direction, which have the
/// same order at both ranks. Thus ranks wait for higher ranks only, never in a
/// circle. Not thread-safe.
class CopyTurns {
 public:
  /// Calls `begin` when the turn begins, which may be at once. `begin` does not
  /// call this object. Turns with one peer in one direction begin in the order
  /// of calls.
  void add(int peer, bool is_send, std::function<void()> begin) {
    waiting_.push_back({peer, is_send, std::move(begin)});
    begin_waiting();
  }
  /// Ends a turn that has begun.
  void end() {
    --num_begun_;
    begin_waiting();
  }
  /// Removes turns that have not begun.
  void drop_waiting() { waiting_.clear(); }

  /// Returns whether the turns that have begun receive from `peer`.
  bool receives_from(int peer) const {
    return num_begun_ > 0 && peer_ == peer && !is_send_;
  }

 private:
  struct Turn {
    int peer;
    bool is_send;
    std::function<void()> begin;
  };

  // Also begins later turns of the same kind: tensors of one message have turns
  // of their own, and none of these ends before the message leaves.
  void begin_waiting() {
    if (num_begun_ == 0 && !waiting_.empty()) {
      peer_ = waiting_.front().peer;
      is_send_ = waiting_.front().is_send;
    }
    for (auto next = waiting_.begin(); next != waiting_.end();) {
      if (next->peer != peer_ || next->is_send != is_send_) {
        ++next;
        continue;
      }
      const std::function<void()> begin = std::move(next->begin);
      next = waiting_.erase(next);
      ++num_begun_;
      begin();
    }
  }

  std::deque<Turn> waiting_;
  int num_begun_ = 0;
  // The other rank and the direction of the turns that have begun.
  int peer_ = -1;
  bool is_send_ = false;
};

}  // namespace smp::lanes
