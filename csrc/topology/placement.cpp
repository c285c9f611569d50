#include "csrc/topology/placement.h"

#include <algorithm>

#include "csrc/common/check.h"

namespace smp::topology {

namespace {

constexpr char kLetters[kNumAxes] = {'P', 'T', 'D'};  // indexed by Axis

std::string resolve_name(const std::string& strategy) {
  if (strategy == "cluster") return "DPT";
  if (strategy == "spread") return "TPD";
  return strategy;
}

}  // namespace

AxisOrder parse_placement(const std::string& strategy) {
  const std::string letters = resolve_name(strategy);
  std::string sorted = letters;
  std::sort(sorted.begin(), sorted.end());
  SMP_CHECK_VALUE(sorted == "DPT", "placement_strategy is '", strategy,
                  "', expected 'cluster', 'spread' or a permutation of 'DPT'");
  AxisOrder order{};
  for (int i = 0; i < kNumAxes; ++i) {
    const auto* found =
        std::find(std::begin(kLetters), std::end(kLetters), letters[i]);
    order[i] = static_cast<Axis>(found - std::begin(kLetters));
  }
  return order;
}

std::string placement_letters(const AxisOrder& order) {
  std::string letters;
  for (const Axis axis : order) letters += kLetters[static_cast<int>(axis)];
  return letters;
}

}  // namespace smp::topology
