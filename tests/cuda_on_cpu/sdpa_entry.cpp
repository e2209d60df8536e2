// The door of the dot product's kernels as C functions, for tests/cuda/shim_backend.py.
#include "cuda/launch.h"

using namespace fastattn;

extern "C" {

int64_t size_of_forward_params() { return sizeof(ForwardParams); }
int64_t size_of_backward_params() { return sizeof(BackwardParams); }

int64_t forward_workspace_bytes(const ForwardParams*) { return 0; }
int64_t backward_workspace_bytes(const BackwardParams* p) {
  return cuda::sdpa_backward_workspace_bytes(*p);
}
const char* forward(const ForwardParams* p) { return cuda::sdpa_forward(*p, nullptr); }
const char* backward(const BackwardParams* p) { return cuda::sdpa_backward(*p, nullptr); }
}
