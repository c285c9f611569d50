#include "csrc/comm/sum_pieces.h"

#include <algorithm>

#include "csrc/common/check.h"

namespace smp::comm {
namespace {

// Least length, in long pieces, of a tensor that gets short pieces. In a
// shorter tensor the cost of more pieces outweighs the time they hide.
constexpr int64_t kFewestLongPieces = 4;

}  // namespace

std::vector<int64_t> sum_pieces(int64_t numel, int64_t longest) {
  SMP_ASSERT(longest >= 4 && longest % 4 == 0, "pieces of ", longest);
  std::vector<int64_t> pieces;
  std::vector<int64_t> last;
  if (numel >= kFewestLongPieces * longest) {
    pieces = {longest / 4, longest / 2};
    last = {longest / 2, longest / 4};
    numel -= 3 * longest / 2;
  }
  for (; numel > 0; numel -= pieces.back()) {
    pieces.push_back(std::min(numel, longest));
  }
  pieces.insert(pieces.end(), last.begin(), last.end());
  return pieces;
}

}  // namespace smp::comm
