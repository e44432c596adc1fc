// For the spanning tests: a model of bytes with a context of 32, trained for a second, in the folder "run".
#pragma once

#include <memory>

#include "base/test_files.h"
#include "data/test_corpus.h"
#include "program.h"

namespace sps {

class ByteModel : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = std::make_unique<TestDir>();
    make_test_data(*dir_);
    const Outcome o = run_program(
        dir_->path(),
        Arguments{"train", "demo_sps_w4_15k", "data.dir=data", "run.dir=run", "run.dtype=f32"} +
            tiny_model() +
            Arguments{"train.tokens=15360", "schedule.warmup_tokens=1280", "schedule.decay_tokens=3840"});
    ASSERT_EQ(o.status, 0) << o.err;
  }
  static void TearDownTestSuite() { dir_.reset(); }

  static inline std::unique_ptr<TestDir> dir_;
};

}  // namespace sps
