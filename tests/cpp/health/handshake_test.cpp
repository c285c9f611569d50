#include "csrc/health/handshake.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cpp/common/expectations.h"

namespace smp::health {
namespace {

const std::string kOurs(kMinSecretBytes, 'a');
const std::string kOthers(kMinSecretBytes, 'b');

// Everything that the two sides say, until one of them has nothing to say.
struct Talk {
  Handshake caller;
  Handshake listener;
  std::vector<std::string> to_listener;
  std::vector<std::string> to_caller;

  // Throws what the sides throw.
  void run(size_t piece = 1000) {
    std::string to_send;
    caller.advance("", to_send);
    while (!to_send.empty()) {
      to_listener.push_back(to_send);
      const std::string answer = feed(listener, to_send, piece);
      if (answer.empty()) return;
      to_caller.push_back(answer);
      to_send = feed(caller, answer, piece);
    }
  }

  static std::string feed(Handshake& side, const std::string& bytes,
                          size_t piece) {
    std::string in;
    std::string out;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      in += bytes.substr(at, piece);
      in.erase(0, side.advance(in, out));
    }
    EXPECT_EQ(in, "");
    return out;
  }
};

Talk talk_of(const std::string& of_caller, const std::string& of_listener,
             const std::string& called = "peer 1",
             const std::string& listening = "peer 1") {
  return {Handshake::caller(of_caller, called, 5),
          Handshake::listener(of_listener, listening),
          {},
          {}};
}

TEST(Handshake, BothSidesProveThemselves) {
  for (const size_t piece : {1, 7, 1000}) {
    Talk talk = talk_of(kOurs, kOurs);
    talk.run(piece);
    EXPECT_TRUE(talk.caller.is_proven());
    EXPECT_TRUE(talk.listener.is_proven());
    EXPECT_EQ(talk.listener.caller_number(), 5);
  }
}

TEST(Handshake, WhatFollowsIsNotTouched) {
  Talk talk = talk_of(kOurs, kOurs);
  std::string opening;
  std::string challenge;
  std::string answer;
  talk.caller.advance("", opening);
  EXPECT_EQ(talk.listener.advance(opening, challenge), opening.size());
  EXPECT_EQ(talk.caller.advance(challenge, answer), challenge.size());
  std::string nothing;
  EXPECT_EQ(talk.listener.advance(answer + "frames", nothing), answer.size());
  EXPECT_EQ(talk.listener.advance("frames", nothing), 0U);
  EXPECT_EQ(nothing, "");
}

TEST(Handshake, TheCallerSaysNothingToAListenerWithAnotherSecret) {
  Talk talk = talk_of(kOurs, kOthers);
  EXPECT_NE(error_of([&] {
              talk.run();
            }).find("does not know the secret of this job"),
            std::string::npos);
  EXPECT_EQ(talk.to_listener.size(), 1U) << "its own proof is no secret lost";
  EXPECT_FALSE(talk.caller.is_proven());
  EXPECT_FALSE(talk.listener.is_proven());
}

TEST(Handshake, AListenerForSomethingElseIsAStranger) {
  EXPECT_NE(error_of([] {
              Talk talk = talk_of(kOurs, kOurs, "peer 1", "peer 2");
              talk.run();
            }),
            "no error");
}

// A caller that does not check the listener, and answers with `change` of what
// a right one would say.
std::string error_of_answer(void (*change)(std::string&)) {
  Talk talk = talk_of(kOurs, kOurs);
  std::string opening;
  std::string challenge;
  std::string answer;
  talk.caller.advance("", opening);
  talk.listener.advance(opening, challenge);
  talk.caller.advance(challenge, answer);
  change(answer);
  std::string nothing;
  const std::string error =
      error_of([&] { talk.listener.advance(answer, nothing); });
  EXPECT_FALSE(talk.listener.is_proven());
  return error;
}

TEST(Handshake, AWrongAnswerIsRefused) {
  for (auto* const change :
       {+[](std::string& answer) { answer[0] ^= 1; },
        +[](std::string& answer) { answer[31] ^= 1; },
        +[](std::string& answer) { answer = std::string(32, '\0'); }}) {
    EXPECT_EQ(error_of_answer(change),
              "it does not know the secret of this job");
  }
}

TEST(Handshake, AnAnswerIsOfOneConnection) {
  Talk heard = talk_of(kOurs, kOurs);
  heard.run();
  auto listener = Handshake::listener(kOurs, "peer 1");
  std::string out;
  EXPECT_EQ(listener.advance(heard.to_listener[0], out), 44U);
  EXPECT_NE(out, heard.to_caller[0]) << "the listener draws anew";
  EXPECT_EQ(error_of([&] { listener.advance(heard.to_listener[1], out); }),
            "it does not know the secret of this job");
}

TEST(Handshake, AListenersOwnProofProvesNoCaller) {
  auto listener = Handshake::listener(kOurs, "peer 1");
  auto caller = Handshake::caller(kOurs, "peer 1", 0);
  std::string opening;
  std::string challenge;
  caller.advance("", opening);
  listener.advance(opening, challenge);
  std::string nothing;
  EXPECT_NE(error_of([&] { listener.advance(challenge.substr(32), nothing); }),
            "no error");
}

TEST(Handshake, OtherProtocolsAreRefusedAtTheirFirstByte) {
  for (const std::string noise :
       {"G", "GET / HTTP/1.1\r\n", "SMPAUTH0", "\x16"}) {
    auto listener = Handshake::listener(kOurs, "liveness");
    std::string out;
    EXPECT_NE(error_of([&] {
                listener.advance(noise, out);
              }).find("does not begin like a connection"),
              std::string::npos)
        << noise;
    EXPECT_EQ(out, "");
  }
}

TEST(Handshake, NumbersBelowZeroAreRefused) {
  auto caller = Handshake::caller(kOurs, "liveness", 1);
  std::string opening;
  caller.advance("", opening);
  opening[8] = '\xff';
  auto listener = Handshake::listener(kOurs, "liveness");
  std::string out;
  EXPECT_NE(error_of([&] { listener.advance(opening, out); }), "no error");
  EXPECT_EQ(out, "");
}

TEST(Handshake, ShortSecretsAreRefused) {
  EXPECT_NE(error_of([] {
              Handshake::listener("too short to be safe", "liveness");
            }).find("needs 32"),
            std::string::npos);
}

}  // namespace
}  // namespace smp::health
