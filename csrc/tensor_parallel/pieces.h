#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "csrc/tensor_parallel/group.h"

namespace smp::tensor_parallel {

/// Returns a tensor [..., features] as a matrix, a view if it is contiguous.
at::Tensor flat(const at::Tensor& x);

/// Returns in how many pieces a gather runs beside the products that read it,
/// on the streams of a device: the next piece is on its way while a product
/// reads the last one. Pieces are equal, so their number divides `extent`, and
/// large enough for products and transfers of full speed. A host gathers in one
/// piece: its transfers take the cores that its products need.
/// @param num_bytes  bytes of the gathered tensor
/// @param extent  size of the dim that pieces cut
int64_t num_pieces(int64_t num_bytes, int64_t extent);

/// A gather of [c, 1, ...] from all ranks along dim 1, in c pieces.
class GatherOfPieces {
 public:
  /// Begins to gather all pieces, in their order.
  GatherOfPieces(Group& group, const at::Tensor& parts, const char* what);

  /// Waits for a piece [t, ...], once for each; by their order.
  at::Tensor take(int64_t piece);
  /// Waits for the pieces that were not taken; returns all of them [c, t, ...].
  at::Tensor take_all();

 private:
  const at::Tensor whole_;
  std::vector<Pending> pending_;
  int64_t num_taken_ = 0;
};

/// The sums over all ranks of pieces [t, ...], of which block i is group rank
/// i's. The result is this rank's part [c, 1, ...].
class SumOfPieces {
 public:
  SumOfPieces(Group& group, int64_t num_pieces, const char* what);

  /// Begins to sum the next piece.
  void begin(const at::Tensor& terms);
  /// Waits for all pieces.
  at::Tensor take();

 private:
  Group& group_;
  const int64_t num_pieces_;
  const char* const what_;
  at::Tensor parts_;
  std::vector<Pending> pending_;
};

}  // namespace smp::tensor_parallel
