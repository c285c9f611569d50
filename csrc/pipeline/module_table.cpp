#include "csrc/pipeline/module_table.h"

#include "csrc/common/check.h"
#include "csrc/pipeline/wire.h"

namespace smp::pipeline {

int64_t ModuleTable::add(const std::vector<std::string>& names,
                         const std::vector<int>& chunk_idxs, int depth) {
  SMP_CHECK_VALUE(names.size() == chunk_idxs.size(), "got ", names.size(),
                  " modules and ", chunk_idxs.size(), " chunks");
  const auto first_id = static_cast<int64_t>(names_.size());
  names_.insert(names_.end(), names.begin(), names.end());
  chunk_idxs_.insert(chunk_idxs_.end(), chunk_idxs.begin(), chunk_idxs.end());
  depth_ = depth;
  ++num_models_;
  return first_id;
}

int64_t ModuleTable::chunk_of(int64_t module_id) const {
  const auto i = static_cast<size_t>(module_id);
  return i < chunk_idxs_.size() ? chunk_idxs_[i] : 0;
}

std::string ModuleTable::name_of(int64_t module_id) const {
  if (module_id == kOperationId) return "(arithmetic)";
  if (module_id == kFunctionId) return "(function)";
  const auto i = static_cast<size_t>(module_id);
  if (i >= names_.size()) return std::to_string(module_id);
  return names_[i].empty() ? "(root)" : names_[i];
}

std::string ModuleTable::describe(schedule::Phase phase, int64_t mb,
                                  int64_t module_id) const {
  using schedule::Phase;
  return "module '" + name_of(module_id) + "', microbatch " +
         std::to_string(mb) +
         (phase == Phase::kForward    ? ", forward"
          : phase == Phase::kBackward ? ", backward"
                                      : ", weight gradients");
}

}  // namespace smp::pipeline
