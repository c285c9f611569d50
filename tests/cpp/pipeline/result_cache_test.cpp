#include "csrc/pipeline/result_cache.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

ResultMeta two_results() {
  ResultMeta meta;
  meta.structure = "structure";
  meta.tensors = {{{2, 3}, at::kFloat, true}, {{}, at::kLong, false}};
  meta.changed_args = {4};
  meta.views = {{1, 0, {3, 2}, {1, 3}, 5}};
  return meta;
}

void expect_equal(const ResultMeta& a, const ResultMeta& b) {
  EXPECT_EQ(a.structure, b.structure);
  EXPECT_EQ(a.changed_args, b.changed_args);
  EXPECT_EQ(a.has_values, b.has_values);
  EXPECT_EQ(a.shares_memory, b.shares_memory);
  ASSERT_EQ(a.views.size(), b.views.size());
  for (size_t i = 0; i < a.views.size(); ++i) {
    EXPECT_EQ(a.views[i].result_idx, b.views[i].result_idx);
    EXPECT_EQ(a.views[i].argument_idx, b.views[i].argument_idx);
    EXPECT_EQ(a.views[i].sizes, b.views[i].sizes);
    EXPECT_EQ(a.views[i].strides, b.views[i].strides);
    EXPECT_EQ(a.views[i].offset, b.views[i].offset);
  }
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    EXPECT_EQ(a.tensors[i].sizes, b.tensors[i].sizes);
    EXPECT_EQ(a.tensors[i].dtype, b.tensors[i].dtype);
    EXPECT_EQ(a.tensors[i].requires_grad, b.tensors[i].requires_grad);
  }
}

TEST(ResultMeta, travels_as_bytes) {
  for (const bool has_values : {false, true}) {
    for (const bool shares_memory : {false, true}) {
      ResultMeta meta = two_results();
      meta.has_values = has_values;
      meta.shares_memory = shares_memory;
      expect_equal(ResultMeta::decode(meta.encode()), meta);
    }
  }
  expect_equal(ResultMeta::decode(ResultMeta{}.encode()), ResultMeta{});
}

TEST(ResultMeta, limits_of_the_format_survive) {
  ResultMeta meta;
  meta.structure = std::string("with\0zeros", 10);
  for (int i = 0; i < 255; ++i) {
    meta.changed_args.push_back(i);
    meta.tensors.push_back({{i}, at::kBFloat16, i % 2 == 0});
  }
  meta.tensors.push_back({std::vector<int64_t>(64, 1), at::kBool, false});
  meta.tensors.push_back({{0, int64_t{1} << 40}, at::kComplexDouble, true});
  expect_equal(ResultMeta::decode(meta.encode()), meta);
}

TEST(ResultMeta, whatever_differs_shows_in_the_digest) {
  std::vector<ResultMeta> metas(11, two_results());
  metas[1].structure = "structurf";
  metas[2].tensors[0].sizes = {3, 2};
  metas[3].tensors[0].dtype = at::kDouble;
  metas[4].tensors[0].requires_grad = false;
  metas[5].changed_args = {3};
  metas[6].has_values = true;
  metas[7].shares_memory = true;
  metas[8].tensors[1].sizes = {1};
  metas[9].views[0].strides = {2, 1};
  metas[10].views.clear();
  std::set<int64_t> digests;
  for (const ResultMeta& meta : metas) {
    EXPECT_NE(meta.digest(), 0);
    digests.insert(meta.digest());
  }
  EXPECT_EQ(digests.size(), metas.size());
  EXPECT_EQ(two_results().digest(), two_results().digest());
}

// An error or a description that makes sense, whatever comes.
void expect_error_or_sense(const std::string& bytes) {
  try {
    const ResultMeta meta = ResultMeta::decode(bytes);
    EXPECT_LE(meta.changed_args.size(), meta.tensors.size());
    for (const ViewOfArgument& view : meta.views) {
      EXPECT_LT(static_cast<size_t>(view.result_idx), meta.tensors.size());
      EXPECT_EQ(view.sizes.size(), view.strides.size());
    }
    for (const TensorMeta& tensor : meta.tensors) {
      EXPECT_GE(tensor.num_bytes(), 0);
    }
  } catch (const Error&) {
  }
}

