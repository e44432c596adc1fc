#include "base/hash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace sps {
namespace {

TEST(Hash, EmptyInputHasThePublishedValue) {
  EXPECT_EQ(hex(hash64("")), "2d06800538d394c2");
}

TEST(Hash, PiecesHashAsTheWhole) {
  for (const size_t n : {0, 1, 16, 17, 240, 241, 1023, 5000}) {
    std::string text(n, '\0');
    for (size_t i = 0; i < n; ++i) text[i] = char(i * 37 + i / 256);
    for (const size_t piece : {1, 7, 64, 1000}) {
      Hasher hasher;
      for (size_t i = 0; i < n; i += piece) hasher.update(text.data() + i, std::min(piece, n - i));
      EXPECT_EQ(hasher.digest(), hash64(text)) << n << " bytes in pieces of " << piece;
      EXPECT_EQ(hasher.digest(), hash64(text.data(), n)) << "digest() ends nothing";
    }
  }
}

TEST(Hash, EveryByteCounts) {
  std::vector<char> bytes(300, 'a');
  const uint64_t before = hash64(bytes.data(), bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] ^= 1;
    EXPECT_NE(hash64(bytes.data(), bytes.size()), before) << i;
    bytes[i] ^= 1;
  }
  EXPECT_NE(hash64(bytes.data(), bytes.size() - 1), before);
}

TEST(Hash, HexHasSixteenDigits) {
  EXPECT_EQ(hex(0), "0000000000000000");
  EXPECT_EQ(hex(0xABCDEF), "0000000000abcdef");
  EXPECT_EQ(hex(~uint64_t{0}), "ffffffffffffffff");
}

}  // namespace
}  // namespace sps
