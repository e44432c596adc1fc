#include "report/report.h"
#include "base/error.h"
#include "base/json.h"
#include "cli/cli.h"

namespace sps {

void add_report(CLI::App& app) {
  struct Arguments {
    std::vector<std::string> runs;
    std::string data;
    bool json = false;
  };
  auto args = std::make_shared<Arguments>();
  CLI::App* cmd = app.add_subcommand("report", "Compare runs in one table");
  cmd->footer("Example:\n  sps report runs/demo_standard_4m runs/demo_sps_w16_tok_4m --data data/text");
  cmd->add_option("runs", args->runs, "Run directories; costs are relative to the first")->required();
  cmd->add_option("--data", args->data, "Also print the unigram entropy of this data set's validation split");
  cmd->add_flag("--json", args->json, "Print one JSON object");
  cmd->callback([args] {
    std::vector<RunSummary> runs;
    for (const std::string& dir : args->runs) runs.push_back(summarise_run(dir));
    double entropy = 0;
    if (!args->data.empty()) entropy = unigram_entropy(TokenFile::open(args->data, "val"));
    if (args->json) {
      nlohmann::ordered_json j{{"runs", report_json(runs)}};
      if (!args->data.empty()) j["unigram_entropy"] = entropy;
      fmt::print("{}\n", dump_json(j));
      return;
    }
    fmt::print("{}\n{}", report_table(runs), report_footer(runs));
    if (!args->data.empty())
      fmt::print("unigram entropy of the validation text: {:.4f} nats/token\n", entropy);
  });
}

}  // namespace sps
