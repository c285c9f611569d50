#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace smp::fuzz {

/// Makes inputs that are nearly right from right ones. Equal seeds make equal
/// inputs.
class Mutator {
 public:
  /// @param corpus  right inputs, at least one
  Mutator(std::vector<std::string> corpus, uint64_t seed);

  std::string next();

 private:
  size_t below(size_t bound);
  void change(std::string& input);
  void change_number(std::string& input);

  const std::vector<std::string> corpus_;
  std::mt19937_64 random_;
};

}  // namespace smp::fuzz
