// What users can do wrong: every mistake gives one sentence on standard error that names it, exit status 2
// (asked for something wrong) or 1 (could not be done), nothing on standard output, and no file that was not
// there before.
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <ostream>

#include "base/test_files.h"
#include "data/test_corpus.h"
#include "model/checkpoint_files.h"
#include "program.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

struct Mistake {
  std::string name;
  Arguments arguments;
  int status;
  std::vector<std::string> mentions;  // in the sentence
};

void PrintTo(const Mistake& mistake, std::ostream* out) {
  *out << mistake.name;
}

// `sps train` of a model that would work, with `more` on top.
Arguments train(const Arguments& more, const std::string& recipe = "demo_sps_w4_15k") {
  return Arguments{"train", recipe, "data.dir=data", "run.dir=new"} + tiny_model() + more;
}
// The run that is there when the tests begin, and the same command with `more` on top.
Arguments train_again(const Arguments& more) {
  return train(Arguments{"run.dir=run", "run.dtype=f32", "train.tokens=1024", "schedule.warmup_tokens=0",
                         "schedule.decay_tokens=256"} +
               more);
}
// `sps eval` and `sps generate` of a checkpoint that works.
Arguments eval(const Arguments& more) {
  return Arguments{"eval", "run", "--data", "data"} + more;
}
Arguments generate(const Arguments& more) {
  return Arguments{"generate", "run", "--tokens", "4"} + more;
}
Arguments new_tokens(const std::string& prompt, const std::string& tokens) {
  return {"generate", "run", "--prompt", prompt, "--tokens", tokens};
}

