// Gives the mailboxes of a process that has this library what SMP_TEST_LANES
// and SMP_TEST_DELAYS ask for.

#include "csrc/mailbox/substitutes.h"

#include <memory>
#include <optional>

#include "tests/cpp/lanes/fake_source.h"
#include "tests/cpp/mailbox/test_delays.h"

namespace smp::mailbox {
namespace {

std::optional<lanes::LaneSource> lanes_of_environment() {
  const auto options = lanes::FakeOptions::from_environment();
  if (!options) return std::nullopt;
  return lanes::fake_source(*options);
}

Pause pause_of(int global_rank) {
  const auto delays = std::make_shared<TestDelays>(global_rank);
  return [delays](PausePlace place) { delays->pause(place); };
}

const bool is_injected = [] {
  substitutes() = {.lanes = lanes_of_environment, .pause = pause_of};
  return true;
}();

}  // namespace
}  // namespace smp::mailbox
