#include "base/hash.h"

#include <fmt/format.h>
#include <xxhash.h>

#include "base/error.h"

namespace sps {

uint64_t hash64(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

struct Hasher::State {
  XXH3_state_t* xxh;
};

Hasher::Hasher() : state_(new State{XXH3_createState()}) {
  SPS_CHECK(state_->xxh != nullptr);
  XXH3_64bits_reset(state_->xxh);
}
Hasher::~Hasher() { XXH3_freeState(state_->xxh); }
void Hasher::update(const void* data, size_t bytes) { XXH3_64bits_update(state_->xxh, data, bytes); }
uint64_t Hasher::digest() const { return XXH3_64bits_digest(state_->xxh); }

std::string hex(uint64_t hash) { return fmt::format("{:016x}", hash); }

}  // namespace sps
