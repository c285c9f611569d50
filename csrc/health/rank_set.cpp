#include "csrc/health/rank_set.h"

#include <cstddef>

#include "csrc/common/check.h"

namespace smp::health {
namespace {

constexpr int kBitsPerByte = 8;

}  // namespace

void RankSet::add(int global_rank) {
  SMP_ASSERT(global_rank >= 0, "a set of ranks gets rank ", global_rank);
  const auto byte = static_cast<size_t>(global_rank / kBitsPerByte);
  if (byte >= bits_.size()) bits_.resize(byte + 1, '\0');
  const int bit = 1 << global_rank % kBitsPerByte;
  bits_[byte] =
      static_cast<char>(static_cast<unsigned char>(bits_[byte]) | bit);
}

std::vector<int> RankSet::ranks() const {
  std::vector<int> found;
  for (size_t byte = 0; byte < bits_.size(); ++byte) {
    const auto bits = static_cast<unsigned char>(bits_[byte]);
    for (int bit = 0; bit < kBitsPerByte; ++bit) {
      if ((bits >> bit & 1) == 0) continue;
      found.push_back(static_cast<int>(byte) * kBitsPerByte + bit);
    }
  }
  return found;
}

RankSet RankSet::decode(std::string_view bytes) {
  RankSet set;
  set.bits_ = bytes.substr(0, bytes.find_last_not_of('\0') + 1);
  return set;
}

}  // namespace smp::health
