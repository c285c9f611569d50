#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include <cstdint>
#include <vector>

namespace smp::comm::suite {

// The same on all ranks: what each sends to each.
using Table = std::vector<std::vector<int64_t>>;

inline Table uneven_table(int size, int kind) {
  Table table(size, std::vector<int64_t>(size, 0));
  uint64_t state = 0x9e3779b97f4a7c15ULL * static_cast<uint64_t>(kind + size);
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      const auto drawn = static_cast<int64_t>(state >> 40);
      if (kind == 0) continue;                             // nothing at all
      if (kind == 1) table[from][to] = to == 0 ? 7 : 0;    // all to one
      if (kind == 2) table[from][to] = from == 0 ? 5 : 0;  // all from one
      if (kind == 3) table[from][to] = drawn % 4;          // often nothing
      if (kind == 4) table[from][to] = drawn % 150'000;    // many chunks
    }
  }
  return table;
}

inline at::Tensor uneven_part(int from, int to, int64_t count,
                              at::ScalarType dtype) {
  return at::arange(count, at::TensorOptions(at::kLong))
      .remainder(10)
      .add(20 * from + 3 * to)
      .to(dtype);
}

}  // namespace smp::comm::suite
