#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace smp {

/// 32 bytes.
using Digest = std::array<uint8_t, 32>;

/// SHA-256 of FIPS 180-4.
Digest sha256(std::string_view bytes);

/// HMAC of RFC 2104 with SHA-256; keys may be of any length.
Digest hmac_sha256(std::string_view key, std::string_view bytes);

/// Its bytes, as long as it lives.
std::string_view view_of(const Digest& digest);

/// Takes equally long wherever the first difference is; other lengths are known
/// to both sides.
bool is_equal_in_constant_time(std::string_view one, std::string_view other);

/// Bytes of the system that nobody can guess.
/// @throws Error when it has none
std::string random_bytes(size_t count);

}  // namespace smp
