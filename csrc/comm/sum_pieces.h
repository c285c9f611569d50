#pragma once

#include <cstdint>
#include <vector>

namespace smp::comm {

/// The pieces in which a long tensor goes through hops that work at the same
/// time, each on another piece. The first and the last ones are short, since
/// what only one hop works on nothing hides: the last hops wait for the first
/// piece, the first ones for nobody at the last.
/// @param numel    of the tensor
/// @param longest  elements of a piece; a multiple of 4
/// @return elements of each piece, in order, none 0
std::vector<int64_t> sum_pieces(int64_t numel, int64_t longest);

}  // namespace smp::comm
