#include "csrc/pipeline/replay.h"

#include <algorithm>

#include "csrc/common/check.h"
#include "csrc/memory/random_state.h"

namespace smp::pipeline {
namespace {

// A caller that does something else for longer than this lets the owner begin.
constexpr std::chrono::milliseconds kSoon{1};

constexpr int64_t kRefsPerContext = kIdsPerContext * kMaxResults;

int64_t first_id_of(const Header& header) {
  return header.request_id - header.request_id % kIdsPerContext;
}

}  // namespace

size_t RecordedRequest::num_bytes() const {
  return sizeof(RecordedRequest) + structure.size() +
         tensors.size() * sizeof(Tensor);
}

std::optional<RecordedRequest> RecordedRequest::of(
    const Header& header, const std::vector<comm::MessageTensor>& tensors,
    const std::string& structure, int caller) {
  const int64_t first_id = first_id_of(header);
  RecordedRequest request;
  request.kind = header.kind;
  request.module_id = header.module_id;
  request.flags = header.flags & (kRecorded - 1);
  request.request_idx = header.request_id - first_id;
  request.forward_id = header.forward_id;
  if (header.kind == Kind::kBackwardRequest) {
    request.forward_id -= first_id;
    if (request.forward_id < 0 || request.forward_id >= kIdsPerContext) {
      return std::nullopt;
    }
  }
  request.call_idx = call_idx_of(header);
  request.structure = structure;
  for (const comm::MessageTensor& tensor : tensors) {
    Tensor& recorded = request.tensors.emplace_back();
    recorded.has_data = tensor.data.defined();
    recorded.requires_grad = tensor.requires_grad;
    if (tensor.ref.id < 0) continue;
    recorded.ref_idx = tensor.ref.id - first_id * kMaxResults;
    if (tensor.ref.owner_rank != caller || recorded.ref_idx < 0 ||
        recorded.ref_idx >= kRefsPerContext) {
      return std::nullopt;
    }
  }
  return request;
}

std::pair<Header, comm::Message> RecordedRequest::restore(
    const Header& progress, int caller, std::vector<comm::MessageTensor>& data,
    size_t& next) const {
  std::pair<Header, comm::Message> result;
  auto& [header, message] = result;
  const int64_t first_id = first_id_of(progress);
  header.kind = kind;
  header.step = progress.step;
  header.mb = progress.mb;
  header.index = progress.index;
  header.module_id = module_id;
  header.flags = flags;
  header.request_id = first_id + request_idx;
  header.forward_id = forward_id;
  if (kind == Kind::kBackwardRequest) header.forward_id += first_id;
  if (kind == Kind::kForwardRequest) {
    header.path = call_path(progress.path, call_idx, module_id);
  }
  message.source_rank = caller;
  message.bytes = structure;
  message.tensors.resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    comm::MessageTensor& tensor = message.tensors[i];
    tensor.requires_grad = tensors[i].requires_grad;
    if (tensors[i].ref_idx >= 0) {
      tensor.ref = {caller, first_id * kMaxResults + tensors[i].ref_idx};
    }
    if (!tensors[i].has_data) continue;
    SMP_CHECK(next < data.size(), "recorded requests of global_rank ", caller,
              " came with ", data.size(),
              " tensors, and want more; the message stream is damaged");
    tensor.data = std::move(data[next++].data);
  }
  return result;
}

// ------------------------------------------------------------------ Programs

int Programs::find(int node, const RecordedRequest& request) const {
  for (const int child : nodes_.at(node).children) {
    if (nodes_[child].request == request) return child;
  }
  return kLeft;
}

bool Programs::is_full(int node) const {
  return size() >= kMaxNodes || num_bytes_ >= kMaxBytes ||
         nodes_.at(node).children.size() >= kMaxChildren;
}

int Programs::add(int node, RecordedRequest request) {
  const int added = static_cast<int>(nodes_.size());
  nodes_.at(node).children.push_back(added);
  num_bytes_ += request.num_bytes();
  Node& made = nodes_.emplace_back();
  made.parent = node;
  made.request = std::move(request);
  return added;
}

std::vector<const RecordedRequest*> Programs::between(int from, int to) const {
  std::vector<const RecordedRequest*> requests;
  for (int node = to; node != from; node = nodes_[node].parent) {
    SMP_CHECK(node > kStart && node <= size(),
              "no recorded program leads from ", from, " to ", to,
              "; the message stream is damaged");
    requests.push_back(&nodes_[node].request);
  }
  std::reverse(requests.begin(), requests.end());
  return requests;
}

void Programs::note_follower(int node, std::chrono::nanoseconds after) {
  auto& known = nodes_.at(node).follower;
  known = known ? (3 * *known + after) / 4 : after;
}

void Programs::note_no_follower(int node) { nodes_.at(node).follower.reset(); }

bool Programs::has_follower(int node) const {
  const auto& known = nodes_.at(node).follower;
  return known && *known < kSoon;
}

// ------------------------------------------------------------ ServedPrograms

void ServedPrograms::record(const Header& header,
                            const std::vector<comm::MessageTensor>& tensors,
                            const std::string& structure, int caller) {
  auto request = RecordedRequest::of(header, tensors, structure, caller);
  SMP_CHECK(request, "global_rank ", caller,
            " records a request that cannot be repeated; the message stream "
            "is damaged");
  std::lock_guard<std::mutex> lock(mutex_);
  int& node = nodes_[{caller, header.index}];
  node = programs_[caller].add(node, *std::move(request));
}

std::vector<std::pair<Header, comm::Message>> ServedPrograms::follow(
    const Header& progress, comm::Message&& message) {
  const int caller = message.source_rank;
  std::vector<std::pair<Header, comm::Message>> requests;
  std::lock_guard<std::mutex> lock(mutex_);
  int& node = nodes_[{caller, progress.index}];
  const int to = static_cast<int>(progress.forward_id);
  size_t next = 0;
  for (const RecordedRequest* request : programs_[caller].between(node, to)) {
    requests.push_back(
        request->restore(progress, caller, message.tensors, next));
  }
  node = to;
  SMP_CHECK(
      !requests.empty() &&
          requests.back().first.request_id == progress.request_id,
      "recorded requests of global_rank ", caller,
      " end with another one than it sent; the message stream is damaged");
  SMP_CHECK(next == message.tensors.size(), "recorded requests of global_rank ",
            caller, " came with ", message.tensors.size(),
            " tensors, and want ", next, "; the message stream is damaged");
  return requests;
}

void ServedPrograms::begin_step(bool forget) {
  std::lock_guard<std::mutex> lock(mutex_);
  nodes_.clear();
  if (forget) programs_.clear();
}

}  // namespace smp::pipeline
