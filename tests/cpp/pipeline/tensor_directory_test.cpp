#include "csrc/pipeline/tensor_directory.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "csrc/common/check.h"
#include "tests/cpp/pipeline/owner_rank.h"

namespace smp::pipeline {
namespace {

constexpr int kPeer = 1;

at::Tensor large_tensor() { return at::arange(1000, at::kDouble); }

TensorDirectory directory_of(OwnerRank& self) {
  return TensorDirectory(at::kCPU, /*calls_itself=*/false, self.messenger,
                         self.scheduler);
}

// The result of a request that was never sent.
RemoteRefPtr name(OwnerRank& self, TensorDirectory& tensors, int idx = 0) {
  Header request = self.messenger.header_of(Kind::kForwardRequest, 0);
  request.request_id = 7;
  return tensors.name_result(*current_context(), request, kPeer, idx,
                             TensorMeta::of(large_tensor()), nullptr, {});
}

mailbox::Message data_of(const mailbox::Ref& ref, const at::Tensor& data) {
  mailbox::Message message;
  message.tensors.resize(1);
  message.tensors[0].ref = ref;
  message.tensors[0].data = data;
  return message;
}

void nobody(OwnerRank&) {}

TEST(TensorDirectory, large_arguments_travel_once_and_small_ones_each_time) {
  run_pair(
      [](OwnerRank& self) {
        TensorDirectory tensors = directory_of(self);
        self.run([&] {
          Context& context = *current_context();
          const at::Tensor large = large_tensor();
          const at::Tensor small = large.narrow(0, 0, 3);
          for (int i = 0; i < 2; ++i) {
            const auto inside = tensors.address(context, kPeer, small);
            EXPECT_TRUE(inside.data.defined());
            EXPECT_LT(inside.ref.id, 0) << "it needs no name";
          }
          const auto first = tensors.address(context, kPeer, large);
          const auto again = tensors.address(context, kPeer, large);
          EXPECT_TRUE(first.data.defined());
          EXPECT_FALSE(again.data.defined());
          EXPECT_EQ(first.ref.id, again.ref.id);
          large.add_(1);
          const auto changed = tensors.address(context, kPeer, large);
          EXPECT_TRUE(changed.data.defined()) << "it is another one now";
          EXPECT_NE(changed.ref.id, first.ref.id);
        });
      },
      nobody);
}

TEST(TensorDirectory, what_is_read_is_ordered_from_its_home_and_waited_for) {
  run_pair(
      [](OwnerRank& self) {
        TensorDirectory tensors = directory_of(self);
        self.set_take([&](const Header& header, mailbox::Message&& message) {
          tensors.take(header, std::move(message));
        });
        self.run([&] {
          const RemoteRefPtr ref = name(self, tensors);
          EXPECT_TRUE(at::equal(tensors.fetch(ref), large_tensor()));
          EXPECT_TRUE(at::equal(tensors.fetch(ref), large_tensor()));
          EXPECT_EQ(tensors.stats().pushes, 1) << "it is here now";
          EXPECT_EQ(tensors.stats().fetches, 1);
          EXPECT_EQ(tensors.num_stored(), 1);
          tensors.fetch_to_own(ref);
          EXPECT_EQ(tensors.num_stored(), 0) << "its reader has it";
        });
        self.set_take({});
      },
      [](OwnerRank& self) {
        const auto [header, order] = self.receive(Kind::kPush);
        EXPECT_EQ(header.index, 0) << "where to";
        const mailbox::Ref ref = order.tensors.at(0).ref;
        EXPECT_EQ(ref.id, 7 * kMaxResults);
        self.messenger.post(0, self.messenger.header_of(Kind::kData, 0), {},
                            data_of(ref, large_tensor()).tensors);
      });
}

TEST(TensorDirectory, data_are_sent_where_they_were_ordered_before_they_exist) {
  run_pair(
      [](OwnerRank& self) {
        TensorDirectory tensors = directory_of(self);
        Header header = self.messenger.header_of(Kind::kPush, 0);
        header.index = kPeer;
        const mailbox::Ref ref{kPeer, 3 * kMaxResults};
        tensors.take(header, data_of(ref, {}));
        Header request = self.messenger.header_of(Kind::kForwardRequest, 0);
        request.request_id = 3;
        // The second one goes on by itself, and the third one stays.
        tensors.offer(request, kPeer,
                      {large_tensor(), large_tensor(), large_tensor()},
                      {{1, kPeer}});
        EXPECT_EQ(tensors.num_stored(), 3);
        tensors.end_microbatch(0);
        EXPECT_EQ(tensors.num_stored(), 0);
      },
      [](OwnerRank& self) {
        for (const int idx : {0, 1}) {
          const auto [header, message] = self.receive(Kind::kData);
          EXPECT_EQ(message.tensors.at(0).ref.id, 3 * kMaxResults + idx);
          EXPECT_TRUE(at::equal(message.tensors[0].data, large_tensor()));
        }
      });
}

TEST(TensorDirectory, nothing_is_kept_for_a_microbatch_that_has_ended) {
  run_pair(
      [](OwnerRank& self) {
        TensorDirectory tensors = directory_of(self);
        const auto take = [&](Kind kind, int64_t mb) {
          tensors.take(self.messenger.header_of(kind, mb),
                       data_of({kPeer, 5 + mb}, large_tensor()));
        };
        tensors.end_microbatch(0);
        take(Kind::kData, 0);
        take(Kind::kRelease, 0);
        EXPECT_EQ(tensors.num_stored(), 0);
        take(Kind::kData, 1);
        EXPECT_EQ(tensors.num_stored(), 1);
        tensors.begin_step();
        take(Kind::kData, 0);
        EXPECT_EQ(tensors.num_stored(), 2) << "a microbatch of another step";
      },
      nobody);
}

TEST(TensorDirectory, what_nobody_names_is_released_with_the_next_request) {
  run_pair(
      [](OwnerRank& self) {
        TensorDirectory tensors = directory_of(self);
        self.run([&] {
          RemoteRefPtr ref = name(self, tensors);
          EXPECT_TRUE(tensors.take_released(kPeer, 0).empty());
          ref.reset();
          const auto released = tensors.take_released(kPeer, 0);
          ASSERT_EQ(released.size(), 1u);
          EXPECT_EQ(released[0].id, 7 * kMaxResults);
          EXPECT_TRUE(tensors.take_released(kPeer, 0).empty());
        });
      },
      nobody);
}

TEST(TensorDirectory, handles_of_several_results_are_made_in_one_call) {
  run_pair(
      [](OwnerRank& self) {
        TensorDirectory tensors = directory_of(self);
        int num_calls = 0;
        tensors.set_handle_factory([&](const std::vector<TensorMeta>& metas) {
          ++num_calls;
          std::vector<at::Tensor> handles;
          for (const TensorMeta& meta : metas) {
            handles.push_back(at::empty(meta.sizes, meta.dtype));
          }
          return handles;
        });
        self.run([&] {
          const std::vector<RemoteRefPtr> refs = {
              name(self, tensors, 0), nullptr, name(self, tensors, 2)};
          const auto handles = tensors.make_handles(refs);
          ASSERT_EQ(handles.size(), 3u);
          EXPECT_EQ(remote_ref_of(handles[0]), refs[0]);
          EXPECT_FALSE(handles[1].defined());
          EXPECT_EQ(remote_ref_of(handles[2]), refs[2]);
          EXPECT_EQ(num_calls, 1);
          EXPECT_TRUE(tensors.make_handles({nullptr}).size() == 1);
          EXPECT_EQ(num_calls, 1) << "there was nothing to make";
        });
      },
      nobody);
}

TEST(TensorDirectory, only_what_outlives_its_context_is_settled) {
  run_pair(
      [](OwnerRank& self) {
        TensorDirectory tensors = directory_of(self);
        self.run([&] {
          const RemoteRefPtr kept = name(self, tensors, 0);
          name(self, tensors, 1);  // is gone
          tensors.put(kept->ref, 0, {large_tensor()});
          kept->copies.push_back(0);
          tensors.settle(*current_context());
          EXPECT_TRUE(at::equal(kept->kept, large_tensor()));
          const auto argument =
              tensors.address(*current_context(), kPeer, kept->kept);
          EXPECT_TRUE(argument.data.defined()) << "an ordinary tensor";
        });
        EXPECT_EQ(tensors.stats().fetches, 0);
      },
      nobody);
}

TEST(TensorDirectory, results_of_another_microbatch_are_refused) {
  run_pair(
      [](OwnerRank& self) {
        TensorDirectory tensors = directory_of(self);
        self.run([&] {
          const RemoteRefPtr ref = name(self, tensors);
          ref->mb = 1;
          EXPECT_THROW(tensors.address_ref(*current_context(), kPeer, *ref),
                       Error);
        });
      },
      nobody);
}

}  // namespace
}  // namespace smp::pipeline
