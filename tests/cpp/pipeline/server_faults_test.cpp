// Tests what is left, and what people read, when a step ends early.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <stdexcept>
#include <thread>

#include "csrc/autograd/node.h"
#include "csrc/common/check.h"
#include "csrc/pipeline/wire.h"
#include "tests/cpp/pipeline/server_ranks.h"

namespace smp::pipeline {
namespace {

constexpr int kMicrobatchesOfFaults = 4;

class BrokenNode : public torch::autograd::Node {
 public:
  using Node::Node;
  std::string name() const override { return "BrokenBackward"; }
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&&) override {
    throw std::runtime_error("broken");
  }
};

at::Tensor break_backward(const at::Tensor& tensor) {
  at::Tensor broken = tensor.detach();
  torch::autograd::create_gradient_edge(
      broken, autograd::make_node<BrokenNode>(
                  torch::autograd::collect_next_edges(tensor)));
  return broken;
}

// Text of the error of a step.
std::string failure_of(Rank& self, int num_microbatches,
                       const std::function<void(int)>& body) {
  try {
    self.step(num_microbatches, body);
  } catch (const std::exception& e) {
    return e.what();
  }
  ADD_FAILURE() << "the step of rank " << self.rank << " did not fail";
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

enum class Place {
  kModule,
  kModuleBackward,
  kNestedModule,
  kDriverBody,
  kDriverBackward,
  kOtherBody,
};

struct FaultCase {
  const char* name;
  Place place;
  int rank;           ///< where it happens
  const char* where;  ///< part of the text on that rank and on the others
};

class Faults : public ::testing::TestWithParam<
                   std::tuple<FaultCase, std::string, bool>> {};

// In the second step (so that all run ahead), microbatch 2.
class FaultyRank {
 public:
  FaultyRank(Rank& self, const FaultCase& fault) : self_(self), fault_(fault) {
    self.modules[1] = [this](std::vector<at::Tensor> inputs) {
      at::Tensor x = inputs[0];
      if (fault_.place == Place::kNestedModule) {
        x = self_.arrive(self_.call_one(2, self_.leave(x)));
      }
      return std::vector{compute(x, self_.w)};
    };
    self.modules[2] = [this](std::vector<at::Tensor> inputs) {
      const bool is_now = current_context()->key.mb == 2 && is_armed_;
      if (is_now && (fault_.place == Place::kModule ||
                     fault_.place == Place::kNestedModule)) {
        throw std::runtime_error("broken");
      }
      const at::Tensor y = compute(inputs[0], self_.w);
      if (is_now && fault_.place == Place::kModuleBackward) {
        return std::vector{break_backward(y)};
      }
      return std::vector{y};
    };
  }

  void arm() { is_armed_ = true; }

  void body(int mb) {
    const bool is_now = is_armed_ && mb == 2;
    if (self_.rank != 0) {
      if (is_now && fault_.place == Place::kOtherBody && self_.rank == 1) {
        throw std::runtime_error("broken");
      }
      return self_.follow(mb);
    }
    at::Tensor x = self_.leave(compute(make_input(mb), self_.w));
    if (is_now && fault_.place == Place::kDriverBackward) x = break_backward(x);
    x = self_.call_one(1, x);
    if (fault_.place != Place::kNestedModule) x = self_.call_one(2, x);
    if (is_now && fault_.place == Place::kDriverBody) {
      throw std::runtime_error("broken");
    }
    self_.train_on(mb, self_.arrive(x).sum());
  }

 private:
  Rank& self_;
  const FaultCase fault_;
  bool is_armed_ = false;
};

TEST_P(Faults, leave_nothing_and_are_known_everywhere) {
  const auto [fault, policy, has_handles] = GetParam();
  const RankSettings settings{
      .size = 3, .policy = policy, .has_handles = has_handles};
  std::barrier between_steps(settings.size);
  run_servers(settings, [&, fault = fault](Rank& self) {
    FaultyRank faulty(self, fault);
    self.step(kMicrobatchesOfFaults, [&](int mb) { faulty.body(mb); });
    self.expect_empty();
    faulty.arm();
    between_steps.arrive_and_wait();  // else it may end the first step
    const std::string text = failure_of(self, kMicrobatchesOfFaults,
                                        [&](int mb) { faulty.body(mb); });
    EXPECT_TRUE(contains(text, "broken")) << text;
    if (self.rank == fault.rank) {
      ASSERT_EQ(self.errors.size(), 1u);
      EXPECT_TRUE(contains(self.errors[0], fault.where)) << self.errors[0];
    } else {
      EXPECT_TRUE(contains(text, fault.where)) << text;
      EXPECT_TRUE(contains(text, "global_rank " + std::to_string(fault.rank)))
          << text;
      EXPECT_TRUE(self.errors.empty()) << "the failure of another rank";
    }
    self.expect_empty();
  });
}

INSTANTIATE_TEST_SUITE_P(
    Places, Faults,
    ::testing::Combine(
        ::testing::Values(FaultCase{"Module", Place::kModule, 2,
                                    "module 'stage2', microbatch 2, forward"},
                          FaultCase{"ModuleBackward", Place::kModuleBackward, 2,
                                    "module 'stage2', microbatch 2, backward"},
                          FaultCase{"NestedModule", Place::kNestedModule, 2,
                                    "module 'stage2', microbatch 2, forward"},
                          FaultCase{"DriverBody", Place::kDriverBody, 0,
                                    "step body, microbatch 2"},
                          FaultCase{"DriverBackward", Place::kDriverBackward, 0,
                                    "step body, microbatch 2"},
                          FaultCase{"OtherBody", Place::kOtherBody, 1,
                                    "step body, microbatch 2"}),
        ::testing::Values("interleaved", "simple"), ::testing::Bool()),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) +
             (std::get<1>(info.param) == "simple" ? "Simple" : "Interleaved") +
             (std::get<2>(info.param) ? "Handles" : "");
    });

