#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/schedule/task.h"

namespace smp::pipeline {

/// The modules that ranks of this replica may call, by their ids, over all
/// models. Changes between steps only, in one order on all ranks.
class ModuleTable {
 public:
  /// Adds the modules of a further model.
  /// @param chunk_idxs  chunk of each module
  /// @param depth  number of ranks that the data pass before this one
  /// @return the id of its first module, the others follow
  int64_t add(const std::vector<std::string>& names,
              const std::vector<int>& chunk_idxs, int depth);

  const std::vector<std::string>& names() const { return names_; }
  const std::vector<int>& chunk_idxs() const { return chunk_idxs_; }
  int num_models() const { return num_models_; }
  int depth() const { return depth_; }  ///< of the model added last

  int64_t chunk_of(int64_t module_id) const;
  /// Returns a name for people, also for the ids of wire.h that are no modules.
  std::string name_of(int64_t module_id) const;
  /// Returns a text like "module 'h.3', microbatch 1, backward".
  std::string describe(schedule::Phase phase, int64_t mb,
                       int64_t module_id) const;

 private:
  std::vector<std::string> names_;
  std::vector<int> chunk_idxs_;
  int num_models_ = 0;
  int depth_ = 0;
};

}  // namespace smp::pipeline
