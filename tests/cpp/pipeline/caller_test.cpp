#include "csrc/pipeline/caller.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <gtest/gtest.h>

#include "csrc/common/check.h"
#include "tests/cpp/pipeline/owner_rank.h"

namespace smp::pipeline {
namespace {

constexpr int kOwner = 1;
constexpr int64_t kCalledModule = 1;

class CallerRank {
 public:
  explicit CallerRank(OwnerRank& self, bool runs_ahead = true)
      : self(self),
        tensors(at::kCPU, false, self.messenger, self.scheduler),
        caller(runs_ahead, self.modules, self.messenger, self.scheduler,
               tensors) {
    self.set_take([this](const Header& header, mailbox::Message&& message) {
      caller.take(header, std::move(message));
    });
  }

  ~CallerRank() { self.set_take({}); }

  IssuedCall call() {
    return caller.call_forward(kOwner, kCalledModule, kGradEnabled, "structure",
                               "mode", {at::ones({4})});
  }

  OwnerRank& self;
  TensorDirectory tensors;
  Caller caller;
};

// Makes the owner's message about a module with one result that needs a
// gradient.
ResultMeta result_meta() {
  ResultMeta meta;
  meta.structure = "result";
  meta.tensors.push_back({{4}, at::kFloat, /*requires_grad=*/true});
  return meta;
}

void answer(OwnerRank& self, Header request, Kind kind,
            const std::string& bytes) {
  request.kind = kind;
  self.messenger.post(0, request, bytes);
}

void answer_forward(OwnerRank& self) {
  const auto [header, message] = self.receive(Kind::kForwardRequest);
  EXPECT_TRUE(header.flags & kWantsMeta);
  answer(self, header, Kind::kForwardMeta, result_meta().encode());
}

TEST(Caller, waits_for_an_unknown_call_and_not_for_a_known_one) {
  run_pair(
      [](OwnerRank& self) {
        CallerRank rank(self);
        self.run([&] {
          const IssuedCall first = rank.call();
          EXPECT_EQ(first.expected->result.structure, "result");
          const IssuedCall second = rank.call();  // nobody answers this one
          EXPECT_EQ(second.expected, first.expected);
          EXPECT_EQ(second.results.at(0)->home_rank, kOwner);
          EXPECT_EQ(second.results[0]->meta.sizes, std::vector<int64_t>{4});
          EXPECT_NE(second.results[0]->ref.id, first.results.at(0)->ref.id);
        });
        EXPECT_EQ(rank.caller.num_requests(), 2);
      },
      [](OwnerRank& self) {
        answer_forward(self);
        const auto [header, message] = self.receive(Kind::kForwardRequest);
        EXPECT_FALSE(header.flags & kWantsMeta);
        EXPECT_EQ(header.forward_id, result_meta().digest())
            << "the owner compares";
      });
}

TEST(Caller, waits_for_each_call_when_it_may_not_run_ahead) {
  run_pair(
      [](OwnerRank& self) {
        CallerRank rank(self, /*runs_ahead=*/false);
        self.run([&] {
          rank.call();
          rank.call();
        });
      },
      [](OwnerRank& self) {
        answer_forward(self);
        answer_forward(self);
      });
}

TEST(Caller, asks_once_which_arguments_get_gradients) {
  run_pair(
      [](OwnerRank& self) {
        CallerRank rank(self);
        self.run([&] {
          const IssuedCall call = rank.call();
          const std::vector<TensorMeta> inputs(2, TensorMeta{{4}, at::kFloat});
          for (int i = 0; i < 2; ++i) {
            const auto grads =
                rank.caller.call_backward(call, inputs, {at::ones({4})});
            ASSERT_EQ(grads.size(), 2u);
            EXPECT_FALSE(grads[0]);
            ASSERT_TRUE(grads[1]);
            EXPECT_TRUE(grads[1]->is_gradient);
          }
        });
      },
      [](OwnerRank& self) {
        answer_forward(self);
        const auto [first, unused] = self.receive(Kind::kBackwardRequest);
        EXPECT_TRUE(first.flags & kWantsMeta);
        answer(self, first, Kind::kBackwardMeta, "01");
        auto [second, message] = self.receive(Kind::kBackwardRequest);
        EXPECT_FALSE(second.flags & kWantsMeta);
        EXPECT_EQ(second.forward_id, first.forward_id);
        take_hops(message.bytes);
        EXPECT_EQ(message.bytes, "01") << "the owner compares";
      });
}

TEST(Caller, arithmetic_happens_where_the_youngest_operand_is) {
  run_pair(
      [](OwnerRank& self) {
        CallerRank rank(self);
        self.run([&] {
          const IssuedCall call = rank.call();
          const RemoteRefPtr sum = rank.caller.call_operation(
              Operation::named("add", false, 1),
              {call.results.at(0), call.results.at(0)});
          EXPECT_EQ(sum->home_rank, kOwner);
          EXPECT_FALSE(sum->meta.requires_grad);
        });
      },
      [](OwnerRank& self) {
        answer_forward(self);
        const auto [header, message] = self.receive(Kind::kOperation);
        ASSERT_EQ(message.tensors.size(), 2u);
        EXPECT_FALSE(message.tensors[0].data.defined());
      });
}

TEST(Caller, a_context_ends_when_its_last_request_is_done) {
  run_pair(
      [](OwnerRank& self) {
        bool is_done = false;
        CallerRank rank(self);
        self.set_take([&](const Header& header, mailbox::Message&& message) {
          is_done |= header.kind == Kind::kRequestsDone && header.path == 1;
          rank.caller.take(header, std::move(message));
        });
        self.run([&] {
          rank.call();
          rank.call();
          rank.caller.finish(*current_context());
          EXPECT_TRUE(is_done);
        });
      },
      [](OwnerRank& self) {
        answer_forward(self);
        Header done = self.receive(Kind::kForwardRequest).first;
        const int64_t last = done.request_id;
        done.request_id = last - 1;
        done.path = 0;
        answer(self, done, Kind::kRequestsDone, {});
        done.request_id = last;
        done.path = 1;
        answer(self, done, Kind::kRequestsDone, {});
      });
}

TEST(Caller, an_answer_that_nobody_waits_for_is_dropped) {
  run_pair(
      [](OwnerRank& self) {
        CallerRank rank(self);
        Header header = self.messenger.header_of(Kind::kForwardMeta, 0);
        header.request_id = 99;
        rank.caller.take(header, {});
        rank.caller.clear();
      },
      [](OwnerRank&) {});
}

TEST(Caller, what_cannot_travel_is_refused_before_anything_is_sent) {
  run_pair(
      [](OwnerRank& self) {
        CallerRank rank(self);
        EXPECT_THROW(rank.call(), Error) << "outside of a step";
        self.run([&] {
          const at::Tensor sparse =
              at::sparse_coo_tensor({4}, at::TensorOptions(at::kFloat));
          EXPECT_THROW(rank.caller.call_forward(kOwner, kCalledModule, 0, "",
                                                "", {sparse}),
                       ValueError);
        });
        EXPECT_EQ(rank.caller.num_requests(), 0);
      },
      [](OwnerRank&) {});
}

TEST(Caller, seeds_are_those_of_calls_made_one_by_one) {
  run_pair(
      [](OwnerRank& self) {
        CallerRank rank(self);
        self.run([&] {
          const auto seeds = rank.caller.seeds_of_next_calls({1, 2});
          rank.caller.skip_calls(1);
          EXPECT_EQ(rank.caller.seeds_of_next_calls({2}).at(0), seeds.at(1));
        });
      },
      [](OwnerRank&) {});
}

}  // namespace
}  // namespace smp::pipeline
