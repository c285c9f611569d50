#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/autograd/node.h"

namespace smp::pipeline {

/// An input of a node of autograd: torch::autograd::Edge for headers.
struct GraphEdge {
  autograd::NodePtr node;  ///< null: there is none
  uint32_t input_nr = 0;

  /// Returns the edge along which the gradient of a tensor flows; the tensor
  /// must require a gradient.
  static GraphEdge of(const at::Tensor& tensor);
};

/// Returns the gradient as a leaf's `.grad` would hold it: dense, so that it
/// can be sent.
at::Tensor dense_grad(at::Tensor grad);

/// A module call as its owner keeps it until the backward: the beginning and
/// the end of the local graph, and no data outside of the graph.
struct CallRecord {
  int64_t mb = 0;
  int64_t module_id = 0;
  /// Nodes of `autograd::begin_graph`; null for arguments that need no
  /// gradient.
  std::vector<autograd::NodePtr> inputs;
  std::vector<GraphEdge> outputs;
};

/// Records by (caller's global rank, its request id). Thread-safe.
class CallRecords {
 public:
  using Key = std::pair<int, int64_t>;

  void put(Key key, CallRecord record);
  /// Takes a record out. @throws Error when there is none: backward ran twice
  CallRecord take(Key key);
  /// Drops what a finished microbatch left: calls whose backward never came.
  void drop_microbatch(int64_t mb);
  void clear();
  int64_t size() const;

 private:
  mutable std::mutex mutex_;
  std::map<Key, CallRecord> records_;
};

}  // namespace smp::pipeline
