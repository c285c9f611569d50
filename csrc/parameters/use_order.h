#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace smp::parameters {

/// In which order units are used, learnt from the passes before: a pass of the
/// same kind is expected to go as the last one went. Pure.
class UseOrder {
 public:
  /// @param kind  for instance training with four microbatches
  void begin(int64_t kind);
  /// What was used in this pass is expected of the next one of its kind.
  void end();

  /// The unit is used now.
  /// @return false when that was not expected: nothing is from now on, until
  ///         the pass has ended
  bool use(int unit);

  /// The units that are expected to be used next, the nearest first, each once.
  std::vector<int> next(int num_units) const;

 private:
  std::span<const int> coming() const;

  std::map<int64_t, std::vector<int>> orders_;  // by kind
  int64_t kind_ = 0;
  bool follows_ = false;
  std::vector<int> record_;
};

}  // namespace smp::parameters
