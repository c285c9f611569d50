// Programs as data; what servers make of them is in server_replay_test.cpp.

#include "csrc/pipeline/replay.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <functional>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

constexpr int kCaller = 3;
constexpr int64_t kContext = 11;
constexpr int64_t kFirst = 5 * kIdsPerContext;
constexpr int64_t kLater = 9 * kIdsPerContext;

Header make_header(int64_t module_id, int64_t request_id) {
  Header header;
  header.kind = Kind::kForwardRequest;
  header.module_id = module_id;
  header.request_id = request_id;
  header.forward_id = 77;
  header.flags = kGradEnabled | kTraining | (int64_t{4} << kCallIdxShift);
  header.index = kContext;
  return header;
}

// One tensor that is there, one that comes with the request, one without name,
// and a missing gradient.
std::vector<comm::MessageTensor> make_tensors(int64_t first_id) {
  std::vector<comm::MessageTensor> tensors(4);
  tensors[0].ref = {kCaller, first_id * kMaxResults + 2};
  tensors[0].requires_grad = true;
  tensors[1].ref = {kCaller, (first_id + 1) * kMaxResults};
  tensors[1].data = at::ones({2});
  tensors[2].data = at::ones({3});
  return tensors;
}

RecordedRequest make_request(int64_t module_id, int64_t first_id = kFirst) {
  return *RecordedRequest::of(make_header(module_id, first_id + 2),
                              make_tensors(first_id), "structure", kCaller);
}

TEST(RecordedRequest, is_the_same_in_each_microbatch) {
  EXPECT_EQ(make_request(1), make_request(1, kLater));
}

TEST(RecordedRequest, differs_when_anything_differs_that_the_owner_sees) {
  const RecordedRequest request = make_request(1);
  EXPECT_NE(make_request(2), request);
  const auto changed =
      [&](const std::function<void(Header&, std::vector<comm::MessageTensor>&,
                                   std::string&)>& change) {
        Header header = make_header(1, kFirst + 2);
        auto tensors = make_tensors(kFirst);
        std::string structure = "structure";
        change(header, tensors, structure);
        return *RecordedRequest::of(header, tensors, structure, kCaller);
      };
  using Tensors = std::vector<comm::MessageTensor>;
  EXPECT_EQ(changed([](Header&, Tensors&, std::string&) {}), request);
  EXPECT_NE(changed([](Header& h, Tensors&, std::string&) { ++h.request_id; }),
            request);
  EXPECT_NE(changed([](Header& h, Tensors&, std::string&) { ++h.forward_id; }),
            request);
  EXPECT_NE(changed([](Header& h, Tensors&, std::string&) {
              h.flags &= ~int64_t{kTraining};
            }),
            request);
  EXPECT_NE(changed([](Header& h, Tensors&, std::string&) {
              h.flags += int64_t{1} << kCallIdxShift;
            }),
            request);
  EXPECT_NE(changed([](Header&, Tensors&, std::string& s) { s += '2'; }),
            request);
  EXPECT_NE(changed([](Header&, Tensors& t, std::string&) { ++t[0].ref.id; }),
            request);
  EXPECT_NE(changed([](Header&, Tensors& t, std::string&) {
              t[0].requires_grad = false;
            }),
            request);
  EXPECT_NE(
      changed([](Header&, Tensors& t, std::string&) { t[1].data.reset(); }),
      request);
  EXPECT_NE(changed([](Header&, Tensors& t, std::string&) { t.pop_back(); }),
            request);
  EXPECT_EQ(changed([](Header& h, Tensors&, std::string&) {
              h.flags += 5 << kFlagBits;
            }),
            request)
      << "what is released is no part of it";
}

TEST(RecordedRequest, is_not_made_of_names_from_outside_of_its_context) {
  const auto is_possible = [](comm::Ref ref) {
    auto tensors = make_tensors(kFirst);
    tensors[0].ref = ref;
    return RecordedRequest::of(make_header(1, kFirst), tensors, "", kCaller)
        .has_value();
  };
  EXPECT_TRUE(is_possible({kCaller, kFirst * kMaxResults}));
  EXPECT_TRUE(
      is_possible({kCaller, (kFirst + kIdsPerContext) * kMaxResults - 1}));
  EXPECT_FALSE(is_possible({kCaller, kFirst * kMaxResults - 1}));
  EXPECT_FALSE(is_possible({kCaller, (kFirst + kIdsPerContext) * kMaxResults}));
  EXPECT_FALSE(is_possible({kCaller + 1, kFirst * kMaxResults}));
  Header backward = make_header(1, kFirst + 2);
  backward.kind = Kind::kBackwardRequest;
  backward.forward_id = kFirst + 1;
  EXPECT_TRUE(RecordedRequest::of(backward, {}, "", kCaller));
  backward.forward_id = kLater;
  EXPECT_FALSE(RecordedRequest::of(backward, {}, "", kCaller));
}

