#include "csrc/lanes/lane_choice.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/lanes/byte_strings.h"
#include "tests/cpp/lanes/ring_pair.h"

namespace smp::lanes {
namespace {

LaneFacts rank_on(const std::string& machine, const std::string& device,
                  std::vector<std::string> reachable) {
  return {.machine = machine,
          .device = device,
          .reachable = std::move(reachable),
          .slot_bytes = 1024};
}

// Two ranks of one host that reach each other, one of it that nobody reaches
// though it reaches all, and one elsewhere.
std::vector<LaneFacts> four_ranks() {
  return {rank_on("x", "a", {"a", "b"}), rank_on("x", "b", {"b", "a"}),
          rank_on("x", "c", {"c", "a", "b"}), rank_on("y", "a", {"a", "b"})};
}

std::vector<LaneFacts> with_mode(std::vector<LaneFacts> all,
                                 const std::string& mode) {
  for (LaneFacts& facts : all) facts.mode = mode;
  return all;
}

template <typename Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const ValueError& error) {
    return error.what();
  }
  return "not refused";
}

void expect_words(const std::string& text, const std::string& words) {
  EXPECT_NE(text.find(words), std::string::npos) << text;
}

TEST(LaneChoice, is_made_by_pair_and_the_same_both_ways) {
  const LaneChoices choices = choose_lanes(four_ranks());
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) {
      if (a == b) continue;
      const bool is_ipc = a + b == 1;
      EXPECT_EQ(choices[a][b].kind, is_ipc ? LaneKind::kIpc : LaneKind::kHost)
          << a << b;
    }
  }
  expect_words(choices[0][2].reason,
               "device of global_rank 0 cannot read that of global_rank 2");
  expect_words(choices[3][0].reason, "different hosts");
}

TEST(LaneChoice, ranks_that_share_a_device_reach_each_other) {
  const std::vector<LaneFacts> all(2, rank_on("x", "a", {"a"}));
  EXPECT_EQ(choose_lanes(all)[1][0].kind, LaneKind::kIpc);
}

TEST(LaneChoice, ranks_of_other_pipelines_have_none_and_are_not_refused) {
  std::vector<LaneFacts> all = four_ranks();
  for (int rank = 0; rank < 4; ++rank) all[rank].pipeline = rank / 2;
  for (const std::string mode : {"auto", "host"}) {
    const LaneChoices choices = choose_lanes(with_mode(all, mode));
    EXPECT_TRUE(choices[0][1].kind && choices[2][3].kind);
    EXPECT_FALSE(choices[0][2].kind || choices[3][1].kind);
    EXPECT_FALSE(choices[0][0].kind);
  }
  all[2].pipeline = 2;  // nor does one that is alone need a lane
  EXPECT_EQ(choose_lanes(with_mode(all, "ipc"))[1][0].kind, LaneKind::kIpc);
}

TEST(LaneChoice, a_rank_that_cannot_says_why) {
  std::vector<LaneFacts> all(2, rank_on("x", "a", {"a"}));
  all[1].why_not = "no CUDA code";
  EXPECT_EQ(choose_lanes(all)[0][1].kind, LaneKind::kHost);
  EXPECT_EQ(choose_lanes(all)[0][1].reason, "global_rank 1: no CUDA code");
}

TEST(LaneChoice, can_be_forced_where_it_can_be) {
  const std::vector<LaneFacts> all(2, rank_on("x", "a", {"a"}));
  EXPECT_EQ(choose_lanes(with_mode(all, "ipc"))[0][1].kind, LaneKind::kIpc);
  const LaneChoice choice = choose_lanes(with_mode(all, "host"))[0][1];
  EXPECT_EQ(choice.kind, LaneKind::kHost);
  EXPECT_EQ(choice.reason, "SMP_LANE=host");
  const std::string text =
      refusal_of([] { choose_lanes(with_mode(four_ranks(), "ipc")); });
  expect_words(text, "global_ranks 0 and 2 cannot share memory");
  expect_words(text, "SMP_LANE=auto");
}

