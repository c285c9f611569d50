#include "csrc/health/handshake.h"

#include <algorithm>
#include <string>

#include "csrc/common/check.h"
#include "tests/fuzz/cpp/decoder.h"

// Two sides with the same secret, and an attacker between them who changes
// their bytes: the input is XORed to the bytes on their way, and the rest of
// it comes behind them. The first byte sets the size of the pieces.

namespace smp::fuzz {
namespace {

using health::Handshake;

constexpr const char* kSecret = "a secret that only the fuzzer knows";

// Takes as much of the input as there are bytes.
std::string changed(std::string bytes, std::string& input) {
  const size_t count = std::min(bytes.size(), input.size());
  for (size_t i = 0; i < count; ++i) bytes[i] ^= input[i];
  input.erase(0, count);
  return bytes;
}

std::string tell(Handshake& side, const std::string& bytes, size_t piece) {
  std::string in;
  std::string out;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    in += bytes.substr(at, piece);
    const size_t used = side.advance(in, out);
    require(used <= in.size(), "a side has used more than there was");
    in.erase(0, used);
  }
  return out;
}

}  // namespace

bool understands(std::span<const uint8_t> input) {
  const size_t piece = input.empty() ? 1 : 1 + input.front();
  std::string mask(input.begin() + (input.empty() ? 0 : 1), input.end());
  auto caller = Handshake::caller(kSecret, "peer 3", 5);
  auto listener = Handshake::listener(kSecret, "peer 3");
  std::string opening;
  caller.advance("", opening);
  const size_t all = opening.size() + 64 + 32;
  const bool is_changed = std::any_of(
      mask.begin(),
      mask.begin() + static_cast<ptrdiff_t>(std::min(all, mask.size())),
      [](char one) { return one != 0; });
  try {
    const std::string challenge = tell(listener, changed(opening, mask), piece);
    const std::string answer = tell(caller, changed(challenge, mask), piece);
    tell(listener, changed(answer, mask) + mask, piece);
  } catch (const Error&) {
    require(is_changed, "a right handshake was refused");
  }
  require(listener.is_proven() == !is_changed,
          "a listener believes what was changed, or not what is right");
  require(caller.is_proven() || !listener.is_proven(),
          "a listener is convinced before the caller");
  return listener.is_proven();
}

}  // namespace smp::fuzz
