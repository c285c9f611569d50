#include <string>

#include "csrc/common/check.h"
#include "csrc/schedule/schedule_text.h"
#include "tests/fuzz/cpp/decoder.h"

namespace smp::fuzz {

bool understands(std::span<const uint8_t> input) {
  const std::string text(input.begin(), input.end());
  try {
    const schedule::Schedule read = schedule::parse_schedule(text);
    require(schedule::parse_schedule(schedule::to_string(read)) == read,
            "a schedule is another one when it is written and read again");
    for (const schedule::ActionList& actions : read) {
      require(schedule::parse_actions(schedule::to_string(actions)) == actions,
              "actions are others when they are written and read again");
    }
  } catch (const ValueError&) {
    return false;
  }
  return true;
}

}  // namespace smp::fuzz
