#include "tensor/graph.h"

#ifdef SPS_HAS_CUDA
#include "tensor/cuda.h"
#endif

namespace sps {

#ifdef SPS_HAS_CUDA

StreamGraph::~StreamGraph() {
  if (graph_ == nullptr) return;
  // A failure here means that the process is ending: there is nobody to tell.
  cudaStreamSynchronize(static_cast<cudaStream_t>(stream_));
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_));
}

void StreamGraph::record(const Exec& ex, const std::function<void()>& issue) {
  const cudaStream_t stream = stream_of(ex);
  cudaGraph_t recorded = nullptr;
  SPS_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    issue();
  } catch (...) {
    cudaStreamEndCapture(stream, &recorded);
    if (recorded != nullptr) cudaGraphDestroy(recorded);
    cudaGetLastError();  // the caller hears what was thrown
    throw;
  }
  SPS_CUDA(cudaStreamEndCapture(stream, &recorded));
  cudaGraphExec_t made = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&made, recorded, 0);
  cudaGraphDestroy(recorded);
  SPS_CUDA(status);
  StreamGraph fresh;
  fresh.graph_ = made, fresh.stream_ = ex.stream;
  *this = std::move(fresh);
}

void StreamGraph::start(const Exec& ex) const {
  SPS_CHECK(graph_ != nullptr);
  SPS_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), stream_of(ex)));
}

#else

StreamGraph::~StreamGraph() = default;
void StreamGraph::record(const Exec&, const std::function<void()>&) {
  SPS_CHECK(graph_ != nullptr);  // there is no GPU whose work could be recorded
}
void StreamGraph::start(const Exec&) const {
  SPS_CHECK(graph_ != nullptr);
}

#endif

}  // namespace sps
