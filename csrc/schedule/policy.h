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
};

/// @param name "interleaved" or "simple"
/// @throws ValueError for any other name
std::unique_ptr<Policy> make_policy(const std::string& name);

std::unique_ptr<Policy> make_interleaved_policy();
std::unique_ptr<Policy> make_simple_policy();

}  // namespace smp::schedule