std::vector<Mistake> mistakes() {
  const std::string text(100, 'x');
  return {
      // The command line itself.
      {"no_command", {}, 2, {"subcommand"}},
      {"unknown_command", {"trian"}, 2, {"trian"}},
      {"unknown_option", {"train", "--recipes"}, 2, {"--recipes"}},
      {"missing_argument", {"eval", "run"}, 2, {"--data"}},
      {"option_without_value", {"generate", "run", "--seed"}, 2, {"--seed"}},
      {"option_of_another_type", {"generate", "run", "--seed", "many"}, 2, {"--seed", "many"}},
      {"bench_of_nothing", {"bench"}, 2, {"subcommand"}},
      // Recipes and keys.
      {"train_nothing", {"train"}, 2, {"recipe"}},
      {"unknown_scale", {"train", "huge_sps_w4_20b"}, 2, {"huge", "demo, xs, s"}},
      {"unknown_family", {"train", "demo_spss_w4_20b"}, 2, {"spss", "family"}},
      {"unknown_recipe_part", {"train", "demo_sps_x64_20b"}, 2, {"x64"}},
      {"recipe_without_tokens", {"train", "demo_sps_w4"}, 2, {"demo_sps_w4", "number of tokens"}},
      {"window_of_a_family_without", {"train", "demo_standard_w4_4m"}, 2, {"window"}},
      {"pooled_without_a_prediction_stream", {"train", "demo_standard_pooled_4m"}, 2, {"pooled"}},
      {"unknown_key", train({"optim.lrr=1e-3"}), 2, {"optim.lrr", "'optim.lr'?"}},
      {"key_without_value", train({"optim.lr"}), 2, {"optim.lr"}},
      {"wrong_type", train({"train.tokens=many"}), 2, {"train.tokens", "many", "integer"}},
      {"out_of_range", train({"train.micro_batch=0"}), 2, {"train.micro_batch", "0", "at least 1"}},
      {"rate_below_zero", train({"optim.lr=-1"}), 2, {"optim.lr", "-1"}},
      {"negative_window", train({"window=-3"}), 2, {"window", "-3"}},
      {"micro_batch_not_dividing", train({"train.micro_batch=3"}), 2, {"train.micro_batch = 3", "8"}},
      {"schedule_longer_than_the_run",
       train({"schedule.warmup_tokens=9999999"}),
       2,
       {"schedule.warmup_tokens"}},
      {"bad_dtype", train({"run.dtype=fp8"}), 2, {"fp8", "bf16"}},
      {"bad_device", train({"run.device=tpu"}), 2, {"run.device", "tpu", "cpu"}},
      {"bad_optimizer", train({"optim.name=sgd"}), 2, {"optim.name", "sgd"}},
      {"heads_not_dividing", train({"d_model=33"}), 2, {"33", "heads"}},
      {"empty_band", train({"band.px=5:2"}), 2, {"band.px", "5:2"}},
      {"malformed_band", train({"band.xp=some"}), 2, {"band.xp", "some"}},
      {"phase_of_a_model_without_one", train({"phase.at=0.5"}), 2, {"phase.at"}},
      {"phase_that_never_ends", train({"phase.at=1"}, "demo_free_pause_15k"), 2, {"phase.at = 1"}},
      {"missing_toml", {"train", "nowhere.toml"}, 1, {"nowhere.toml"}},
      {"malformed_toml", {"train", "malformed.toml"}, 2, {"malformed.toml", "2"}},
      {"unknown_toml_key", {"train", "unknown.toml"}, 2, {"unknown.toml", "optim.learning", "key"}},
      // Data.
      {"no_data_dir", {"train", "demo_standard_15k", "run.dir=new"}, 2, {"data.dir", "sps prepare"}},
      {"missing_data", train({"data.dir=nowhere"}), 1, {"nowhere"}},
      {"vocabulary_too_small", train({"vocab=100"}), 2, {"model.vocab = 100", "257"}},
      {"other_end_of_text", train({"eot=7"}), 2, {"model.eot = 7", "256"}},
      {"context_longer_than_the_data",
       train({"context=100000", "train.tokens=4e6"}),
       1,
       {"train.bin", "100001"}},
      {"no_validation_tokens", train({"data.dir=noval", "eot=256", "vocab=320"}), 1, {"val.bin"}},
      {"empty_validation", train({"data.dir=emptyval", "eot=256", "vocab=320"}), 1, {"val.bin", "0 tokens"}},
      {"odd_sized_tokens", {"eval", "run", "--data", "odd.bin"}, 1, {"odd.bin", "5"}},
      {"ids_outside_the_vocabulary", {"eval", "run", "--data", "large.bin"}, 1, {"large.bin", "4096"}},
      {"damaged_meta", train({"data.dir=badmeta"}), 1, {"meta.json"}},
      {"unknown_split", eval({"--split", "test"}), 1, {"test"}},
      // Run directories.
      {"run_below_a_file", train({"run.dir=file/run"}), 1, {"file"}},
      {"run_is_a_file", train({"run.dir=file"}), 1, {"file"}},
      {"run_of_another_model", train_again({"layers=3"}), 1, {"run", "model.layers = 2", "3"}},
      {"run_with_another_seed", train_again({"train.seed=5"}), 1, {"train.seed"}},
      {"run_of_another_dtype", train_again({"run.dtype=bf16"}), 1, {"run.dtype", "f32", "bf16"}},
      // Checkpoints.
      {"missing_checkpoint", {"eval", "nowhere", "--data", "data"}, 2, {"nowhere"}},
      {"folder_without_checkpoint", {"eval", "data", "--data", "data"}, 2, {"data"}},
      {"truncated_checkpoint", {"eval", "cut", "--data", "data"}, 1, {"weights.safetensors"}},
      {"changed_checkpoint", {"generate", "flipped", "--prompt", "a"}, 1, {"weights.safetensors"}},
      {"checkpoint_with_other_weights", {"eval", "mixed", "--data", "data"}, 1, {"mixed"}},
      {"info_of_nothing", {"info", "nowhere"}, 2, {"nowhere"}},
      {"info_with_a_bad_key", {"info", "demo_sps_w4_4m", "bandd.xx=0:3"}, 2, {"bandd.xx"}},
      // Evaluation and generation.
      {"batch_of_nothing", eval({"--batch", "0"}), 2, {"--batch", "0"}},
      {"negative_tokens", eval({"--tokens", "-1"}), 2, {"--tokens", "-1"}},
      {"eval_dtype", eval({"--dtype", "int8"}), 2, {"int8"}},
      {"int8_in_f32",
       generate({"--weights", "int8", "--dtype", "f32", "--device", "cpu"}),
       2,
       {"--weights int8", "f32", "--dtype bf16"}},
      {"unknown_weights", generate({"--weights", "int4"}), 2, {"--weights", "int4"}},
      {"prompt_too_long", generate({"--prompt", text}), 2, {"100", "32"}},
      {"temperature_below_zero", generate({"--temperature", "-1"}), 2, {"temperature = -1"}},
      {"temperature_not_a_number", generate({"--temperature", "nan"}), 2, {"temperature"}},
      {"top_p_zero", generate({"--top-p", "0"}), 2, {"top_p = 0"}},
      {"top_k_below_zero", generate({"--top-k", "-2"}), 2, {"top_k = -2"}},
      {"min_p_above_one", generate({"--min-p", "1.5"}), 2, {"min_p = 1.5"}},
      {"repetition_penalty_zero", generate({"--repetition-penalty", "0"}), 2, {"repetition_penalty = 0"}},
      {"empty_stop_string", generate({"--stop", ""}), 2, {"stop string is empty"}},
      {"no_sequences", generate({"--sequences", "0"}), 2, {"--sequences"}},
      {"missing_prompts", generate({"--file", "nowhere.jsonl"}), 1, {"nowhere.jsonl"}},
      {"prompts_and_prompt", generate({"--file", "nowhere.jsonl", "--prompt", "a"}), 2, {"--file"}},
      {"too_many_new_tokens",
       new_tokens("a", "9223372036854775807"),
       2,
       {"9223372036854775807", "context of 32"}},
      {"more_new_tokens_than_numbers",
       new_tokens("a", "9223372036854775808"),
       2,
       {"--tokens", "9223372036854775808"}},
      {"new_tokens_in_octal", new_tokens("a", "010"), 2, {"--tokens", "010"}},
      {"new_tokens_below_zero", new_tokens("a", "-1"), 2, {"-1", "0 or more"}},
      {"prompt_that_leaves_no_room",
       new_tokens(text.substr(0, 32), "1"),
       2,
       {"32 tokens and 1 new", "context of 32"}},
      {"prompt_longer_than_the_context",
       new_tokens(text.substr(0, 33), "0"),
       2,
       {"33 tokens and 0 new", "context of 32"}},
      {"log_probabilities_without_json",
       generate({"--log-probabilities"}),
       2,
       {"--log-probabilities", "--json"}},
      {"too_many_threads", generate({"--threads", "1000000"}), 2, {"--threads"}},
      {"threads_below_zero", generate({"--threads", "-1"}), 2, {"--threads"}},
      {"seed_below_zero", generate({"--seed", "-1"}), 2, {"--seed", "-1"}},
      {"seed_of_65_bits",
       generate({"--seed", "18446744073709551616"}),
       2,
       {"--seed", "18446744073709551615"}},
      {"prompts_of_no_name", generate({"--file", ""}), 2, {"--file is empty"}},
      {"no_prompt_in_a_text", generate({"--file", "empty.txt"}), 1, {"empty.txt", "no prompt"}},
      {"no_prompt_in_json", generate({"--file", "blank.jsonl"}), 1, {"blank.jsonl", "no prompt"}},
      {"prompts_from_a_run", generate({"--file", "run"}), 1, {"run"}},
      {"prompt_of_another_field",
       generate({"--file", "data.jsonl"}),
       1,
       {"data.jsonl:1", "prompt", "--text-field"}},
      {"prompt_of_a_number", generate({"--file", "number.jsonl"}), 1, {"number.jsonl:1", "prompt"}},
      {"prompt_of_a_list", generate({"--file", "list.jsonl"}), 1, {"list.jsonl:1", "prompt"}},
      {"prompt_of_an_object", generate({"--file", "object.jsonl"}), 1, {"object.jsonl:1", "prompt"}},
      {"prompt_that_is_no_object", generate({"--file", "string.jsonl"}), 1, {"string.jsonl:1"}},
      {"prompt_that_is_not_utf8", generate({"--file", "latin1.jsonl"}), 1, {"latin1.jsonl:1", "UTF-8"}},
      {"prompt_with_a_nul", generate({"--file", "nul.jsonl"}), 1, {"nul.jsonl:1", "control character"}},
      {"prompt_of_a_file_too_long", generate({"--file", "long.jsonl"}), 2, {"long.jsonl:1", "40 tokens"}},
      {"unknown_tokenizer", generate({"--tokenizer", "words"}), 2, {"words", "bytes"}},
      // Preparation.
      {"prepare_missing_file", {"prepare", "nowhere.txt", "--out", "new"}, 1, {"nowhere.txt"}},
      {"prepare_empty_text", {"prepare", "empty.txt", "--out", "new"}, 1, {"no text in the input"}},
      {"prepare_malformed_json", {"prepare", "malformed.jsonl", "--out", "new"}, 1, {"malformed.jsonl:2"}},
      {"prepare_without_the_field",
       {"prepare", "data.jsonl", "--text-field", "body", "--out", "new"},
       1,
       {"body"}},
      {"prepare_below_a_file", {"prepare", "data.jsonl", "--out", "file/data"}, 1, {"file"}},
      {"prepare_over_other_data", {"prepare", "malformed.toml", "--out", "data"}, 1, {"data", "--force"}},
      {"prepare_all_for_validation",
       {"prepare", "data.jsonl", "--out", "new", "--val-fraction", "2"},
       2,
       {"2"}},
      // Tokenizers.
      {"tokenizer_of_nothing", {"tokenizer"}, 2, {"subcommand"}},
      {"tokenizer_missing", {"tokenizer", "info", "nowhere"}, 2, {"nowhere"}},
      {"tokenizer_missing_text", {"tokenizer", "train", "nowhere.txt", "--out", "new"}, 1, {"nowhere.txt"}},
      {"tokenizer_of_no_text", {"tokenizer", "train", "empty.txt", "--out", "new"}, 1, {"no text"}},
      {"tokenizer_too_small",
       {"tokenizer", "train", "data.jsonl", "--out", "new", "--vocab-size", "256"},
       2,
       {"vocab_size", "256", "257"}},
      {"tokenizer_unknown_pattern",
       {"tokenizer", "train", "data.jsonl", "--out", "new", "--pattern", "gpt3"},
       2,
       {"gpt3", "llama3"}},
      {"tokenizer_malformed_pattern",
       {"tokenizer", "train", "data.jsonl", "--out", "new", "--pattern", "(a"},
       1,
       {"(a"}},
      {"tokenizer_below_a_file", {"tokenizer", "train", "data.jsonl", "--out", "file/tok"}, 1, {"file"}},
      {"tokenizer_in_a_missing_folder",
       {"tokenizer", "train", "data.jsonl", "--out", "new/tok.json"},
       1,
       {"new/tok.json"}},
      {"tokenizer_over_another_file",
       {"tokenizer", "train", "data.jsonl", "--vocab-size", "260", "--out", "other.json"},
       1,
       {"other.json", "--force"}},
      {"tokenizer_end_twice",
       {"tokenizer", "train", "data.jsonl", "--out", "new", "--eot", "</s>", "--special", "</s>"},
       2,
       {"</s>", "twice"}},
      {"encode_two_texts", {"tokenizer", "encode", "a", "--file", "data.jsonl"}, 2, {"--file"}},
      {"decode_an_unknown_id", {"tokenizer", "decode", "65", "300"}, 2, {"300", "256"}},
      {"decode_a_word", {"tokenizer", "decode", "65x"}, 2, {"65x"}},
      {"prepare_unknown_format",
       {"prepare", "data.jsonl", "--out", "new", "--format", "zip"},
       2,
       {"zip", "llmc"}},
      {"prepare_unknown_split",
       {"prepare", "data.jsonl", "--out", "new", "--split-by", "line"},
       2,
       {"line", "id"}},
      {"prepare_unknown_tokenizer",
       {"prepare", "data.jsonl", "--out", "new", "--tokenizer", "words"},
       2,
       {"words"}},
      {"data_of_nothing", {"data"}, 2, {"subcommand"}},
      {"data_show_missing", {"data", "show", "nowhere"}, 1, {"nowhere"}},
      {"data_show_without_tokenizer", {"data", "show", "large.bin"}, 2, {"large.bin", "--tokenizer"}},
      {"data_show_context", {"data", "show", "data", "--context", "0"}, 2, {"--context", "0"}},
      {"data_check_damaged", {"data", "check", "badmeta"}, 1, {"meta.json"}},
      {"data_check_a_run", {"data", "check", "run"}, 1, {"run", "meta.json"}},
      // Reports.
      {"report_of_nothing", {"report", "nowhere"}, 1, {"nowhere"}},
      {"report_of_data", {"report", "run", "data"}, 1, {"data"}},
      {"report_of_damaged_metrics", {"report", "run", "badmetrics"}, 1, {"metrics.jsonl"}},
      {"report_with_missing_data", {"report", "run", "--data", "nowhere"}, 1, {"nowhere"}},
  };
}

