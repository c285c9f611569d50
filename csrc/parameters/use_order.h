#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace smp::parameters {

/// The order in which units are used, learnt from earlier passes: a pass is
/// expected to go like the last pass of its kind. Pure.
class UseOrder {
 public:
  /// @param kind  for instance training with four microbatches
  void begin(int64_t kind);
  /// Ends a pass. The next pass of its kind is expected to use the same units.
  void end();

  /// Notes that the unit is used now.
  /// @return false when that was not expected: nothing is expected from now on,
  ///     until the pass has ended
  bool use(int unit);

  /// Returns the units expected to be used next, the nearest first, each once.
  std::vector<int> next(int num_units) const;

 private:
  std::span<const int> coming() const;

  std::map<int64_t, std::vector<int>> orders_;  // by kind
  int64_t kind_ = 0;
  bool follows_ = false;
  std::vector<int> record_;
};

}  // namespace smp::parameters
