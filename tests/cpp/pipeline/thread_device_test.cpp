// Tests that the threads of a rank are on its device, in the order of the
// stream that was the current one where the step was called.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/max.h>
#include <ATen/ops/sum.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "csrc/comm/c10d_communicator.h"
#include "csrc/comm/flight_watch.h"
#include "csrc/memory/device_scope.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/memory/fake_device.h"
#include "tests/cpp/pipeline/server_ranks.h"

namespace smp::pipeline {
namespace {

using fake_device::Use;

// Gets what ends in threads that bring messages.
class Listener final : public MicrobatchListener {
 public:
  explicit Listener(int home) : home_(home) {}
  void on_microbatch_end(int) override { fake_device::note("end", home_); }

 private:
  const int home_;
};

std::string describe(const Use& use) {
  return use.what + " for device " + std::to_string(use.home) + " in thread " +
         use.thread + " on device " + std::to_string(use.current_device) +
         ", stream " + std::to_string(use.current_stream);
}

constexpr const char* kStepBegins = "the step begins";

// Expects that every thread asked for work on its rank's device, on the stream
// of the rank's step or on one of the lane's copies, which come from the pool.
// The work of a rank before its step belongs to the test.
void expect_places(const std::map<int, int64_t>& streams, bool has_receivers) {
  std::set<std::string> threads;
  std::set<std::string> wrong;
  std::set<int> begun;
  for (const Use& use : fake_device::uses()) {
    if (use.home < 0) continue;
    if (use.what == kStepBegins) begun.insert(use.home);
    const bool is_ours = use.thread.substr(0, 4) == "smp-";
    if (!is_ours && begun.count(use.home) == 0) continue;
    threads.insert(use.thread.substr(0, 8));
    const bool is_ordered = use.what == fake_device::kUseOfEvent ||
                            use.current_stream == streams.at(use.home) ||
                            fake_device::is_from_pool(use.current_stream);
    if (use.current_device != use.home || !is_ordered) {
      wrong.insert(describe(use));
    }
  }
  for (const std::string& text : wrong) ADD_FAILURE() << text;
  EXPECT_TRUE(threads.count("smp-cont")) << "no context used a device";
  if (has_receivers) {
    EXPECT_TRUE(threads.count("smp-recv")) << "no receiver used a device";
  }
}

class ThreadDevice
    : public testing::TestWithParam<std::tuple<std::string, bool, bool, int>> {
};

TEST_P(ThreadDevice, is_that_of_the_rank_and_the_stream_that_of_the_step) {
  const auto [policy, has_handles, has_shared_memory, num_chunks] = GetParam();
  RankSettings settings;
  settings.policy = policy;
  settings.has_handles = has_handles;
  settings.has_shared_memory = has_shared_memory;
  settings.num_chunks = num_chunks;
  settings.has_devices = true;
  constexpr int kNumMicrobatches = 3;
  std::vector<double> expected;
  for (int mb = 0; mb < kNumMicrobatches; ++mb) {
    at::Tensor x = make_input(mb);
    for (int i = 0; i < settings.num_modules(); ++i) {
      x = compute(x, make_weight(i % settings.size).detach());
    }
    expected.push_back(x.sum().item<double>());
  }
  for (int step = 0; step < 2; ++step) {
    std::mutex mutex;
    std::map<int, int64_t> streams;
    fake_device::reset();
    run_servers(settings, [&](Rank& self) {
      const int home = self.device().index();
      self.server->steps().set_listeners({std::make_shared<Listener>(home)});
      const c10::Stream stream = fake_device::new_stream(home);
      {
        const std::lock_guard lock(mutex);
        streams[home] = stream.id();
      }
      // A script does this after smp.init, around its call of the step
      // function.
      memory::enter_device(self.device());
      const c10::StreamGuard guard(stream);
      fake_device::note(kStepBegins, home);
      self.step_of_chains(kNumMicrobatches);
      EXPECT_EQ(self.losses, expected);
      EXPECT_GT(self.w.grad().abs().max().item<double>(), 0);
      EXPECT_EQ(*memory::current_stream(self.device()), stream);
    });
    // With shared memory a context that waits may receive it all.
    expect_places(streams, /*has_receivers=*/!has_shared_memory);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, ThreadDevice,
    testing::Values(std::tuple("interleaved", true, false, 1),
                    std::tuple("interleaved", true, true, 1),
                    std::tuple("interleaved", false, true, 1),
                    std::tuple("simple", true, true, 1),
                    std::tuple("zero_bubble", true, true, 1),
                    std::tuple("virtual_interleaved", true, true, 2)));

// -------------------------------------------------------- groups of a device

constexpr int kHome = 1;

// Expects that a thread has used the device, and only on that device.
void expect_on_device(const std::string& thread) {
  int num_uses = 0;
  for (const Use& use : fake_device::uses()) {
    if (use.thread != thread || use.home < 0) continue;
    ++num_uses;
    EXPECT_EQ(use.current_device, use.home) << describe(use);
  }
  EXPECT_GT(num_uses, 0) << thread << " used no device";
}

TEST(ThreadDeviceOfGroups, is_that_of_events_which_the_watch_destroys) {
  fake_device::reset();
  comm::FlightWatch::Options options;
  options.look_every = std::chrono::milliseconds(2);
  options.begin_thread = [] {
    memory::enter_device(fake_device::device(kHome));
  };
  const auto watch = std::make_shared<comm::FlightWatch>(
      std::make_shared<health::FaultBoard>(0), options);
  auto mark = std::make_unique<c10::Event>(fake_device::device(0).type());
  mark->record(fake_device::new_stream(kHome));
  watch->add({.is_over = [event = std::shared_ptr<c10::Event>(
                              std::move(mark))] { return event->query(); },
              .what = "all_reduce over dp (2 ranks)",
              .ranks = {0, 1}});
  EXPECT_TRUE(becomes_true([&] { return watch->num_in_flight() == 0; }));
  expect_on_device("smp-flights");
}

template <typename Backend = c10d::Backend>
constexpr bool kShutsDown = requires(Backend& any) { any.shutdown(); };

// A backend that uses the device where it ends.
class EndingBackend final : public c10d::Backend {
 public:
  EndingBackend() : Backend(0, 2) {}
  const std::string getBackendName() const override { return "nccl"; }
  // Override those of Backend, which not all releases of torch have.
  void abort() { fake_device::note("abort", kHome); }
  void shutdown() { fake_device::note("shutdown", kHome); }
};

TEST(ThreadDeviceOfGroups, is_that_of_a_backend_that_ends) {
  for (const bool is_aborted : {true, false}) {
    fake_device::reset();
    const auto backend = c10::make_intrusive<EndingBackend>();
    const auto group =
        comm::make_c10d_communicator(backend, "nccl:dp",
                                     {.device = fake_device::device(kHome),
                                      .end = [backend] { backend->abort(); }});
    is_aborted ? group->abort() : group->shut_down();
    const auto uses = [] {
      std::vector<std::string> found;
      for (const Use& use : fake_device::uses()) {
        if (use.thread == "smp-group-end") found.push_back(use.what);
      }
      return found;
    };
    std::vector<std::string> expected = {is_aborted ? "abort" : "synchronize"};
    if (!is_aborted && kShutsDown<>) expected.push_back("shutdown");
    EXPECT_TRUE(becomes_true([&] { return uses() == expected; }));
    expect_on_device("smp-group-end");
  }
}

// ---------------------------------------------------------------- contexts

class ContextDevice : public testing::Test {
 protected:
  using Place = std::pair<int, int64_t>;  // device, and its current stream

  static Place place_here() {
    const c10::impl::VirtualGuardImpl impl(fake_device::device(0).type());
    const c10::Device device = impl.getDevice();
    return {device.index(), impl.getStream(device).id()};
  }

  static void leave(c10::Device device) {
    const c10::impl::VirtualGuardImpl impl(device.type());
    impl.setDevice(device);
    impl.exchangeStream(fake_device::new_stream(device.index()));
  }

  // Runs a body that goes elsewhere for each microbatch, one after the other.
  std::vector<Place> places_in_step(int num_microbatches) {
    policy = schedule::make_policy("interleaved");
    StepOptions options;
    options.policy = policy.get();
    options.num_microbatches = num_microbatches;
    options.active_microbatches = 1;
    scheduler.begin_step(options);
    std::vector<Place> places;
    for (int mb = 0; mb < num_microbatches; ++mb) {
      scheduler.add_body(mb, "body", 0, [&] {
        places.push_back(place_here());
        leave(fake_device::device(3));
        leave(fake_device::device(1));
        leave(fake_device::device(2));
      });
      scheduler.end_microbatch(mb);
    }
    EXPECT_TRUE(scheduler.wait_until_idle(std::chrono::seconds(120)));
    scheduler.end_step();
    return places;
  }

  const c10::Device device = fake_device::device(1);
  ContextThreads threads;
  Scheduler scheduler{&threads, device};
  std::unique_ptr<Policy> policy;
};

TEST_F(ContextDevice, each_context_begins_where_its_step_was_called) {
  for (int step = 0; step < 2; ++step) {
    const c10::Stream stream = fake_device::new_stream(1);
    const c10::StreamGuard guard(stream);
    const Place called{1, stream.id()};
    EXPECT_EQ(places_in_step(3), std::vector<Place>(3, called));
  }
}

TEST_F(ContextDevice, threads_have_their_own_stream_again_between_steps) {
  const c10::Stream stream = fake_device::new_stream(1);
  {
    const c10::StreamGuard guard(stream);
    places_in_step(1);
  }
  ASSERT_EQ(threads.num_threads(), 1);
  std::vector<Place> after;
  threads.run([&] {
    after.push_back(place_here());
    const memory::DeviceScope scope(*memory::current_stream(device));
    after.push_back(place_here());
  });
  threads.join();
  EXPECT_EQ(after, (std::vector<Place>{{0, 0}, {1, 0}}));
}

}  // namespace
}  // namespace smp::pipeline
