#include "csrc/schedule/task.h"

#include "csrc/schedule/text_reader.h"

namespace smp::schedule {

std::string to_string(const TaskKey& key) {
  std::string text(1, phase_letter(key.phase));
  text += std::to_string(key.mb);
  if (key.module_id != TaskKey::kStepBody) {
    text += ":m" + std::to_string(key.module_id);
  }
  if (key.visit > 0) text += "." + std::to_string(key.visit);
  if (key.resume > 0) text += "/" + std::to_string(key.resume);
  return text;
}

TaskKey parse_task_key(const std::string& text) {
  TextReader reader(text, "task");
  TaskKey key;
  key.phase = reader.phase();
  key.mb = reader.number("the microbatch");
  if (reader.skip(':')) {
    reader.expect('m', "the module, as in F0:m5");
    const int64_t sign = reader.skip('-') ? -1 : 1;  // see pipeline/wire.h
    key.module_id = sign * reader.number("the module");
  }
  if (reader.skip('.')) key.visit = reader.number("the visit");
  if (reader.skip('/')) key.resume = reader.number("the resumption");
  reader.expect_end();
  return key;
}

}  // namespace smp::schedule
