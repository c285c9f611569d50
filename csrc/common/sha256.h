#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace smp {

/// 32 bytes.
using Digest = std::array<uint8_t, 32>;

/// Returns SHA-256 of FIPS 180-4.
Digest sha256(std::string_view bytes);

/// Returns HMAC of RFC 2104 with SHA-256; keys may be of any length.
Digest hmac_sha256(std::string_view key, std::string_view bytes);

/// Returns a view of the digest; valid while the digest lives.
std::string_view view_of(const Digest& digest);

/// Compares in equal time wherever the first difference is; both sides know
/// other lengths anyway.
bool is_equal_in_constant_time(std::string_view one, std::string_view other);

/// Returns random bytes of the system that an attacker cannot guess.
/// @throws Error when the system has none
std::string random_bytes(size_t count);

}  // namespace smp
