#include "model/memory_plan.h"

#include <algorithm>

#include "model/activations.h"
#include "model/model.h"
#include "ops/attention/attention_scratch.h"
#include "ops/cross_entropy/head_cuts.h"
#include "ops/embedding/embedding_scratch.h"
#include "ops/linear/cublas_workspace.h"

namespace sps {

namespace {

// The largest request for each of device_scratch's three slots; partial sums of norms and gates are smaller
// than those of the embedding for any pass worth planning.
size_t gpu_scratch(const ModelConfig& c, const Plan& plan, const ModelOptions& o) {
  // Every position may carry a loss.
  const ops::HeadCuts head = ops::head_cuts(o.max_rows, c.vocab, o.compute, o.train);
  size_t workspace = ops::kCublasWorkspaceBytes, partial = 0;
  size_t rows = ops::head_scratch_bytes(head, o.compute, o.train);
  if (o.train) {
    for (const Stage& stage : plan.stages) {
      const bool x = stage.state >= 0 && plan.state[size_t(stage.state)] >= Need::pool;
      const bool p = stage.pred >= 0 && plan.pred[size_t(stage.pred)] >= Need::pool;
      const Tower& tower = stage.state >= 0 ? c.state : c.pred;
      const ops::AttentionScratch attention = ops::attention_backward_scratch(
          std::max<int64_t>(1, o.max_rows / c.context), std::min(c.context, o.max_rows), tower.heads,
          c.head_dim, int64_t(x) + int64_t(p), o.compute);
      rows = std::max(rows, attention.rows), workspace = std::max(workspace, attention.workspace);
    }
    for (const int64_t width : {c.state.width, c.pred.width})
      partial = std::max(partial, ops::embedding_backward_scratch_bytes(o.max_rows, width,
                                                                        c.pred_input == PredInput::token));
  }
  return workspace + partial + rows;
}

}  // namespace

MemoryPlan plan_memory(const ModelConfig& config, const ModelOptions& o) {
  const Plan plan = make_plan(config, o.eliminate_dead);
  const ModelParameters params = describe_parameters(config, o.freeze);
  const DType master = master_of(o.compute);
  const bool gpu = o.device == Device::cuda;
  const auto arena_bytes = [](const auto& lay_out) {
    Arena planning;
    lay_out(planning);
    return planning.peak();
  };
  MemoryPlan m;
  m.weights = arena_bytes([&](Arena& arena) {
    arena.take(master, 1, held_masters(params.list, o.compute, o.train, o.masters));
    if (o.compute == DType::bf16) arena.take(DType::bf16, 1, params.count());
  });
  if (o.train) {
    m.gradients = arena_bytes([&](Arena& arena) { arena.take(master, 1, params.count()); });
    m.moments = arena_bytes([&](Arena& arena) {
      std::vector<Tensor> first, second;
      lay_out_moments(params.list, master, arena, first, second);
    });
  }
  m.activations = activation_bytes({&plan, &params, o.compute, o.train, o.recompute, o.freeze}, o.max_rows);
  m.tables = Model::table_bytes(config, master) + Model::list_bytes(o.max_rows);
  if (gpu) {
    m.scratch = gpu_scratch(config, plan, o);
    m.context = kGpuContextBytes;
  }
  return m;
}

}  // namespace sps
