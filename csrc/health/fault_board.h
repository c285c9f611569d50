#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/health/goodbyes.h"
#include "csrc/health/wait_registry.h"

namespace smp::health {

/// Why a run cannot go on.
struct Fault {
  enum class Kind {
    kRaised,       ///< an exception in a rank; `text` holds it
    kDied,         ///< connection lost without a word: killed, crashed
    kUnreachable,  ///< its host does not answer; `text` says how it was seen
    kLeft,         ///< exited normally although somebody still waits for it
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

  /// The rank has, or soon has, an exception of its own.
  bool is_raised_by(int rank) const {
    return rank == global_rank && kind != Kind::kStuck;
  }

  /// One or more lines for people, naming rank, place and reason.
  std::string describe() const;
  /// The first of these lines.
  std::string headline() const;
};

/// What a process knows about the health of the others. The first fault wins
/// and stays until the object dies. Every blocking wait of the library
/// subscribes, so that it ends when a fault comes. Thread-safe.
class FaultBoard {
 public:
  explicit FaultBoard(int global_rank);

  int global_rank() const { return global_rank_; }

  /// Words for each global rank, for instance "pp 1 tp 0 rdp 1"; later faults
  /// name those of the culprit.
  void set_coordinates(std::vector<std::string> per_global_rank);
  std::string coordinates(int global_rank) const;

  /// Addresses at which the hosts of all global ranks are reached by others;
  /// empty ones are not known.
  void set_addresses(std::vector<std::string> per_global_rank);
  /// The first rank at an address; -1 when none is.
  int rank_at(const std::string& address) const;

  /// Records a fault (first one wins) and wakes all subscribers. Of a rank that
  /// cannot say so itself the first other rank prints a line at once, so that
  /// the culprit is on the screen even when a launcher ends this process next.
  /// @return true when this one is the first.
  bool report(Fault fault);

  /// A rank said goodbye. No fault by itself; a wait that needs it fails.
  /// @param entered  the collectives that it has done its part of
  void mark_left(int global_rank, CollectiveLog::State entered = {});
  /// So did several, of which the hub knows what they have done their part of.
  void mark_left(const RankSet& ranks);

  std::optional<Fault> fault() const;
  bool has_left(int global_rank) const { return goodbyes_.has(global_rank); }
  /// Who has left, and what they will not do their part of.
  Goodbyes& goodbyes() { return goodbyes_; }

  /// @throws PeerFailure with `describe()` when there is a fault.
  void raise_if_faulted() const;

  /// Calls `wake` (from any thread, without locks of ours held that the other
  /// methods need) at each change. `wake` may not subscribe or unsubscribe.
  /// @return token for `unsubscribe`, which returns only when no call to
  ///         `wake` is running.
  int subscribe(std::function<void()> wake);
  void unsubscribe(int token);

  /// `check` is called a few times per second by waits of the library, without
  /// their locks, and may throw: for Ctrl-C. Set it before the first wait.
  void set_interrupt_check(std::function<void()> check);
  void check_interrupt() const;

  /// What this process waits for at the moment.
  WaitRegistry& waits() { return waits_; }

 private:
  void wake_all();
  std::string coordinates_locked(int global_rank) const;

  const int global_rank_;
  WaitRegistry waits_;
  Goodbyes goodbyes_;
  std::function<void()> interrupt_check_;
  mutable std::mutex mutex_;
  std::optional<Fault> fault_;
  std::vector<std::string> coordinates_;
  std::vector<std::string> addresses_;
  std::mutex subscribers_mutex_;  // held while waking: see unsubscribe
  std::vector<std::pair<int, std::function<void()>>> subscribers_;
  int next_token_ = 0;
};

}  // namespace smp::health
