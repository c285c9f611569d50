#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/parameters/backward_uses.h"

namespace smp::parameters {

/// A module's forward, or other code that reads parameters. While it lasts, the
/// units are held, and so are further units that it reads. Their backward holds
/// them again. Scopes of one thread lie inside each other; `leave` is called on
/// the thread that entered.
class ParameterScope {
 public:
  /// Enters the scope. Collective over the shard group, like everything that
  /// holds units.
  /// @param is_forward  outside of a step and of other scopes it begins a pass
  ParameterScope(std::shared_ptr<BackwardUses> uses, std::vector<int> units,
                 bool is_forward = true);
  ~ParameterScope();
  ParameterScope(const ParameterScope&) = delete;
  ParameterScope& operator=(const ParameterScope&) = delete;

  /// Leaves the scope. A result that is a parameter, or a view of one, stays
  /// valid in the outer scope.
  /// @param results  results of the forward; none if it failed
  void leave(const std::vector<at::Tensor>& results);

  /// Prepares a parameter of a unit for code on this thread that is about to
  /// read it. Outside of all scopes that code reads the memory that the
  /// parameter shows.
  /// @return false outside of all scopes
  static bool read(const BackwardUses& uses, int unit);

 private:
  bool holds(int unit) const;
  void begin_passing() const;
  void expect_backward(const std::vector<at::Tensor>& results) const;
  void begin_before(torch::autograd::Node& node,
                    const BackwardUsePtr& use) const;
  bool is_from_here(const at::TensorBase& tensor) const;
  void hand_on(const std::vector<at::Tensor>& results);

  const std::shared_ptr<BackwardUses> uses_;
  std::vector<int> units_;
  uint64_t first_node_ = 0;
  bool has_left_ = false;
};

}  // namespace smp::parameters
