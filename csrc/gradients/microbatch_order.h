#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <vector>

namespace smp::gradients {

/// Puts the gradients of each parameter into microbatch order: a gradient
/// passes when no earlier microbatch will give another one to this parameter,
/// else it waits. Inside one microbatch there is one logical thread of control,
/// so the order of the calls is kept. The sum of a parameter does not depend on
/// how the work on microbatches was interleaved.
///
/// A microbatch gives no more gradients once it is finished, which a pipeline
/// rank learns long after its own part. So a parameter may come with the number
/// of gradients that each microbatch gave it before: then its end is known at
/// once, and nothing waits in memory. Gradients of a microbatch beyond that
/// number come last of all, in microbatch order too, unless `emit_surplus` asks
/// for them.
class MicrobatchOrder {
 public:
  using Emit = std::function<void(int param_idx, const at::Tensor& grad)>;

  explicit MicrobatchOrder(Emit emit) : emit_(std::move(emit)) {}

  /// Forgets all gradients and expects microbatches [0, num_microbatches).
  /// @param counts  per parameter: gradients that each microbatch will give; 0
  ///     where that is not known
  void begin(int num_microbatches, std::vector<int> counts);

  /// @param mb  -1 means the first unfinished microbatch
  /// @throws Error when the microbatch is finished or does not exist
  void add(int param_idx, int mb, const at::Tensor& grad);

  /// Ends a microbatch: no gradient of it will come any more.
  void finish(int mb);
  /// Passes the gradients of a finished microbatch beyond the number expected,
  /// where microbatches are reduced one by one.
  void emit_surplus(int mb);
  /// Passes all gradients that wait, because no more will come.
  void finish_all();

  /// Returns, per parameter, the number of gradients of each microbatch; 0
  /// where these numbers differ.
  std::vector<int> counts() const;

 private:
  using Waiting = std::map<int, std::vector<at::Tensor>>;  // by microbatch

  struct Parameter {
    int count = 0;               // that each microbatch will give, if not 0
    int next = 0;                // first microbatch that may still give some
    std::vector<int> num_given;  // by microbatch
    Waiting waiting;
    Waiting surplus;  // more than `count`; waits for the end
  };

  int num_microbatches() const { return static_cast<int>(finished_.size()); }
  int next_of(Parameter& param) const;
  void drain(int param_idx);

  const Emit emit_;
  int cursor_ = 0;  // first unfinished microbatch
  std::vector<bool> finished_;
  std::vector<Parameter> params_;
};

}  // namespace smp::gradients