// A module whose result is not what it was for the same kind of arguments.
TEST(Mismatch, of_results_is_an_error_that_names_the_module_on_all_ranks) {
  std::barrier between_steps(3);
  run_servers({.size = 3}, [&](Rank& self) {
    bool is_armed = false;
    self.modules[1] = [&](std::vector<at::Tensor> inputs) {
      const at::Tensor y = compute(inputs[0], self.w);
      return std::vector{is_armed ? y.narrow(0, 0, 3) : y};
    };
    const auto body = [&](int mb) {
      if (self.rank != 0) return self.follow(mb);
      at::Tensor x = self.call_one(2, self.call_one(1, make_input(mb)));
      self.train_on(mb, self.arrive(x).sum());
    };
    self.step(2, body);
    is_armed = true;
    between_steps.arrive_and_wait();  // else it may end the first step
    const std::string text = failure_of(self, 2, body);
    EXPECT_TRUE(contains(text, "'stage1'")) << text;
    EXPECT_TRUE(contains(text, "returned something else than before")) << text;
    self.expect_empty();
  });
}

TEST(Mismatch, of_gradients_is_an_error_that_names_the_module_on_all_ranks) {
  std::barrier between_steps(2);
  run_servers({.size = 2}, [&](Rank& self) {
    bool is_armed = false;
    self.modules[1] = [&](std::vector<at::Tensor> inputs) {
      const at::Tensor y =
          compute(is_armed ? inputs[0].detach() : inputs[0], self.w);
      return std::vector{y};
    };
    const auto body = [&](int mb) {
      if (self.rank != 0) return self.follow(mb);
      const at::Tensor x = self.leave(compute(make_input(mb), self.w));
      self.train_on(mb, self.arrive(self.call_one(1, x)).sum());
    };
    self.step(2, body);
    is_armed = true;
    between_steps.arrive_and_wait();  // else it may end the first step
    const std::string text = failure_of(self, 2, body);
    EXPECT_TRUE(contains(text,
                         "arguments of module 'stage1' that get gradients"
                         " changed"))
        << text;
    self.expect_empty();
  });
}

