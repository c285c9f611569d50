// The module server over the in-process world: threads are ranks.

#include "csrc/pipeline/server.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>

#include "csrc/comm/local_world.h"
#include "csrc/common/check.h"
#include "csrc/common/task_scope.h"
#include "csrc/pipeline/remote_call.h"
#include "tests/cpp/comm/run_ranks.h"

namespace smp::pipeline {
namespace {

at::Tensor weight(int rank) {
  // A fixed, different matrix per rank.
  at::Tensor w = at::empty({4, 4}, at::kDouble);
  for (int i = 0; i < 16; ++i) {
    w.data_ptr<double>()[i] =
        0.1 * (1 + rank) + 0.05 * (i / 4) - 0.03 * (i % 4) * (rank + 1);
  }
  return w.set_requires_grad(true);
}

at::Tensor input(int mb) {
  at::Tensor x = at::empty({2, 4}, at::kDouble);
  for (int i = 0; i < 8; ++i) {
    x.data_ptr<double>()[i] = 0.1 * (i + 1) * (mb + 1);
  }
  return x;
}

// One rank: module r computes tanh(x W_r); ranks above 0 serve it.
struct Rank {
  Rank(int rank, int size, comm::CommunicatorPtr world,
       const std::string& policy)
      : rank(rank), size(size), w(weight(rank)) {
    faults = std::make_shared<comm::FaultBoard>(rank);
    mailbox = std::make_shared<comm::Mailbox>(world, faults);
    Server::Options options;
    options.global_rank = rank;
    for (int r = 0; r < size; ++r) {
      options.pp_ranks.push_back(r);
      options.module_names.push_back("stage" + std::to_string(r));
    }
    options.policy = policy;
    options.timeout = std::chrono::seconds(20);
    server = std::make_unique<Server>(options, mailbox, faults);
    server->set_forward_handler([this](Call call) {
      Call result;
      result.structure = "result";
      result.tensors.resize(1);
      result.tensors[0].data = at::tanh(at::mm(call.tensors[0].data, w));
      return result;
    });
  }

  ~Rank() {
    server->close();
    mailbox->close();
  }

  // Body of a step: the driver runs the chain, the others follow.
  void body(int mb) {
    if (!server->is_driver()) {
      Call output = server->await_output();
      losses[mb] = output.tensors[0].data.item<double>();
      server->await_backward();
      return;
    }
    at::Tensor x = at::tanh(at::mm(input(mb), w));
    for (int r = 1; r < size; ++r) {
      Call result = remote_call(*server, r, r, true, "call", {x});
      x = result.tensors[0].data;
    }
    at::Tensor loss = x.sum();
    Call output;
    output.structure = "loss";
    output.tensors.resize(1);
    output.tensors[0].data = loss.detach().clone();
    server->publish_output(output);
    losses[mb] = loss.item<double>();
    server->begin_backward();
    torch::autograd::backward({loss}, {});
    server->end_backward();
  }

  void step(int num_microbatches) {
    losses.assign(num_microbatches, 0);
    ASSERT_EQ(server->begin_step("train", num_microbatches), num_microbatches);
    server->run_step(num_microbatches, 1, [this](int mb) { body(mb); });
  }

  int rank;
  int size;
  at::Tensor w;
  std::shared_ptr<comm::FaultBoard> faults;
  std::shared_ptr<comm::Mailbox> mailbox;
  std::unique_ptr<Server> server;
  std::vector<double> losses;
};

class ServerTest
    : public ::testing::TestWithParam<std::tuple<int, std::string, int>> {};

TEST_P(ServerTest, chain_over_ranks_matches_one_process) {
  const auto [size, policy, num_microbatches] = GetParam();
  std::vector<at::Tensor> weights;
  for (int r = 0; r < size; ++r) weights.push_back(weight(r));
  std::vector<double> losses;
  for (int mb = 0; mb < num_microbatches; ++mb) {
    at::Tensor x = input(mb);
    for (const at::Tensor& w : weights) x = at::tanh(at::mm(x, w));
    at::Tensor loss = x.sum();
    losses.push_back(loss.item<double>());
    torch::autograd::backward({loss}, {});
  }
  comm::run_ranks(size, [&](int rank, comm::CommunicatorPtr world) {
    Rank self(rank, size, world, policy);
    self.step(num_microbatches);
    EXPECT_EQ(self.losses, losses);
    EXPECT_TRUE(at::allclose(self.w.grad(), weights[rank].grad(), 1e-13));
    EXPECT_GT(self.w.grad().abs().max().item<double>(), 0);
    if (rank > 0) {
      EXPECT_EQ(self.server->num_served_calls(), num_microbatches);
    }
    EXPECT_EQ(self.server->num_records(), 0);
    self.step(num_microbatches);  // a second step on the same server
    EXPECT_EQ(self.losses, losses);
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, ServerTest,
                         ::testing::Combine(::testing::Values(2, 3, 4),
                                            ::testing::Values("interleaved",
                                                              "simple"),
                                            ::testing::Values(1, 2, 8)));

TEST(Server, exception_in_a_module_reaches_the_rank_it_happened_on) {
  comm::run_ranks(2, [](int rank, comm::CommunicatorPtr world) {
    Rank self(rank, 2, world, "interleaved");
    std::string where;
    self.server->set_error_reporter(
        [&](const std::string& place, const std::string&) { where = place; });
    if (rank == 1) {
      self.server->set_forward_handler(
          [](Call) -> Call { throw std::runtime_error("broken module"); });
    }
    if (rank == 0) {
      // In processes the liveness channel brings the news; here, this thread.
      std::thread news([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        comm::Fault fault;
        fault.global_rank = 1;
        fault.text = "broken module";
        self.faults->report(fault);
      });
      EXPECT_THROW(self.step(2), PeerFailure);
      news.join();
    } else {
      EXPECT_THROW(self.step(2), std::runtime_error);
      EXPECT_EQ(where, "module 'stage1', microbatch 0, forward");
    }
  });
}

TEST(Server, ranks_that_run_different_step_functions_are_told) {
  comm::run_ranks(2, [](int rank, comm::CommunicatorPtr world) {
    Rank self(rank, 2, world, "interleaved");
    if (rank == 0) {
      self.server->begin_step("train", 2);
    } else {
      try {
        self.server->begin_step("evaluate", 2);
        FAIL() << "no error";
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("'evaluate' here but 'train'"),
                  std::string::npos)
            << e.what();
      }
    }
  });
}

TEST(Server, a_second_backward_through_a_remote_call_is_refused) {
  comm::run_ranks(2, [](int rank, comm::CommunicatorPtr world) {
    Rank self(rank, 2, world, "interleaved");
    self.server->begin_step("train", 1);
    std::string refused;
    self.server->run_step(1, 0, [&](int) {
      if (rank == 1) return;
      auto [result, id] = self.server->call_forward(1, [] {
        Call call;
        call.module_id = 1;
        call.flags = kGradEnabled;
        call.tensors.resize(1);
        call.tensors[0].data = input(0);
        return call;
      }());
      self.server->call_backward(id, {result.tensors[0].data});
      refused = "asked once";
    });
    if (rank == 0) {
      EXPECT_EQ(refused, "asked once");
    }
    EXPECT_EQ(self.server->num_records(), 0);
  });
  CallRecords records;
  records.put({0, 7}, {});
  records.take({0, 7});
  EXPECT_THROW(records.take({0, 7}), Error);
}

}  // namespace
}  // namespace smp::pipeline