class BadInput : public testing::TestWithParam<Mistake> {
 protected:
  static void SetUpTestSuite() {
    dir_ = std::make_unique<TestDir>();
    make_test_data(*dir_);
    const Outcome o = run_program(dir_->path(), train_again({}));
    ASSERT_EQ(o.status, 0) << o.err;
    dir_->write("file", "not a folder");
    dir_->write("malformed.toml", "[optim]\nlr = = 3\n");
    dir_->write("unknown.toml", "[optim]\nlearning = 3\n");
    dir_->write("malformed.jsonl", "{\"text\": \"fine\"}\n{\"text\": \"no end\n");
    dir_->write("empty.txt", "");
    dir_->write("other.json", "{}");
    dir_->write("blank.jsonl", "\n  \n");
    dir_->write("number.jsonl", "{\"prompt\": 5}\n");
    dir_->write("list.jsonl", "{\"prompt\": [\"a\", \"b\"]}\n");
    dir_->write("object.jsonl", "{\"prompt\": {}}\n");
    dir_->write("string.jsonl", "\"a\"\n");
    dir_->write("latin1.jsonl", "{\"prompt\": \"caf\xE9\"}\n");
    dir_->write("nul.jsonl", std::string("{\"prompt\": \"a\0b\"}\n", 17));
    dir_->write("long.jsonl", "{\"prompt\": \"" + std::string(40, 'x') + "\"}\n");
    dir_->write("odd.bin", "12345");
    std::string ids;
    for (int i = 0; i < 200; ++i) ids += std::string("\0\x10", 2);  // 4096
    dir_->write("large.bin", ids);
    const std::string train_bin = read_text(*dir_ / "data/train.bin");
    dir_->write("noval/train.bin", train_bin);
    dir_->write("emptyval/train.bin", train_bin);
    dir_->write("emptyval/val.bin", "");
    fs::copy(*dir_ / "data", *dir_ / "badmeta");
    dir_->write("badmeta/meta.json", "{\"tokenizer\": \"bytes\", ");
    const fs::path checkpoint = latest_checkpoint(*dir_ / "run")->path;
    const auto damage = [&](const char* name, const auto& change) {
      fs::copy(checkpoint, *dir_ / name, fs::copy_options::recursive);
      change(*dir_ / name / kWeightsFile);
    };
    damage("cut", [](const fs::path& file) { fs::resize_file(file, fs::file_size(file) / 2); });
    damage("flipped", [](const fs::path& file) {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekp(-1, std::ios::end);
      stream.put('\x55');
    });
    fs::copy(checkpoint, *dir_ / "mixed", fs::copy_options::recursive);
    fs::copy(*dir_ / "mixed" / kOptimizerFile, *dir_ / "mixed" / kWeightsFile,
             fs::copy_options::overwrite_existing);
    fs::copy(*dir_ / "run", *dir_ / "badmetrics", fs::copy_options::recursive);
    dir_->write("badmetrics/metrics.jsonl", "{\"step\": 1, \"tokens\": 64, \"seconds\": }\n");
  }
  static void TearDownTestSuite() { dir_.reset(); }

  static inline std::unique_ptr<TestDir> dir_;
};

TEST_P(BadInput, IsOneSentence) {
  const Mistake& mistake = GetParam();
  const auto before = folder_content(dir_->path());
  const Outcome o = run_program(dir_->path(), mistake.arguments);
  EXPECT_EQ(o.status, mistake.status) << o.err;
  EXPECT_EQ(o.signal, 0) << o.err;
  EXPECT_EQ(o.out, "");
  EXPECT_EQ(lines_of(o.err).size(), 1u) << o.err;
  EXPECT_TRUE(o.err.starts_with("sps: ") && o.err.ends_with('\n')) << o.err;
  for (const std::string& what : mistake.mentions) EXPECT_PRED2(mentions, o.err, what);
  const auto after = folder_content(dir_->path());
  for (const auto& [name, bytes] : after) EXPECT_TRUE(before.contains(name)) << "left behind: " << name;
  EXPECT_TRUE(after == before) << "a file has changed";
  fs::remove_all(*dir_ / "new");
}

INSTANTIATE_TEST_SUITE_P(Commands, BadInput, testing::ValuesIn(mistakes()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace sps
