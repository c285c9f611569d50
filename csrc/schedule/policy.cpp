#include "csrc/schedule/policy.h"

#include "csrc/common/check.h"

namespace smp::schedule {

std::unique_ptr<Policy> make_policy(const std::string& name) {
  if (name == "interleaved") return make_interleaved_policy();
  if (name == "simple") return make_simple_policy();
  SMP_CHECK_VALUE(false, "pipeline policy '", name,
                  "' is unknown; use 'interleaved' or 'simple'");
  return nullptr;
}

}  // namespace smp::schedule
