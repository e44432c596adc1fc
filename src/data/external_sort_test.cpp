#include "data/external_sort.h"

#include "base/rng.h"
#include "base/test_dir.h"
#include "base/test_limits.h"

namespace sps {
namespace {

struct Item {
  uint32_t key, number;
  bool operator==(const Item&) const = default;
};
struct ByKey {
  bool operator()(const Item& a, const Item& b) const { return a.key < b.key; }
};
using Sorter = ExternalSorter<Item, ByKey>;

std::vector<Item> items(uint32_t count, uint32_t keys) {
  const Rng rng(3, "items");
  std::vector<Item> list;
  for (uint32_t i = 0; i < count; ++i) list.push_back({uint32_t(rng.below(i, keys)), i});
  return list;
}

std::vector<Item> sorted_by(Sorter& sorter, const std::vector<Item>& list) {
  for (const Item& item : list) sorter.add(item);
  sorter.finish();
  std::vector<Item> out;
  for (Item item; sorter.next(item);) out.push_back(item);
  Item none;
  EXPECT_FALSE(sorter.next(none));
  return out;
}

TEST(ExternalSorter, AnyMemoryGivesTheOrderOfASort) {
  const TestDir dir;
  struct All {
    bool operator()(const Item& a, const Item& b) const {
      return a.key != b.key ? a.key < b.key : a.number < b.number;
    }
  };
  for (const uint32_t count : {0u, 1u, 2u, 3u, 1000u}) {
    const auto list = items(count, 50);
    auto want = list;
    std::sort(want.begin(), want.end(), All());
    for (const size_t memory : {1u, 17u, 1000u, 8000u, 1u << 20}) {
      ExternalSorter<Item, All> sorter(dir / "runs", memory);
      for (const Item& item : list) sorter.add(item);
      sorter.finish();
      EXPECT_EQ(sorter.size(), count);
      EXPECT_EQ(sorter.runs() > 0, count > std::max<size_t>(memory / sizeof(Item), 2));
      std::vector<Item> out;
      for (Item item; sorter.next(item);) out.push_back(item);
      EXPECT_EQ(out, want) << count << " records, " << memory << " bytes";
    }
    EXPECT_EQ(dir.count_entries(), 0u) << "the runs are removed";
  }
}

TEST(ExternalSorter, RecordsThatAreEqualAllComeOut) {
  const TestDir dir;
  Sorter sorter(dir / "runs", 80);
  auto out = sorted_by(sorter, items(500, 1));
  EXPECT_GE(sorter.runs(), 50u);
  std::sort(out.begin(), out.end(), [](const Item& a, const Item& b) { return a.number < b.number; });
  EXPECT_EQ(out, items(500, 1));
}

TEST(ExternalSorter, AFullDiskIsAnErrorThatNamesTheFile) {
  const TestDir dir;
  Sorter sorter(dir / "runs", 800);
  const std::string sentence = error_of([&] {
    const FileSizeLimit limit(1000);
    for (const Item& item : items(500, 9)) sorter.add(item);
  });
  EXPECT_PRED2(mentions, sentence, (dir / "runs").string());
}

}  // namespace
}  // namespace sps
