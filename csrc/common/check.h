#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

/// Exported to libraries of ours that are loaded later; all else is hidden.
#define SMP_EXPORT __attribute__((visibility("default")))

namespace smp {

/// An error at run time; `RuntimeError` in Python.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// An unusable value from the caller; `ValueError` in Python.
class ValueError : public Error {
  using Error::Error;
};

/// A bug of ours; `AssertionError` in Python.
class InternalError : public Error {
  using Error::Error;
};

/// The failure of another rank, which raised, exited or died; `smp.PeerFailure`
/// in Python.
class PeerFailure : public Error {
  using Error::Error;
};

namespace detail {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace detail

/// Returns `"[global_rank 5 | pp 1 tp 0 rdp 1] "` once the rank is known, else
/// an empty text. Every error that users see begins with it.
SMP_EXPORT std::string rank_prefix();

/// Sets the text of `rank_prefix()`; called by init and shutdown.
void set_rank_prefix(std::string text);

}  // namespace smp

#define SMP_THROW_IF_NOT(type, cond, ...)                                    \
  do {                                                                       \
    if (!(cond)) [[unlikely]] {                                              \
      throw type(::smp::rank_prefix() + ::smp::detail::concat(__VA_ARGS__)); \
    }                                                                        \
  } while (false)

/// Checks the user's input: the text says what was expected, what came, and
/// what to do.
#define SMP_CHECK_VALUE(cond, ...) \
  SMP_THROW_IF_NOT(::smp::ValueError, cond, __VA_ARGS__)

/// Checks for a failure of the outside world or of another rank.
#define SMP_CHECK(cond, ...) SMP_THROW_IF_NOT(::smp::Error, cond, __VA_ARGS__)

/// Checks an invariant of ours; never used for user input.
#define SMP_ASSERT(cond, ...)                                                  \
  SMP_THROW_IF_NOT(::smp::InternalError, cond, "internal error in ", __FILE__, \
                   ":", __LINE__, ": (" #cond ") ", __VA_ARGS__,               \
                   "; please report this")
