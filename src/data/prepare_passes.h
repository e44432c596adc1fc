// The two passes of prepare() (prepare.h).
#pragma once

#include <csignal>

#include "data/prepare.h"
#include "data/prepare_work.h"
#include "tokenizer/tokenizer.h"

namespace sps {

// Thrown inside prepare_until() when it is to stop.
struct PrepareStopped {};

// What both passes tell and ask on their way.
struct PrepareHooks {
  const PrepareReport& progress;
  const volatile std::sig_atomic_t* stop;  // may be null
  void report(const PrepareProgress& state) const {
    if (progress) progress(state);
  }
  bool stopping() const { return stop != nullptr && *stop != 0; }
};

// Pass 1: from work.state to the end of the input. Before PrepareStopped leaves it everything that was
// tokenised is saved, if `resumable`.
void tokenise_documents(DocumentReader& reader, const Tokenizer& tokenizer, const PrepareOptions& options,
                        bool resumable, PrepareWork& work, const PrepareHooks& hooks);

// Pass 2: makes the writers, which the caller commits, and fills in the splits of `meta`.
struct OrderedFiles {
  std::unique_ptr<TokenWriter> train, val;
};
OrderedFiles write_in_order(const PrepareOptions& options, const PrepareWork& work, TokenMeta& meta,
                            const PrepareHooks& hooks);

}  // namespace sps