TEST(Programs, know_the_way_that_was_added) {
  Programs programs;
  EXPECT_EQ(programs.find(Programs::kStart, make_request(1)), Programs::kLeft);
  const int one = programs.add(Programs::kStart, make_request(1));
  const int two = programs.add(one, make_request(2));
  EXPECT_EQ(programs.find(Programs::kStart, make_request(1)), one);
  EXPECT_EQ(programs.find(one, make_request(2)), two);
  EXPECT_EQ(programs.find(one, make_request(1)), Programs::kLeft);
  EXPECT_EQ(programs.find(Programs::kStart, make_request(2)), Programs::kLeft);
}

TEST(Programs, may_go_on_differently_after_the_same_beginning) {
  Programs programs;
  const int one = programs.add(Programs::kStart, make_request(1));
  const int two = programs.add(one, make_request(2));
  const int other = programs.add(one, make_request(3));
  const int last = programs.add(other, make_request(2));
  EXPECT_EQ(programs.find(one, make_request(3)), other);
  EXPECT_EQ(programs.find(one, make_request(2)), two);
  const auto way = programs.between(Programs::kStart, last);
  ASSERT_EQ(way.size(), 3u);
  EXPECT_EQ(way[0]->module_id, 1);
  EXPECT_EQ(way[1]->module_id, 3);
  EXPECT_EQ(way[2]->module_id, 2);
  EXPECT_EQ(programs.between(one, other).size(), 1u);
  EXPECT_THROW(programs.between(two, last), Error);
  EXPECT_THROW(programs.between(Programs::kStart, last + 1), Error);
  EXPECT_THROW(programs.between(Programs::kStart, -7), Error);
}

