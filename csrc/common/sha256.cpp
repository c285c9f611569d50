#include "csrc/common/sha256.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "csrc/common/check.h"

namespace smp {
namespace {

constexpr size_t kBlockBytes = 64;
constexpr size_t kLengthBytes = 8;

// First 32 bits of the fractions of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

// First 32 bits of the fractions of the square roots of the first 8 primes.
constexpr State kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 |
         uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

void take_block(State& state, const uint8_t* block) {
  std::array<uint32_t, 64> words;
  for (size_t i = 0; i < 16; ++i) words[i] = big_endian(block + 4 * i);
  for (size_t i = 16; i < words.size(); ++i) {
    const uint32_t far = words[i - 15];
    const uint32_t near = words[i - 2];
    words[i] = words[i - 16] + words[i - 7] +
               (std::rotr(far, 7) ^ std::rotr(far, 18) ^ (far >> 3)) +
               (std::rotr(near, 17) ^ std::rotr(near, 19) ^ (near >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < words.size(); ++i) {
    const uint32_t first =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
        ((e & f) ^ (~e & g)) + kRoundConstants[i] + words[i];
    const uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) +
        ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const State added = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) state[i] += added[i];
}

}  // namespace

Digest sha256(std::string_view bytes) {
  State state = kStart;
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  size_t left = bytes.size();
  for (; left >= kBlockBytes; left -= kBlockBytes, data += kBlockBytes) {
    take_block(state, data);
  }
  // The tail has the last bytes, a one bit, zeros, and the number of bits.
  std::array<uint8_t, 2 * kBlockBytes> tail{};
  if (left > 0) std::memcpy(tail.data(), data, left);
  tail[left] = 0x80;
  const size_t end =
      left + 1 + kLengthBytes <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes;
  const uint64_t bits = uint64_t{bytes.size()} * 8;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    tail[end - 1 - i] = static_cast<uint8_t>(bits >> (8 * i));
  }
  for (size_t at = 0; at < end; at += kBlockBytes) {
    take_block(state, tail.data() + at);
  }
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state[i / 4] >> (8 * (3 - i % 4)));
  }
  return digest;
}

Digest hmac_sha256(std::string_view key, std::string_view bytes) {
  std::string padded(key);
  if (key.size() > kBlockBytes) {
    const Digest digest = sha256(key);
    padded = view_of(digest);
  }
  padded.resize(kBlockBytes, '\0');
  std::string inner = padded;
  std::string outer = padded;
  for (char& one : inner) one = static_cast<char>(one ^ 0x36);
  for (char& one : outer) one = static_cast<char>(one ^ 0x5c);
  inner.append(bytes);
  const Digest digest = sha256(inner);
  outer.append(view_of(digest));
  return sha256(outer);
}

std::string_view view_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

bool is_equal_in_constant_time(std::string_view one, std::string_view other) {
  if (one.size() != other.size()) return false;
  // Without volatile the compiler might stop at the first difference.
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < one.size(); ++i) {
    difference = static_cast<uint8_t>(difference |
                                      static_cast<uint8_t>(one[i] ^ other[i]));
  }
  return difference == 0;
}

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t done = 0; done < count;) {
    const ssize_t got = ::getrandom(bytes.data() + done, count - done, 0);
    if (got < 0 && errno == EINTR) continue;
    SMP_CHECK(got > 0,
              "the system gives no random bytes: ", std::strerror(errno));
    done += static_cast<size_t>(got);
  }
  return bytes;
}

}  // namespace smp
