#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace smp::health {

/// Shorter secrets could be guessed by who has heard a proof.
inline constexpr size_t kMinSecretBytes = 32;

/// One side of what every connection of a job begins with: both ends prove that
/// they know its secret, by HMAC-SHA-256 of numbers that both draw anew, before
/// anything else is looked at. Bytes in, bytes out; the sockets are others'.
///
///   caller:    "SMPAUTH1", its number (4 bytes), its nonce (32)
///   listener:  its nonce (32), HMAC(secret, "listener" and all above) (32)
///   caller:    HMAC(secret, "caller" and all above) (32), then what it wants
///
/// A proof is of one connection, one side, one purpose: heard, it opens
/// nothing. What follows is neither encrypted nor signed.
class Handshake {
 public:
  /// @param secret   of the job, at least kMinSecretBytes
  /// @param purpose  what the listener is for; equal on both sides
  static Handshake listener(std::string secret, std::string purpose);
  /// @param caller  a number >= 0 by which the listener is to know this side
  static Handshake caller(std::string secret, std::string purpose,
                          int32_t caller);

  /// Goes on as far as the bytes lead.
  /// @param in   received and not yet used
  /// @param out  gets, at its end, what is to be sent
  /// @return how many of the bytes belong to the handshake; once `is_proven`,
  ///         those behind them are what the connection is for
  /// @throws Error when the other side is not of this job
  size_t advance(std::string_view in, std::string& out);

  /// The other side knows the secret, and may be listened to.
  bool is_proven() const { return state_ == State::kProven; }

  /// Who calls: known to be true when `is_proven`; -1 while nobody has said.
  int32_t caller_number() const { return caller_; }

 private:
  enum class State { kBegin, kOpening, kChallenge, kAnswer, kProven };

  Handshake(std::string secret, std::string purpose, State state);
  bool take(std::string_view in, size_t& used, std::string& out);
  void take_opening(std::string_view opening, std::string& out);
  void take_challenge(std::string_view challenge, std::string& out);
  void take_answer(std::string_view answer);
  std::string proof_of(std::string_view side) const;

  std::string secret_;
  std::string purpose_;
  State state_;
  std::string opening_;
  std::string nonce_;  // of the listener
  int32_t caller_ = -1;
};

}  // namespace smp::health
