#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace smp::pipeline {

/// An input of a node of autograd: torch::autograd::Edge for headers.
struct GraphEdge {
  std::shared_ptr<torch::autograd::Node> node;  ///< null: there is none
  uint32_t input_nr = 0;

  /// Where the gradient of a tensor goes, which must require one.
  static GraphEdge of(const at::Tensor& tensor);
};

/// As it would lie in `.grad` of a leaf: dense, so that it can be sent.
at::Tensor dense_grad(at::Tensor grad);

/// What the owner of a module keeps of a call until its backward: where the
/// local graph begins and ends, and none of the data that are not in it.
struct CallRecord {
  int64_t mb = 0;
  int64_t module_id = 0;
  /// Of `autograd::begin_graph`; null for arguments that need no gradient.
  std::vector<std::shared_ptr<torch::autograd::Node>> inputs;
  std::vector<GraphEdge> outputs;
};

/// Records by (caller's global rank, its request id). Thread-safe.
class CallRecords {
 public:
  using Key = std::pair<int, int64_t>;

  void put(Key key, CallRecord record);
  /// Takes a record out. @throws Error when there is none: backward ran twice
  CallRecord take(Key key);
  /// Drops what a finished microbatch left: outputs nobody asked gradients of.
  void drop_microbatch(int64_t mb);
  void clear();
  int64_t size() const;

 private:
  mutable std::mutex mutex_;
  std::map<Key, CallRecord> records_;
};

}  // namespace smp::pipeline
