#pragma once

#include <vector>

namespace smp::partition {

/// Gives out `num_seats` one by one, each to the entry with the largest cost
/// per seat it would then have; the lowest index wins ties.
/// @param costs  at least one entry, none negative
/// @return seats per entry; they sum to `num_seats`
/// Source: D'Hondt's method of proportional representation.
std::vector<int> dhondt(const std::vector<double>& costs, int num_seats);

}  // namespace smp::partition
