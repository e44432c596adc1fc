#include "data/data_report.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <unordered_map>

#include "base/error.h"
#include "data/data_tokenizer.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kPiece = 1 << 16;

// Most files have small ids; a damaged one may have any.
class Counter {
 public:
  void add(int32_t id) {
    if (size_t(id) < small_.size())
      ++small_[size_t(id)];
    else
      ++large_[id];
  }
  std::vector<TokenCount> sorted() const {
    std::vector<TokenCount> counts;
    for (size_t id = 0; id < small_.size(); ++id)
      if (small_[id] > 0) counts.push_back({int32_t(id), small_[id]});
    for (const auto& [id, count] : large_) counts.push_back({id, count});
    std::sort(counts.begin(), counts.end(), [](const TokenCount& a, const TokenCount& b) {
      return a.count != b.count ? a.count > b.count : a.id < b.id;
    });
    return counts;
  }

 private:
  std::vector<uint64_t> small_ = std::vector<uint64_t>(size_t{1} << 18);
  std::unordered_map<int32_t, uint64_t> large_;
};

void check_split(const fs::path& folder, const char* name) {
  const TokenFile file = TokenFile::open(folder, name);
  const TokenMeta& meta = *file.meta();
  const SplitMeta& split = name == std::string_view("train") ? meta.train : meta.val;
  const std::string path = file.path().string();
  file.verify();
  const TokenStatistics found = token_statistics(file, meta.eot);
  if (found.unfinished_tokens > 0)
    fail("{}: the last id should be end of text ({}), but {} tokens follow the last one", path, meta.eot,
         found.unfinished_tokens);
  if (found.documents != split.documents)
    fail("{}: has {} documents, but meta.json says {}", path, found.documents, split.documents);
  // A byte is a token here; other tokenizers may add or change some.
  if (meta.tokenizer == ByteTokenizer().name() && split.text_bytes > 0 &&
      split.text_bytes != found.tokens - found.documents)
    fail("{}: its tokens stand for {} bytes of text, but meta.json says {}", path,
         found.tokens - found.documents, split.text_bytes);
}

}  // namespace

double TokenStatistics::mean_length() const {
  return documents == 0 ? 0 : double(tokens - unfinished_tokens) / double(documents);
}

uint64_t TokenStatistics::length_quantile(double share) const {
  const uint64_t wanted = uint64_t(std::ceil(share * double(documents)));
  uint64_t seen = 0;
  for (const auto& [length, count] : lengths)
    if ((seen += count) >= wanted) return length;
  return 0;
}

std::vector<uint64_t> TokenStatistics::length_histogram() const {
  std::vector<uint64_t> bins;
  for (const auto& [length, count] : lengths) {
    const size_t bin = size_t(std::bit_width(length)) - 1;  // a length is at least 1: the end of text
    if (bins.size() <= bin) bins.resize(bin + 1);
    bins[bin] += count;
  }
  return bins;
}

TokenStatistics token_statistics(const TokenFile& file, int32_t eot) {
  TokenStatistics found;
  found.tokens = uint64_t(file.size());
  Counter counter;
  std::vector<int32_t> ids(kPiece);
  uint64_t length = 0;
  for (int64_t begin = 0; begin < file.size(); begin += kPiece) {
    const int64_t n = std::min(kPiece, file.size() - begin);
    file.read(begin, n, ids.data());
    for (int64_t i = 0; i < n; ++i) {
      counter.add(ids[size_t(i)]);
      ++length;
      if (ids[size_t(i)] != eot) continue;
      ++found.lengths[length];
      ++found.documents;
      length = 0;
    }
  }
  found.unfinished_tokens = length;
  found.counts = counter.sorted();
  return found;
}

void check_data_set(const fs::path& folder) {
  const auto meta = read_token_meta(folder);
  if (!meta) fail("{} is not a data set: it has no meta.json", folder.string());
  const bool narrow = meta->type == TokenType::u16;
  if (narrow ? token_type_for(meta->vocab_size) != TokenType::u16 : meta->format == TokenFormat::raw)
    fail("{}: ids of type {} do not go with the format {} and a vocabulary of {}",
         (folder / "meta.json").string(), token_type_name(meta->type), token_format_name(meta->format),
         meta->vocab_size);
  const auto tokenizer = data_set_tokenizer(folder, *meta);
  if (tokenizer && (tokenizer->vocab_size() != meta->vocab_size || tokenizer->eot() != meta->eot))
    fail("{}: says {} ids with end of text {}, but its tokenizer has {} and {}",
         (folder / "meta.json").string(), meta->vocab_size, meta->eot, tokenizer->vocab_size(),
         tokenizer->eot());
  for (const char* name : {"train", "val"}) check_split(folder, name);
}

}  // namespace sps
