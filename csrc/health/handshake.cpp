#include "csrc/health/handshake.h"

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/sha256.h"

namespace smp::health {
namespace {

constexpr std::string_view kMagic = "SMPAUTH1";
constexpr size_t kNumberBytes = 4;
constexpr size_t kNonceBytes = 32;
constexpr size_t kProofBytes = sizeof(Digest);
constexpr size_t kOpeningBytes = kMagic.size() + kNumberBytes + kNonceBytes;
constexpr size_t kChallengeBytes = kNonceBytes + kProofBytes;

std::string bytes_of(int32_t number) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) {
    bytes += static_cast<char>(static_cast<uint32_t>(number) >> shift);
  }
  return bytes;
}

int32_t number_of(std::string_view bytes) {
  uint32_t number = 0;
  for (const char byte : bytes)
    number = number << 8 | static_cast<uint8_t>(byte);
  return static_cast<int32_t>(number);
}

// Throws without the prefix of the rank, which the catcher adds with the place.
void require(bool condition, const std::string& why) {
  if (!condition) throw Error(why);
}

}  // namespace

Handshake::Handshake(std::string secret, std::string purpose, State state)
    : secret_(std::move(secret)), purpose_(std::move(purpose)), state_(state) {
  SMP_CHECK_VALUE(secret_.size() >= kMinSecretBytes, "the secret of a job has ",
                  secret_.size(), " bytes; it needs ", kMinSecretBytes);
}

Handshake Handshake::listener(std::string secret, std::string purpose) {
  return {std::move(secret), std::move(purpose), State::kOpening};
}

Handshake Handshake::caller(std::string secret, std::string purpose,
                            int32_t caller) {
  Handshake made(std::move(secret), std::move(purpose), State::kBegin);
  SMP_CHECK_VALUE(caller >= 0, "a caller has no number: ", caller);
  made.caller_ = caller;
  return made;
}

size_t Handshake::advance(std::string_view in, std::string& out) {
  if (state_ == State::kBegin) {
    opening_ = kMagic;
    opening_ += bytes_of(caller_) + random_bytes(kNonceBytes);
    out += opening_;
    state_ = State::kChallenge;
  }
  size_t used = 0;
  while (state_ != State::kProven && take(in.substr(used), used, out)) {
  }
  return used;
}

// Returns whether the bytes were enough for another message.
bool Handshake::take(std::string_view in, size_t& used, std::string& out) {
  size_t size = kOpeningBytes;
  if (state_ == State::kChallenge) size = kChallengeBytes;
  if (state_ == State::kAnswer) size = kProofBytes;
  if (state_ == State::kOpening) {  // refuses other openings early
    const size_t known = std::min(in.size(), kMagic.size());
    require(in.substr(0, known) == kMagic.substr(0, known),
            "it does not begin like a connection of this version of smp");
  }
  if (in.size() < size) return false;
  const std::string_view message = in.substr(0, size);
  used += size;
  if (state_ == State::kOpening) {
    take_opening(message, out);
  } else if (state_ == State::kChallenge) {
    take_challenge(message, out);
  } else {
    take_answer(message);
  }
  return true;
}

void Handshake::take_opening(std::string_view opening, std::string& out) {
  caller_ = number_of(opening.substr(kMagic.size(), kNumberBytes));
  require(caller_ >= 0, "its number is below 0");
  opening_ = opening;
  nonce_ = random_bytes(kNonceBytes);
  out += nonce_ + proof_of("listener");
  state_ = State::kAnswer;
}

void Handshake::take_challenge(std::string_view challenge, std::string& out) {
  nonce_ = challenge.substr(0, kNonceBytes);
  require(is_equal_in_constant_time(challenge.substr(kNonceBytes),
                                    proof_of("listener")),
          "who listens there does not know the secret of this job (another "
          "job, or another SMP_JOB_SECRET)");
  out += proof_of("caller");
  state_ = State::kProven;
}

void Handshake::take_answer(std::string_view answer) {
  require(is_equal_in_constant_time(answer, proof_of("caller")),
          "it does not know the secret of this job");
  state_ = State::kProven;
}

// Returns the proof. Each part but the purpose has a fixed length, and the
// purpose comes last.
std::string Handshake::proof_of(std::string_view side) const {
  std::string text = "smp ";
  text += side;
  text += '\0';
  text += opening_ + nonce_ + purpose_;
  const Digest digest = hmac_sha256(secret_, text);
  return std::string(view_of(digest));
}

}  // namespace smp::health
