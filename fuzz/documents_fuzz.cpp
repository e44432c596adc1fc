// A file of documents: packed or not, text, lines of JSON or an array, under one of several names.
#include "data/documents.h"
#include "fuzz/fuzz.h"

namespace {

constexpr std::string_view kNames[] = {"x.jsonl",    "x.json",   "x.txt",     "x.jsonl.gz",
                                       "x.json.zst", "x.txt.gz", "x.txt.zst", "x.jsonl.zst"};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sps;
  static const fuzz::Scratch scratch;
  fuzz::Input input(data, size);
  const std::string_view name = kNames[input.choose(std::size(kNames))];
  const std::string file = scratch.write(name, input.rest()).string();
  const ReaderOptions options{.max_document_bytes = uint64_t{1} << 20};

  std::vector<ReaderPosition> positions;
  std::vector<std::string> records;
  const bool whole = fuzz::accepts([&] {
    DocumentReader reader({file}, options);
    positions.push_back(reader.position());
    for (RawDocument raw; records.size() < 1000 && reader.next_raw(raw);) {
      records.push_back(raw.bytes + raw.id);
      positions.push_back(reader.position());
      Document document;
      fuzz::accepts([&] { reader.parse(raw, document); });
      SPS_CHECK(reader.bytes_read() <= reader.total_bytes());
    }
  });
  // From the middle on the same records come.
  const size_t from = records.size() / 2;
  const auto read_on = [&] {
    DocumentReader reader({file}, options);
    reader.seek(positions[from]);
    SPS_CHECK(reader.position() == positions[from]);
    RawDocument raw;
    for (size_t i = from; i < records.size(); ++i) {
      SPS_CHECK(reader.next_raw(raw));
      SPS_CHECK(raw.bytes + raw.id == records[i]);
    }
  };
  if (!records.empty()) read_on();
  (void)whole;
  std::filesystem::remove(file);
  return 0;
}
