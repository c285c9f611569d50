#include "csrc/health/stop_agreement.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/health/liveness.h"
#include "csrc/health/socket.h"
#include "tests/cpp/health/liveness_world.h"

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(StopAgreement, NobodyStopsBeforeSomebodyAsks) {
  StopAgreement stops(std::make_shared<FaultBoard>(0));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(stops.arrive(seconds(5)));
  EXPECT_FALSE(stops.is_asked());
}

TEST(StopAgreement, RanksBehindTheBoundaryGoOnToIt) {
  StopAgreement stops(std::make_shared<FaultBoard>(0));
  stops.arrive(seconds(5));
  EXPECT_EQ(stops.freeze(), 2);
  stops.decide(4);
  stops.decide(2);  // too late
  EXPECT_FALSE(stops.arrive(seconds(5)));
  EXPECT_FALSE(stops.arrive(seconds(5)));
  EXPECT_TRUE(stops.arrive(seconds(5)));
  EXPECT_TRUE(stops.arrive(seconds(5))) << "and everywhere behind it";
}

TEST(StopAgreement, FaultEndsTheWait) {
  auto board = std::make_shared<FaultBoard>(0);
  StopAgreement stops(board);
  stops.freeze();
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(50));
    board->report({.kind = Fault::Kind::kDied, .global_rank = 1});
  });
  EXPECT_THROW(stops.arrive(seconds(20)), PeerFailure);
  other.join();
}

TEST(StopAgreement, WaitWithoutAnAnswerTimesOut) {
  StopAgreement stops(std::make_shared<FaultBoard>(0));
  stops.freeze();
  EXPECT_THROW(stops.arrive(milliseconds(30)), Error);
}

// Ranks that run apart, asked at any time by any number of them.
TEST(StopAgreement, AllRanksStopAtTheSameBoundaryWheneverTheyAreAsked) {
  constexpr int kRanks = 4;
  std::mt19937 random(7);
  for (int round = 0; round < 6; ++round) {
    LivenessHub hub(kRanks, kLoopback, kSecret, {});
    std::vector<std::shared_ptr<FaultBoard>> boards;
    std::vector<std::shared_ptr<StopAgreement>> stops;
    std::vector<std::unique_ptr<LivenessClient>> clients;
    for (int rank = 0; rank < kRanks; ++rank) {
      boards.push_back(std::make_shared<FaultBoard>(rank));
      stops.push_back(std::make_shared<StopAgreement>(boards[rank]));
      LivenessClient::Options options;
      options.stops = stops[rank];
      clients.push_back(std::make_unique<LivenessClient>(
          "127.0.0.1", hub.port(), kSecret, rank, boards[rank], options));
    }
    std::vector<int> stopped_at(kRanks, -1);
    std::vector<std::thread> ranks;
    const int asked_at = static_cast<int>(random() % 100);
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto pause = std::chrono::microseconds(50 * (rank + 1));
      ranks.emplace_back([&, rank, pause] {
        for (int step = 0; step < 20000; ++step) {
          std::this_thread::sleep_for(pause);
          if (step == asked_at && rank % 2 == round % 2) {
            clients[rank]->request_stop();
          }
          if (stops[rank]->arrive(seconds(20))) {
            stopped_at[rank] = step;
            return;
          }
        }
      });
    }
    for (auto& one : ranks) one.join();
    for (auto& client : clients) client->leave();
    EXPECT_GE(stopped_at[0], asked_at);
    for (const int step : stopped_at) EXPECT_EQ(step, stopped_at[0]);
  }
}

}  // namespace
}  // namespace smp::health
