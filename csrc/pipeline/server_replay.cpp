// Requests that repeat those of an earlier microbatch: with static_mode they
// are a place in its program, and several to one owner are one message.

#include <cstring>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/pipeline/server.h"

namespace smp::pipeline {
namespace {

using Clock = std::chrono::steady_clock;

// However fast the caller goes on, the owner does not wait for longer.
constexpr std::chrono::milliseconds kMaxDelay{1};
// Larger tensors are sent at once: copying them costs more than a message.
constexpr int64_t kMaxCopyBytes = 1024;

}  // namespace

// Step bodies do the same in each microbatch. Services are answers to them, and
// what a rank asks of itself costs no message.
bool Server::is_recorded(const Context& context, int owner) const {
  return options_.static_mode && is_driver() &&
         context.key.module_id == TaskKey::kStepBody &&
         owner != options_.global_rank;
}

// The number of a request, or of a tensor that becomes an argument.
int64_t Server::take_id(Context& context) {
  if (!is_recorded(context, -1)) return next_request_id_++;
  CallerState& caller = context.caller;
  if (caller.next_id == caller.end_id) {
    const bool is_first = caller.end_id == 0;
    for (const int owner : options_.pp_ranks) {
      // A body that gives more ids than this is recorded up to here only.
      if (!is_first) caller.program_nodes[owner] = Programs::kLeft;
    }
    // Twice as many as needed, so that there is a multiple among them.
    caller.next_id = next_request_id_.fetch_add(2 * kIdsPerContext);
    caller.next_id += kIdsPerContext - 1;
    caller.next_id -= caller.next_id % kIdsPerContext;
    caller.end_id = caller.next_id + kIdsPerContext;
  }
  return caller.next_id++;
}

// Takes a request over when it goes on as an earlier microbatch did. Else makes
// it one that others may repeat, if that is possible.
bool Server::replay(Context& context, int owner, Header& header,
                    const std::string& structure,
                    std::vector<comm::MessageTensor>& tensors,
                    std::vector<comm::Ref>& released) {
  if (!is_recorded(context, owner)) {
    end_run(context);
    return false;
  }
  CallerState& caller = context.caller;
  if (caller.batch.owner != owner) send_batch(context);
  Programs& programs = programs_[owner];
  int& node = caller.program_nodes[owner];  // at first: the start
  if (header.kind == Kind::kForwardRequest) {
    header.flags |= caller.num_calls << kCallIdxShift;
  }
  auto request = node == Programs::kLeft
                     ? std::nullopt
                     : RecordedRequest::of(header, tensors, structure,
                                           options_.global_rank);
  const int next = request ? programs.find(node, *request) : Programs::kLeft;
  if (next == Programs::kLeft) {
    send_batch(context);
    caller.posted[owner] = header.request_id;
    const bool is_full = request && programs.is_full(node);
    if (is_full) forget_programs_ = true;
    node = request && !is_full ? programs.add(node, *std::move(request))
                               : Programs::kLeft;
    if (node == Programs::kLeft) {
      end_run(context);
    } else {
      header.flags |= kRecorded;
      note_request(caller, owner, node);
    }
    return false;
  }
  node = next;
  note_request(caller, owner, node);
  add_to_batch(context, header, tensors, released);
  return true;
}

// The last noted request of a context.
void Server::add_to_batch(Context& context, const Header& header,
                          std::vector<comm::MessageTensor>& tensors,
                          const std::vector<comm::Ref>& released) {
  CallerState& caller = context.caller;
  CallerState::Batch& batch = caller.batch;
  if (batch.owner < 0) batch.since = caller.last.when;
  batch.owner = caller.last.owner;
  batch.node = caller.last.node;
  batch.request_id = header.request_id;
  batch.module_id = header.module_id;
  for (comm::MessageTensor& tensor : tensors) {
    if (!tensor.data.defined()) continue;
    batch.has_large_data |=
        static_cast<int64_t>(tensor.data.nbytes()) > kMaxCopyBytes;
    batch.data.push_back(std::move(tensor));
  }
  batch.released.insert(batch.released.end(), released.begin(), released.end());
  {
    std::lock_guard<std::mutex> lock(stats_mutex_);
    ++stats_.replayed_requests;
  }
  if (!may_hold_back(caller)) {
    send_batch(context);
    return;
  }
  // The caller may write to its tensors as soon as the call is over.
  for (; batch.num_copied < batch.data.size(); ++batch.num_copied) {
    at::Tensor& data = batch.data[batch.num_copied].data;
    data = data.clone();
  }
}

void Server::note_request(CallerState& caller, int owner, int node) {
  const auto now = Clock::now();
  CallerState::LastRequest& last = caller.last;
  if (last.owner == owner) {
    programs_[owner].note_follower(last.node, now - last.when);
  } else if (last.owner >= 0) {
    programs_[last.owner].note_no_follower(last.node);
  }
  last = {owner, node, now};
}

// Whether the batch may wait for the request that will follow in moments: the
// owner would not begin it anyway, because it (or another owner, whose results
// it needs) is busy with earlier ones.
bool Server::may_hold_back(const CallerState& caller) {
  const CallerState::Batch& batch = caller.batch;
  if (batch.has_large_data) return false;
  if (!programs_[batch.owner].has_follower(batch.node)) return false;
  if (caller.last.when - batch.since >= kMaxDelay) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto acks = acks_.find(caller.context_id);
  for (const auto& [owner, last] : caller.posted) {
    if (acks == acks_.end()) return true;
    const auto done = acks->second.find(owner);
    if (done == acks->second.end() || done->second < last) return true;
  }
  return false;
}

void Server::send_batch(Context& context) {
  CallerState::Batch& waiting = context.caller.batch;
  if (waiting.owner < 0) return;
  CallerState::Batch batch = std::exchange(waiting, {});
  context.caller.posted[batch.owner] = batch.request_id;
  Header header = header_of(Kind::kProgress, context.key.mb);
  header.request_id = batch.request_id;
  header.forward_id = batch.node;
  header.module_id = batch.module_id;
  header.index = context.caller.context_id;
  header.path = static_cast<int64_t>(context.seed);
  comm::Message message;
  for (const comm::Ref& ref : batch.released) {
    message.bytes.append(reinterpret_cast<const char*>(&ref.id), sizeof ref.id);
  }
  message.tensors = std::move(batch.data);
  send(batch.owner, header, std::move(message));
  std::lock_guard<std::mutex> lock(stats_mutex_);
  ++stats_.replays;
}

// The context does something else than calling modules: it may take long.
void Server::end_run(Context& context) {
  CallerState& caller = context.caller;
  send_batch(context);
  if (caller.last.owner >= 0) {
    programs_[caller.last.owner].note_no_follower(caller.last.node);
  }
  caller.last = {};
}

void Server::serve_progress(const Header& progress, comm::Message&& message) {
  const int caller = message.source_rank;
  const std::string released = std::move(message.bytes);
  for (auto& [header, request] :
       served_programs_.follow(progress, std::move(message))) {
    serve(header, std::move(request));
  }
  // After requests that still name them: those have got their tensors, or are
  // waiting for them.
  for (size_t i = 0; i + sizeof(int64_t) <= released.size();
       i += sizeof(int64_t)) {
    comm::Ref ref{caller, 0};
    std::memcpy(&ref.id, released.data() + i, sizeof ref.id);
    store_.release(ref, progress.mb);
  }
}

}  // namespace smp::pipeline
