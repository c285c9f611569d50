#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "csrc/pipeline/remote_ref.h"

namespace smp::pipeline {

/// A context's record of the calls it has made to other ranks.
struct CallerState {
  using WeakTensor =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  /// A tensor of this rank that was an argument, and its name.
  struct SentTensor {
    WeakTensor tensor;
    uint32_t version = 0;
    RemoteRefPtr ref;
  };

  int64_t context_id = 0;  ///< unique on this rank; 0 before the first call
  int64_t num_calls = 0;   ///< part of the call path
  /// Last request per owner.
  std::map<int, int64_t> issued;
  /// Number of earlier calls by their expected result.
  std::map<const void*, int64_t> visits;
  std::vector<SentTensor> sent;
  /// Refs named here whose data may still be needed.
  std::vector<std::weak_ptr<RemoteRef>> refs;

  /// Remembers a ref; from time to time forgets refs that are gone.
  void add_ref(const RemoteRefPtr& ref);
  /// Returns the name that `tensor` got when it was sent before, if it has not
  /// changed since. Forgets tensors that are gone.
  RemoteRefPtr find_sent(const at::Tensor& tensor);

 private:
  size_t prune_at_ = 64;
};

}  // namespace smp::pipeline
