#include "csrc/lanes/lane_agreement.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/lanes/byte_strings.h"
#include "csrc/lanes/lane_table.h"
#include "csrc/lanes/nccl_lane.h"
#include "tests/cpp/lanes/fake_meeting.h"
#include "tests/cpp/lanes/fake_source.h"
#include "tests/cpp/lanes/lane_facts.h"
#include "tests/cpp/lanes/meeting_pair.h"
#include "tests/cpp/lanes/ring_pair.h"

namespace smp::lanes {
namespace {

// Copies of the fake device, of which one thing does not work.
class Broken final : public DeviceCopies {
 public:
  enum class What { kNothing, kAllocate, kOpen, kRead };

  Broken(std::unique_ptr<DeviceCopies> inner, What what)
      : inner_(std::move(inner)), what_(what) {}

  std::string device_name() const override { return inner_->device_name(); }
  std::vector<std::string> reachable() const override {
    return inner_->reachable();
  }
  DeviceMemory allocate(int64_t num_bytes) override {
    SMP_CHECK(what_ != What::kAllocate, "out of memory");
    return inner_->allocate(num_bytes);
  }
  std::string handle_of(const DeviceMemory& memory) override {
    return inner_->handle_of(memory);
  }
  DeviceMemory open_memory(const std::string& handle) override {
    SMP_CHECK(what_ != What::kOpen, "invalid handle");
    return inner_->open_memory(handle);
  }
  SharedEventPtr new_event() override { return inner_->new_event(); }
  std::string handle_of(const SharedEvent& event) override {
    return inner_->handle_of(event);
  }
  SharedEventPtr open_event(const std::string& handle) override {
    return inner_->open_event(handle);
  }
  void put(uint8_t* to, const std::string& bytes) override {
    inner_->put(to, bytes);
  }
  std::string get(const uint8_t* from, int64_t num_bytes) override {
    if (what_ == What::kRead) return std::string(num_bytes, '\0');
    return inner_->get(from, num_bytes);
  }
  CopyQueue& outgoing() override { return inner_->outgoing(); }
  CopyQueue& incoming() override { return inner_->incoming(); }
  void stop() override { inner_->stop(); }

 private:
  const std::unique_ptr<DeviceCopies> inner_;
  const What what_;
};

// Channels of the fake device that cannot be made.
class NoChannels final : public MeetingCopies {
 public:
  enum class What { kOffer, kConnect };
  explicit NoChannels(What what) : what_(what) {}

  std::string offer(const std::vector<CopyChannel>& /*channels*/) override {
    SMP_CHECK(what_ != What::kOffer, "no channels left");
    return {};
  }
  void connect(const CopyChannel& /*channel*/,
               const std::string& /*offer*/) override {
    SMP_CHECK(false, "no route");
  }
  memory::Mark send(const CopyChannel& /*channel*/,
                    const at::Tensor& /*data*/) override {
    return {};
  }
  memory::MarkedTensor receive(const CopyChannel& /*channel*/,
                               at::IntArrayRef /*sizes*/,
                               at::ScalarType /*dtype*/) override {
    return {};
  }
  void stop() override {}

 private:
  const What what_;
};

constexpr int kNumAgreeing = 3;

// Ranks of one host, all of which have a ring, and channels if `has_channels`.
class Agreeing {
 public:
  // The time to test channels suffices on a busy machine.
  explicit Agreeing(bool has_channels, std::chrono::milliseconds timeout =
                                           std::chrono::seconds(20))
      : timeout_(timeout) {
    for (int rank = 0; rank < kNumAgreeing; ++rank) {
      break_ring(rank, Broken::What::kNothing);
      if (has_channels)
        set_channels(rank, make_fake_meeting(options_, rank, board_));
    }
  }

  ~Agreeing() {
    for (const auto& lane : channels_) {
      if (lane) lane->stop();  // while the others still take receipts
    }
  }

  void break_ring(int rank, Broken::What what) {
    rings_[rank] = std::make_unique<IpcLane>(
        std::make_unique<Broken>(make_fake_copies(options_, rank, board_),
                                 what),
        RingOptions{.num_slots = 2, .slot_bytes = 1024}, rank, board_,
        [](int, const Receipt&) {});
  }
  void set_channels(int rank, std::unique_ptr<MeetingCopies> copies) {
    channels_[rank] = std::make_unique<NcclLane>(
        std::move(copies),
        ChannelOptions{.num_channels = 2, .timeout = timeout_},
        c10::Device(c10::DeviceType::CPU), rank, board_,
        [this, rank](int dst, const Receipt& receipt) {
          channels_[dst]->acknowledge(rank, receipt);
        });
  }

