#include "data/batch.h"

#include "base/rng.h"
#include "base/test_dir.h"

namespace sps {
namespace {

using Ids = std::vector<int32_t>;
constexpr int32_t E = 100, P = 101;
constexpr SpecialIds kSpecial{E, P};

Batch batch_of(const Ids& windows, int64_t length) {
  Batch batch;
  batch.fill(windows, length, kSpecial);
  return batch;
}

// The three examples of the model spec, section 4, as first positions instead of document numbers.
TEST(Batch, DocumentsOfTheSpecsExamples) {
  EXPECT_EQ(batch_of({1, 2, 3, E, 4, 5, 6}, 6).document_start, (Ids{0, 0, 0, 0, 4, 4}));
  EXPECT_EQ(batch_of({1, E, E, E, 2, 3}, 5).document_start, (Ids{0, 0, 2, 3, 4}));
  const Batch padded = batch_of({P, P, 1, 2, E, 3, 4, 5}, 7);
  EXPECT_EQ(padded.document_start, (Ids{0, 1, 2, 2, 2, 5, 5}));
  EXPECT_EQ(padded.positions, (Ids{0, 0, 0, 1, 2, 3, 4}));
  EXPECT_EQ(padded.targets, (Ids{-1, -1, 2, E, -1, 4, 5}));
  EXPECT_EQ(padded.tokens, (Ids{P, P, 1, 2, E, 3, 4}));
  EXPECT_EQ(padded.scored, 4);
}

// One id that begins documents instead of ending them: it sees nothing before it, and predicts.
TEST(Batch, EndOfTextThatBeginsDocuments) {
  Batch batch;
  batch.fill(Ids{1, 2, E, 3, E, E, 4, 5}, 7, SpecialIds{E, -1, true});
  EXPECT_EQ(batch.document_start, (Ids{0, 0, 2, 2, 4, 5, 5}));
  EXPECT_EQ(batch.targets, (Ids{2, E, 3, E, E, 4, 5}));
  EXPECT_EQ(batch.scored, 7);
  batch.fill(Ids{P, E, 3, E, 4}, 4, SpecialIds{E, P, true});
  EXPECT_EQ(batch.document_start, (Ids{0, 1, 1, 3}));
  EXPECT_EQ(batch.targets, (Ids{-1, 3, E, 4}));
}

TEST(Batch, RowsDoNotSeeEachOther) {
  const Batch batch = batch_of({1, 2, E, /**/ 3, 4, 5, /**/ E, 6, 7}, 2);
  EXPECT_EQ(batch.batch, 3);
  EXPECT_EQ(batch.length, 2);
  EXPECT_EQ(batch.tokens, (Ids{1, 2, 3, 4, E, 6}));
  EXPECT_EQ(batch.targets, (Ids{2, E, 4, 5, -1, 7}));
  EXPECT_EQ(batch.document_start, (Ids{0, 0, 0, 0, 0, 1}));
  EXPECT_EQ(batch.positions, (Ids{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(batch.scored, 5);
}

TEST(Batch, PaddingAfterATokenIsAnError) {
  for (const Ids& window : {Ids{1, P, 2, 3}, Ids{P, 1, P, 2}, Ids{1, 2, 3, P}, Ids{P, P, E, P}})
    EXPECT_PRED2(mentions, error_of([&] { batch_of(window, 3); }), "padding");
  const Batch all_padding = batch_of({P, P, P, P}, 3);  // allowed: a row that fills up a batch
  EXPECT_EQ(all_padding.scored, 0);
  EXPECT_EQ(all_padding.targets, (Ids{-1, -1, -1}));
  EXPECT_EQ(all_padding.document_start, (Ids{0, 1, 2}));
  EXPECT_EQ(batch_of({P, P, P, 1}, 3).scored, 0);
}

TEST(Batch, WithoutAPaddingIdAnyIdIsAToken) {
  Batch batch;
  batch.fill(Ids{P, 1, P, 2}, 3, SpecialIds{E});
  EXPECT_EQ(batch.targets, (Ids{1, P, 2}));
  EXPECT_EQ(batch.document_start, (Ids{0, 0, 0}));
}

// The definitions of the spec, written naively, on random rows. peer-faults 52: the denominator counts
// exactly the positions that have a target.
TEST(Batch, AgreesWithTheDefinitionsOnRandomRows) {
  const Rng rng(1, "rows");
  uint64_t draw = 0;
  for (int round = 0; round < 300; ++round) {
    const int64_t rows = 1 + int64_t(rng.below(draw++, 4)), length = 1 + int64_t(rng.below(draw++, 40));
    Ids windows;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t pads = int64_t(rng.below(draw++, 3) == 0 ? rng.below(draw++, uint64_t(length) + 1) : 0);
      for (int64_t i = 0; i <= length; ++i)
        windows.push_back(i < pads ? P : rng.below(draw++, 4) == 0 ? E : int32_t(rng.below(draw++, 50)));
    }
    const Batch batch = batch_of(windows, length);
    int64_t with_target = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t* row = windows.data() + r * (length + 1);
      const auto document =
          [&](int64_t i) {  // of the spec: end-of-texts strictly before i plus padding, up to i
            int64_t n = 0;
            for (int64_t j = 0; j < i; ++j) n += row[j] == E || row[j] == P;
            return n;
          };
      for (int64_t i = 0; i < length; ++i) {
        const size_t at = size_t(r * length + i);
        int64_t first = i, tokens_before = 0;
        while (first > 0 && document(first - 1) == document(i)) --first;
        for (int64_t j = 0; j < i; ++j) tokens_before += row[j] != P;
        const bool scored = row[i] != E && row[i] != P;
        with_target += scored;
        ASSERT_EQ(batch.tokens[at], row[i]);
        ASSERT_EQ(batch.document_start[at], first);
        ASSERT_EQ(batch.positions[at], tokens_before);
        ASSERT_EQ(batch.targets[at], scored ? row[i + 1] : -1);
      }
    }
    ASSERT_EQ(batch.scored, with_target);
  }
}

TEST(Batch, RefillingReusesTheMemory) {
  Batch batch;
  batch.fill(Ids(4 * 11, 7), 10, kSpecial);
  const int32_t* before[] = {batch.tokens.data(), batch.targets.data(), batch.document_start.data(),
                             batch.positions.data()};
  batch.fill(Ids(2 * 6, 8), 5, kSpecial);
  EXPECT_EQ(batch.scored, 10);
  EXPECT_EQ(batch.tokens.size(), 10u);
  batch.fill(Ids(4 * 11, 9), 10, kSpecial);
  const int32_t* after[] = {batch.tokens.data(), batch.targets.data(), batch.document_start.data(),
                            batch.positions.data()};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(before[i], after[i]);
}

TEST(Batch, FromAFileEqualsFromItsWindows) {
  const TestDir dir;
  TokenWriter writer(dir / "x.bin", TokenType::u16);
  Ids ids;
  for (int i = 0; i < 50; ++i) ids.push_back(i % 7 == 3 ? E : i);
  writer.append(ids);
  writer.commit();
  const TokenFile file = TokenFile::open(dir / "x.bin");
  Batch from_file, from_windows;
  const std::vector<int64_t> starts{41, 0, 13};
  from_file.fill(file, starts, 8, kSpecial);
  Ids windows;
  for (const int64_t s : starts) windows.insert(windows.end(), ids.begin() + s, ids.begin() + s + 9);
  from_windows.fill(windows, 8, kSpecial);
  EXPECT_EQ(from_file.tokens, from_windows.tokens);
  EXPECT_EQ(from_file.targets, from_windows.targets);
  EXPECT_EQ(from_file.document_start, from_windows.document_start);
  EXPECT_EQ(from_file.positions, from_windows.positions);
  EXPECT_EQ(from_file.scored, from_windows.scored);
  EXPECT_LT(from_file.scored, 24);
}

}  // namespace
}  // namespace sps
