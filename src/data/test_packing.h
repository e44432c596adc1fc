// For tests: gzip and zstd data.
#pragma once

#include <zlib.h>
#include <zstd.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace sps {

inline std::string gzip(std::string_view text) {
  z_stream state{};
  SPS_CHECK(deflateInit2(&state, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string packed(deflateBound(&state, text.size()), '\0');
  state.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  state.avail_in = uInt(text.size());
  state.next_out = reinterpret_cast<Bytef*>(packed.data());
  state.avail_out = uInt(packed.size());
  SPS_CHECK(deflate(&state, Z_FINISH) == Z_STREAM_END);
  packed.resize(state.total_out);
  deflateEnd(&state);
  return packed;
}

inline std::string zstd(std::string_view text) {
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  const size_t size = ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 3);
  SPS_CHECK(!ZSTD_isError(size));
  packed.resize(size);
  return packed;
}

inline std::string repeat(std::string_view text, size_t times) {
  std::string all;
  all.reserve(text.size() * times);
  for (size_t i = 0; i < times; ++i) all += text;
  return all;
}

}  // namespace sps
