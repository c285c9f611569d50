#include "csrc/comm/socket_frames.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "csrc/common/check.h"
#include "csrc/health/socket.h"

namespace smp::comm {
namespace {

constexpr uint32_t kFrameMagic = 0x46504d53;  // "SMPF"
// Limit of unproven bytes, above any message of a handshake.
constexpr size_t kMaxHandshakeBytes = 4096;
constexpr size_t kMaxVectors = 64;
constexpr size_t kStageBytes = 32 << 10;
// Bytes after which another connection has its turn.
constexpr size_t kTurnBytes = 4 << 20;

template <typename Plain>
PeerSockets::Piece piece_of(const Plain& plain) {
  auto copy = std::make_shared<Plain>(plain);
  const auto* data = reinterpret_cast<const uint8_t*>(copy.get());
  return {std::move(copy), data, sizeof(Plain)};
}

}  // namespace

// ----------------------------------------------------------------- sending

std::string peer_purpose(int global_rank) {
  return "peer " + std::to_string(global_rank);
}

void OutgoingSocket::begin(health::OwnedFd fd, health::Handshake handshake) {
  fd_ = std::move(fd);
  handshake_ = std::move(handshake);
}

std::string OutgoingSocket::prove() {
  const health::IoResult got =
      health::read_available(fd_, handshake_in_, kMaxHandshakeBytes);
  try {
    handshake_in_.erase(0, handshake_->advance(handshake_in_, handshake_out_));
  } catch (const Error& error) {
    return error.what();
  }
  const health::IoResult sent = health::write_available(fd_, handshake_out_);
  is_open_ = handshake_->is_proven() && handshake_out_.empty();
  if (got == health::IoResult::kOk && sent == health::IoResult::kOk) return "";
  return "closed by the other side before both had proven that they know the "
         "secret of the job";
}

void OutgoingSocket::queue(uint64_t stream,
                           std::vector<PeerSockets::Outgoing> frames,
                           PeerSockets::Sent sent) {
  Batch batch;
  for (PeerSockets::Outgoing& frame : frames) {
    FrameHead head{kFrameMagic, 0, stream, frame.tag, frame.note, 0};
    for (const PeerSockets::Piece& piece : frame.pieces) {
      head.size += piece.size;
    }
    batch.pieces.push_back(piece_of(head));
    for (PeerSockets::Piece& piece : frame.pieces) {
      if (piece.size > 0) batch.pieces.push_back(std::move(piece));
    }
  }
  batch.sent = std::move(sent);
  queue_.push_back(std::move(batch));
}

std::string OutgoingSocket::send(Done& done) {
  while (is_open_ && !queue_.empty()) {
    std::array<iovec, kMaxVectors> vectors;
    size_t count = 0;
    for (const Batch& batch : queue_) {
      for (const PeerSockets::Piece& piece : batch.pieces) {
        if (count == kMaxVectors) break;
        vectors[count++] = {const_cast<uint8_t*>(piece.data), piece.size};
      }
    }
    msghdr message{};
    message.msg_iov = vectors.data();
    message.msg_iovlen = count;
    const ssize_t size = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (size < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return "";
      return health::connection_error(errno);
    }
    auto left = static_cast<size_t>(size);
    while (!queue_.empty()) {
      Batch& batch = queue_.front();
      while (!batch.pieces.empty() && batch.pieces.front().size <= left) {
        left -= batch.pieces.front().size;
        batch.pieces.pop_front();
      }
      if (!batch.pieces.empty()) {
        batch.pieces.front().data += left;
        batch.pieces.front().size -= left;
        break;
      }
      if (batch.sent) done.emplace_back(std::move(batch.sent), "");
      queue_.pop_front();
    }
  }
  return "";
}

std::string OutgoingSocket::look_for_end() const {
  char byte = 0;
  const ssize_t size = ::recv(fd_.get(), &byte, 1, MSG_DONTWAIT);
  if (size == 0) return "closed by the other side";
  const bool goes_on =
      size > 0 || errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  return goes_on ? "" : health::connection_error(errno);
}

void OutgoingSocket::fail(const std::string& why, Done& done) {
  for (Batch& batch : queue_) {
    if (batch.sent) done.emplace_back(std::move(batch.sent), why);
  }
  queue_.clear();
  fd_.reset();
  is_open_ = false;
}

// --------------------------------------------------------------- receiving

IncomingSocket::IncomingSocket(health::OwnedFd fd, health::Handshake handshake,
                               FindReceiver find)
    : fd_(std::move(fd)),
      handshake_(std::move(handshake)),
      find_(std::move(find)),
      staged_(kStageBytes) {}

bool IncomingSocket::read(std::string& why,
                          const std::function<void()>& admit) {
  for (size_t turn = 0; turn < kTurnBytes;) {
    bool is_empty = false;
    const size_t before = filled_;
    if (!read_some(why, is_empty)) return false;
    if (is_empty) return true;
    consume(admit);
    turn += std::max(kStageBytes, filled_ > before ? filled_ - before : 0);
  }
  return true;
}

// Reads long frames directly to their memory and short ones to the stage.
bool IncomingSocket::read_some(std::string& why, bool& is_empty) {
  const bool straight = in_frame_ && staged_begin_ == staged_end_ &&
                        frame_.size - filled_ >= kStageBytes;
  if (!straight && staged_begin_ > 0) {
    std::memmove(staged_.data(), staged_.data() + staged_begin_,
                 staged_end_ - staged_begin_);
    staged_end_ -= staged_begin_;
    staged_begin_ = 0;
  }
  uint8_t* to = straight ? to_ + filled_ : staged_.data() + staged_end_;
  const size_t room =
      straight ? frame_.size - filled_ : kStageBytes - staged_end_;
  const ssize_t size = ::recv(fd_.get(), to, room, 0);
  if (size > 0) {
    (straight ? filled_ : staged_end_) += static_cast<size_t>(size);
    return true;
  }
  if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    is_empty = true;
    return true;
  }
  if (size < 0 && errno == EINTR) return true;
  why =
      size == 0 ? "closed by the other side" : health::connection_error(errno);
  return false;
}

