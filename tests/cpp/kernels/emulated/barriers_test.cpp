#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "csrc/kernels/compact_state.h"
#include "tests/cpp/kernels/emulated/emulated.h"

// Each barrier of the kernels is left out once, and that is a race in each
// launch that passes it, but for those that are explained here.

namespace smp::kernels::emulated {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRows = 2, kColumns = 1100;  // a block for each row

struct Launch {
  std::string name;
  std::function<const char*()> run;
};

// Arrays of all launches.
struct Data {
  explicit Data(int64_t size = kRows * kColumns + 4)
      : a(size, 0.5f), b(size, 0.25f), c(size), d(size), e(size, 1.0f) {}
  std::vector<float> a, b, c, d, e;
  std::vector<double> partial = std::vector<double>(2 * kRows * kColumns);
  std::vector<double> totals = std::vector<double>(8, 1.0);
  std::vector<int64_t> targets = std::vector<int64_t>(kRows, 3);
  float step = 1;
  double rate = 0.1;

  UpdateArrays update() {
    UpdateArrays arrays;
    arrays.param = c.data();
    arrays.grad = a.data();
    arrays.exp_avg = d.data();
    arrays.exp_avg_sq = e.data();
    arrays.step = &step;
    arrays.num_elements = kColumns;
    return arrays;
  }
  UpdateScalars scalars() { return {&rate, nullptr, nullptr}; }
  Array array() { return {a.data(), kColumns, Dtype::kFloat}; }

  NormBackward norm(int64_t columns, bool wants_dx) {
    NormBackward op;
    op.dy = a.data();
    op.x = b.data();
    op.mean = e.data();
    op.rstd = e.data();
    op.dx = wants_dx ? c.data() : nullptr;
    op.num_rows = kRows;
    op.num_columns = columns;
    return op;
  }
};

std::vector<Launch> norms(Data& d) {
  const auto backward = [&d](int64_t columns, bool wants_dx, bool wants_sums) {
    return cuda::norm_backward(d.norm(columns, wants_dx),
                               wants_sums ? d.partial.data() : nullptr,
                               nullptr);
  };
  // A row of 1,101 floats is not read in packs of 16 bytes.
  return {
      {"norm_forward",
       [&d] {
         return cuda::norm_forward(
             {d.a.data(), nullptr, nullptr, d.c.data(), d.d.data(),
              d.d.data() + kRows, kRows, kColumns, 1e-3},
             nullptr);
       }},
      {"norm_backward", [=] { return backward(1101, true, false); }},
      {"norm_columns", [=] { return backward(kColumns, false, true); }},
      {"norm_backward_once", [=] { return backward(kColumns, true, true); }}};
}

std::vector<Launch> elementwise(Data& d) {
  return {{"bias_gelu_backward", [&d] {
             return cuda::bias_gelu_backward(
                 {d.a.data(), nullptr, d.b.data(), d.c.data(), kRows, kColumns},
                 d.partial.data(), nullptr);
           }}};
}

std::vector<Launch> softmaxes(Data& d) {
  const auto cross_entropy = [&d](bool wants_sum) {
    CrossEntropy op;
    op.logits = d.a.data();
    op.targets = d.targets.data();
    op.max = d.c.data();
    op.exp_sum = d.c.data() + kRows;
    op.target_logit = d.c.data() + 2 * kRows;
    op.sum = wants_sum ? d.c.data() + 3 * kRows : nullptr;
    op.num_rows = kRows;
    op.num_columns = op.row_stride = op.vocab_size = kColumns;
    return cuda::cross_entropy_forward(op, nullptr);
  };
  return {
      {"softmax_forward",
       [&d] {
         ScaledMaskedSoftmax op;
         op.scores = d.a.data();
         op.probs = d.c.data();
         op.batch_size = op.num_heads = 1;
         op.num_queries = kRows;
         op.num_keys = kColumns;
         return cuda::softmax_forward(op, nullptr);
       }},
      {"softmax_backward",
       [&d] {
         ScaledMaskedSoftmaxBackward op;
         op.dy = d.a.data();
         op.probs = d.b.data();
         op.dscores = d.c.data();
         op.num_rows = op.num_queries = kRows;
         op.num_keys = kColumns;
         return cuda::softmax_backward(op, nullptr);
       }},
      {"cross_entropy_forward", [=] { return cross_entropy(false); }},
      {"cross_entropy_forward with sums", [=] { return cross_entropy(true); }}};
}

std::vector<Launch> reductions(Data& d) {
  return {{"sums_of_squares",
           [&d] {
             const Array array = d.array();
             return cuda::sums_of_squares(&array, 1, d.partial.data(),
                                          d.totals.data(), nullptr);
           }},
          {"max_abs", [&d] {
             const Array array = d.array();
             return cuda::max_abs(&array, 1, d.partial.data(), d.totals.data(),
                                  nullptr);
           }}};
}

std::vector<Launch> optimizers(Data& d) {
  return {{"adam",
           [&d] {
             const UpdateArrays arrays = d.update();
             return cuda::adam(&arrays, 1, {}, d.scalars(), nullptr);
           }},
          {"adam_compact",
           [&d] {
             CompactArrays compact;
             compact.arrays = d.update();
             return cuda::adam_compact(&compact, 1, {}, d.scalars(), nullptr);
           }},
          {"lamb_moments",
           [&d] {
             const UpdateArrays arrays = d.update();
             return cuda::lamb_moments(&arrays, 1, {}, d.scalars(),
                                       d.partial.data(), d.totals.data(),
                                       nullptr);
           }},
          {"lamb_apply",
           [&d] {
             const UpdateArrays arrays = d.update();
             return cuda::lamb_apply(&arrays, 1, {}, d.scalars(),
                                     d.totals.data(), nullptr);
           }},
          {"novograd", [&d] {
             const UpdateArrays arrays = d.update();
             return cuda::novograd(&arrays, 1, {}, d.scalars(), d.totals.data(),
                                   nullptr);
           }}};
}

std::vector<Launch> all_launches(Data& data) {
  std::vector<Launch> all;
  for (auto* part :
       {&norms, &elementwise, &softmaxes, &reductions, &optimizers}) {
    for (Launch& launch : part(data)) all.push_back(std::move(launch));
  }
  return all;
}

// A barrier by its file and its number there: "fused.cuh 2".
std::map<std::pair<fs::path, int>, std::string> barriers_in(
    const fs::path& folder) {
  std::map<std::pair<fs::path, int>, std::string> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    std::ifstream file(entry.path());
    std::string line;
    int number = 0;
    for (int i = 1; std::getline(file, line); ++i) {
      if (line.find("__syncthreads()") == std::string::npos) continue;
      found[{entry.path(), i}] =
          entry.path().filename().string() + " " + std::to_string(++number);
    }
  }
  return found;
}