TEST(ResultMeta, bytes_that_end_early_are_an_error) {
  const std::string bytes = two_results().encode();
  const size_t without_structure = bytes.size() - 9;
  for (size_t size = 0; size < without_structure; ++size) {
    EXPECT_THROW(ResultMeta::decode(bytes.substr(0, size)), Error) << size;
  }
}

TEST(ResultMeta, a_huge_number_of_results_is_an_error_and_takes_no_memory) {
  std::string bytes = two_results().encode();
  for (int i = 1; i <= 4; ++i) bytes[i] = '\xff';
  EXPECT_THROW(ResultMeta::decode(bytes), Error);
}

TEST(ResultMeta, sizes_and_dtypes_that_do_not_exist_are_an_error) {
  ResultMeta meta = two_results();
  meta.tensors[0].sizes = {-1, 3};
  EXPECT_THROW(ResultMeta::decode(meta.encode()), Error);
  meta.tensors[0].sizes = {int64_t{1} << 40, int64_t{1} << 40};
  EXPECT_THROW(ResultMeta::decode(meta.encode()), Error);
  meta = two_results();
  for (const int dtype : {-1, 120}) {
    meta.tensors[0].dtype = static_cast<at::ScalarType>(dtype);
    EXPECT_THROW(ResultMeta::decode(meta.encode()), Error);
  }
  meta = two_results();
  meta.changed_args = {0, 1, 2};
  EXPECT_THROW(ResultMeta::decode(meta.encode()), Error);
  meta = two_results();
  meta.views[0].result_idx = 2;
  EXPECT_THROW(ResultMeta::decode(meta.encode()), Error);
}

TEST(ResultMeta, damaged_bytes_never_crash) {
  std::mt19937_64 random(1);
  const std::string good = two_results().encode();
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = good;
    const int num_changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < num_changes; ++i) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    expect_error_or_sense(bytes);
  }
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes(random() % 64, '\0');
    for (char& c : bytes) c = static_cast<char>(random() % 8 ? 0 : random());
    expect_error_or_sense(bytes);
  }
}

TEST(ResultCache, gives_back_what_was_put_under_the_same_key) {
  ResultCache cache;
  EXPECT_EQ(cache.find("key"), nullptr);
  const auto entry = cache.put("key", two_results());
  EXPECT_EQ(entry->digest, two_results().digest());
  EXPECT_EQ(cache.find("key"), entry);
  EXPECT_EQ(cache.find("other"), nullptr);
}

TEST(ResultCache, results_with_values_are_never_expected) {
  ResultCache cache;
  ResultMeta meta = two_results();
  meta.has_values = true;
  EXPECT_NE(cache.put("key", meta), nullptr);
  EXPECT_EQ(cache.find("key"), nullptr);
  EXPECT_EQ(cache.size(), 0u);
}

TEST(ResultCache, shapes_that_always_change_do_not_fill_the_memory) {
  ResultCache cache;
  const auto held = cache.put("first", two_results());
  for (int i = 0; i < 20'000; ++i) {
    cache.put(std::to_string(i), two_results());
    EXPECT_NE(cache.find(std::to_string(i)), nullptr);
  }
  EXPECT_LE(cache.size(), 8192u);
  EXPECT_EQ(held->digest, two_results().digest()) << "those in use stay";
}

TEST(ResultCache, a_route_belongs_to_its_visit) {
  ResultCache::Forward entry;
  const auto first = route_of(entry.routes, int64_t{0});
  first->add(0, 2);
  const auto second = route_of(entry.routes, int64_t{1});
  EXPECT_TRUE(second->hops().empty());
  EXPECT_EQ(route_of(entry.routes, int64_t{0}), first);
}

}  // namespace
}  // namespace smp::pipeline
