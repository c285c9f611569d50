#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/health/goodbyes.h"
#include "csrc/health/wait_registry.h"

namespace smp::health {

/// A reason why a run cannot go on.
struct Fault {
  enum class Kind {
    kRaised,       ///< an exception in a rank; `text` holds it
    kDied,         ///< connection lost without a word: killed, crashed
    kUnreachable,  ///< its host does not answer; `text` says how it was seen
    kLeft,         ///< exited normally although another rank needs it
    kDeadlock,     ///< every rank waits; `text` holds the table
    kStuck,        ///< neither waits nor moves while others wait for it
  };
  Kind kind = Kind::kRaised;
  int global_rank = -1;    ///< the culprit; -1 when not known, or all of them
  std::string where = {};  ///< module, microbatch as far as known
  std::string text = {};
  std::string coordinates = {};  ///< of `global_rank`; filled by the board
  bool is_found_here = false;    ///< the wait that finds it raises it
  std::vector<int> stuck = {};   ///< of kStuck, from the hub: all of them

  /// Returns whether the rank has, or soon has, an exception of its own.
  bool is_raised_by(int rank) const {
    return rank == global_rank && kind != Kind::kStuck;
  }

  /// Returns one or more lines for people, naming rank, place and reason.
  std::string describe() const;
  /// Returns the first of these lines.
  std::string headline() const;
};

/// The health of the other ranks, as far as this process has been told. The
/// first fault wins and stays until the object dies. Every blocking wait of the
/// library subscribes, so that it ends when a fault comes. Thread-safe.
class FaultBoard {
 public:
  explicit FaultBoard(int global_rank);

  int global_rank() const { return global_rank_; }

  /// Sets words for each global rank, for instance "pp 1 tp 0 rdp 1". Later
  /// faults include those of the culprit.
  void set_coordinates(std::vector<std::string> per_global_rank);
  std::string coordinates(int global_rank) const;

  /// Sets the addresses at which other hosts reach the hosts of all global
  /// ranks; empty: unknown.
  void set_addresses(std::vector<std::string> per_global_rank);
  /// Returns the first rank at an address, or -1.
  int rank_at(const std::string& address) const;

  /// Records a fault (the first one wins) and wakes all subscribers. If the
  /// culprit cannot print an error itself, the first other rank prints a line
  /// at once. The culprit is then on the screen even if a launcher ends this
  /// process next.
  /// @return true when this fault is the first.
  bool report(Fault fault);

  /// Records that a rank said goodbye. No fault by itself; a wait that needs
  /// the rank fails.
  /// @param entered  collectives that the rank has done its part of
  void mark_left(int global_rank, CollectiveLog::State entered = {});
  /// Records that several ranks said goodbye; only the hub has their logs.
  void mark_left(const RankSet& ranks);

  /// Hides faults of other ranks than `needed` for the time `limit` after each
  /// is reported, so that ranks that do not need the culprit can finish what
  /// they do together. Faults without a culprit, or of this rank, are not
  /// hidden. Lasts until `release`; a later call replaces an earlier one.
  void hold(std::vector<int> needed, std::chrono::milliseconds limit);
  /// Ends a hold, and wakes all subscribers if it has hidden a fault.
  void release();

  /// Returns the fault, unless it is hidden.
  std::optional<Fault> fault() const;
  /// Returns the fault, hidden or not.
  std::optional<Fault> known_fault() const;
  bool has_left(int global_rank) const { return goodbyes_.has(global_rank); }
  /// Returns the ranks that have left, and the collectives they will not join.
  Goodbyes& goodbyes() { return goodbyes_; }

  /// @throws PeerFailure with `describe()` when there is a fault.
  void raise_if_faulted() const;

  /// Calls `wake` at each change, from any thread, without holding locks that
  /// the other methods need. `wake` may not subscribe or unsubscribe.
  /// @return token for `unsubscribe`, which returns only when no call to `wake`
  ///         is running.
  int subscribe(std::function<void()> wake);
  void unsubscribe(int token);

  /// Sets a check that may throw, for Ctrl-C. Waits of the library call it a
  /// few times per second without their locks. Set it before the first wait.
  void set_interrupt_check(std::function<void()> check);
  void check_interrupt() const;

  /// Returns the waits that this process is in at the moment.
  WaitRegistry& waits() { return waits_; }

 private:
  void wake_all();
  std::string coordinates_locked(int global_rank) const;
  bool is_hidden_locked() const;

  struct Hold {
    std::vector<int> needed;
    std::chrono::milliseconds limit;
  };

  const int global_rank_;
  WaitRegistry waits_;
  Goodbyes goodbyes_;
  std::function<void()> interrupt_check_;
  mutable std::mutex mutex_;
  std::optional<Fault> fault_;
  std::chrono::steady_clock::time_point reported_at_;
  std::optional<Hold> hold_;
  std::vector<std::string> coordinates_;
  std::vector<std::string> addresses_;
  std::mutex subscribers_mutex_;  // held while waking: see unsubscribe
  std::vector<std::pair<int, std::function<void()>>> subscribers_;
  int next_token_ = 0;
};

}  // namespace smp::health
