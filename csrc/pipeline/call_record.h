#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace smp::pipeline {

/// What the owner of a module keeps of a call until its backward: the local
/// graph begins at `inputs` (leaves) and ends at `outputs`.
struct CallRecord {
  int64_t mb = 0;
  int64_t module_id = 0;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
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
