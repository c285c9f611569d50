#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/cpp/decoder.h"
#include "tests/fuzz/cpp/mutator.h"

// Gives a decoder inputs that are nearly right; arguments as of libFuzzer:
//   smp_fuzz_wire -runs=1000000 -seed=1 tests/fuzz/corpus/wire
// Inputs in single files are tried as they are: smp_fuzz_wire failed-input

extern "C" const char* __asan_default_options() {
  // A size that cannot be is an error of the allocation, as without ASan.
  return "allocator_may_return_null=1:max_allocation_size_mb=4096:"
         "detect_leaks=0";
}

namespace smp::fuzz {
namespace {

constexpr const char* kFailedInput = "failed-input";
const std::string* g_input = nullptr;

void write_input() {
  if (g_input == nullptr) return;
  std::ofstream(kFailedInput, std::ios::binary) << *g_input;
  std::fprintf(stderr, "the input of %zu bytes is in ./%s\n", g_input->size(),
               kFailedInput);
}

bool try_one(const std::string& input) {
  g_input = &input;
  bool is_understood = false;
  try {
    is_understood = understands(
        {reinterpret_cast<const uint8_t*>(input.data()), input.size()});
  } catch (const std::exception& error) {
    fail(std::string("raised what it may not: ") + error.what());
  }
  g_input = nullptr;
  return is_understood;
}

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Arguments {
  uint64_t runs = 1'000'000;
  uint64_t seed = 1;
  std::vector<std::string> corpus;
  bool is_folder = false;
};

Arguments read_arguments(int argc, char** argv) {
  Arguments given;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("-runs=")) {
      given.runs = std::stoull(word.substr(6));
    } else if (word.starts_with("-seed=")) {
      given.seed = std::stoull(word.substr(6));
    } else if (std::filesystem::is_directory(word)) {
      given.is_folder = true;
      std::vector<std::filesystem::path> paths(
          std::filesystem::directory_iterator(word), {});
      std::sort(paths.begin(), paths.end());
      for (const auto& path : paths) given.corpus.push_back(read(path));
    } else {
      given.corpus.push_back(read(word));
    }
  }
  if (given.corpus.empty()) fail("give a folder of right inputs, or inputs");
  return given;
}

int run(const Arguments& given) {
  for (const std::string& input : given.corpus) {
    const bool is_understood = try_one(input);
    if (given.is_folder) require(is_understood, "the corpus is not right");
  }
  if (!given.is_folder) return 0;
  Mutator mutator(given.corpus, given.seed);
  uint64_t num_understood = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < given.runs; ++i) {
    num_understood += try_one(mutator.next()) ? 1 : 0;
  }
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - begin;
  std::printf("%llu inputs in %.0f s, %llu refused\n",
              static_cast<unsigned long long>(given.runs), took.count(),
              static_cast<unsigned long long>(given.runs - num_understood));
  require(num_understood > given.runs / 100 && num_understood < given.runs,
          "not both ways were gone");
  return 0;
}

}  // namespace

void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  write_input();
  std::_Exit(1);
}

}  // namespace smp::fuzz

int main(int argc, char** argv) {
  __sanitizer_set_death_callback(&smp::fuzz::write_input);
  return smp::fuzz::run(smp::fuzz::read_arguments(argc, argv));
}
