#pragma once

#include <cstdint>

#include "csrc/comm/message.h"

namespace smp::pipeline {

/// What a message of Channel::kPipeline says.
enum class Kind : int64_t {
  kStepBegin,         ///< driver → others: microbatches and name of the step
  kForwardRequest,    ///< caller → owner: run a module
  kForwardResponse,   ///< owner → caller: its results
  kBackwardRequest,   ///< caller → owner: gradients of the results
  kBackwardResponse,  ///< owner → caller: gradients of the arguments
  kModelOutput,       ///< driver → others: what the root module returned
  kBackwardDone,      ///< driver → others: one model.backward is over
  kMicrobatchEnd,     ///< driver → others: free what belongs to a microbatch
  kStepEnd,           ///< driver → others: no further work in this step
};

const char* to_string(Kind kind);

enum Flags : int64_t {
  kGradEnabled = 1,
  kTraining = 2,
};

/// The header of a pipeline message, as the names of Message::fields.
struct Header {
  Kind kind = Kind::kStepBegin;
  int64_t step = 0;
  int64_t mb = 0;
  /// Number of the request among those of its sender; answers repeat it.
  int64_t request_id = 0;
  /// Backward: request id of the forward it belongs to.
  int64_t forward_id = 0;
  int64_t module_id = 0;
  int64_t flags = 0;
  /// 0: the bytes come along and are not kept. Else the id of the structure;
  /// its bytes come along the first time only (see StructureCache).
  int64_t structure_id = 0;
  /// Random seed that stands for (seed, step, microbatch, call path).
  int64_t path = 0;
  /// Which call of the model, or of backward, within the step body.
  int64_t index = 0;

  void write_to(comm::Message& message) const;
  static Header read_from(const comm::Message& message);
};

}  // namespace smp::pipeline
