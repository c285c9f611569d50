#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "csrc/common/check.h"

namespace smp::lanes {

/// Packs several byte strings into one, for exchanges between ranks.
inline std::string pack(const std::vector<std::string>& strings) {
  std::string result;
  for (const std::string& one : strings) {
    const auto size = static_cast<uint64_t>(one.size());
    result.append(reinterpret_cast<const char*>(&size), sizeof(size));
    result += one;
  }
  return result;
}

/// Unpacks what `pack` has made. @throws Error for other bytes
inline std::vector<std::string> unpack(const std::string& bytes) {
  std::vector<std::string> strings;
  size_t at = 0;
  while (at < bytes.size()) {
    uint64_t size = 0;
    const bool has_size = bytes.size() - at >= sizeof(size);
    if (has_size) std::memcpy(&size, bytes.data() + at, sizeof(size));
    SMP_CHECK(has_size && size <= bytes.size() - at - sizeof(size),
              "what another rank says of its lanes is cut off; ranks that run "
              "different versions of smp cannot work together");
    strings.push_back(bytes.substr(at + sizeof(size), size));
    at += sizeof(size) + size;
  }
  return strings;
}

}  // namespace smp::lanes