TEST(LaneChoice, what_ranks_do_not_have_in_common_is_refused) {
  std::vector<LaneFacts> all = four_ranks();
  all[2].mode = "host";
  expect_words(refusal_of([&] { choose_lanes(all); }),
               "global_rank 0 has 'auto', global_rank 2 has 'host'");
  expect_words(refusal_of([&] { choose_lanes(with_mode(all, "nvlink")); }),
               "auto, ipc or host");
  all = four_ranks();
  all[3].slot_bytes = 1;
  expect_words(refusal_of([&] { choose_lanes(all); }), "SMP_LANE_SLOT_MB");
}

TEST(LaneChoice, byte_strings_come_back_and_cut_ones_do_not) {
  const std::vector<std::string> strings{"", std::string("a\0b", 3), "c"};
  const std::string packed = pack(strings);
  EXPECT_EQ(unpack(packed), strings);
  EXPECT_THROW(unpack(packed.substr(0, packed.size() - 1)), Error);
  EXPECT_TRUE(unpack("").empty());
}

// --------------------------------------------------------------- agreement

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

struct Agreed {
  std::vector<LaneChoices> choices;
  std::vector<std::vector<bool>> reaches;
};

// Three ranks of one host; something is broken on rank 2.
Agreed agree(Broken::What what, const std::string& mode) {
  constexpr int kSize = 3;
  const FakeOptions options{.num_slots = 2, .slot_bytes = 1024};
  const auto board = std::make_shared<health::FaultBoard>(0);
  std::vector<std::unique_ptr<IpcLane>> lanes;
  for (int rank = 0; rank < kSize; ++rank) {
    lanes.push_back(std::make_unique<IpcLane>(
        std::make_unique<Broken>(make_fake_copies(options, rank, board),
                                 rank == 2 ? what : Broken::What::kNothing),
        RingOptions{.num_slots = 2, .slot_bytes = 1024}, rank, board,
        [](int, const Receipt&) {}));
  }
  Meeting meeting(kSize);
  std::vector<std::future<LaneChoices>> running;
  for (int rank = 0; rank < kSize; ++rank) {
    running.push_back(std::async(std::launch::async, [&, rank] {
      LaneFacts facts = rank_on("x", "cpu", {"cpu"});
      facts.mode = mode;
      return agree_on_lanes(
          facts, rank, lanes[rank].get(),
          [&](const std::string& own) { return meeting.exchange(rank, own); });
    }));
  }
  for (auto& one : running) one.wait();
  Agreed result;
  for (auto& one : running) result.choices.push_back(one.get());
  for (int a = 0; a < kSize; ++a) {
    result.reaches.emplace_back();
    for (int b = 0; b < kSize; ++b) {
      result.reaches.back().push_back(lanes[a]->reaches(b));
    }
  }
  return result;
}

TEST(LaneAgreement, opens_all_pairs) {
  const Agreed agreed = agree(Broken::What::kNothing, "ipc");
  for (int a = 0; a < 3; ++a) {
    for (int b = 0; b < 3; ++b) {
      EXPECT_EQ(agreed.reaches[a][b], a != b);
    }
  }
}

TEST(LaneAgreement, what_cannot_be_opened_goes_through_the_host) {
  using What = Broken::What;
  for (const auto& [what, words] :
       {std::pair{What::kAllocate, "out of memory"},
        std::pair{What::kOpen, "invalid handle"},
        std::pair{What::kRead, "has other bytes"}}) {
    const Agreed agreed = agree(what, "auto");
    for (int rank = 0; rank < 3; ++rank) {
      const LaneChoices& choices = agreed.choices[rank];
      EXPECT_EQ(choices[0][1].kind, LaneKind::kIpc);
      EXPECT_EQ(choices[0][2].kind, LaneKind::kHost);
      EXPECT_EQ(choices[2][1].kind, LaneKind::kHost);
      expect_words(choices[0][2].reason, words);
    }
    EXPECT_TRUE(agreed.reaches[0][1] && agreed.reaches[1][0]);
    EXPECT_FALSE(agreed.reaches[0][2] || agreed.reaches[2][0]);
    expect_words(refusal_of([&, broken = what] { agree(broken, "ipc"); }),
                 words);
  }
}

}  // namespace
}  // namespace smp::lanes
