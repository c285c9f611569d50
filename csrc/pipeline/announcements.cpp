#include "csrc/pipeline/announcements.h"

#include <cstring>
#include <utility>

#include "csrc/pipeline/result_cache.h"

namespace smp::pipeline {
namespace {

// Outputs of the model up to this size go to all ranks at once.
constexpr int64_t kEagerOutputBytes = 64 * 1024;

}  // namespace

Announcements::Announcements(Messenger& messenger, Scheduler& scheduler,
                             TensorDirectory& tensors)
    : messenger_(messenger), scheduler_(scheduler), tensors_(tensors) {}

void Announcements::publish_output(const std::string& structure,
                                   const std::vector<at::Tensor>& tensors) {
  Context& context = calling_context("the model's output");
  Header header = messenger_.header_of(Kind::kModelOutput, context.key.mb);
  header.index = context.num_model_calls++;
  ResultMeta result;
  result.structure = structure;
  std::vector<mailbox::MessageTensor> sent(tensors.size());
  std::string homes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    result.tensors.push_back(TensorMeta::of(tensors[i]));
    sent[i].requires_grad = tensors[i].requires_grad();
    RemoteRefPtr ref = remote_ref_of(tensors[i]);
    int32_t home = -1;
    const bool is_away = ref && !ref->kept.defined();
    if (!is_away && result.tensors[i].num_bytes() <= kEagerOutputBytes) {
      // A copy: the user's code may change outputs while they are on their way.
      sent[i].data = ref ? ref->kept : tensors[i].detach().clone();
    } else {
      if (!is_away) ref = tensors_.keep(context, tensors[i]);
      sent[i].ref = ref->ref;
      home = ref->home_rank;
      ++ref->num_published;
      std::lock_guard<std::mutex> lock(mutex_);
      published_[static_cast<int>(header.mb)].push_back(ref);
    }
    homes.append(reinterpret_cast<const char*>(&home), sizeof home);
  }
  messenger_.post_to_others(header, homes + result.encode(), sent);
}

ModelOutput Announcements::await_output() {
  Context& context = calling_context("following the driver");
  mailbox::Message message = await(
      Kind::kModelOutput, context.num_model_calls++, "the model's output");
  const size_t homes_bytes = message.tensors.size() * sizeof(int32_t);
  const ResultMeta result =
      ResultMeta::decode(message.bytes.substr(homes_bytes));
  ModelOutput output;
  output.structure = result.structure;
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    mailbox::MessageTensor& tensor = message.tensors[i];
    ModelOutput::Tensor& received = output.tensors.emplace_back();
    received.requires_grad = tensor.requires_grad;
    if (tensor.data.defined()) {
      received.data =
          tensors_.use({std::move(tensor.data), std::move(tensor.mark)});
      continue;
    }
    int32_t home = -1;
    std::memcpy(&home, message.bytes.data() + i * sizeof home, sizeof home);
    received.ref = std::make_shared<RemoteRef>();
    received.ref->ref = tensor.ref;
    received.ref->home_rank = home;
    received.ref->mb = context.key.mb;
    received.ref->meta = result.tensors.at(i);
    context.caller.add_ref(received.ref);
  }
  return output;
}

void Announcements::end_backward() {
  Context& context = calling_context("backward");
  Header header = messenger_.header_of(Kind::kBackwardDone, context.key.mb);
  header.index = context.num_backward_calls++;
  messenger_.post_to_others(header);
}

void Announcements::await_backward() {
  Context& context = calling_context("backward");
  await(Kind::kBackwardDone, context.num_backward_calls++,
        "the driver's backward");
}

mailbox::Message Announcements::await(Kind kind, int64_t index,
                                      const char* waits_for) {
  Context& context = calling_context("following the driver");
  const Key key{kind, context.key.mb, index};
  Slot* slot = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    slot = &notices_[key];
  }
  mailbox::Message message =
      scheduler_.wait(*slot, waits_for, messenger_.driver_rank());
  std::lock_guard<std::mutex> lock(mutex_);
  notices_.erase(key);
  return message;
}

void Announcements::take(const Header& header, mailbox::Message&& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  scheduler_.fill(notices_[{header.kind, header.mb, header.index}],
                  std::move(message));
}

void Announcements::end_microbatch(int mb) {
  std::vector<RemoteRefPtr> unpublished;  // ends without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = published_.find(mb);
  if (found == published_.end()) return;
  unpublished = std::move(found->second);
  published_.erase(found);
}

void Announcements::clear() {
  decltype(published_) unpublished;
  std::lock_guard<std::mutex> lock(mutex_);
  notices_.clear();
  unpublished.swap(published_);
}

}  // namespace smp::pipeline
