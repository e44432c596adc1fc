#include "data/batch.h"

#include <algorithm>

#include "base/error.h"

namespace sps {

void Batch::resize(int64_t rows, int64_t row_length) {
  batch = rows;
  length = row_length;
  scored = 0;
  for (auto* values : {&tokens, &targets, &document_start, &positions})
    values->resize(size_t(rows * row_length));
}

void Batch::fill(std::span<const int32_t> windows, int64_t row_length, SpecialIds special) {
  SPS_CHECK(row_length >= 1 && windows.size() % size_t(row_length + 1) == 0);
  resize(int64_t(windows.size()) / (row_length + 1), row_length);
  for (int64_t row = 0; row < batch; ++row) {
    const auto window = windows.subspan(size_t(row * (length + 1)), size_t(length + 1));
    std::copy_n(window.begin(), length, tokens.begin() + row * length);
    finish_row(row, window.back(), special);
  }
}

void Batch::fill(const TokenFile& file, std::span<const int64_t> starts, int64_t row_length,
                 SpecialIds special) {
  SPS_CHECK(row_length >= 1);
  resize(int64_t(starts.size()), row_length);
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t start = starts[size_t(row)];
    file.read(start, length, tokens.data() + row * length);
    finish_row(row, file.token(start + length), special);
  }
}

void Batch::finish_row(int64_t row, int32_t next, SpecialIds special) {
  SPS_CHECK(special.pad < 0 || special.pad != special.eot);
  const int64_t at = row * length;
  const int32_t* ids = tokens.data() + at;
  int32_t pads = 0, document = 0;
  for (int32_t i = 0; i < int32_t(length); ++i) {
    const bool pad = special.pad >= 0 && ids[i] == special.pad;
    if (pad && pads < i)
      fail("position {} of row {} is padding (id {}) after a token; padding must stand at the left", i, row,
           special.pad);
    pads += pad;
    const bool border = special.eot_begins ? ids[i] == special.eot : i > 0 && ids[i - 1] == special.eot;
    if (pad || i == pads || border) document = i;
    const bool counts = !pad && (special.eot_begins || ids[i] != special.eot);
    targets[size_t(at + i)] = !counts ? -1 : i + 1 < length ? ids[i + 1] : next;
    document_start[size_t(at + i)] = document;
    positions[size_t(at + i)] = pad ? 0 : i - pads;
    scored += counts;
  }
  if (special.pad >= 0 && next == special.pad && pads < length)
    fail("the last target of row {} is padding (id {}) after a token; padding must stand at the left", row,
         special.pad);
}

}  // namespace sps
