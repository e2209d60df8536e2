// Decides which kernels compute a problem, and which problems they cannot compute.
#include "cuda/additive/passes.h"
#include "cuda/additive/plan.h"
#include "cuda/dot/passes.h"
#include "cuda/kernels.h"

namespace fastattn::cuda {
namespace {

// Of D and E of the dot product: of its forward pass, which may have more conditions over 128, and
// of its gradients, so that sums fit the registers.
constexpr int64_t kMaxDot = 256, kMaxDotGradients = 128;

// Differences take the additive kernels, with loops of their own.
bool is_additive(const AttentionParams& p) { return p.score != ScoreKind::kDot; }

constexpr char kWide[] = "the dot product's results have the dtype of q";

}  // namespace

const char* unsupported(const AttentionParams& p) {
  if (is_additive(p)) {
    if (p.D > kMaxDims) return "the additive and the gaussian score's D is at most 4096";
    if (p.E > kMaxValues) return "the additive and the gaussian score's E is at most 256";
    return nullptr;
  }
  if (p.q.dtype == DType::kFloat32) return "the dot product on tensor cores is fp16 and bf16";
  if (max64(p.D, p.E) > kMaxDot) return "the dot product's D and E are at most 256";
  return nullptr;
}

int64_t forward_workspace_bytes(const ForwardParams& p) {
  return is_additive(p) ? additive_forward_workspace_bytes(p) : sdpa_forward_workspace_bytes(p);
}

int64_t backward_workspace_bytes(const BackwardParams& p) {
  return is_additive(p) ? additive_backward_workspace_bytes(p) : sdpa_backward_workspace_bytes(p);
}

const char* forward(const ForwardParams& p, void* stream) {
  if (const char* reason = unsupported(p)) return reason;
  if (is_additive(p)) return additive_forward(p, stream);
  return p.out.dtype == p.q.dtype ? sdpa_forward(p, stream) : kWide;
}

const char* backward(const BackwardParams& p, void* stream) {
  if (const char* reason = unsupported(p)) return reason;
  if (is_additive(p)) return additive_backward(p, stream);
  if (max64(p.D, p.E) > kMaxDotGradients)
    return "the dot product's gradients have D and E up to 128";
  return p.grad_q.dtype == p.q.dtype ? sdpa_backward(p, stream) : kWide;
}

}  // namespace fastattn::cuda
