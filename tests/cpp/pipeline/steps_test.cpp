#include "csrc/pipeline/steps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "csrc/common/check.h"
#include "tests/cpp/pipeline/server_ranks.h"

namespace smp::pipeline {
namespace {

constexpr int kMicrobatchesOfSteps = 4;

class Recorder : public MicrobatchListener {
 public:
  void on_microbatch_end(int mb) override {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_.push_back(mb);
  }
  std::vector<int> ended() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return ended_;
  }
  bool has_heard(int mb) const {
    const auto all = ended();
    return std::find(all.begin(), all.end(), mb) != all.end();
  }

 private:
  mutable std::mutex mutex_;
  std::vector<int> ended_;
};

class Ends : public ::testing::TestWithParam<const char*> {};

TEST_P(Ends, of_microbatches_are_heard_once_on_every_rank_and_before_python) {
  run_servers({.size = 3, .policy = GetParam()}, [](Rank& self) {
    const auto recorder = std::make_shared<Recorder>();
    Steps& steps = self.server->steps();
    steps.set_listeners({recorder});
    std::atomic<int> num_done{0};
    steps.set_microbatch_done([&](int mb) {
      EXPECT_TRUE(recorder->has_heard(mb));
      ++num_done;
    });
    for (int step = 1; step <= 2; ++step) {
      self.step_of_chains(kMicrobatchesOfSteps);
      std::vector<int> ended = recorder->ended();
      ASSERT_EQ(ended.size(), size_t{kMicrobatchesOfSteps} * step);
      std::sort(ended.begin(), ended.end());
      for (int mb = 0; mb < kMicrobatchesOfSteps; ++mb) {
        EXPECT_EQ(ended[mb * step], mb);
      }
    }
    EXPECT_EQ(num_done, 2 * kMicrobatchesOfSteps);
    steps.set_listeners({});
    self.step_of_chains(1);
    EXPECT_EQ(recorder->ended().size(), size_t{2} * kMicrobatchesOfSteps);
  });
}

// zero_bubble puts gradients of weights off, and with them the end.
INSTANTIATE_TEST_SUITE_P(Policies, Ends,
                         ::testing::Values("interleaved", "simple",
                                           "zero_bubble"));

TEST(Steps, the_end_of_a_microbatch_comes_after_all_of_its_gradients) {
  run_servers({.size = 2, .policy = "zero_bubble"}, [](Rank& self) {
    class Checker : public MicrobatchListener {
     public:
      explicit Checker(Rank& rank) : rank_(rank) {}
      void on_microbatch_end(int) override {
        EXPECT_TRUE(rank_.w.grad().defined());
      }

     private:
      Rank& rank_;
    };
    self.server->steps().set_listeners({std::make_shared<Checker>(self)});
    self.step_of_chains(1);
  });
}

TEST(Steps, the_number_of_microbatches_and_the_words_are_the_drivers) {
  run_servers({.size = 2}, [](Rank& self) {
    Steps& steps = self.server->steps();
    const bool is_first = self.rank == 0;
    const auto [num, words] =
        steps.begin("train", is_first ? 3 : 7, is_first ? "mine" : "other");
    EXPECT_EQ(num, 3);
    EXPECT_EQ(words, "mine");
    self.losses.assign(num, 0);
    steps.run(num, 1, [&](int mb) { self.chain(mb); });
    self.expect_empty();
  });
}

TEST(Steps, messages_of_a_step_wait_until_it_begins_here) {
  run_servers({.size = 2}, [](Rank& self) {
    for (int step = 0; step < 3; ++step) {
      // The driver's requests come before the other rank has called anything.
      if (self.rank == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      EXPECT_FALSE(self.server->steps().is_open());
      self.step_of_chains(2);
    }
    EXPECT_EQ(self.server->num_served_calls(), self.rank * 6);
  });
}

TEST(Steps, are_open_while_their_bodies_run) {
  run_servers({.size = 2}, [](Rank& self) {
    std::atomic<bool> was_open{false};
    self.step(1, [&](int mb) {
      self.chain(mb);
      was_open = self.server->steps().is_open();
    });
    EXPECT_TRUE(was_open);
    EXPECT_FALSE(self.server->steps().is_open());
  });
}

TEST(Steps, one_that_failed_is_closed_and_left_empty) {
  run_servers({.size = 2}, [](Rank& self) {
    EXPECT_THROW(self.step(2,
                           [&](int mb) {
                             if (self.rank == 0 && mb == 1) {
                               throw std::runtime_error("broken");
                             }
                             self.chain(mb);
                           }),
                 std::exception);
    EXPECT_FALSE(self.server->steps().is_open());
    self.expect_empty();
  });
}

TEST(Steps, none_begins_after_the_end) {
  run_servers({.size = 2}, [](Rank& self) {
    self.server->close();
    EXPECT_THROW(self.server->steps().begin("train", 1), InternalError);
  });
}

}  // namespace
}  // namespace smp::pipeline
