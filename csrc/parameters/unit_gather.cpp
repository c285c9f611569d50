#include "csrc/parameters/unit_gather.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"

namespace smp::parameters {
namespace {

// Returns the elements of one rank's part of a parameter in a flat tensor of
// bytes.
at::Tensor typed(const at::Tensor& bytes, const ShardedParameter& param) {
  return bytes.view(param.shard().scalar_type());
}

}  // namespace

UnitGather::UnitGather(std::vector<ShardedParameter*> params,
                       GatherGroup& group, uint64_t stamp, std::string what)
    : params_(std::move(params)), stamp_(stamp), what_(std::move(what)) {
  const at::NoGradGuard no_grad;
  comparison_ = group.compare(stamp_);
  for (ShardedParameter* param : params_) {
    if (param->num_bytes() >= kAloneBytes || params_.size() == 1) {
      gather_alone(*param, group);
    } else {
      small_.push_back(param);
    }
  }
  if (!small_.empty()) gather_together(group);
}

void UnitGather::gather_alone(ShardedParameter& param, GatherGroup& group) {
  param.allocate();
  gathers_.push_back(group.all_gather(param.parts().view(at::kByte),
                                      param.shard().view(at::kByte), stamp_));
}

void UnitGather::gather_together(GatherGroup& group) {
  int64_t alignment = 1;
  for (const ShardedParameter* param : small_) {
    alignment = std::max(alignment, param->item_bytes());
  }
  for (const ShardedParameter* param : small_) {
    offsets_.push_back(part_bytes_);
    part_bytes_ += param->shard_bytes();
    part_bytes_ = (part_bytes_ + alignment - 1) / alignment * alignment;
  }
  flat_ = at::empty({group.size() * part_bytes_},
                    small_.front()->shard().options().dtype(at::kByte));
  gathers_.push_back(group.all_gather(flat_, packed_shards(), stamp_));
}

// Returns shards in one piece. Shards that already lie behind each other are
// sent from their place.
at::Tensor UnitGather::packed_shards() const {
  const at::Tensor first = small_.front()->shard().view(at::kByte);
  const auto* base = static_cast<const char*>(first.const_data_ptr());
  bool is_packed = true;
  for (size_t i = 0; i < small_.size(); ++i) {
    const at::Tensor& shard = small_[i]->shard();
    is_packed &= static_cast<const char*>(shard.const_data_ptr()) ==
                     base + offsets_[i] &&
                 shard.is_alias_of(first);
  }
  const int64_t end = first.storage_offset() + part_bytes_;
  if (is_packed && end <= static_cast<int64_t>(first.storage().nbytes())) {
    return first.as_strided({part_bytes_}, {1});
  }
  const at::Tensor packed = at::empty({part_bytes_}, flat_.options());
  for (size_t i = 0; i < small_.size(); ++i) {
    const at::Tensor bytes = small_[i]->shard().view(at::kByte);
    packed.narrow(0, offsets_[i], bytes.numel()).copy_(bytes);
  }
  return packed;
}

void UnitGather::finish(const comm::WaitOptions& wait) {
  const std::lock_guard lock(mutex_);
  if (is_finished_) return;
  if (comparison_) comparison_->follow(wait, what_);
  for (const GatherPtr& gather : gathers_) gather->follow(wait, what_);
  const at::NoGradGuard no_grad;
  if (!small_.empty()) copy_out();
  for (ShardedParameter* param : params_) param->show();
  is_finished_ = true;
}

void UnitGather::copy_out() {
  const int64_t num_parts = flat_.numel() / part_bytes_;
  for (size_t i = 0; i < small_.size(); ++i) {
    ShardedParameter& param = *small_[i];
    param.allocate();
    const int64_t numel = param.shard().numel();
    const int64_t item = param.item_bytes();
    const at::Tensor parts =
        typed(flat_, param)
            .as_strided({num_parts, numel}, {part_bytes_ / item, 1},
                        offsets_[i] / item);
    param.parts().view({num_parts, numel}).copy_(parts);
  }
  flat_.reset();
}

}  // namespace smp::parameters
