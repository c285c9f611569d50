#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/group_wait.h"

namespace smp::parameters {

/// Brings the parts that each rank of a shard group has updated to all its
/// ranks, while other work goes on. All gathers are launched together, in the
/// order in which the parameters are needed, and each is waited for where its
/// parameters are used. Thread-safe; the lock is never held while waiting. On a
/// device the host waits for none before the end of a run; then one stream uses
/// the parameters of a rank.
class FlatGathers {
 public:
  /// @param flats  each `[size * n]`; part r belongs to group rank r. The same
  ///     sizes in one order on all ranks
  /// @param shard  no other code may launch on it out of order
  FlatGathers(std::vector<at::Tensor> flats, comm::CommunicatorPtr shard,
              comm::WaitOptions wait);

  /// Begins to gather everything, after waiting for earlier gathers: they may
  /// still read memory that an update is going to write. Collective.
  void launch();

  /// Returns whether a gather was not waited for yet. Costs nothing.
  bool pending() const { return num_pending_ > 0; }
  /// Waits for some of the gathers, where they are in flight.
  void wait(const std::vector<int>& flat_idxs);
  void wait_all();
  /// Waits for all gathers at the end of a run, when other ranks may have left:
  /// only gathers that they have begun before can be expected.
  void finish(std::chrono::milliseconds timeout);

  int64_t num_gathers() const { return num_gathers_; }
  /// Returns the number of gathers that `wait` waited for, hence overlapped
  /// with other work.
  int64_t num_overlapped() const { return num_overlapped_; }

 private:
  comm::WorkPtr work_of(int flat_idx) const;
  void forget(int flat_idx, const comm::WorkPtr& work);
  void await(int flat_idx);

  const std::vector<at::Tensor> flats_;
  const comm::CommunicatorPtr shard_;
  const comm::WaitOptions wait_;
  std::atomic<int> num_pending_ = 0;
  std::atomic<int64_t> num_gathers_ = 0;
  std::atomic<int64_t> num_overlapped_ = 0;
  mutable std::mutex mutex_;          // guards `works_`
  std::vector<comm::WorkPtr> works_;  // by flat; null: not in flight
};

}  // namespace smp::parameters
