#include "csrc/tensor_parallel/pieces.h"

#include <algorithm>

#include "csrc/common/check.h"

namespace smp::tensor_parallel {
namespace {

// Estimates, which no device has confirmed.
constexpr int64_t kMaxPieces = 4;
constexpr int64_t kLeastBytes = int64_t{16} << 20;

}  // namespace

at::Tensor flat(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

int64_t num_pieces(int64_t num_bytes, int64_t extent) {
  int64_t count = std::clamp<int64_t>(num_bytes / kLeastBytes, 1, kMaxPieces);
  while (extent % count != 0) --count;
  return count;
}

GatherOfPieces::GatherOfPieces(Group& group, const at::Tensor& parts,
                               const char* what)
    : whole_([&] {
        std::vector<int64_t> shape = parts.sizes().vec();
        shape[1] = group.size();
        return parts.new_empty(shape);
      }()) {
  SMP_ASSERT(parts.size(1) == 1, "pieces of one rank, got ", parts.sizes());
  const at::Tensor own = parts.contiguous();
  for (int64_t piece = 0; piece < own.size(0); ++piece) {
    pending_.push_back(
        group.begin_gather_into(whole_[piece], own[piece], what));
  }
}

at::Tensor GatherOfPieces::take(int64_t piece) {
  SMP_ASSERT(piece == num_taken_, "piece ", piece, " after ", num_taken_);
  return pending_[num_taken_++].take();
}

at::Tensor GatherOfPieces::take_all() {
  while (num_taken_ < whole_.size(0)) take(num_taken_);
  return whole_;
}

SumOfPieces::SumOfPieces(Group& group, int64_t num_pieces, const char* what)
    : group_(group), num_pieces_(num_pieces), what_(what) {}

void SumOfPieces::begin(const at::Tensor& terms) {
  if (!parts_.defined()) {
    std::vector<int64_t> shape = terms.sizes().vec();
    shape[0] = 1;
    shape.insert(shape.begin(), num_pieces_);
    parts_ = terms.new_empty(shape);
  }
  const auto piece = static_cast<int64_t>(pending_.size());
  pending_.push_back(group_.begin_scatter_into(parts_[piece], terms, what_));
}

at::Tensor SumOfPieces::take() {
  SMP_ASSERT(static_cast<int64_t>(pending_.size()) == num_pieces_, "begun ",
             pending_.size(), " of ", num_pieces_, " pieces");
  for (Pending& pending : pending_) pending.take();
  return parts_;
}

}  // namespace smp::tensor_parallel
