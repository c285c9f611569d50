#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace smp::comm {

/// Why a run cannot go on.
struct Fault {
  enum class Kind {
    kRaised,    ///< an exception in a rank; `text` holds it
    kDied,      ///< connection lost without a word: killed, crashed
    kLeft,      ///< exited normally although somebody still waits for it
    kDeadlock,  ///< every rank waits; `text` holds the table
  };
  Kind kind = Kind::kRaised;
  int global_rank = -1;
  std::string where;  ///< coordinates, module, microbatch as far as known
  std::string text;

  /// One or more lines for people, naming rank, place and reason.
  std::string describe() const;
};

/// What a process knows about the health of the others. The first fault wins
/// and stays until the object dies. Every blocking wait of the library
/// subscribes, so that it ends when a fault comes. Thread-safe.
class FaultBoard {
 public:
  explicit FaultBoard(int global_rank);

  /// Records a fault (first one wins) and wakes all subscribers.
  /// @return true when this one is the first.
  bool report(Fault fault);

  /// A rank said goodbye. No fault by itself; a wait that needs it fails.
  void mark_left(int global_rank);

  std::optional<Fault> fault() const;
  bool has_left(int global_rank) const;

  /// @throws PeerFailure with `describe()` when there is a fault.
  void raise_if_faulted() const;

  /// Calls `wake` (from any thread, without locks of ours held) at each change.
  /// @return token for `unsubscribe`, which returns only when no call to
  ///         `wake` is running.
  int subscribe(std::function<void()> wake);
  void unsubscribe(int token);

 private:
  void wake_all();

  const int global_rank_;
  mutable std::mutex mutex_;
  std::optional<Fault> fault_;
  std::vector<int> left_;
  std::mutex subscribers_mutex_;  // held while waking: see unsubscribe
  std::vector<std::pair<int, std::function<void()>>> subscribers_;
  int next_token_ = 0;
};

}  // namespace smp::comm
