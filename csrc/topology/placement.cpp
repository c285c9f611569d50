#include "csrc/topology/placement.h"

#include <algorithm>
#include <cstddef>

#include "csrc/common/check.h"

namespace smp::topology {

namespace {

constexpr char kLetters[kNumAxes] = {'P', 'T', 'D', 'C'};  // indexed by Axis

std::string resolve_name(const std::string& strategy) {
  if (strategy == "cluster") return "DPT";
  if (strategy == "spread") return "TPD";
  return strategy;
}

/// Puts C beside T, on the side of D. Of the replicas of parameters, those that
/// exchange activations are then the nearest.
std::string with_context_axis(std::string letters) {
  const size_t tp = letters.find('T');
  return letters.insert(letters.find('D') < tp ? tp : tp + 1, "C");
}

}  // namespace

AxisOrder parse_placement(const std::string& strategy) {
  std::string letters = resolve_name(strategy);
  std::string sorted = letters;
  std::sort(sorted.begin(), sorted.end());
  SMP_CHECK_VALUE(sorted == "DPT" || sorted == "CDPT",
                  "placement_strategy is '", strategy,
                  "', expected 'cluster', 'spread' or a permutation of 'DPT' "
                  "or 'DPTC'");
  if (sorted == "DPT") letters = with_context_axis(letters);
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
