#include "csrc/pipeline/callee.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

#include "csrc/common/check.h"
#include "tests/cpp/pipeline/owner_rank.h"

namespace smp::pipeline {
namespace {

constexpr int kCaller = 1;
constexpr int64_t kServedModule = 1;

// A rank whose module doubles its argument: it multiplies by its one weight.
class CalleeRank {
 public:
  explicit CalleeRank(OwnerRank& self)
      : self(self),
        tensors(at::kCPU, false, self.messenger, self.scheduler),
        caller(true, self.modules, self.messenger, self.scheduler, tensors),
        weights(self.modules, *self.policy, self.scheduler, [](int) {}),
        callee(self.modules, self.messenger, self.scheduler, tensors, caller,
               weights),
        weight(at::full({4}, 2.0).set_requires_grad(true)) {
    callee.set_forward_handler([this](Call call) {
      structures.push_back(call.structure);
      Call result;
      result.structure = "result";
      result.tensors.emplace_back();
      result.tensors.back().data = call.tensors.at(0).data.mul(weight);
      return result;
    });
    self.begin_step();
    self.set_take([this](const Header& header, mailbox::Message&& message) {
      try {
        callee.take(header, std::move(message));
      } catch (const Error& e) {
        refusal = e.what();
      }
      ++num_taken;
    });
  }

  ~CalleeRank() { self.set_take({}); }

  // Takes so many requests in, and runs them.
  void serve(int num_requests) {
    while (num_taken < num_requests) std::this_thread::yield();
    self.end_step();
  }

