#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/lanes/lane_choice.h"

namespace smp::lanes {

/// Makes the facts of a rank that has no NCCL.
inline LaneFacts rank_on(const std::string& machine, const std::string& device,
                         std::vector<std::string> reachable) {
  return {.machine = machine,
          .device = device,
          .reachable = std::move(reachable),
          .why_no_nccl = "no NCCL",
          .slot_bytes = 1024};
}

/// The text of a ValueError.
template <typename Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const ValueError& error) {
    return error.what();
  }
  return "not refused";
}

inline void expect_words(const std::string& text, const std::string& words) {
  EXPECT_NE(text.find(words), std::string::npos) << text;
}

}  // namespace smp::lanes
