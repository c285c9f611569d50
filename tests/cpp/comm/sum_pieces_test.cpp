#include "csrc/comm/sum_pieces.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace smp::comm {
namespace {

using Pieces = std::vector<int64_t>;

TEST(SumPieces, OfALongTensorBeginAndEndShort) {
  EXPECT_EQ(sum_pieces(40, 8), (Pieces{2, 4, 8, 8, 8, 4, 4, 2}));
  EXPECT_EQ(sum_pieces(32, 8), (Pieces{2, 4, 8, 8, 4, 4, 2}));
}

TEST(SumPieces, OfAShortTensorAreFew) {
  EXPECT_EQ(sum_pieces(0, 8), Pieces{});
  EXPECT_EQ(sum_pieces(1, 8), Pieces{1});
  EXPECT_EQ(sum_pieces(8, 8), Pieces{8});
  EXPECT_EQ(sum_pieces(31, 8), (Pieces{8, 8, 8, 7}));
}

TEST(SumPieces, AddUpAndAreNeitherEmptyNorTooLong) {
  for (const int64_t longest : {4, 8, 12}) {
    for (int64_t numel = 0; numel < 10 * longest; ++numel) {
      const Pieces pieces = sum_pieces(numel, longest);
      EXPECT_EQ(std::accumulate(pieces.begin(), pieces.end(), int64_t{0}),
                numel);
      for (const int64_t piece : pieces) {
        EXPECT_GT(piece, 0) << numel << " in " << longest;
        EXPECT_LE(piece, longest) << numel << " in " << longest;
      }
    }
  }
}

}  // namespace
}  // namespace smp::comm
