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

/// Decides which ready task runs next, and knows all else that depends on the
/// kind of schedule: nobody compares names. Pure: no clock, no state, no torch.
class Policy {
 public:
  virtual ~Policy() = default;

  /// What users write in the configuration.
  virtual const std::string& name() const = 0;

  /// @return index into `ready`, or nothing when it is better to wait for a
  ///         task that is certain to come.
  virtual std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                                     const StepProgress& progress) const = 0;

  /// How many microbatches may be in flight when the user did not say.
  virtual int default_active_microbatches(int num_partitions,
                                          int num_microbatches) const = 0;

  /// Stages per rank when the user did not say. With 1 there are never more.
  virtual int default_chunks() const { return 1; }

  /// Most microbatches whose activations rank `depth` of the pipeline keeps at
  /// once while `active_microbatches` are in flight, for the partition to know
  /// its memory.
  virtual int kept_microbatches(const PipelineSize& size,
                                int active_microbatches, int depth) const;

  /// Whether the backward of this microbatch and chunk is done in two tasks,
  /// `kBackward` for the gradients of inputs and `kWeight` for the rest.
  virtual bool splits_backward(int64_t mb, int64_t chunk) const;

  /// Whether the driver may send a microbatch that has finished its forward
  /// into its backward now.
  virtual bool may_begin_backward(const StepProgress& progress) const;

  /// Whether the order is given: `pick` does not choose by what is ready, so
  /// nothing is lost when a host asks its device for all of it at once.
  virtual bool has_fixed_order() const { return false; }

  /// Whether `pick` looks at what is under way on its rank, and may let a
  /// forward wait for it, in a step that keeps activations or keeps none.
  virtual bool limits_forwards(bool keeps_activations) const;

  /// What each rank does in a step in which every stage takes the same time.
  /// What the policy does with such stages, unless the literature has a list.
  /// @throws ValueError for sizes that the list is not made for
  virtual Schedule plan(const PipelineSize& size) const;
};

using PolicyPtr = std::unique_ptr<Policy>;

/// If the user names none.
inline constexpr const char* kDefaultPolicy = "interleaved";

/// Names of the policies there are, in alphabetical order.
std::vector<std::string> policy_names();

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

/// Runs what the list of this rank says ("schedules given as data"): waits for
/// its next entry, however long. Needs `StepProgress::begun`. Of the ready
/// tasks runs, in this order,
///   - a further part of an entry that has begun, the earliest entry first;
///   - the next entry; entries of microbatches that have ended are passed over;
///   - a task that the list does not name, since the next entry may wait for
///     what comes out of it: backward first, then by microbatch and arrival.
/// Whether a list can finish at all, `simulate` tells beforehand.
/// @throws ValueError if an entry is there twice, or a W without its B before
PolicyPtr make_listed_policy(ActionList actions);

/// The plan of a policy by its name.
/// @throws ValueError for an unknown name, or for sizes that make no sense
Schedule make_plan(const std::string& policy_name, const PipelineSize& size);

}  // namespace smp::schedule
