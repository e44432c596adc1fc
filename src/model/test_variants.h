// For tests: models built as people write them, a scale and key=value settings, and those of the two-tower
// spec by name.
#pragma once

#include <string>
#include <vector>

#include "model/family.h"
#include "model/keys.h"

namespace sps {

// `settings`: "family=sps window=64", keys without their "model.".
inline ModelKeys keys_for(std::string_view scale_name, const std::string& settings) {
  const Scale& s = *find_scale(scale_name);
  ModelKeys keys;
  keys.layers = s.layers, keys.d_model = s.d_model, keys.heads = s.heads, keys.kv_heads = s.kv_heads;
  keys.d_ffn = {s.d_ffn}, keys.context = s.context;
  OptionTable table;
  bind_model(table, keys);
  for (size_t at = 0; at < settings.size();) {
    const size_t end = std::min(settings.find(' ', at), settings.size());
    table.set_assignment("model." + settings.substr(at, end - at));
    at = end + 1;
  }
  return keys;
}

inline ModelConfig config_for(std::string_view scale, const std::string& settings) {
  return resolve(keys_for(scale, settings));
}

// The rows of the two-tower spec's tables 1.10 and 2.3, at scale s.
struct Variant {
  std::string name, settings;
  int64_t non_embedding, total;  // parameters
  int64_t published;             // FLOPs a token
  double required;               // GFLOP a token, as printed there
};

inline const std::vector<Variant>& variants() {
  constexpr int64_t kTwelve = 413'984'256, kTwentyFour = 750'773'760, kSps = 755'547'648;
  static const std::vector<Variant> all{
      {"standard tied", "family=standard", 92'031'744, 130'665'216, kTwelve, 0.3377},
      {"standard untied", "family=standard tie_head=false", 92'031'744, 169'298'688, kTwelve, 0.3377},
      {"sps tied", "family=sps window=64", 92'031'744, 130'665'216, kSps, 0.6029},
      {"sps untied", "family=sps window=64 tie_head=false", 92'031'744, 169'298'688, kSps, 0.6029},
      {"two-tower 12+12", "family=two_tower", 184'071'936, 299'972'352, kTwentyFour, 0.5981},
      {"sequential 12+12", "family=sequential", 184'071'936, 299'972'352, kTwentyFour, 0.5981},
      {"two-tower 12+12, MLP reallocation", "family=two_tower d_ffn=1152 pred_ffn=3456", 184'071'936,
       299'972'352, kTwentyFour, 0.5981},
      {"two-tower 6+6", "family=two_tower layers=6", 92'036'352, 207'936'768, kTwelve, 0.3377},
      {"sequential 6+6", "family=sequential state_layers=6 pred_layers=6", 92'036'352, 207'936'768, kTwelve,
       0.3377},
      {"sequential 3+9", "family=sequential state_layers=3 pred_layers=9", 92'038'656, 207'939'072, kTwelve,
       0.3377},
      {"sequential 9+3", "family=sequential state_layers=9 pred_layers=3", 92'034'048, 207'934'464, kTwelve,
       0.3377},
      {"sequential 6+6, pause untied", "family=sequential layers=6 pred_input=vector", 92'036'352,
       169'304'064, kTwelve, 0.3377},
      {"sequential 6+6, slim", "family=sequential layers=6 pred_input=vector tie_head=true", 92'036'352,
       130'670'592, kTwelve, 0.3377},
      {"two-tower 12+6",
       "family=two_tower pred_layers=6 d_ffn=4608,2304,2304,2304,2304,2304,2304,2304,2304,1152,1152,1152 "
       "pred_ffn=2304",
       135'397'632, 251'298'048, 577'070'592, 0.4626},
      {"two-tower 12+12, shared attention", "family=two_tower share=attention", 155'760'384, 271'660'800,
       kTwentyFour, 0.5981},
      {"free pause", "family=free_pause", 92'031'744, 130'665'984, 722'462'208, 0.5698},
      {"shared two-tower",
       "family=two_tower read.level=same read.kv=state pred_input=vector share=all tie_head=true", 92'031'744,
       130'665'984, 722'462'208, 0.5698},
      {"shared sequential", "family=free_pause read.level=final", 93'212'160, 131'846'400, 724'821'504,
       0.5722},
      {"AF-SPS faithful", "family=free_pause ffn=pooled", 92'068'608, 130'702'848, 595'060'224, 0.4425},
      // The spec prints no required value for it: the faithful one plus 12 projections of keys and values, 4
      // d^2 each.
      {"AF-SPS first", "family=free_pause ffn=pooled read.kv=own share=attention", 92'096'256, 130'730'496,
       623'371'776, 0.4708},
  };
  return all;
}

}  // namespace sps
