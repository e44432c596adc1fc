// Batch: rows of windows as the models read them (model spec, section 4).
//
//   tokens          input ids
//   targets         the next id, or -1 where the position carries no loss: its input is end of text
//                   (but see SpecialIds::eot_begins) or padding
//   document_start  index, within the row, of the first position of the position's document. End of text
//                   closes its document and belongs to it; each padding position is a document of its own.
//   positions       index among the row's tokens that are not padding; padding has 0
//   scored          positions with a target: the denominator of the loss
//
// Padding stands at the left of a row only; padding after a token is an error.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/token_file.h"

namespace sps {

struct SpecialIds {
  int32_t eot;
  int32_t pad = -1;         // -1: there is none
  bool eot_begins = false;  // end of text opens the document behind it instead, and carries a loss
};

struct Batch {
  int64_t batch = 0, length = 0;
  std::vector<int32_t> tokens, targets, document_start, positions;  // batch x length each
  int64_t scored = 0;

  // Both reuse the vectors' memory. `windows`: rows of length + 1 ids, one after the other.
  void fill(std::span<const int32_t> windows, int64_t length, SpecialIds special);
  void fill(const TokenFile& file, std::span<const int64_t> starts, int64_t length, SpecialIds special);

 private:
  void resize(int64_t rows, int64_t row_length);
  void finish_row(int64_t row, int32_t next,
                  SpecialIds special);  // all but tokens, from tokens and the id after them
};

}  // namespace sps
