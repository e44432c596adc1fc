// GFLOP/s of the three products of a linear layer, each beside oneDNN's own product of the whole problem
// ("Plain"). Arguments: rows, in, out, threads.
#include <benchmark/benchmark.h>

#include <dnnl.hpp>

#include "base/threads.h"
#include "ops/check.h"
#include "ops/linear/linear.h"

namespace sps::ops {
namespace {

struct Problem {
  int64_t rows, in, out;
  int before = thread_count();
  Matrix x, w, y, dw;

  Problem(const benchmark::State& state, DType act)
      : rows(state.range(0)),
        in(state.range(1)),
        out(state.range(2)),
        x(act, rows, in),
        w(act, out, in),
        y(act, rows, out),
        dw(DType::f32, out, in) {
    set_thread_count(int(state.range(3)));
    // Values do not matter for time, except that zeros may be unusually cheap.
    x.fill(0.5), w.fill(-0.25), y.fill(0.125), dw.fill(0);
  }
  ~Problem() { set_thread_count(before); }
  void report(benchmark::State& state) const {
    const double flops = 2.0 * double(rows) * double(in) * double(out);
    state.counters["GFLOP/s"] =
        benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  }
};

template <DType act>
void Forward(benchmark::State& state) {
  const Problem p(state, act);
  for (auto _ : state) linear_forward({}, p.x, p.w, p.y);
  p.report(state);
}

template <DType act>
void BackwardInput(benchmark::State& state) {
  const Problem p(state, act);
  for (auto _ : state) linear_backward_input({}, p.y, p.w, p.x);
  p.report(state);
}

template <DType act>
void BackwardWeight(benchmark::State& state) {
  const Problem p(state, act);
  for (auto _ : state) linear_backward_weight({}, p.y, p.x, p.dw);
  p.report(state);
}

// c (+)= a b in one oneDNN call; a, b and c are matrices in any stride order.
void run_plain(benchmark::State& state, const Problem& p, dnnl::memory::desc a, void* a_data,
               dnnl::memory::desc b, void* b_data, dnnl::memory::desc c, void* c_data, bool accumulate) {
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  dnnl::primitive_attr attributes;
  if (accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0F);
    attributes.set_post_ops(sum);
  }
  const dnnl::matmul::primitive_desc desc(dnnl::matmul::desc(a, b, c), attributes, engine);
  state.SetLabel(desc.impl_info_str());
  const dnnl::matmul product(desc);
  const dnnl::memory am(a, engine, a_data), bm(b, engine, b_data), cm(c, engine, c_data);
  for (auto _ : state)
    product.execute(stream, {{DNNL_ARG_SRC, am}, {DNNL_ARG_WEIGHTS, bm}, {DNNL_ARG_DST, cm}});
  p.report(state);
}

using Dims = dnnl::memory::dims;
template <DType act>
constexpr auto kType = act == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;

template <DType act>
void PlainForward(benchmark::State& state) {
  const Problem p(state, act);
  run_plain(state, p, {{p.rows, p.in}, kType<act>, Dims{p.in, 1}}, p.x->data,
            {{p.in, p.out}, kType<act>, Dims{1, p.in}}, p.w->data,
            {{p.rows, p.out}, kType<act>, Dims{p.out, 1}}, p.y->data, false);
}

template <DType act>
void PlainBackwardInput(benchmark::State& state) {
  const Problem p(state, act);
  run_plain(state, p, {{p.rows, p.out}, kType<act>, Dims{p.out, 1}}, p.y->data,
            {{p.out, p.in}, kType<act>, Dims{p.in, 1}}, p.w->data,
            {{p.rows, p.in}, kType<act>, Dims{p.in, 1}}, p.x->data, false);
}

template <DType act>
void PlainBackwardWeight(benchmark::State& state) {
  const Problem p(state, act);
  run_plain(state, p, {{p.out, p.rows}, kType<act>, Dims{1, p.out}}, p.y->data,
            {{p.rows, p.in}, kType<act>, Dims{p.in, 1}}, p.x->data,
            {{p.out, p.in}, kType<DType::f32>, Dims{p.in, 1}}, p.dw->data, true);
}

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"rows", "in", "out", "threads"})->UseRealTime()->MinTime(0.1);
  for (const int64_t threads : {1, 2}) {
    for (const int64_t rows : {4096, 16384})
      for (const auto& [in, out] : {std::pair<int64_t, int64_t>{192, 576},
                                    {256, 768},
                                    {384, 384},
                                    {384, 1152},
                                    {512, 512},
                                    {512, 1536},
                                    {768, 2304},
                                    {1536, 512}})
        b->Args({rows, in, out, threads});
    for (const int64_t rows : {1, 8, 64, 512}) b->Args({rows, 512, 1536, threads});
  }
}

BENCHMARK_TEMPLATE(Forward, DType::bf16)->Apply(shapes);
BENCHMARK_TEMPLATE(PlainForward, DType::bf16)->Apply(shapes);
BENCHMARK_TEMPLATE(BackwardInput, DType::bf16)->Apply(shapes);
BENCHMARK_TEMPLATE(PlainBackwardInput, DType::bf16)->Apply(shapes);
BENCHMARK_TEMPLATE(BackwardWeight, DType::bf16)->Apply(shapes);
BENCHMARK_TEMPLATE(PlainBackwardWeight, DType::bf16)->Apply(shapes);
BENCHMARK_TEMPLATE(Forward, DType::f32)->Apply(shapes);
BENCHMARK_TEMPLATE(PlainForward, DType::f32)->Apply(shapes);
BENCHMARK_TEMPLATE(BackwardInput, DType::f32)->Apply(shapes);
BENCHMARK_TEMPLATE(PlainBackwardInput, DType::f32)->Apply(shapes);
BENCHMARK_TEMPLATE(BackwardWeight, DType::f32)->Apply(shapes);
BENCHMARK_TEMPLATE(PlainBackwardWeight, DType::f32)->Apply(shapes);

}  // namespace
}  // namespace sps::ops
