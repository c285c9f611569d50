#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace smp {

/// The one place in C++ that reads the environment. Names begin with SMP_ or
/// belong to a launcher. A variable that is set but empty counts as not set.

std::optional<std::string> env_string(const char* name);

/// Returns an integer variable.
/// @throws ValueError if the value is no integer in [min, max]
int64_t env_int(const char* name, int64_t fallback, int64_t min, int64_t max);

/// Returns a duration or a factor.
/// @throws ValueError if the value is no finite number >= 0
double env_number(const char* name, double fallback);

/// Returns true for 1, true, on, yes and false for 0, false, off, no; any case.
/// @throws ValueError for any other word
bool env_flag(const char* name, bool fallback);

}  // namespace smp
