#include "csrc/schedule/policy.h"

#include "csrc/common/check.h"

namespace smp::schedule {

bool Policy::splits_backward(int64_t, int64_t) const { return false; }

bool Policy::may_begin_backward(const StepProgress&) const { return true; }

std::unique_ptr<Policy> make_policy(const std::string& name) {
  if (name == "interleaved") return make_interleaved_policy();
  if (name == "simple") return make_simple_policy();
  if (name == "virtual_interleaved") return make_virtual_interleaved_policy();
  if (name == "zero_bubble") return make_zero_bubble_policy();
  SMP_CHECK_VALUE(false, "pipeline policy '", name,
                  "' is unknown; use 'interleaved', 'simple', "
                  "'virtual_interleaved' or 'zero_bubble'");
  return nullptr;
}

}  // namespace smp::schedule
