// Tensors that travel over lanes: none is read before its mark is over.

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "tests/cpp/pipeline/server_ranks.h"

namespace smp::pipeline {
namespace {

constexpr int kMicrobatchesOfLanes = 6;
constexpr int kStepsOfLanes = 3;

// The numbers that a run leaves on each rank.
struct Numbers {
  explicit Numbers(int size) : losses(size), grads(size), lanes(size) {}
  std::vector<std::vector<double>> losses;
  std::vector<at::Tensor> grads;
  std::vector<lanes::LaneCounters> lanes;
};

Numbers train(const RankSettings& settings,
              const std::function<void(Rank&, int mb)>& body) {
  Numbers numbers(settings.size);
  run_servers(settings, [&](Rank& self) {
    for (int step = 0; step < kStepsOfLanes; ++step) {
      self.step(kMicrobatchesOfLanes, [&](int mb) { body(self, mb); });
      for (const double loss : self.losses) {
        numbers.losses[self.rank].push_back(loss);
      }
      self.expect_empty();
    }
    numbers.grads[self.rank] = self.w.grad();
    numbers.lanes[self.rank] = self.mailbox->stats().lanes;
  });
  return numbers;
}

struct LaneKinds {
  bool has_ring = false;
  bool has_meeting = false;
};
constexpr LaneKinds kKindsOfLanes[] = {{}, {true, false}, {false, true}};

struct LaneCase {
  const char* name;
  RankSettings settings;
};

class Lanes : public ::testing::TestWithParam<LaneCase> {};

// A skip connection over all ranks, arithmetic where a tensor is, and a tensor
// of the driver that several modules read.
void skip(Rank& self, int mb) {
  if (self.rank != 0) return self.follow(mb);
  const at::Tensor x = compute(make_input(mb), self.w);
  at::Tensor y = self.call_one(1, self.leave(x));
  for (int r = 2; r < self.size(); ++r) y = self.call_one(r, y);
  const at::Tensor again = self.call_one(1, self.leave(x));
  self.train_on(mb, at::mul(self.arrive(y), self.arrive(again)).sum());
}

void expect_same(const RankSettings& settings, const Numbers& plain,
                 const Numbers& late) {
  int64_t num_full = 0;
  for (int rank = 0; rank < settings.size; ++rank) {
    EXPECT_EQ(plain.losses[rank], late.losses[rank]) << rank;
    // Microbatches add to a weight in any order here: no reducer sorts them.
    EXPECT_TRUE(
        settings.active_microbatches == 1
            ? at::equal(plain.grads[rank], late.grads[rank])
            : at::allclose(plain.grads[rank], late.grads[rank], 1e-12, 1e-13))
        << rank;
    EXPECT_EQ(plain.lanes[rank].tensors_sent, 0);
    // Each rank hands on activations and gradients in each microbatch.
    EXPECT_GE(late.lanes[rank].tensors_sent,
              kStepsOfLanes * kMicrobatchesOfLanes);
    EXPECT_GE(late.lanes[rank].tensors_received,
              kStepsOfLanes * kMicrobatchesOfLanes);
    EXPECT_LT(late.lanes[rank].times_full, late.lanes[rank].tensors_sent);
    num_full += late.lanes[rank].times_full;
  }
  // The slots of a ring are free sooner: as soon as their reading is asked for.
  // Where copies meet each pair has slots of its own.
  if (settings.active_microbatches == 0 && !settings.lanes->has_ring &&
      !settings.lanes->has_meeting) {
    EXPECT_GT(num_full, 0) << "no lane was ever full";
  }
}

TEST_P(Lanes, numbers_are_those_of_a_run_without) {
  for (const bool has_skip : {false, true}) {
    const auto body = [&](Rank& self, int mb) {
      has_skip ? skip(self, mb) : self.chain(mb);
    };
    RankSettings settings = GetParam().settings;
    const Numbers plain = train(settings, body);
    for (const auto& [has_ring, has_meeting] : kKindsOfLanes) {
      settings.lanes = lanes::FakeOptions{.seed = 7,
                                          .max_us = 400,
                                          .num_slots = 2,
                                          .has_ring = has_ring,
                                          .has_meeting = has_meeting};
      expect_same(settings, plain, train(settings, body));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Runs, Lanes,
    ::testing::Values(
        LaneCase{"two", {.size = 2}},
        LaneCase{"one_by_one", {.size = 3, .active_microbatches = 1}},
        LaneCase{"shared", {.size = 3, .has_shared_memory = true}},
        LaneCase{"simple", {.size = 3, .policy = "simple"}},
        LaneCase{"zero_bubble", {.size = 3, .policy = "zero_bubble"}},
        LaneCase{"fetched", {.size = 3, .has_handles = false}},
        LaneCase{
            "virtual",
            {.size = 3, .policy = "virtual_interleaved", .num_chunks = 2}}),
    [](const auto& info) { return info.param.name; });

std::string error_of_step(Rank& self, const std::function<void(int)>& body) {
  try {
    self.step(2, body);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

// A copy that never ends is one whose sender has died: all that waits for it,
// on a stream, in a queue of messages, or for an answer, ends.
class LanesOfTheDead : public ::testing::TestWithParam<LaneKinds> {};

INSTANTIATE_TEST_SUITE_P(Kinds, LanesOfTheDead,
                         ::testing::ValuesIn(kKindsOfLanes),
                         [](const auto& info) {
                           if (info.param.has_meeting) return "meeting";
                           return info.param.has_ring ? "ring" : "messages";
                         });

TEST_P(LanesOfTheDead, end_all_waits_with_the_name_of_the_culprit) {
  for (const int64_t num_ending : {0, 1, 2, 3, 5}) {
    RankSettings settings{.size = 3, .has_shared_memory = true};
    settings.lanes = lanes::FakeOptions{.max_us = 100,
                                        .num_slots = 4,
                                        .num_ending = num_ending,
                                        .has_ring = GetParam().has_ring,
                                        .has_meeting = GetParam().has_meeting};
    run_servers(settings, [&](Rank& self, Ranks& ranks) {
      std::thread liveness([&] {
        // Long enough for all to have come as far as they can.
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        ranks.tell(self.rank,
                   {.kind = health::Fault::Kind::kDied, .global_rank = 2});
      });
      const std::string text = error_of_step(self, [&](int mb) {
        if (self.rank != 2) return self.chain(mb);
        while (!ranks.boards[2]->fault()) {  // busy when it dies
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        throw std::runtime_error("dead");
      });
      EXPECT_NE(text.find(self.rank == 2 ? "dead" : "global_rank 2"),
                std::string::npos)
          << text;
      self.expect_empty();
      liveness.join();
    });
  }
}

}  // namespace
}  // namespace smp::pipeline
