// The command line: main and one small file per sub-command. Each adds itself to the app; its callback does
// the work. Errors leave as sps::Error and become one sentence on standard error and exit status 1 or 2.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

#include "infer/sampling.h"
#include "tokenizer/tokenizer.h"

namespace sps {

int run_command_line(int argc, const char* const* argv);

void add_prepare(CLI::App& app);
void add_data(CLI::App& app);
void add_train(CLI::App& app);
void add_eval(CLI::App& app);
void add_generate(CLI::App& app);
void add_info(CLI::App& app);
void add_bench(CLI::App& app);
void add_report(CLI::App& app);
void add_tokenizer(CLI::App& app);
void add_convert(CLI::App& app);

// --eot and --pattern, for a command that takes a tokenizer by its files.
void add_tokenizer_options(CLI::App* cmd, TokenizerOptions& options);

// --temperature, --top-k, --top-p, --min-p, --repetition-penalty, --seed: how the next token is chosen.
void add_sampling_options(CLI::App* cmd, SamplingOptions& sampling);

// --threads, for a command that works on the CPU; 0: all cores.
void add_threads_option(CLI::App* cmd, int& threads);

// Error if what has been written to standard output does not get there: a full disk, a closed file.
void flush_output();

// A sub-command's exit status other than 0 (interrupted training).
void set_exit_status(int status);

}  // namespace sps
