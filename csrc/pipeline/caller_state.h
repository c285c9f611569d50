#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "csrc/pipeline/remote_ref.h"

namespace smp::pipeline {

/// What a context remembers of the calls it has made to other ranks.
struct CallerState {
  using WeakTensor =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  /// A tensor of this rank that was an argument, and the name it got.
  struct SentTensor {
    WeakTensor tensor;
    uint32_t version = 0;
    RemoteRefPtr ref;
  };

  int64_t context_id = 0;  ///< unique on this rank; 0 before the first call
  int64_t num_calls = 0;   ///< part of the call path
  /// Last request per owner.
  std::map<int, int64_t> issued;
  /// How often each kind of call came before, by what is known of it.
  std::map<const void*, int64_t> visits;
  std::vector<SentTensor> sent;
  /// Everything named here that may still be asked for.
  std::vector<std::weak_ptr<RemoteRef>> refs;

  /// Remembers a ref; forgets those that are gone from time to time.
  void add_ref(const RemoteRefPtr& ref);
  /// The name that `tensor` got when it was sent before, if it has not
  /// changed since. Forgets tensors that are gone.
  RemoteRefPtr find_sent(const at::Tensor& tensor);

 private:
  size_t prune_at_ = 64;
};

}  // namespace smp::pipeline
