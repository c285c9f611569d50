#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "csrc/schedule/task.h"

namespace smp::schedule {

/// Returns `'F'`, `'B'` or `'W'`.
char phase_letter(Phase phase);

/// Walks over one line of a text form; every error names the expected text, the
/// text found and its column (from 1).
class TextReader {
 public:
  /// @param what names the text in errors: "task", "schedule, line 3"
  TextReader(std::string_view text, std::string what)
      : text_(text), what_(std::move(what)) {}

  bool at_end() const { return pos_ == text_.size(); }
  /// @return whether there were any spaces
  bool skip_spaces();
  /// Takes `c` if it comes next.
  bool skip(char c);
  void expect(char c, const char* what);
  void expect_end();
  int64_t number(const char* what);
  Phase phase();

  [[noreturn]] void fail(const std::string& expected) const;
  /// Raises an error about the text that starts at `column` (from 1).
  [[noreturn]] void fail_at(size_t column, const std::string& complaint) const;
  size_t column() const { return pos_ + 1; }

 private:
  std::string_view text_;
  std::string what_;
  size_t pos_ = 0;
};

}  // namespace smp::schedule
