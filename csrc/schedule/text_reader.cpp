#include "csrc/schedule/text_reader.h"

#include <charconv>

#include "csrc/common/check.h"

namespace smp::schedule {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

char phase_letter(Phase phase) {
  switch (phase) {
    case Phase::kForward:
      return 'F';
    case Phase::kBackward:
      return 'B';
    case Phase::kWeight:
      return 'W';
  }
  SMP_ASSERT(false, "phase ", static_cast<int64_t>(phase));
}

bool TextReader::skip_spaces() {
  const size_t begin = pos_;
  while (!at_end() && (text_[pos_] == ' ' || text_[pos_] == '\t')) ++pos_;
  return pos_ > begin;
}

bool TextReader::skip(char c) {
  if (at_end() || text_[pos_] != c) return false;
  ++pos_;
  return true;
}

void TextReader::expect(char c, const char* what) {
  if (!skip(c)) fail(std::string("'") + c + "' and " + what);
}

void TextReader::expect_end() {
  if (!at_end()) fail("the end");
}

int64_t TextReader::number(const char* what) {
  if (at_end() || !is_digit(text_[pos_])) {
    fail(std::string("the number of ") + what);
  }
  const size_t begin = pos_;
  while (!at_end() && is_digit(text_[pos_])) ++pos_;
  int64_t value = 0;
  const auto [end, error] =
      std::from_chars(text_.data() + begin, text_.data() + pos_, value);
  if (error != std::errc()) {
    fail_at(begin + 1, std::string("the number of ") + what +
                           " does not fit into 64 bits");
  }
  return value;
}

Phase TextReader::phase() {
  if (skip('F')) return Phase::kForward;
  if (skip('B')) return Phase::kBackward;
  if (skip('W')) return Phase::kWeight;
  fail("F (forward), B (backward) or W (weight gradients)");
}

void TextReader::fail(const std::string& expected) const {
  const std::string got =
      at_end() ? "the text ends"
               : std::string("got '") + std::string(text_.substr(pos_, 8)) +
                     (text_.size() > pos_ + 8 ? "...'" : "'");
  fail_at(column(), "expected " + expected + ", " + got);
}

void TextReader::fail_at(size_t column, const std::string& complaint) const {
  SMP_CHECK_VALUE(false, what_, ", column ", column, ": ", complaint, " in '",
                  text_.substr(0, 120), text_.size() > 120 ? "...'" : "'");
  SMP_ASSERT(false, "unreachable");
}

}  // namespace smp::schedule