// Barriers without which a launch has no race. They protect the memory of a
// call of the same function before, and these launches have a single call of
// it: each combination of values has memory of its own.
const std::set<std::string> kSingleCalls = {
    "fused.cuh 1 in softmax_forward",       "fused.cuh 1 in softmax_backward",
    "fused.cuh 1 in cross_entropy_forward", "fused.cuh 4 in bias_gelu_backward",
    "chunks.cuh 1 in sums_of_squares",
};

TEST(Barriers, EachOneIsNeeded) {
  Data data;
  std::vector<std::pair<Launch, Site>> passed;
  for (const Launch& launch : all_launches(data)) {
    take_barriers();
    expect_launched(launch.run());
    for (const Site& site : take_barriers()) passed.emplace_back(launch, site);
  }
  ASSERT_FALSE(passed.empty());
  const auto names =
      barriers_in(fs::path(passed.front().second.file).parent_path());
  std::set<std::string> needed, needless;
  for (const auto& [launch, site] : passed) {
    const std::string& name = names.at({site.file, site.line});
    const std::string place = name + " in " + launch.name;
    const WithoutBarrier removed(site);
    const char* error = launch.run();
    std::cout << "without " << place << ": "
              << (error == nullptr ? "no error" : error) << "\n";
    if (error == nullptr) {
      needless.insert(place);
      continue;
    }
    EXPECT_NE(std::string(error).find("a race"), std::string::npos) << error;
    needed.insert(name);
  }
  EXPECT_EQ(needless, kSingleCalls);
  for (const auto& [place, name] : names) {
    EXPECT_TRUE(needed.count(name)) << name << " can be left out";
  }
}

}  // namespace
}  // namespace smp::kernels::emulated
