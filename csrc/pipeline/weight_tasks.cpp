#include "csrc/pipeline/weight_tasks.h"

#include "csrc/pipeline/split_backward.h"

namespace smp::pipeline {

WeightTasks::WeightTasks(const ModuleTable& modules, const Policy& policy,
                         Scheduler& scheduler,
                         std::function<void(int mb)> finish_microbatch)
    : modules_(modules),
      policy_(policy),
      scheduler_(scheduler),
      finish_microbatch_(std::move(finish_microbatch)) {}

std::optional<std::vector<at::Tensor>> WeightTasks::begin_backward(
    const Header& header, int64_t module_id, const CallRecord& record,
    const std::vector<GraphEdge>& roots,
    const std::vector<at::Tensor>& root_grads) {
  if (module_id < 0) return std::nullopt;  // functions have no parameters
  const int64_t chunk = modules_.chunk_of(module_id);
  if (!policy_.splits_backward(header.mb, chunk)) return std::nullopt;
  std::vector<GraphEdge> inputs;
  for (const auto& input : record.inputs) inputs.push_back({input, 0});
  auto first = run_input_backward(roots, root_grads, inputs);
  if (!first) {
    // A list must not wait for an action that will not come.
    scheduler_.skip_action({Phase::kWeight, header.mb, chunk});
    return std::nullopt;
  }
  add(header, module_id, std::move(first->add_weight_grads));
  return std::move(first->input_grads);
}

void WeightTasks::add(const Header& header, int64_t module_id,
                      std::function<void()> add_weight_grads) {
  const int mb = static_cast<int>(header.mb);
  int64_t visit = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    visit = visits_[{header.mb, module_id}]++;
    ++pending_[mb].num_tasks;
  }
  scheduler_.add_service(
      {Phase::kWeight, header.mb, module_id, visit, 0},
      modules_.describe(Phase::kWeight, header.mb, module_id),
      static_cast<uint64_t>(header.path),
      [this, mb, add_weight_grads = std::move(add_weight_grads)] {
        add_weight_grads();
        finish(mb);
      });
}

void WeightTasks::finish(int mb) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Pending& pending = pending_[mb];
    if (--pending.num_tasks > 0 || !pending.others_are_done) return;
  }
  finish_microbatch_(mb);
}

bool WeightTasks::puts_off_end(int mb) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pending_.find(mb);
  if (found == pending_.end() || found->second.num_tasks == 0) return false;
  found->second.others_are_done = true;
  return true;
}

void WeightTasks::begin_step() {
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.clear();
  visits_.clear();
}

}  // namespace smp::pipeline
