#include "csrc/pipeline/wire.h"

#include "csrc/memory/random_state.h"

namespace smp::pipeline {

const char* to_string(Kind kind) {
  switch (kind) {
    case Kind::kStepBegin:
      return "step begin";
    case Kind::kForwardRequest:
      return "forward request";
    case Kind::kForwardMeta:
      return "forward metadata";
    case Kind::kBackwardRequest:
      return "backward request";
    case Kind::kBackwardMeta:
      return "backward metadata";
    case Kind::kOperation:
      return "operation";
    case Kind::kPush:
      return "push";
    case Kind::kRelease:
      return "release";
    case Kind::kData:
      return "data";
    case Kind::kRequestsDone:
      return "requests done";
    case Kind::kModelOutput:
      return "model output";
    case Kind::kBackwardDone:
      return "backward done";
    case Kind::kBodyDone:
      return "body done";
    case Kind::kMicrobatchEnd:
      return "microbatch end";
    case Kind::kStepEnd:
      return "step end";
  }
  return "unknown message";
}

void Header::write_to(mailbox::Message& message) const {
  message.channel = mailbox::Channel::kPipeline;
  message.fields = {static_cast<int64_t>(kind),
                    step,
                    mb,
                    request_id,
                    forward_id,
                    module_id,
                    flags,
                    structure_id,
                    path,
                    index};
}

Header Header::read_from(const mailbox::Message& message) {
  const auto& f = message.fields;
  Header header;
  header.kind = static_cast<Kind>(f[0]);
  header.step = f[1];
  header.mb = f[2];
  header.request_id = f[3];
  header.forward_id = f[4];
  header.module_id = f[5];
  header.flags = f[6];
  header.structure_id = f[7];
  header.path = f[8];
  header.index = f[9];
  return header;
}

size_t num_released_of(const Header& header) {
  return static_cast<size_t>(header.flags >> kFlagBits);
}

int64_t call_path(int64_t seed, int64_t call_idx, int64_t module_id) {
  const uint64_t call_seed = memory::mix_seed(static_cast<uint64_t>(seed),
                                              static_cast<uint64_t>(call_idx));
  return static_cast<int64_t>(
      memory::mix_seed(call_seed, static_cast<uint64_t>(module_id)));
}

}  // namespace smp::pipeline
