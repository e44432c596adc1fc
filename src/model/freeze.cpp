#include "model/freeze.h"

#include "base/error.h"

namespace sps {

bool Freeze::covers(std::string_view parameter) const {
  return (state && (parameter == "embed" || parameter.starts_with("state."))) ||
         (read_head && parameter.starts_with("read_head."));
}

void check_freezable(const ModelConfig& c) {
  constexpr std::string_view tower = "a frozen state tower (freeze.from)";
  if (!c.has_pred())
    usage_error(
        "{} needs a prediction tower to train (model.pred_layers > 0), but model.family = {} has none", tower,
        c.family);
  if (c.tie_head)
    usage_error("{} needs model.tie_head = false: a tied head would be frozen with the embedding", tower);
  if (c.share.any())
    usage_error("{} needs model.share = none, found {}: what both towers share would be frozen in both",
                tower, share_text(c.share));
  if (c.ffn == FfnMode::pooled)
    usage_error("{} needs model.ffn = separate: a pooled layer feeds the prediction stream into the state",
                tower);
  if (!c.xp.empty())
    usage_error("{} needs model.band.xp = none, found {}: the state must not read the prediction stream",
                tower, band_text(c.xp));
  if (c.pred_input == PredInput::row)
    usage_error(
        "{} cannot have model.pred_input = row: the row would have to learn, and the embedding is frozen; "
        "use "
        "vector, table, token or state",
        tower);
}

}  // namespace sps
