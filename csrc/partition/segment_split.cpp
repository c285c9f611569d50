#include "csrc/partition/segment_split.h"

#include <algorithm>
#include <limits>

#include "csrc/common/check.h"

namespace smp::partition {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Sums taken in another order differ by rounding; such costs count as equal.
constexpr double kRounding = 1e-9;

std::vector<double> prefix_sums(const std::vector<double>& costs) {
  std::vector<double> sums{0};
  for (double cost : costs) sums.push_back(sums.back() + cost);
  return sums;
}

// The smallest possible value of the largest segment:
// c(k, i) = min over j < i of max(c(k-1, j), cost of [j, i)).
double smallest_maximum(const std::vector<double>& sums, int num_segments) {
  const int n = static_cast<int>(sums.size()) - 1;
  std::vector<double> best(n + 1, kInfinity);
  best[0] = 0;
  for (int k = 1; k <= num_segments; ++k) {
    std::vector<double> next(n + 1, kInfinity);
    for (int i = k; i <= n; ++i) {
      for (int j = k - 1; j < i; ++j) {
        next[i] = std::min(next[i], std::max(best[j], sums[i] - sums[j]));
      }
    }
    best = std::move(next);
  }
  return best[n];
}

}  // namespace

std::vector<int> split_segments(const std::vector<double>& costs,
                                int num_segments) {
  const int n = static_cast<int>(costs.size());
  SMP_ASSERT(num_segments >= 1 && num_segments <= n, "cannot cut ", n,
             " items into ", num_segments, " segments");
  const std::vector<double> sums = prefix_sums(costs);
  const double limit =
      smallest_maximum(sums, num_segments) + kRounding * sums.back();

  // Same recursion for the sum of squares, over segments within the limit.
  std::vector<double> best(n + 1, kInfinity);
  best[0] = 0;
  std::vector<std::vector<int>> cut(num_segments + 1,
                                    std::vector<int>(n + 1, 0));
  for (int k = 1; k <= num_segments; ++k) {
    std::vector<double> next(n + 1, kInfinity);
    for (int i = k; i <= n; ++i) {
      for (int j = k - 1; j < i; ++j) {
        const double segment = sums[i] - sums[j];
        if (segment > limit || best[j] == kInfinity) continue;
        const double squares = best[j] + segment * segment;
        if (squares < next[i]) {
          next[i] = squares;
          cut[k][i] = j;
        }
      }
    }
    best = std::move(next);
  }

  std::vector<int> ends(num_segments);
  for (int k = num_segments, end = n; k >= 1; --k) {
    ends[k - 1] = end;
    end = cut[k][end];
  }
  return ends;
}

}  // namespace smp::partition
