#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/schedule/task.h"

namespace smp::schedule {

/// Decides which ready task runs next. Pure: no clock, no state, no torch.
class Policy {
 public:
  virtual ~Policy() = default;

  virtual const std::string& name() const = 0;

  /// @return index into `ready`, or nothing when it is better to wait for a
  ///         task that is certain to come.
  virtual std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                                     const StepProgress& progress) const = 0;

  /// How many microbatches may be in flight when the user did not say.
  virtual int default_active_microbatches(int num_partitions,
                                          int num_microbatches) const = 0;

  /// Whether the backward of this microbatch and chunk is done in two tasks,
  /// `kBackward` for the gradients of inputs and `kWeight` for the rest.
  virtual bool splits_backward(int64_t mb, int64_t chunk) const;

  /// Whether the driver may send a microbatch that has finished its forward
  /// into its backward now.
  virtual bool may_begin_backward(const StepProgress& progress) const;
};

/// @param name "interleaved", "simple", "virtual_interleaved", "zero_bubble"
/// @throws ValueError for any other name
std::unique_ptr<Policy> make_policy(const std::string& name);

std::unique_ptr<Policy> make_interleaved_policy();
std::unique_ptr<Policy> make_simple_policy();
std::unique_ptr<Policy> make_virtual_interleaved_policy();
std::unique_ptr<Policy> make_zero_bubble_policy();

/// Runs what the list of this rank says ("schedules given as data"): waits for
/// its next entry, however long. Needs `StepProgress::begun`. Of the ready
/// tasks runs, in this order,
///   - a further part of an entry that has begun, the earliest entry first;
///   - the next entry; entries of microbatches that have ended are passed over;
///   - a task that the list does not name, since the next entry may wait for
///     what comes out of it: backward first, then by microbatch and arrival.
/// Whether a list can finish at all, `simulate` tells beforehand.
/// @throws ValueError if an entry is there twice, or a W without its B before
std::unique_ptr<Policy> make_listed_policy(ActionList actions);

/// Forwards that rank `depth` of 1F1B over virtual stages does first.
int virtual_warmup(int num_partitions, int num_chunks, int depth);

}  // namespace smp::schedule
