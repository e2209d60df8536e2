// The door of the kernels as C functions, for tests/cuda/shim_backend.py.
#include "cuda/launch.h"

using namespace fastattn;

extern "C" {

// For the Python side to check its mirror of the structs.
int64_t size_of_forward_params() { return sizeof(ForwardParams); }
int64_t size_of_backward_params() { return sizeof(BackwardParams); }

const char* unsupported(const AttentionParams* p) { return cuda::unsupported(*p); }
int64_t forward_workspace_bytes(const ForwardParams* p) {
  return cuda::forward_workspace_bytes(*p);
}
int64_t backward_workspace_bytes(const BackwardParams* p) {
  return cuda::backward_workspace_bytes(*p);
}
const char* forward(const ForwardParams* p) { return cuda::forward(*p, nullptr); }
const char* backward(const BackwardParams* p) { return cuda::backward(*p, nullptr); }
}
