#include "csrc/pipeline/call_record.h"

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "csrc/common/check.h"

namespace smp::pipeline {

GraphEdge GraphEdge::of(const at::Tensor& tensor) {
  torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(tensor);
  return {std::move(edge.function), edge.input_nr};
}

at::Tensor dense_grad(at::Tensor grad) {
  if (!grad.defined() || grad.is_sparse() ||
      grad.is_non_overlapping_and_dense()) {
    return grad;
  }
  return grad.clone(at::MemoryFormat::Contiguous);
}

void CallRecords::put(Key key, CallRecord record) {
  std::lock_guard<std::mutex> lock(mutex_);
  records_[key] = std::move(record);
}

CallRecord CallRecords::take(Key key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = records_.find(key);
  SMP_CHECK(found != records_.end(), "call ", key.second, " of global_rank ",
            key.first,
            " has no graph here any more: its backward ran already. "
            "retain_graph is not supported; call model.backward once on the "
            "sum of the losses");
  CallRecord record = std::move(found->second);
  records_.erase(found);
  return record;
}

void CallRecords::drop_microbatch(int64_t mb) {
  std::map<Key, CallRecord> dropped;  // graphs are freed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = records_.begin(); it != records_.end();) {
    if (it->second.mb == mb) {
      dropped.insert(records_.extract(it++));
    } else {
      ++it;
    }
  }
}

void CallRecords::clear() {
  std::map<Key, CallRecord> dropped;  // graphs are freed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(records_);
}

int64_t CallRecords::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(records_.size());
}

}  // namespace smp::pipeline
