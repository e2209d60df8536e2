// Picks the kernels of one instruction set at run time. Each set's kernels are compiled from the
// same sources with FASTATTN_ISA naming their namespace; FASTATTN_HAVE_* say which were built
// besides the baseline.
#include <cstring>
#ifdef FASTATTN_HAVE_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/kernels.h"
#include "cpu/plan.h"

#define FASTATTN_DECLARE(isa)                                     \
  namespace fastattn::isa {                                       \
  void sdpa_forward(const ForwardParams&, const Parallel&);       \
  void sdpa_backward(const BackwardParams&, const Parallel&);     \
  void additive_forward(const ForwardParams&, const Parallel&);   \
  void additive_backward(const BackwardParams&, const Parallel&); \
  }
#define FASTATTN_TABLE(isa, supported) FASTATTN_TABLE_OF(isa, supported, isa)
#define FASTATTN_TABLE_OF(isa, supported, additive) \
  {#isa,                                            \
   supported,                                       \
   isa::sdpa_forward,                               \
   isa::sdpa_backward,                              \
   additive::additive_forward,                      \
   additive::additive_backward}

FASTATTN_DECLARE(baseline)
#ifdef FASTATTN_HAVE_AVX2
FASTATTN_DECLARE(avx2)
#endif
#ifdef FASTATTN_HAVE_AVX512
FASTATTN_DECLARE(avx512)
#endif
#ifdef FASTATTN_HAVE_AVX512_BF16
FASTATTN_DECLARE(avx512_bf16)
#endif
#ifdef FASTATTN_HAVE_AMX
FASTATTN_DECLARE(amx)
#endif

namespace fastattn::cpu {
namespace {

struct Kernels {
  const char* name;
  bool (*supported)();
  void (*sdpa_forward)(const ForwardParams&, const Parallel&);
  void (*sdpa_backward)(const BackwardParams&, const Parallel&);
  void (*additive_forward)(const ForwardParams&, const Parallel&);
  void (*additive_backward)(const BackwardParams&, const Parallel&);
};

bool always() { return true; }
#if defined(FASTATTN_HAVE_AVX2) || defined(FASTATTN_HAVE_AVX512) || \
    defined(FASTATTN_HAVE_AVX512_BF16)
// Everything that the compiler may use under -mavx2 -mfma -mf16c.
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
[[maybe_unused]] bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
}
#endif
#ifdef FASTATTN_HAVE_AMX
// A process must ask Linux (5.16 and later) before it uses the tile registers.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, since 5.16 as well
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
bool has_amx() {
  if (!has_avx512_bf16()) return false;
  unsigned a, b, c, d;  // __builtin_cpu_supports() knows AMX from GCC 13 on
  constexpr unsigned kTile = 1u << 24, kBFloat16 = 1u << 22;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kTile | kBFloat16)) != (kTile | kBFloat16))
    return false;
  static const bool permitted = may_use_tiles();
  return permitted;
}
#endif

// Widest first.
constexpr Kernels kTable[] = {
#ifdef FASTATTN_HAVE_AMX
    FASTATTN_TABLE_OF(amx, has_amx, avx512_bf16),
#endif
#ifdef FASTATTN_HAVE_AVX512_BF16
    FASTATTN_TABLE(avx512_bf16, has_avx512_bf16),
#endif
#ifdef FASTATTN_HAVE_AVX512
    FASTATTN_TABLE(avx512, has_avx512),
#endif
#ifdef FASTATTN_HAVE_AVX2
    FASTATTN_TABLE(avx2, has_avx2),
#endif
    FASTATTN_TABLE(baseline, always),
};

// nullptr when the set was not built or this machine lacks it.
const Kernels* find(const char* name) {
  const bool any = std::strcmp(name, "auto") == 0;
  for (const Kernels& kernels : kTable)
    if ((any || std::strcmp(name, kernels.name) == 0) && kernels.supported()) return &kernels;
  return nullptr;
}

const Kernels*& selected() {
  static const Kernels* kernels = find("auto");
  return kernels;
}

}  // namespace

const char* selected_isa() { return selected()->name; }

bool select_isa(const char* name) {
  const Kernels* const kernels = find(name);
  if (kernels != nullptr) selected() = kernels;
  return kernels != nullptr;
}

int64_t forward_workspace_bytes(const ForwardParams& p) { return plan_forward(p).workspace_bytes; }
int64_t backward_workspace_bytes(const BackwardParams& p) {
  return plan_backward(p).workspace_bytes;
}

void forward(const ForwardParams& p, const Parallel& parallel) {
  (p.w.data == nullptr ? selected()->sdpa_forward : selected()->additive_forward)(p, parallel);
}
void backward(const BackwardParams& p, const Parallel& parallel) {
  (p.w.data == nullptr ? selected()->sdpa_backward : selected()->additive_backward)(p, parallel);
}

}  // namespace fastattn::cpu
