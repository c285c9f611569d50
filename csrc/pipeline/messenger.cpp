#include "csrc/pipeline/messenger.h"

#include <utility>

namespace smp::pipeline {

Messenger::Messenger(int global_rank, std::vector<int> pp_ranks,
                     std::shared_ptr<mailbox::Mailbox> mailbox,
                     std::shared_ptr<Timeline> timeline)
    : global_rank_(global_rank),
      pp_ranks_(std::move(pp_ranks)),
      mailbox_(std::move(mailbox)),
      timeline_(std::move(timeline)) {}

Header Messenger::header_of(Kind kind, int64_t mb) const {
  Header header;
  header.kind = kind;
  header.step = step_;
  header.mb = mb;
  return header;
}

void Messenger::post(int dst, Header header, const std::string& structure,
                     std::vector<mailbox::MessageTensor> tensors) {
  mailbox::Message message;
  const auto [id, with_bytes] = structures_.on_send(dst, structure);
  header.structure_id = id;
  if (with_bytes) message.bytes = structure;
  message.tensors = std::move(tensors);
  header.write_to(message);
  if (dst != global_rank_) {
    int64_t data_bytes = 0;
    for (const mailbox::MessageTensor& tensor : message.tensors) {
      if (tensor.data.defined()) data_bytes += tensor.data.nbytes();
    }
    std::lock_guard<std::mutex> lock(stats_mutex_);
    ++stats_.headers;
    if (data_bytes > 0) stats_.data_bytes[dst] += data_bytes;
  }
  if (timeline_->is_on()) {
    timeline_->record_tensors(TimelineEvent::Kind::kSent, global_rank_, dst,
                              message);
  }
  mailbox_->post(dst, std::move(message));
}

void Messenger::post_to_others(
    const Header& header, const std::string& structure,
    const std::vector<mailbox::MessageTensor>& tensors) {
  for (const int rank : pp_ranks_) {
    if (rank != global_rank_) post(rank, header, structure, tensors);
  }
}

Header Messenger::open(mailbox::Message& message) {
  const Header header = Header::read_from(message);
  if (timeline_->is_on()) {
    timeline_->record_tensors(TimelineEvent::Kind::kReceived, global_rank_,
                              message.source_rank, message);
  }
  message.bytes = structures_.on_receive(
      message.source_rank, header.structure_id, std::move(message.bytes));
  return header;
}

Messenger::Stats Messenger::stats() const {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  return stats_;
}

}  // namespace smp::pipeline
