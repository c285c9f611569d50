#include "tests/fuzz/cpp/mutator.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

namespace smp::fuzz {
namespace {

constexpr size_t kMostChanges = 4;
constexpr size_t kMostInserted = 24;
// Numbers at which sizes and counts go wrong.
constexpr std::array<uint64_t, 14> kNumbers = {0,
                                               1,
                                               7,
                                               127,
                                               128,
                                               255,
                                               4096,
                                               uint64_t{1} << 31,
                                               UINT32_MAX,
                                               uint64_t{1} << 32,
                                               uint64_t{1} << 40,
                                               INT64_MAX,
                                               UINT64_MAX,
                                               uint64_t{1} << 61};
constexpr std::array<size_t, 4> kWidths = {1, 2, 4, 8};

}  // namespace

Mutator::Mutator(std::vector<std::string> corpus, uint64_t seed)
    : corpus_(std::move(corpus)), random_(seed) {}

size_t Mutator::below(size_t bound) {
  return static_cast<size_t>(random_() % bound);
}

std::string Mutator::next() {
  std::string input = corpus_[below(corpus_.size())];
  for (size_t left = below(kMostChanges + 1); left > 0; --left) change(input);
  return input;
}

void Mutator::change(std::string& input) {
  const size_t at = below(input.size() + 1);
  const size_t count = std::min(1 + below(kMostInserted), input.size() - at);
  switch (below(8)) {
    case 0:
      return input.resize(at);
    case 1:
      input.erase(at, count);
      return;
    case 2:
      input.insert(at, input.substr(at, count));
      return;
    case 3: {
      const std::string& other = corpus_[below(corpus_.size())];
      input.resize(at);
      input += other.substr(below(other.size() + 1));
      return;
    }
    case 4:
      for (size_t left = 1 + below(kMostInserted); left > 0; --left) {
        input.insert(input.begin() + static_cast<ptrdiff_t>(at),
                     static_cast<char>(random_()));
      }
      return;
    case 5:
      if (at < input.size()) input[at] = static_cast<char>(random_());
      return;
    case 6:
      if (at < input.size()) input[at] ^= static_cast<char>(1 << below(8));
      return;
    default:
      return change_number(input);
  }
}

// Changes a number at a multiple of its width, as sizes are aligned.
void Mutator::change_number(std::string& input) {
  const size_t width = kWidths[below(kWidths.size())];
  if (input.size() < width) return;
  char* const at = input.data() + below(input.size() / width) * width;
  uint64_t number = 0;
  std::memcpy(&number, at, width);
  number =
      below(2) == 0 ? kNumbers[below(kNumbers.size())] : number + below(3) - 1;
  std::memcpy(at, &number, width);
}

}  // namespace smp::fuzz
