#include "csrc/schedule/task.h"

namespace smp::schedule {

std::string to_string(const TaskKey& key) {
  std::string text = key.phase == Phase::kForward ? "F" : "B";
  text += std::to_string(key.mb);
  if (key.module_id != TaskKey::kStepBody) {
    text += ":m" + std::to_string(key.module_id);
  }
  if (key.visit > 0) text += "." + std::to_string(key.visit);
  if (key.resume > 0) text += "/" + std::to_string(key.resume);
  return text;
}

}  // namespace smp::schedule
