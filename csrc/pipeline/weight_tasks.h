#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/pipeline/call_record.h"
#include "csrc/pipeline/module_table.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/wire.h"

namespace smp::pipeline {

/// Makes tasks of the gradients of weights that the schedule puts off.
/// Thread-safe.
class WeightTasks {
 public:
  /// @param finish_microbatch  ends a microbatch whose end had to wait
  WeightTasks(const ModuleTable& modules, const Policy& policy,
              Scheduler& scheduler,
              std::function<void(int mb)> finish_microbatch);

  /// Returns the gradients of the inputs, if the schedule wants the backward in
  /// two parts and the graph can be run so; the other part becomes a task.
  std::optional<std::vector<at::Tensor>> begin_backward(
      const Header& header, int64_t module_id, const CallRecord& record,
      const std::vector<GraphEdge>& roots,
      const std::vector<at::Tensor>& root_grads);

  /// Returns whether weight gradients of the microbatch are left. The last of
  /// them then ends it: the driver does not wait for them before it lets the
  /// next one in.
  bool puts_off_end(int mb);
  void begin_step();

 private:
  struct Pending {
    int num_tasks = 0;
    bool others_are_done = false;  // the rest of the microbatch is over
  };

  void add(const Header& header, int64_t module_id,
           std::function<void()> add_weight_grads);
  void finish(int mb);

  const ModuleTable& modules_;
  const Policy& policy_;
  Scheduler& scheduler_;
  const std::function<void(int mb)> finish_microbatch_;
  std::mutex mutex_;
  std::map<int, Pending> pending_;                         // by microbatch
  std::map<std::pair<int64_t, int64_t>, int64_t> visits_;  // by mb and module
};

}  // namespace smp::pipeline
