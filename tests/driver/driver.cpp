// csrc/cpu without torch: reads one problem from a file, runs it, writes the results to another.
// grid.py writes the first file and reads the second. Both programs list the same fields in the
// same order.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/kernels.h"

using namespace fastattn;

namespace {

std::FILE* in;
std::FILE* out;

template <typename T>
T read() {
  T value;
  if (std::fread(&value, sizeof value, 1, in) != 1) std::exit(3);
  return value;
}
int64_t number() { return read<int64_t>(); }

// Memory full of NaN, as kernels may find it.
void* memory(size_t bytes) {
  void* const data = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
  return std::memset(data, 0xff, bytes);
}

// Reads a tensor of four dims: its length in bytes (-1: absent), dtype, strides, and its bytes.
View tensor() {
  const int64_t bytes = number();
  View view = {nullptr, static_cast<DType>(number()), number(), number(), number(), number()};
  if (bytes < 0) return view;
  view.data = memory(static_cast<size_t>(bytes));
  if (std::fread(view.data, 1, static_cast<size_t>(bytes), in) != static_cast<size_t>(bytes))
    std::exit(3);
  return view;
}

struct Result {
  void* data;
  size_t bytes;
};
std::vector<Result> results;

// A contiguous result [b, h, r, c]. It is written to the file at the end.
View result(int64_t b, int64_t h, int64_t r, int64_t c, DType dtype) {
  const int64_t size = dtype == DType::kFloat32 ? 4 : 2;
  results.push_back({memory(b * h * r * c * size), static_cast<size_t>(b * h * r * c * size)});
  const auto stride = [](int64_t n, int64_t elements) { return n == 1 ? 0 : elements; };
  return {results.back().data, dtype,        stride(b, h * r * c),
          stride(h, r * c),    stride(r, c), stride(c, 1)};
}
float* rows(int64_t b, int64_t h, int64_t r, int64_t c) {
  return static_cast<float*>(result(b, h, r, c, DType::kFloat32).data);
}

void read_problem(AttentionParams* p) {
  for (int64_t* n : {&p->B, &p->H, &p->Hkv, &p->M, &p->N, &p->D, &p->E}) *n = number();
  p->weights_mode = static_cast<WeightsMode>(number());
  p->score = static_cast<ScoreKind>(number());
  p->mask.band_lo = number();
  p->mask.band_hi = number();
  p->dropout.threshold = static_cast<uint32_t>(number());
  p->dropout.seed = static_cast<uint64_t>(number());
  p->dropout.enabled = number() != 0;
  for (uint32_t* n :
       {&p->dropout.first.b, &p->dropout.first.h, &p->dropout.first.i, &p->dropout.first.j4})
    *n = static_cast<uint32_t>(number());
  p->dropout.scale = static_cast<float>(read<double>());
  p->scale = static_cast<float>(read<double>());
  p->softcap = static_cast<float>(read<double>());
  for (View* view : {&p->q, &p->k, &p->v, &p->w, &p->bias}) *view = tensor();
  p->bias_is_line = number() != 0;
  if (p->bias_is_line) {
    const int64_t bytes = (p->bias.dtype == DType::kFloat32 ? 4 : 2) * p->bias.stride_c;
    p->bias.data = static_cast<char*>(p->bias.data) + (p->M - 1) * bytes;
    p->bias.stride_r = -p->bias.stride_c;
  }
  for (KeyLimit* limit : {&p->mask.kv_len, &p->mask.kv_begin}) {
    const View from = tensor();
    *limit = {static_cast<const int32_t*>(from.data), from.stride_b, from.stride_r};
  }
  const View keep = tensor();
  p->mask.keep = static_cast<const uint8_t*>(keep.data);
  p->mask.keep_stride_b = keep.stride_b, p->mask.keep_stride_h = keep.stride_h;
  p->mask.keep_stride_m = keep.stride_r, p->mask.keep_stride_n = keep.stride_c;
  p->sink = tensor();
}

// Several threads at once, for ThreadSanitizer; else one, which does the work of each in turn.
Parallel threads(int64_t n) {
  return {n, [](int64_t count, void (*body)(void*, int64_t, int64_t), void* context) {
#ifdef __SANITIZE_THREAD__
            std::vector<std::thread> all;
            for (int64_t i = 0; i < count; ++i) all.emplace_back([=] { body(context, i, i + 1); });
            for (auto& each : all) each.join();
#else
            for (int64_t i = 0; i < count; ++i) body(context, i, i + 1);
#endif
          }};
}

void forward() {
  ForwardParams p{};
  const Parallel parallel = threads(number());
  read_problem(&p);
  p.out = result(p.B, p.H, p.M, p.E, p.q.dtype);
  p.lse = rows(p.B, p.H, p.M, 1);
  if (p.weights_mode == WeightsMode::kFull) p.weights = result(p.B, p.H, p.M, p.N, p.q.dtype);
  if (p.weights_mode == WeightsMode::kMean) p.weights = result(p.B, 1, p.M, p.N, p.q.dtype);
  p.stats = rows(p.B, p.H, p.M, 2);
  p.workspace = memory(static_cast<size_t>(cpu::forward_workspace_bytes(p)));
  cpu::forward(p, parallel);
}

void backward() {
  BackwardParams p{};
  const Parallel parallel = threads(number());
  read_problem(&p);
  p.out = tensor();
  p.stats = static_cast<const float*>(tensor().data);
  p.grad_out = tensor();
  p.grad_lse = static_cast<const float*>(tensor().data);
  p.grad_weights = tensor();
  p.grad_q = result(p.B, p.H, p.M, p.D, p.q.dtype);
  p.grad_k = result(p.B, p.Hkv, p.N, p.D, p.q.dtype);
  p.grad_v = result(p.B, p.Hkv, p.N, p.E, p.q.dtype);
  if (p.w.data != nullptr) p.grad_w = rows(p.B, p.H, 1, p.D);
  if (number() != 0) {
    for (int64_t* n : {&p.bias_B, &p.bias_H, &p.bias_M, &p.bias_N}) *n = number();
    p.grad_bias = result(p.bias_B, p.bias_H, p.bias_M, p.bias_N, p.bias.dtype);
  }
  if (p.sink.data != nullptr) p.grad_sink = result(p.B, p.H, 1, 1, DType::kFloat32);
  p.workspace = memory(static_cast<size_t>(cpu::backward_workspace_bytes(p)));
  cpu::backward(p, parallel);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  in = std::fopen(arguments[1], "rb");
  if (in == nullptr) return 2;
  number() == 0 ? forward() : backward();
  out = std::fopen(arguments[2], "wb");
  if (out == nullptr) return 2;
  for (const Result& each : results)
    if (std::fwrite(each.data, 1, each.bytes, out) != each.bytes) return 4;
  return std::fclose(out);
}
