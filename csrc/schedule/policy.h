#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/schedule/schedule_text.h"
#include "csrc/schedule/task.h"

namespace smp::schedule {

/// Sizes of a pipeline and of the steps that pass it.
struct PipelineSize {
  int num_partitions = 1;
  int num_chunks = 1;  ///< stages per rank
  int num_microbatches = 1;
};

/// Decides which ready task runs next, and everything else that depends on the
/// kind of schedule: no other code compares names. Pure: no clock, no state, no
/// torch.
class Policy {
 public:
  virtual ~Policy() = default;

  /// Returns the name that users write in the configuration.
  virtual const std::string& name() const = 0;

  /// @return index into `ready`, or nothing when it is better to wait for a
  ///     task that is certain to come.
  virtual std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                                     const StepProgress& progress) const = 0;

  /// Returns the number of microbatches in flight if the user gave none.
  virtual int default_active_microbatches(int num_partitions,
                                          int num_microbatches) const = 0;

  /// Returns the stages per rank if the user gave none. With 1 there are never
  /// more.
  virtual int default_chunks() const { return 1; }

  /// Returns the most microbatches whose activations rank `depth` of the
  /// pipeline keeps at once while `active_microbatches` are in flight. The
  /// partition computes its memory from this number.
  virtual int kept_microbatches(const PipelineSize& size,
                                int active_microbatches, int depth) const;

  /// Returns whether the backward of this microbatch and chunk is done in two
  /// tasks, `kBackward` for the gradients of inputs and `kWeight` for the rest.
  virtual bool splits_backward(int64_t mb, int64_t chunk) const;

  /// Returns whether the driver may send a microbatch that has finished its
  /// forward into its backward now.
  virtual bool may_begin_backward(const StepProgress& progress) const;

  /// Returns whether the order is given: `pick` does not choose by readiness,
  /// so nothing is lost when a host asks its device for all of it at once.
  virtual bool has_fixed_order() const { return false; }

  /// Returns whether `pick` looks at the work under way on its rank, and may
  /// let a forward wait for it, in a step that keeps activations or keeps none.
  virtual bool limits_forwards(bool keeps_activations) const;

  /// Returns the actions of each rank in a step in which every stage takes the
  /// same time: those of the policy with such stages, unless the literature has
  /// a list.
  /// @throws ValueError for sizes that the list is not made for
  virtual Schedule plan(const PipelineSize& size) const;
};

using PolicyPtr = std::unique_ptr<Policy>;

/// Policy of users who name none.
inline constexpr const char* kDefaultPolicy = "interleaved";

/// Returns the names of all policies, in alphabetical order.
std::vector<std::string> policy_names();

/// Makes a policy by its name.
/// @throws ValueError for a name that is not in `policy_names`
PolicyPtr make_policy(const std::string& name);

void register_policy(PolicyPtr (*make)());

/// Makes a policy known by its name. At namespace scope of its source:
/// `const RegisterPolicy<MyPolicy> registered;`
template <typename Type>
struct RegisterPolicy {
  RegisterPolicy() {
    register_policy([]() -> PolicyPtr { return std::make_unique<Type>(); });
  }
};

/// Makes a policy that runs the list of this rank ("schedules given as data"):
/// it waits for the list's next entry, however long. Needs
/// `StepProgress::begun`. Of the ready tasks it runs, in this order,
///   - a further part of an entry that has begun, the earliest entry first;
///   - the next entry; entries of microbatches that have ended are passed over;
///   - a task that the list does not name, since the next entry may wait for
///     its result: backward first, then by microbatch and arrival.
/// `simulate` finds out beforehand whether a list can finish at all.
/// @throws ValueError if an entry is there twice, or a W without its B before
PolicyPtr make_listed_policy(ActionList actions);

/// Returns the plan of a policy by its name.
/// @throws ValueError for an unknown name, or for sizes that make no sense
Schedule make_plan(const std::string& policy_name, const PipelineSize& size);

}  // namespace smp::schedule
