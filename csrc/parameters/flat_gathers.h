#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/group_wait.h"

namespace smp::parameters {

/// Brings what each rank of a shard group has updated of its flat parameters to
/// all of them, while other work goes on: all gathers are launched together, in
/// the order in which the parameters are needed, and each is waited for where
/// its parameters are used. Thread-safe; the lock is never held while waiting.
/// Of a device the host waits for none before the end of a run; then one stream
/// uses the parameters of a rank.
class FlatGathers {
 public:
  /// @param flats  each `[size * n]`; part r belongs to group rank r. The same
  ///               sizes in one order on all ranks
  /// @param shard  nobody else launches on it out of order
  FlatGathers(std::vector<at::Tensor> flats, comm::CommunicatorPtr shard,
              comm::Patience patience);

  /// Begins to gather everything; earlier gathers are waited for before,
  /// because they may still read what an update is going to write. Collective.
  void launch();

  /// Is a gather not waited for yet? Costs nothing.
  bool pending() const { return num_pending_ > 0; }
  /// Waits for some of them, where they are in flight.
  void wait(const std::vector<int>& flat_idxs);
  void wait_all();
  /// `wait_all` for the end of a run, when other ranks may have left: only what
  /// they have begun before can be expected.
  void finish(std::chrono::milliseconds timeout);

  int64_t num_gathers() const { return num_gathers_; }
  /// Gathers that were waited for by `wait`, hence overlapped with something.
  int64_t num_overlapped() const { return num_overlapped_; }

 private:
  comm::WorkPtr work_of(int flat_idx) const;
  void forget(int flat_idx, const comm::WorkPtr& work);
  void await(int flat_idx);

  const std::vector<at::Tensor> flats_;
  const comm::CommunicatorPtr shard_;
  const comm::Patience patience_;
  std::atomic<int> num_pending_ = 0;
  std::atomic<int64_t> num_gathers_ = 0;
  std::atomic<int64_t> num_overlapped_ = 0;
  mutable std::mutex mutex_;          // guards `works_`
  std::vector<comm::WorkPtr> works_;  // by flat; null: not in flight
};

}  // namespace smp::parameters
