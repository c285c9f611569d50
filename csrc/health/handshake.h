#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace smp::health {

/// Least length of a secret; a shorter one could be guessed from a proof.
inline constexpr size_t kMinSecretBytes = 32;

/// One side of the handshake at the start of every connection of a job. Both
/// ends prove that they have the secret before anything else is read. A proof
/// is the HMAC-SHA-256 of numbers that both ends draw for this connection. The
/// class only takes and makes bytes; callers own the sockets.
///
///   caller:    "SMPAUTH1", its number (4 bytes), its nonce (32)
///   listener:  its nonce (32), HMAC(secret, "listener" and all above) (32)
/// caller:    HMAC(secret, "caller" and all above) (32), then its frames
///
/// A proof is valid for one connection, one side and one purpose, so that a
/// recorded proof is useless. Later bytes are neither encrypted nor signed.
class Handshake {
 public:
  /// @param secret   secret of the job, at least kMinSecretBytes long
  /// @param purpose  name of the listener's service; equal on both sides
  static Handshake listener(std::string secret, std::string purpose);
  /// @param caller  number >= 0 that identifies this side to the listener
  static Handshake caller(std::string secret, std::string purpose,
                          int32_t caller);

  /// Advances as far as the bytes allow.
  /// @param in   bytes received and not yet used
  /// @param out  string to which the bytes to send are appended
  /// @return how many of the bytes belong to the handshake; once `is_proven`,
  ///         the rest belongs to the connection's own protocol
  /// @throws Error when the other side is not of this job
  size_t advance(std::string_view in, std::string& out);

  /// Returns whether the other side has the secret, so that its frames count.
  bool is_proven() const { return state_ == State::kProven; }

  /// Returns the caller's number, or -1 before the opening; true only once
  /// `is_proven`.
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
