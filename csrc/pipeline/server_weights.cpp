// Weight gradients that the schedule puts off: tasks of their own.

#include <utility>

#include "csrc/pipeline/server.h"
#include "csrc/pipeline/split_backward.h"

namespace smp::pipeline {

// Gradients of the inputs, if the schedule wants the backward in two parts and
// the graph can be run so; the other part becomes a task.
std::optional<std::vector<at::Tensor>> Server::begin_split_backward(
    const Header& header, int64_t module_id, const CallRecord& record,
    const std::vector<GraphEdge>& roots,
    const std::vector<at::Tensor>& root_grads) {
  if (module_id < 0) return std::nullopt;  // functions have no parameters
  const auto idx = static_cast<size_t>(module_id);
  const int64_t chunk = idx < chunk_idxs_.size() ? chunk_idxs_[idx] : 0;
  if (!policy_->splits_backward(header.mb, chunk)) return std::nullopt;
  std::vector<GraphEdge> inputs;
  for (const auto& input : record.inputs) inputs.push_back({input, 0});
  auto first = run_input_backward(roots, root_grads, inputs);
  if (!first) {
    // A list must not wait for what will not come.
    scheduler_.skip_action({Phase::kWeight, header.mb, chunk});
    return std::nullopt;
  }
  add_weight_task(header, module_id, std::move(first->add_weight_grads));
  return std::move(first->input_grads);
}

void Server::add_weight_task(const Header& header, int64_t module_id,
                             std::function<void()> add_weight_grads) {
  const int mb = static_cast<int>(header.mb);
  int64_t visit = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    visit = visits_[{Phase::kWeight, header.mb, module_id}]++;
    ++weights_[mb].num_pending;
  }
  scheduler_.add_service({Phase::kWeight, header.mb, module_id, visit, 0},
                         describe_task(Phase::kWeight, header.mb, module_id),
                         static_cast<uint64_t>(header.path),
                         [this, mb, add = std::move(add_weight_grads)] {
                           add();
                           finish_weight_task(mb);
                         });
}

void Server::finish_weight_task(int mb) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Weights& weights = weights_[mb];
    if (--weights.num_pending > 0 || !weights.others_are_done) return;
  }
  finish_microbatch(mb);
}

// The driver does not wait for weight gradients: it lets the next microbatch
// in. So the end of a microbatch may find some of them left here, and the last
// of these ends it.
bool Server::must_wait_for_weights(int mb) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = weights_.find(mb);
  if (found == weights_.end() || found->second.num_pending == 0) return false;
  found->second.others_are_done = true;
  return true;
}

}  // namespace smp::pipeline
