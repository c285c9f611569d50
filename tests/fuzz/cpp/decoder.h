#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace smp::fuzz {

/// Gives bytes to a decoder, one for each program.
/// @return whether they were understood, not refused with an error that it may
///         raise; all else, and what is not as it must be afterwards, ends the
///         process
bool understands(std::span<const uint8_t> input);

/// Ends the process, which tells the input.
[[noreturn]] void fail(const std::string& what);

inline void require(bool condition, const char* what) {
  if (!condition) fail(what);
}

}  // namespace smp::fuzz
