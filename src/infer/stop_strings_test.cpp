#include "infer/stop_strings.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "base/test_dir.h"

namespace sps {
namespace {

TEST(StopStrings, TheTextIsCutBeforeTheFirst) {
  StopStrings stops({"END", "\n\n"});
  EXPECT_EQ(stops.feed("abc"), "abc");
  EXPECT_EQ(stops.feed("dE"), "d");
  EXPECT_EQ(stops.feed("N"), "");
  EXPECT_EQ(stops.feed("E\n"), "ENE");
  EXPECT_FALSE(stops.stopped());
  EXPECT_EQ(stops.feed("\nmore END"), "");
  EXPECT_TRUE(stops.stopped());
  EXPECT_EQ(stops.feed("more"), "");
  EXPECT_EQ(stops.flush(), "");
}

TEST(StopStrings, WhatWasHeldBackComesAtTheEnd) {
  StopStrings stops({"stop"});
  EXPECT_EQ(stops.feed("a sto"), "a ");
  EXPECT_EQ(stops.flush(), "sto");
  EXPECT_FALSE(stops.stopped());
  StopStrings none({});
  EXPECT_EQ(none.feed("anything"), "anything");
  EXPECT_PRED2(mentions, error_of([] { StopStrings({"a", ""}); }), "empty");
}

// Whatever the pieces, the text is the one that a search in the whole gives; strings that overlap with
// themselves.
TEST(StopStrings, PiecesDoNotMatter) {
  const std::vector<std::string> strings{"aab", "abab", "bb"};
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const Rng rng(seed, "text");
    std::string text;
    for (uint64_t i = 0; i < 12; ++i) text += rng.below(i, 3) == 0 ? 'b' : 'a';
    size_t end = std::string::npos;
    for (const std::string& s : strings) end = std::min(end, text.find(s));
    StopStrings stops(strings);
    std::string shown;
    for (size_t at = 0, n = 100; at < text.size(); ++n) {
      const size_t size = 1 + rng.below(n, 4);
      shown += stops.feed(std::string_view(text).substr(at, size));
      at += size;
    }
    EXPECT_EQ(stops.stopped(), end != std::string::npos) << text;
    EXPECT_EQ(shown + stops.flush(), text.substr(0, end)) << text;
  }
}

}  // namespace
}  // namespace sps
