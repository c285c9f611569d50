#include "csrc/health/liveness_frame.h"

#include <cstdio>
#include <cstring>
#include <string_view>

#include "csrc/common/check.h"

namespace smp::health {
namespace {

// The part before the three strings. All hosts of a run have the same byte
// order.
struct Prefix {
  uint32_t frame_bytes;  // of all that follows this number
  uint32_t where_bytes;
  uint32_t text_bytes;
  uint32_t collectives_bytes;
  int32_t global_rank;
  uint32_t reserved_too;
  int64_t blocked_ms;
  int64_t progress;
  int64_t num_unsent;
  uint8_t type;
  uint8_t is_blocked;
  uint8_t device_waits;
  uint8_t reserved[5];
};

constexpr size_t kFixedBytes = sizeof(Prefix) - sizeof(uint32_t);

std::string_view cut(const std::string& text) {
  return std::string_view(text).substr(0, kMaxTextBytes);
}

}  // namespace

std::string encode_frame(const LivenessFrame& frame) {
  const std::string_view where = cut(frame.where);
  const std::string_view text = cut(frame.text);
  const std::string_view collectives = cut(frame.collectives);
  Prefix prefix{};
  prefix.where_bytes = static_cast<uint32_t>(where.size());
  prefix.text_bytes = static_cast<uint32_t>(text.size());
  prefix.collectives_bytes = static_cast<uint32_t>(collectives.size());
  prefix.frame_bytes = static_cast<uint32_t>(kFixedBytes + where.size() +
                                             text.size() + collectives.size());
  prefix.global_rank = frame.global_rank;
  prefix.blocked_ms = frame.blocked_ms;
  prefix.progress = frame.progress;
  prefix.num_unsent = frame.num_unsent;
  prefix.type = static_cast<uint8_t>(frame.type);
  prefix.is_blocked = frame.is_blocked ? 1 : 0;
  prefix.device_waits = frame.device_waits ? 1 : 0;
  std::string bytes(reinterpret_cast<const char*>(&prefix), sizeof(prefix));
  bytes.append(where);
  bytes.append(text);
  bytes.append(collectives);
  return bytes;
}

std::optional<LivenessFrame> take_frame(std::string& buffer) {
  Prefix prefix{};
  uint32_t frame_bytes = 0;
  if (buffer.size() < sizeof(frame_bytes)) return std::nullopt;
  std::memcpy(&frame_bytes, buffer.data(), sizeof(frame_bytes));
  SMP_CHECK(frame_bytes >= kFixedBytes &&
                frame_bytes <= kFixedBytes + 3 * kMaxTextBytes,
            "liveness frame of ", frame_bytes, " bytes");
  if (buffer.size() < sizeof(frame_bytes) + frame_bytes) return std::nullopt;
  std::memcpy(&prefix, buffer.data(), sizeof(prefix));
  SMP_CHECK(prefix.where_bytes <= kMaxTextBytes &&
                prefix.text_bytes <= kMaxTextBytes &&
                prefix.collectives_bytes <= kMaxTextBytes &&
                kFixedBytes + prefix.where_bytes + prefix.text_bytes +
                        prefix.collectives_bytes ==
                    frame_bytes,
            "liveness frame with sizes that do not agree");
  SMP_CHECK(prefix.type > 0 &&
                prefix.type < static_cast<uint8_t>(LivenessFrame::Type::kCount),
            "liveness frame of unknown type ", static_cast<int>(prefix.type));
  LivenessFrame frame;
  frame.type = static_cast<LivenessFrame::Type>(prefix.type);
  frame.global_rank = prefix.global_rank;
  frame.is_blocked = prefix.is_blocked != 0;
  frame.device_waits = prefix.device_waits != 0;
  frame.blocked_ms = prefix.blocked_ms;
  frame.progress = prefix.progress;
  frame.num_unsent = prefix.num_unsent;
  frame.where = buffer.substr(sizeof(prefix), prefix.where_bytes);
  frame.text =
      buffer.substr(sizeof(prefix) + prefix.where_bytes, prefix.text_bytes);
  frame.collectives =
      buffer.substr(sizeof(prefix) + prefix.where_bytes + prefix.text_bytes,
                    prefix.collectives_bytes);
  buffer.erase(0, sizeof(frame_bytes) + frame_bytes);
  return frame;
}

std::string seconds_text(std::chrono::duration<double> duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", duration.count());
  return text;
}

}  // namespace smp::health
