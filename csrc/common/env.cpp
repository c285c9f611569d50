#include "csrc/common/env.h"

#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "csrc/common/check.h"

namespace smp {

std::optional<std::string> env_string(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

int64_t env_int(const char* name, int64_t fallback, int64_t min, int64_t max) {
  const auto text = env_string(name);
  if (!text) return fallback;
  int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [rest, error] = std::from_chars(text->data(), end, value);
  const bool parsed = error == std::errc() && rest == end;
  SMP_CHECK_VALUE(parsed && value >= min && value <= max,
                  "environment variable ", name, " must be an integer from ",
                  min, " to ", max, ", got '", *text, "'");
  return value;
}

double env_number(const char* name, double fallback) {
  const auto text = env_string(name);
  if (!text) return fallback;
  char* rest = nullptr;
  const double value = std::strtod(text->c_str(), &rest);
  const bool parsed = rest == text->c_str() + text->size();
  SMP_CHECK_VALUE(parsed && std::isfinite(value) && value >= 0,
                  "environment variable ", name,
                  " must be a number >= 0, got '", *text, "'");
  return value;
}

bool env_flag(const char* name, bool fallback) {
  const auto text = env_string(name);
  if (!text) return fallback;
  std::string lower;
  for (const char c : *text) {
    lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  for (const std::string_view word : {"1", "true", "on", "yes"}) {
    if (lower == word) return true;
  }
  for (const std::string_view word : {"0", "false", "off", "no"}) {
    if (lower == word) return false;
  }
  SMP_CHECK_VALUE(false, "environment variable ", name,
                  " must be one of 1, true, on, yes, 0, false, off, no; got '",
                  *text, "'");
  return fallback;
}

}  // namespace smp
