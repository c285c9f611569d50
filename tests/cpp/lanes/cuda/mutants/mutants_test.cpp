#include <gtest/gtest.h>

#include <iostream>
#include <string>
#include <vector>

#include "tests/cpp/lanes/cuda/cuda_rank.h"
#include "tests/cpp/lanes/cuda/injected_errors.h"
#include "tests/cpp/lanes/cuda/mutants/mutation.h"

// Tests that the tests of lanes over the stand-in find faults (mutations.py).

namespace smp::lanes {
namespace {

std::string& the_mutation() {
  static std::string name;
  return name;
}

struct Mutation {
  std::string name;
  bool is_found;  // as expected
  bool is_stale;  // the source has changed
};

std::vector<Mutation> all_mutations() {
  return {
#include "mutation_list.h"
  };
}

// Long enough for a busy machine; a mutant that hangs is found.
constexpr std::chrono::seconds kPatience{20};
constexpr uint64_t kNumSeeds = 3;

// Returns the scenario that finds it; empty: none does.
std::string who_finds_it() {
  for (uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    for (const Scenario& scenario : all_scenarios()) {
      for (const RankEnd& end : run_scenario(scenario, seed, kPatience)) {
        if (!end.is_good()) return scenario.name;
      }
    }
  }
  for (const RankEnd& end : run_with_injected_errors({}, false, 100)) {
    if (!end.is_good()) return "injected errors";
  }
  return {};
}

TEST(MutationList, fits_the_sources) {
  for (const Mutation& mutation : all_mutations()) {
    EXPECT_FALSE(mutation.is_stale)
        << mutation.name << ": adjust its text in "
        << "tests/cpp/lanes/cuda/mutants/mutations.py";
  }
}

class Mutants : public ::testing::TestWithParam<Mutation> {};

TEST_P(Mutants, are_found_if_listed) {
  set_mutation(GetParam().name);
  const std::string who = who_finds_it();
  set_mutation("");
  std::cout << GetParam().name << ": "
            << (who.empty() ? "not found" : "found by " + who) << "\n";
  // A fault that changes nothing may be found by chance, on a busy machine.
  EXPECT_TRUE(!who.empty() || !GetParam().is_found);
}

INSTANTIATE_TEST_SUITE_P(All, Mutants, ::testing::ValuesIn(all_mutations()),
                         [](const auto& param) { return param.param.name; });

}  // namespace

bool is_mutated(const char* name) { return the_mutation() == name; }
void set_mutation(const std::string& name) { the_mutation() = name; }

}  // namespace smp::lanes
