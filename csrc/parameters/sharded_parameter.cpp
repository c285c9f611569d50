#include "csrc/parameters/sharded_parameter.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "csrc/common/check.h"

namespace smp::parameters {

ShardedParameter::ShardedParameter(at::Tensor param, at::Tensor shard,
                                   int num_shards, StoragePool& pool)
    : param_(std::move(param)),
      placeholder_(param_.variable_data()),
      shard_(std::move(shard)),
      num_shards_(num_shards),
      pool_(&pool) {
  const int64_t part = (numel() + num_shards - 1) / num_shards;
  SMP_CHECK_VALUE(
      shard_.dim() == 1 && shard_.numel() == part && shard_.is_contiguous() &&
          shard_.scalar_type() == param_.scalar_type() &&
          shard_.device() == param_.device(),
      "expected a shard of ", part, " elements for a parameter of sizes ",
      param_.sizes(), ", got sizes ", shard_.sizes(), ", dtype ",
      shard_.scalar_type(), " on ", shard_.device());
  const at::NoGradGuard no_grad;
  parts_ = at::empty({num_shards * part}, shard_.options());
  whole_ = parts_.narrow(0, 0, numel()).view(param_.sizes());
  release();
}

void ShardedParameter::allocate() {
  SMP_ASSERT(!has_memory_, "memory of a parameter");
  c10::StorageImpl* storage = parts_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(pool_->take(num_bytes(), storage->allocator()));
  storage->set_nbytes(static_cast<size_t>(num_bytes()));
  has_memory_ = true;
}

void ShardedParameter::show() { param_.set_data(whole_); }

void ShardedParameter::release() {
  param_.set_data(placeholder_);
  if (!has_memory_) return;
  c10::StorageImpl* storage = parts_.storage().unsafeGetStorageImpl();
  pool_->give(num_bytes(),
              storage->set_data_ptr(at::DataPtr(nullptr, storage->device())));
  storage->set_nbytes(0);
  has_memory_ = false;
}

}  // namespace smp::parameters
