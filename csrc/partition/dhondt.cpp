#include "csrc/partition/dhondt.h"

#include "csrc/common/check.h"

namespace smp::partition {

std::vector<int> dhondt(const std::vector<double>& costs, int num_seats) {
  SMP_ASSERT(!costs.empty() && num_seats >= 0, "dhondt of ", costs.size(),
             " costs and ", num_seats, " seats");
  std::vector<int> seats(costs.size(), 0);
  for (int seat = 0; seat < num_seats; ++seat) {
    size_t best = 0;
    for (size_t k = 1; k < costs.size(); ++k) {
      if (costs[k] / (seats[k] + 1) > costs[best] / (seats[best] + 1)) best = k;
    }
    ++seats[best];
  }
  return seats;
}

}  // namespace smp::partition