void IncomingSocket::consume(const std::function<void()>& admit) {
  while (true) {
    if (in_frame_) {
      const size_t part =
          std::min(frame_.size - filled_, staged_end_ - staged_begin_);
      if (part > 0) {
        std::memcpy(to_ + filled_, staged_.data() + staged_begin_, part);
      }
      filled_ += part;
      staged_begin_ += part;
      if (filled_ < frame_.size) return;
      end_frame();
    } else if (!is_proven()) {
      if (!shake_hands(admit)) return;
    } else {
      if (staged_end_ - staged_begin_ < sizeof(FrameHead)) return;
      begin_frame();
    }
  }
}

// Returns whether the other side has proven its identity.
bool IncomingSocket::shake_hands(const std::function<void()>& admit) {
  const std::string_view in(
      reinterpret_cast<const char*>(staged_.data()) + staged_begin_,
      staged_end_ - staged_begin_);
  std::string out;
  const size_t used = handshake_.advance(in, out);
  staged_begin_ += used;
  if (used > 0) admit();
  // The answer fits, because these are the first bytes sent there.
  SMP_CHECK(
      health::write_available(fd_, out) == health::IoResult::kOk && out.empty(),
      "its handshake cannot be answered: ", std::strerror(errno));
  return is_proven();
}

void IncomingSocket::begin_frame() {
  FrameHead head;
  std::memcpy(&head, staged_.data() + staged_begin_, sizeof(head));
  staged_begin_ += sizeof(head);
  SMP_CHECK(head.magic == kFrameMagic && head.size <= kMaxFrameBytes,
            "what global_rank ", handshake_.caller_number(),
            " sends makes no sense; ranks that run different versions of smp "
            "cannot work together");
  frame_ = {handshake_.caller_number(), head.tag, head.note, head.size};
  receiver_ = find_(head.stream);
  to_ = receiver_->begin(frame_);
  filled_ = 0;
  in_frame_ = true;
}

void IncomingSocket::end_frame() {
  in_frame_ = false;
  const std::shared_ptr<PeerSockets::Receiver> receiver =
      std::exchange(receiver_, nullptr);
  receiver->end(frame_);
}

}  // namespace smp::comm
