#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <thread>

namespace smp {

/// Time until a test gives a wait up. What ended a wait says so itself: tests
/// set limits that they do not mean to this one, and read no clock.
constexpr std::chrono::seconds kPatience{120};

/// Returns whether a predicate becomes true within a time.
template <typename Pred>
bool becomes_true(Pred pred, std::chrono::milliseconds limit = kPatience) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!pred()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// The text of what a call throws.
template <typename Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace smp
