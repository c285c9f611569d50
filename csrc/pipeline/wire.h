#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/mailbox/message.h"

namespace smp::pipeline {

/// The meaning of a message of Channel::kPipeline.
enum class Kind : int64_t {
  kStepBegin,        ///< driver → others: microbatches, name of the step, words
  kForwardRequest,   ///< caller → owner: run a module
  kForwardMeta,      ///< owner → caller: what it returned, without data
  kBackwardRequest,  ///< caller → owner: gradients of the results
  kBackwardMeta,     ///< owner → caller: which arguments have gradients
  kOperation,        ///< caller → owner: arithmetic on tensors that are there
  kPush,             ///< anyone → home of a ref: send its data to a rank
  kRelease,          ///< to oneself: refs that no later message names
  kData,             ///< home of refs → ranks that need them
  kRequestsDone,     ///< owner → caller: all requests of a context are done
  kModelOutput,      ///< driver → others: what the root module returned
  kBackwardDone,     ///< driver → others: one model.backward is over
  kBodyDone,         ///< others → driver: a step body is over
  kMicrobatchEnd,    ///< driver → others: free what belongs to a microbatch
  kStepEnd,          ///< driver → others: no further work in this step
};

const char* to_string(Kind kind);

enum Flags : int64_t {
  kGradEnabled = 1,
  kTraining = 2,
  kWantsMeta = 4,  ///< the caller waits for the metadata
  kStrided = 8,    ///< an argument has gaps or another order at its caller
};

/// Shift above the flags for the number of last tensors that are only released.
constexpr int kFlagBits = 8;

/// Module ids for arithmetic, for a function of Python, and for the end of a
/// microbatch.
constexpr int64_t kOperationId = -2;
constexpr int64_t kFunctionId = -3;
constexpr int64_t kMicrobatchEndId = -4;
/// Results of one request are named by consecutive numbers from
/// `request_id * kMaxResults`.
constexpr int64_t kMaxResults = 4096;

/// The header of a pipeline message, as the names of Message::fields.
struct Header {
  Kind kind = Kind::kStepBegin;
  int64_t step = 0;
  int64_t mb = 0;
  /// Number of the request among those of its sender; answers repeat it.
  int64_t request_id = 0;
  /// Backward: request id of the forward it belongs to. Forward: digest of
  /// what the caller expects, 0 for nothing.
  int64_t forward_id = 0;
  int64_t module_id = 0;
  int64_t flags = 0;
  /// 0: the bytes come along and are not kept. Else the id of the structure;
  /// its bytes come along the first time only (see StructureCache).
  int64_t structure_id = 0;
  /// Random seed made of (seed, step, microbatch, call path).
  int64_t path = 0;
  /// Requests: the caller's context. Notices: number of the call of the model,
  /// or of backward, within the step body. Push: destination.
  int64_t index = 0;

  void write_to(mailbox::Message& message) const;
  static Header read_from(const mailbox::Message& message);
};

/// Returns how many of the last tensors of a request are only released.
size_t num_released_of(const Header& header);
/// Returns the seed of a forward.
/// @param seed  seed of its caller's context
int64_t call_path(int64_t seed, int64_t call_idx, int64_t module_id);

}  // namespace smp::pipeline
