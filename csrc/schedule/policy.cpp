#include "csrc/schedule/policy.h"

#include <map>

#include "csrc/common/check.h"
#include "csrc/schedule/simulator.h"

namespace smp::schedule {
namespace {

using Makers = std::map<std::string, PolicyPtr (*)()>;

Makers& makers() {
  static Makers all;
  return all;
}

// Returns a text like "'a', 'b' or 'c'": policies that have `min_chunks` stages
// per rank or more.
std::string choices(int min_chunks) {
  std::vector<std::string> names;
  for (const auto& [name, make] : makers()) {
    if (make()->default_chunks() >= min_chunks) names.push_back(name);
  }
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 < names.size() ? ", " : " or ";
    text += "'" + names[i] + "'";
  }
  return text;
}

}  // namespace

int Policy::kept_microbatches(const PipelineSize&, int active_microbatches,
                              int) const {
  return active_microbatches;
}

bool Policy::splits_backward(int64_t, int64_t) const { return false; }

bool Policy::may_begin_backward(const StepProgress&) const { return true; }

bool Policy::limits_forwards(bool) const { return true; }

Schedule Policy::plan(const PipelineSize& size) const {
  return executed_by_equal_stages(
      *this, size,
      default_active_microbatches(size.num_partitions, size.num_microbatches));
}

void register_policy(PolicyPtr (*make)()) {
  const std::string name = make()->name();
  SMP_ASSERT(makers().emplace(name, make).second, "two policies '", name, "'");
}

std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : makers()) names.push_back(name);
  return names;
}

PolicyPtr make_policy(const std::string& name) {
  const auto found = makers().find(name);
  SMP_CHECK_VALUE(found != makers().end(), "pipeline policy '", name,
                  "' is unknown; use ", choices(1));
  return found->second();
}

Schedule make_plan(const std::string& policy_name, const PipelineSize& size) {
  SMP_CHECK_VALUE(size.num_partitions >= 1 && size.num_microbatches >= 1 &&
                      size.num_chunks >= 1,
                  "a schedule needs at least one rank, microbatch and chunk; "
                  "got ",
                  size.num_partitions, ", ", size.num_microbatches, " and ",
                  size.num_chunks);
  const PolicyPtr policy = make_policy(policy_name);
  SMP_CHECK_VALUE(size.num_chunks == 1 || policy->default_chunks() > 1,
                  "schedule '", policy_name, "' has one chunk per rank, got ",
                  size.num_chunks, "; use ", choices(2), " for more");
  return policy->plan(size);
}

}  // namespace smp::schedule
