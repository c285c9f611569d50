#include "csrc/common/sha256.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>

namespace smp {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", byte);
    text += two;
  }
  return text;
}

std::string repeated(size_t count, char byte) {
  return std::string(count, byte);
}

// Examples of FIPS 180-4 and of NIST's list of test vectors.
TEST(Sha256, GivesThePublishedDigests) {
  EXPECT_EQ(hex(sha256("")),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnop"
                       "nopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijkl"
                       "mnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopq"
                       "rstu")),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(hex(sha256(repeated(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// The padding needs a block of its own from 56 bytes on (values of coreutils).
TEST(Sha256, GivesThePublishedDigestsAtTheEndOfABlock) {
  EXPECT_EQ(hex(sha256(repeated(55, 'a'))),
            "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(hex(sha256(repeated(56, 'a'))),
            "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  EXPECT_EQ(hex(sha256(repeated(64, 'a'))),
            "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

// RFC 4231, cases 1 to 4, 6 and 7.
TEST(Hmac, GivesTheDigestsOfTheRfc) {
  EXPECT_EQ(hex(hmac_sha256(repeated(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(repeated(20, '\xaa'), repeated(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counted;
  for (char byte = 1; byte <= 25; ++byte) counted += byte;
  EXPECT_EQ(hex(hmac_sha256(counted, repeated(50, '\xcd'))),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hex(hmac_sha256(repeated(131, '\xaa'),
                            "Test Using Larger Than Block-Size Key - Hash Key "
                            "First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hex(hmac_sha256(repeated(131, '\xaa'),
                            "This is a test using a larger than block-size key "
                            "and a larger than block-size data. The key needs "
                            "to be hashed before being used by the HMAC "
                            "algorithm.")),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(Sha256, ComparesAllBytes) {
  EXPECT_TRUE(is_equal_in_constant_time("", ""));
  EXPECT_TRUE(is_equal_in_constant_time("abc", "abc"));
  EXPECT_FALSE(is_equal_in_constant_time("abc", "abd"));
  EXPECT_FALSE(is_equal_in_constant_time("abc", "bbc"));
  EXPECT_FALSE(is_equal_in_constant_time("abc", "abcd"));
}

TEST(RandomBytes, DifferEachTime) {
  const std::string one = random_bytes(32);
  EXPECT_EQ(one.size(), 32U);
  EXPECT_NE(one, random_bytes(32));
}

}  // namespace
}  // namespace smp