  OwnerRank& self;
  TensorDirectory tensors;
  Caller caller;
  WeightTasks weights;
  Callee callee;
  at::Tensor weight;
  std::vector<std::string> structures;  // of the calls, in their order
  std::string refusal;
  std::atomic<int> num_taken{0};
};

struct Argument {
  mailbox::Ref ref;
  at::Tensor data;
};

void request(OwnerRank& self, Kind kind, int64_t request_id, int64_t flags,
             const std::string& structure, const Argument& argument,
             const Route::Hops& hops = {}, int64_t forward_id = 0) {
  Header header = self.messenger.header_of(kind, 0);
  header.request_id = request_id;
  header.module_id = kServedModule;
  header.flags = flags;
  header.index = 1;  // the caller's context
  header.forward_id = forward_id;
  std::vector<mailbox::MessageTensor> tensors(1);
  tensors[0].ref = argument.ref;
  tensors[0].data = argument.data;
  tensors[0].requires_grad = true;
  self.messenger.post(0, header, with_hops(hops, structure), tensors);
}

Argument inline_ones() { return {{}, at::ones({4})}; }

TEST(Callee, runs_a_module_says_what_came_out_and_sends_it_on) {
  run_pair(
      [](OwnerRank& self) {
        CalleeRank rank(self);
        rank.serve(1);
        EXPECT_EQ(rank.structures, std::vector<std::string>{"call"});
        EXPECT_EQ(rank.callee.num_served_calls(), 1);
        EXPECT_EQ(rank.callee.num_records(), 1) << "for its backward";
        rank.callee.end_microbatch(0);
        EXPECT_EQ(rank.callee.num_records(), 0);
      },
      [](OwnerRank& self) {
        request(self, Kind::kForwardRequest, 5, kGradEnabled | kWantsMeta,
                "call", inline_ones(), {{0, kCaller}});
        const auto [meta, bytes] = self.receive(Kind::kForwardMeta);
        EXPECT_EQ(meta.request_id, 5);
        const ResultMeta result = ResultMeta::decode(bytes.bytes);
        EXPECT_EQ(result.structure, "result");
        EXPECT_TRUE(result.tensors.at(0).requires_grad);
        const auto [header, data] = self.receive(Kind::kData);
        EXPECT_EQ(data.tensors.at(0).ref.id, 5 * kMaxResults);
        EXPECT_TRUE(at::equal(data.tensors[0].data, at::full({4}, 2.0)));
        const auto [done, empty] = self.receive(Kind::kRequestsDone);
        EXPECT_EQ(done.request_id, 5);
        EXPECT_EQ(done.index, 1);
      });
}

TEST(Callee, gives_gradients_of_arguments_and_adds_those_of_weights) {
  run_pair(
      [](OwnerRank& self) {
        CalleeRank rank(self);
        rank.serve(2);
        EXPECT_TRUE(at::equal(rank.weight.grad(), at::full({4}, 3.0)));
        EXPECT_EQ(rank.callee.num_records(), 0);
      },
      [](OwnerRank& self) {
        request(self, Kind::kForwardRequest, 5, kGradEnabled | kWantsMeta,
                "call", inline_ones());
        request(self, Kind::kBackwardRequest, 6, kWantsMeta, "",
                {{}, at::full({4}, 3.0)}, {{0, kCaller}}, 5);
        std::set<Kind> kinds;
        for (int i = 0; i < 5; ++i) {
          const auto [header, message] = self.receive();
          kinds.insert(header.kind);
          if (header.kind == Kind::kBackwardMeta) {
            EXPECT_EQ(message.bytes, "1");
          } else if (header.kind == Kind::kData) {
            EXPECT_EQ(message.tensors.at(0).ref.id, 6 * kMaxResults);
            EXPECT_TRUE(at::equal(message.tensors[0].data, at::full({4}, 6.0)));
          }
          if (header.kind == Kind::kRequestsDone && header.request_id == 6) {
            break;
          }
        }
        EXPECT_TRUE(kinds.count(Kind::kBackwardMeta));
        EXPECT_TRUE(kinds.count(Kind::kData));
      });
}

TEST(Callee, requests_of_a_context_keep_their_order_when_a_tensor_is_late) {
  run_pair(
      [](OwnerRank& self) {
        CalleeRank rank(self);
        while (rank.num_taken < 2) std::this_thread::yield();
        EXPECT_TRUE(rank.structures.empty());
        EXPECT_EQ(rank.callee.num_queued(), 2);
        EXPECT_NE(rank.callee.describe_queued().find("'first'"),
                  std::string::npos);
        rank.tensors.put({kCaller, 77}, 0, {at::ones({4})});
        self.end_step();
        EXPECT_EQ(rank.structures, (std::vector<std::string>{"late", "ready"}));
        EXPECT_EQ(rank.callee.num_queued(), 0);
      },
      [](OwnerRank& self) {
        request(self, Kind::kForwardRequest, 5, kWantsMeta, "late",
                {{kCaller, 77}, {}});
        request(self, Kind::kForwardRequest, 6, kWantsMeta, "ready",
                inline_ones());
      });
}

TEST(Callee, a_result_that_its_caller_does_not_expect_is_an_error) {
  run_pair(
      [](OwnerRank& self) {
        CalleeRank rank(self);
        try {
          rank.serve(1);
          FAIL() << "no error";
        } catch (const Error& e) {
          const std::string text = e.what();
          EXPECT_NE(text.find("'first'"), std::string::npos) << text;
          EXPECT_NE(text.find("global_rank 1"), std::string::npos) << text;
        }
        rank.callee.clear();
        EXPECT_EQ(rank.callee.num_queued(), 0);
      },
      [](OwnerRank& self) {
        request(self, Kind::kForwardRequest, 5, 0, "call", inline_ones(), {},
                /*forward_id=*/1234);
      });
}

TEST(Callee, damaged_requests_are_refused) {
  run_pair(
      [](OwnerRank& self) {
        CalleeRank rank(self);
        while (rank.num_taken < 1) std::this_thread::yield();
        EXPECT_NE(rank.refusal.find("lacks tensors"), std::string::npos);
        self.end_step();
        EXPECT_TRUE(rank.structures.empty());
      },
      [](OwnerRank& self) {
        request(self, Kind::kForwardRequest, 5, int64_t{2} << kFlagBits, "call",
                inline_ones());
      });
}

TEST(Callee, computes_arithmetic_where_the_tensors_are) {
  run_pair(
      [](OwnerRank& self) {
        CalleeRank rank(self);
        rank.serve(1);
        EXPECT_EQ(rank.tensors.num_stored(), 1);
        EXPECT_TRUE(rank.structures.empty()) << "no module runs";
      },
      [](OwnerRank& self) {
        request(self, Kind::kOperation, 5, 0,
                Operation::named("mul", true, 4).encode(), inline_ones(),
                {{0, kCaller}});
        const auto [header, data] = self.receive(Kind::kData);
        EXPECT_TRUE(at::equal(data.tensors.at(0).data, at::full({4}, 4.0)));
      });
}

}  // namespace
}  // namespace smp::pipeline
