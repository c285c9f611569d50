#pragma once

#include <cstdint>
#include <vector>

namespace smp::comm {

/// Returns the pieces of a long tensor for hops that work at the same time,
/// each on another piece. The first and the last pieces are short, because time
/// in which only one hop works is not hidden: the last hops wait for the first
/// piece, and the first hops are idle during the last piece.
/// @param numel    elements of the tensor
/// @param longest  most elements of a piece; a multiple of 4
/// @return elements of each piece, in order, none 0
std::vector<int64_t> sum_pieces(int64_t numel, int64_t longest);

}  // namespace smp::comm