  // Runs the agreement on all ranks. Returns the choices of each.
  std::vector<LaneChoices> agree(const std::string& mode) {
    Meeting meeting(kNumAgreeing);
    std::vector<std::future<LaneChoices>> running;
    for (int rank = 0; rank < kNumAgreeing; ++rank) {
      running.push_back(std::async(std::launch::async, [&, rank] {
        LaneFacts facts = rank_on("x", "cpu", {"cpu"});
        facts.mode = mode;
        facts.nccl_host = std::to_string(rank);
        if (channels_[rank]) facts.why_no_nccl.clear();
        return agree_on_lanes(facts, rank,
                              {rings_[rank].get(), channels_[rank].get()},
                              [&](const std::string& own) {
                                return meeting.exchange(rank, own);
                              });
      }));
    }
    for (auto& one : running) one.wait();
    std::vector<LaneChoices> choices;
    std::string refusal;
    int num_refused = 0;
    for (auto& one : running) {
      try {
        choices.push_back(one.get());
      } catch (const ValueError& error) {
        refusal = error.what();
        ++num_refused;
      }
    }
    EXPECT_TRUE(num_refused == 0 || num_refused == kNumAgreeing)
        << "all or none: " << refusal;
    if (num_refused > 0) throw ValueError(refusal);
    return choices;
  }

  bool maps(int a, int b) const { return rings_[a]->reaches(b); }
  bool has_channel(int a, int b) const { return channels_[a]->reaches(b); }
  NcclLane& channels(int rank) { return *channels_[rank]; }

