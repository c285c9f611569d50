#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace smp::data_parallel {

/// Puts gradients into microbatch order. Those of the first unfinished
/// microbatch pass at once, those of later ones wait until it is their turn.
/// Inside one microbatch there is one logical thread of control, so the order
/// of the calls is kept; all in all the order in which gradients come out does
/// not depend on how the work on microbatches was interleaved.
class MicrobatchOrder {
 public:
  using Emit = std::function<void(int param_idx, const at::Tensor& grad)>;

  explicit MicrobatchOrder(Emit emit) : emit_(std::move(emit)) {}

  /// Forgets what is there and expects microbatches [0, num_microbatches).
  void begin(int num_microbatches);

  /// @param mb  -1 stands for the first unfinished microbatch
  /// @throws Error when the microbatch is finished or does not exist
  void add(int param_idx, int mb, const at::Tensor& grad);

  /// Nothing of this microbatch will come any more.
  void finish(int mb);
  void finish_all();

  int cursor() const { return cursor_; }

 private:
  struct Contribution {
    int param_idx;
    at::Tensor grad;
  };

  void advance();

  const Emit emit_;
  int cursor_ = 0;  // first unfinished microbatch
  std::vector<bool> finished_;
  std::vector<std::vector<Contribution>> waiting_;  // by microbatch
};

}  // namespace smp::data_parallel