// A rank dies while the others wait for it, in all kinds of waits.
TEST(Cancelled, a_rank_that_dies_ends_the_step_of_the_others) {
  std::atomic<int> num_done{0};
  run_servers({.size = 3}, [&](Rank& self, Ranks& ranks) {
    self.modules[2] = [&](std::vector<at::Tensor>) -> std::vector<at::Tensor> {
      // Never answers, and is gone.
      for (const int other : {0, 1}) {
        ranks.tell(other,
                   {.kind = health::Fault::Kind::kDied, .global_rank = 2});
      }
      while (num_done < 2) std::this_thread::yield();
      throw std::runtime_error("over");
    };
    const std::string text = failure_of(self, 3, [&](int mb) {
      if (self.rank != 0) return self.follow(mb);
      const at::Tensor x = self.call_one(2, self.call_one(1, make_input(mb)));
      self.train_on(mb, self.arrive(x).sum());
    });
    self.expect_empty();
    EXPECT_TRUE(contains(text, self.rank == 2 ? "over" : "global_rank 2"))
        << text;
    ++num_done;
  });
}

TEST(Cancelled, requests_whose_tensors_never_come_are_dropped) {
  run_servers({.size = 2}, [](Rank& self, Ranks& ranks) {
    const std::string text = failure_of(self, 1, [&](int) {
      if (self.rank == 0) {
        auto ref = std::make_shared<RemoteRef>();
        ref->ref = {0, 99};
        ref->home_rank = 1;  // where nobody makes it
        const at::Tensor handle = make_input(0);
        attach_remote_ref(handle, ref);
        self.call_one(1, handle);
        return;
      }
      // The thread that delivers queues it, then asks for its tensor.
      while (self.server->num_queued() == 0 || self.server->num_stored() == 0) {
        std::this_thread::yield();
      }
      EXPECT_EQ(self.server->num_queued(), 1);
      EXPECT_EQ(self.server->num_stored(), 1);
      ranks.tell(0, {.kind = health::Fault::Kind::kDied, .global_rank = 1});
      ranks.tell(1, {.kind = health::Fault::Kind::kDied, .global_rank = 0});
      self.server->announcements().await_output();
    });
    EXPECT_TRUE(contains(text, "died")) << text;
    self.expect_empty();
  });
}

TEST(Refused, an_argument_that_cannot_travel_leaves_the_step_as_it_was) {
  run_servers({.size = 2}, [](Rank& self) {
    for (int step = 0; step < 2; ++step) {
      self.step(2, [&](int mb) {
        if (self.rank != 0) return self.follow(mb);
        const at::Tensor sparse = at::sparse_coo_tensor(
            {kRows, kWidth}, at::TensorOptions(at::kDouble));
        EXPECT_THROW(self.call(1, {make_input(7), sparse}), ValueError);
        const at::Tensor x = self.call_one(1, make_input(mb));
        self.train_on(mb, self.arrive(x).sum());
      });
      self.expect_empty();
    }
    EXPECT_TRUE(self.errors.empty());
  });
}

TEST(Damaged, a_request_without_a_route_is_a_fault_and_ends_the_step) {
  for (const bool is_early : {false, true}) {
    run_servers({.size = 2}, [&](Rank& self, Ranks& ranks) {
      const auto post = [&] {
        Header header;
        header.kind = Kind::kForwardRequest;
        mailbox::Message message;
        header.write_to(message);
        self.mailbox->post(1, std::move(message));
      };
      if (self.rank == 0) {
        if (is_early) post();
        const std::string text = failure_of(self, 1, [&](int) {
          if (!is_early) post();
          self.arrive(self.call_one(1, make_input(0)));
        });
        EXPECT_TRUE(contains(text, "has no route")) << text;
      } else {
        try {
          self.step(1,
                    [&](int) { self.server->announcements().await_output(); });
          ADD_FAILURE() << "no error";
        } catch (const Error& e) {
          EXPECT_TRUE(contains(e.what(), "has no route")) << e.what();
          ranks.tell_others(1, "a message", e.what());
        }
      }
      self.expect_empty();
    });
  }
}

}  // namespace
}  // namespace smp::pipeline