 private:
  const std::chrono::milliseconds timeout_;
  const FakeOptions options_{.num_slots = 2, .slot_bytes = 1024};
  const std::shared_ptr<health::FaultBoard> board_ =
      std::make_shared<health::FaultBoard>(0);
  std::unique_ptr<IpcLane> rings_[kNumAgreeing];
  std::unique_ptr<NcclLane> channels_[kNumAgreeing];
};

TEST(LaneAgreement, opens_all_pairs) {
  Agreeing ranks(false);
  ranks.agree("ipc");
  for (int a = 0; a < kNumAgreeing; ++a) {
    for (int b = 0; b < kNumAgreeing; ++b) {
      EXPECT_EQ(ranks.maps(a, b), a != b);
    }
  }
}

const std::pair<Broken::What, const char*> kBrokenRings[] = {
    {Broken::What::kAllocate, "out of memory"},
    {Broken::What::kOpen, "invalid handle"},
    {Broken::What::kRead, "has other bytes"}};

TEST(LaneAgreement, what_cannot_be_opened_goes_through_the_host) {
  for (const auto& [what, words] : kBrokenRings) {
    Agreeing ranks(false);
    ranks.break_ring(2, what);
    for (const LaneChoices& choices : ranks.agree("auto")) {
      EXPECT_EQ(choices[0][1].kind, LaneKind::kIpc);
      EXPECT_EQ(choices[0][2].kind, LaneKind::kHost);
      EXPECT_EQ(choices[2][1].kind, LaneKind::kHost);
      expect_words(choices[0][2].reason, words);
    }
    EXPECT_TRUE(ranks.maps(0, 1) && ranks.maps(1, 0));
    EXPECT_FALSE(ranks.maps(0, 2) || ranks.maps(2, 0));
    Agreeing others(false);
    others.break_ring(2, what);
    expect_words(refusal_of([&] { others.agree("ipc"); }), words);
  }
}

TEST(LaneAgreement, what_cannot_be_opened_goes_over_nccl) {
  for (const auto& [what, words] : kBrokenRings) {
    Agreeing ranks(true);
    ranks.break_ring(2, what);
    for (const LaneChoices& choices : ranks.agree("auto")) {
      EXPECT_EQ(choices[0][1].kind, LaneKind::kIpc);
      EXPECT_EQ(choices[0][2].kind, LaneKind::kNccl);
      EXPECT_EQ(choices[2][1].kind, LaneKind::kNccl);
      expect_words(choices[0][2].reason, words);
    }
    EXPECT_FALSE(ranks.has_channel(0, 1) || ranks.has_channel(1, 0));
    EXPECT_TRUE(ranks.has_channel(0, 2) && ranks.has_channel(2, 0));
    const at::Tensor data = at::full({5}, 3.0, at::kDouble);
    const auto posted = ranks.channels(2).post(1, data, true);
    const at::Tensor came =
        ranks.channels(1).take(2, posted->descriptor, {}).use();
    EXPECT_TRUE(at::equal(came, data));
  }
}

TEST(LaneAgreement, ranks_may_use_nothing_but_nccl) {
  Agreeing ranks(true);
  for (const LaneChoices& choices : ranks.agree("nccl")) {
    EXPECT_EQ(choices[0][1].kind, LaneKind::kNccl);
  }
  for (int a = 0; a < kNumAgreeing; ++a) {
    for (int b = 0; b < kNumAgreeing; ++b) {
      EXPECT_EQ(ranks.has_channel(a, b), a != b);
      EXPECT_FALSE(ranks.maps(a, b));
    }
  }
}

TEST(LaneAgreement, a_rank_has_only_so_many_ways) {
  for (const int max_peers : {1, 2, 4}) {
    MeetingRank rank({.num_slots = 4}, 0);
    rank.lane.limit_channels(max_peers);
    EXPECT_EQ(unpack(rank.lane.offer({1})).size() / 2,
              static_cast<size_t>(kMaxChannels / 2 / std::max(max_peers, 2)))
        << "of this direction";
  }
  constexpr int kMany = kMaxChannels / 2 + 2;
  Meeting meeting(kMany);
  std::vector<std::future<LaneChoices>> running;
  for (int rank = 0; rank < kMany; ++rank) {
    running.push_back(std::async(std::launch::async, [&, rank] {
      LaneFacts facts = rank_on(std::to_string(rank), "gpu", {});
      facts.why_no_nccl.clear();
      return agree_on_lanes(facts, rank, {}, [&](const std::string& own) {
        return meeting.exchange(rank, own);
      });
    }));
  }
  for (auto& one : running) {
    const LaneChoices choices = one.get();
    EXPECT_EQ(choices[0][1].kind, LaneKind::kHost);
    EXPECT_EQ(choices[kMany - 1][0].kind, LaneKind::kHost);
    expect_words(choices[0][1].reason, "global_rank 0 has 9 peers over NCCL");
  }
}

// Returns the choice of two ranks for each other, where one of them has this
// value of CUDA_LAUNCH_BLOCKING.
LaneChoice choice_with(const std::string& launch_blocking) {
  Meeting meeting(2);
  const auto choose = [&](int rank) {
    LaneOptions options{.source = fake_source({.has_meeting = true})};
    if (rank == 0) options.launch_blocking = launch_blocking;
    LaneTable table(options, rank, std::make_shared<health::FaultBoard>(rank),
                    [](int, const Receipt&) {});
    table.agree(
        [&](const std::string& own) { return meeting.exchange(rank, own); });
    return table.choices()[0][1];
  };
  auto other = std::async(std::launch::async, [&] { return choose(1); });
  const LaneChoice choice = choose(0);
  EXPECT_EQ(other.get().kind, choice.kind);
  return choice;
}

TEST(LaneAgreement, launches_that_block_choose_the_host_with_one_warning) {
  EXPECT_EQ(choice_with("").kind, LaneKind::kNccl);
  ::testing::internal::CaptureStderr();
  const LaneChoice choice = choice_with("1");
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(choice.kind, LaneKind::kHost);
  expect_words(choice.reason, "CUDA_LAUNCH_BLOCKING=1");
  expect_words(told, "unset CUDA_LAUNCH_BLOCKING to use NCCL");
  EXPECT_EQ(told.find("through the host"), told.rfind("through the host"));
}

TEST(LaneAgreement, ways_that_cannot_be_made_are_given_up_on_all_ranks) {
  for (const auto& [what, words] :
       {std::pair{NoChannels::What::kOffer, "no channels left"},
        std::pair{NoChannels::What::kConnect, "no route"}}) {
    for (const std::string mode : {"auto", "nccl"}) {
      Agreeing ranks(true, std::chrono::milliseconds(200));
      ranks.break_ring(0, Broken::What::kOpen);
      ranks.set_channels(0, std::make_unique<NoChannels>(what));
      if (mode == "nccl") {
        expect_words(refusal_of([&] { ranks.agree(mode); }), words);
        continue;
      }
      for (const LaneChoices& choices : ranks.agree(mode)) {
        EXPECT_EQ(choices[0][1].kind, LaneKind::kHost);
        EXPECT_EQ(choices[2][0].kind, LaneKind::kHost);
        EXPECT_EQ(choices[1][2].kind, LaneKind::kIpc);
      }
      EXPECT_FALSE(ranks.has_channel(0, 1) || ranks.has_channel(1, 0));
    }
  }
}

}  // namespace
}  // namespace smp::lanes