TEST(Programs, are_full_when_one_place_goes_on_in_too_many_ways) {
  Programs programs;
  int num_added = 0;
  while (!programs.is_full(Programs::kStart) && num_added < 100'000) {
    programs.add(Programs::kStart, make_request(num_added++));
  }
  EXPECT_GE(num_added, 16);
  EXPECT_LE(num_added, 1024);
  EXPECT_FALSE(programs.is_full(1)) << "elsewhere there is room";
  int node = 1;
  while (!programs.is_full(node) && num_added < 100'000) {
    node = programs.add(node, make_request(num_added++));
  }
  EXPECT_LT(num_added, 100'000) << "but not without an end";
  EXPECT_EQ(programs.size(), num_added);
}

TEST(Programs, learn_what_follows_soon) {
  Programs programs;
  const int node = programs.add(Programs::kStart, make_request(1));
  EXPECT_FALSE(programs.has_follower(node));
  programs.note_follower(node, std::chrono::microseconds(100));
  EXPECT_TRUE(programs.has_follower(node));
  programs.note_follower(node, std::chrono::microseconds(500));
  EXPECT_TRUE(programs.has_follower(node));
  programs.note_follower(node, std::chrono::seconds(1));
  EXPECT_FALSE(programs.has_follower(node)) << "not soon any more";
  programs.note_no_follower(node);
  programs.note_follower(node, std::chrono::microseconds(100));
  EXPECT_TRUE(programs.has_follower(node));
}

class ServedProgramsTest : public ::testing::Test {
 protected:
  // Two requests that came whole.
  void SetUp() override {
    for (int64_t i = 0; i < 2; ++i) {
      served_.record(make_header(1 + i, kFirst + 2 + i), make_tensors(kFirst),
                     "structure", kCaller);
    }
  }

  static Header make_progress(int node, int64_t request_id) {
    Header progress;
    progress.kind = Kind::kProgress;
    progress.step = 6;
    progress.mb = 2;
    progress.forward_id = node;
    progress.request_id = request_id;
    progress.index = kContext + 1;
    progress.path = 4321;
    return progress;
  }

  static comm::Message make_message(size_t num_tensors) {
    comm::Message message;
    message.source_rank = kCaller;
    for (size_t i = 0; i < num_tensors; ++i) {
      message.tensors.emplace_back();
      message.tensors.back().data = at::full({1}, static_cast<double>(i));
    }
    return message;
  }

  ServedPrograms served_;
};

TEST_F(ServedProgramsTest, make_requests_of_a_place) {
  const auto requests =
      served_.follow(make_progress(2, kLater + 3), make_message(4));
  ASSERT_EQ(requests.size(), 2u);
  const auto& [header, message] = requests[1];
  EXPECT_EQ(header.kind, Kind::kForwardRequest);
  EXPECT_EQ(header.step, 6);
  EXPECT_EQ(header.mb, 2);
  EXPECT_EQ(header.module_id, 2);
  EXPECT_EQ(header.request_id, kLater + 3);
  EXPECT_EQ(header.forward_id, 77);
  EXPECT_EQ(header.flags, kGradEnabled | kTraining);
  EXPECT_EQ(header.index, kContext + 1);
  EXPECT_EQ(header.path, call_path(4321, 4, 2));
  EXPECT_EQ(message.source_rank, kCaller);
  EXPECT_EQ(message.bytes, "structure");
  ASSERT_EQ(message.tensors.size(), 4u);
  EXPECT_EQ(message.tensors[0].ref.id, kLater * kMaxResults + 2);
  EXPECT_EQ(message.tensors[0].ref.owner_rank, kCaller);
  EXPECT_TRUE(message.tensors[0].requires_grad);
  EXPECT_FALSE(message.tensors[0].data.defined());
  EXPECT_EQ(message.tensors[1].ref.id, (kLater + 1) * kMaxResults);
  EXPECT_EQ(message.tensors[1].data.item<double>(), 2);
  EXPECT_LT(message.tensors[2].ref.id, 0);
  EXPECT_EQ(message.tensors[2].data.item<double>(), 3);
  EXPECT_FALSE(message.tensors[3].data.defined());
}

TEST_F(ServedProgramsTest, go_on_where_a_context_is) {
  EXPECT_EQ(
      served_.follow(make_progress(1, kLater + 2), make_message(2)).size(), 1u);
  EXPECT_EQ(
      served_.follow(make_progress(2, kLater + 3), make_message(2)).size(), 1u);
}

TEST_F(ServedProgramsTest, a_context_that_deviates_continues_with_requests) {
  served_.follow(make_progress(1, kLater + 2), make_message(2));
  Header other = make_header(8, kLater + 3);
  other.index = kContext + 1;
  served_.record(other, make_tensors(kLater), "other", kCaller);
  Header progress = make_progress(3, kFirst + 3);
  progress.index = kContext + 2;
  const auto requests = served_.follow(progress, make_message(4));
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_EQ(requests[0].first.module_id, 1);
  EXPECT_EQ(requests[1].first.module_id, 8);
  EXPECT_EQ(requests[1].second.bytes, "other");
}

TEST_F(ServedProgramsTest, damaged_messages_are_refused) {
  EXPECT_THROW(served_.follow(make_progress(3, kLater + 3), make_message(4)),
               Error);
  served_.begin_step(false);
  EXPECT_THROW(served_.follow(make_progress(2, kLater + 4), make_message(4)),
               Error);
  served_.begin_step(false);
  EXPECT_THROW(served_.follow(make_progress(2, kLater + 3), make_message(3)),
               Error);
  served_.begin_step(false);
  EXPECT_THROW(served_.follow(make_progress(2, kLater + 3), make_message(5)),
               Error);
  served_.begin_step(false);
  EXPECT_THROW(served_.follow(make_progress(0, kLater), make_message(0)),
               Error);
}

TEST_F(ServedProgramsTest, outlive_steps_unless_they_are_to_be_forgotten) {
  served_.begin_step(false);
  EXPECT_EQ(
      served_.follow(make_progress(2, kLater + 3), make_message(4)).size(), 2u);
  served_.begin_step(true);
  EXPECT_THROW(served_.follow(make_progress(2, kLater + 3), make_message(4)),
               Error);
}

}  // namespace
}  // namespace smp::pipeline
