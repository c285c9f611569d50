#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/parameters/parameter_store.h"

namespace smp::parameters {

/// The units that the backward of one call of a module needs.
struct BackwardUse {
  std::vector<int> units;
  // Numbers of autograd nodes: the call's nodes are in [first, end).
  uint64_t first = 0;
  uint64_t end = 0;
  std::thread::id thread;  // made them; each thread counts by itself

  // Guarded by the mutex of BackwardUses:
  int task = -1;         // the backward that holds the units, if any
  bool is_kept = false;  // held since its forward, which ran in a backward
};

using BackwardUsePtr = std::shared_ptr<BackwardUse>;

/// Holds units from the first node of their modules' calls to the last one.
///
/// Autograd runs the nodes of one backward in the opposite order in which they
/// were made. So when it reaches the result of a call, all calls that began
/// after the end of that call are over. See Note [Order of a backward].
class BackwardUses : public std::enable_shared_from_this<BackwardUses> {
 public:
  explicit BackwardUses(ParameterStorePtr store) : store_(std::move(store)) {}

  /// Notes that the backward on this thread has reached a result of the call.
  void begin(const BackwardUsePtr& use);

  /// Keeps the units of a forward that ran in a backward (to recompute
  /// activations) and has ended: the backward will reach it soon. Does nothing
  /// if calls that the backward has reached already hold the units.
  void keep(const BackwardUsePtr& use);

  const ParameterStorePtr& store() const { return store_; }

 private:
  using Uses = std::vector<BackwardUsePtr>;

  // The units that a running backward holds.
  struct Backward {
    Uses uses;
    bool will_end = false;  // `end` is going to be called
  };

  void join(int task, const BackwardUsePtr& use);
  static std::vector<int> take_finished(Uses& active, const BackwardUse& use);
  void end(int task);

  const ParameterStorePtr store_;
  std::mutex mutex_;
  std::map<int, Backward> active_;
};

}  // namespace smp::parameters
