// Picks the kernels of one instruction set at run time. All sets are compiled from the same
// sources; FASTATTN_ISA names the set's namespace. FASTATTN_HAVE_* say which were built beside the
// baseline.
#include <cstdlib>
#include <cstring>
#if defined(FASTATTN_HAVE_AMX) || defined(FASTATTN_HAVE_AMX_FP16)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/choose.h"
#include "cpu/kernels.h"
#ifdef FASTATTN_HAVE_AMX_FP16
#include "cpu/base/matrix_unit.h"
#include "cpu/isa_trial.h"
#endif

// setup.py says which of these a set has.
#define FASTATTN_DECLARE(isa)                                                  \
  namespace fastattn::isa {                                                    \
  void sdpa_forward(const ForwardParams&, const Path&, const Parallel&);       \
  void sdpa_backward(const BackwardParams&, const Path&, const Parallel&);     \
  void additive_forward(const ForwardParams&, const Path&, const Parallel&);   \
  void additive_backward(const BackwardParams&, const Path&, const Parallel&); \
  void gaussian_forward(const ForwardParams&, const Path&, const Parallel&);   \
  void gaussian_backward(const BackwardParams&, const Path&, const Parallel&); \
  void unit_forward(const ForwardParams&, const Path&, const Parallel&);       \
  void unit_backward(const BackwardParams&, const Path&, const Parallel&);     \
  double run_loop(const LoopCall&, const Parallel&);                           \
  }
FASTATTN_DECLARE(baseline)
FASTATTN_DECLARE(avx2)
FASTATTN_DECLARE(avx512)
FASTATTN_DECLARE(avx512_bf16)
FASTATTN_DECLARE(amx)
FASTATTN_DECLARE(amx_fp16)

namespace fastattn::cpu {
namespace {

struct Passes {
  void (*forward)(const ForwardParams&, const Path&, const Parallel&);
  void (*backward)(const BackwardParams&, const Path&, const Parallel&);
};

struct Kernels {
  const char* name;
  bool (*supported)();  // as CPUID says, and gains by: "auto" goes by it
  bool (*runs)();       // enough for who names the set
  double (*run_loop)(const LoopCall&, const Parallel&);
  Passes scores[3];  // by ScoreKind
  Unit unit;
  Passes on_unit;  // of the dot product

  template <typename Params>
  const Passes& passes(const Params& p, const Path& path) const {
    return path.way == Way::kMatrixUnit ? on_unit : scores[static_cast<int>(p.score)];
  }
};

#ifdef FASTATTN_IN_SOFTWARE
constexpr bool kInSoftware = true;  // all sets beyond AVX2: tests/cpu/software
#else
constexpr bool kInSoftware = false;
#endif

bool always() { return true; }
#if defined(FASTATTN_HAVE_AVX2) || defined(FASTATTN_HAVE_AVX512)
// Everything that the compiler may use under -mavx2 -mfma -mf16c.
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && (kInSoftware ||
                        (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")));
}
[[maybe_unused]] bool has_avx512_bf16() {
  return has_avx512() && (kInSoftware || __builtin_cpu_supports("avx512bf16"));
}
// Intel's vdpbf16ps multiplies at half the rate of FMA (Emerald Rapids), AMD's at twice (Zen 4).
[[maybe_unused]] bool gains_by_avx512_bf16() {
  return has_avx512_bf16() && __builtin_cpu_is("amd");
}
#endif
#if defined(FASTATTN_HAVE_AMX) || defined(FASTATTN_HAVE_AMX_FP16)
// A process needs permission from Linux (5.16 and later) to use the tile registers.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, since 5.16 as well
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
bool has_amx() {
  if (kInSoftware || !has_avx512_bf16()) return has_avx512_bf16();
  unsigned a, b, c, d;  // __builtin_cpu_supports() knows AMX from GCC 13 on
  constexpr unsigned kTile = 1u << 24, kBFloat16 = 1u << 22;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kTile | kBFloat16)) != (kTile | kBFloat16))
    return false;
  static const bool permitted = may_use_tiles();
  return permitted;
}
#endif
#ifdef FASTATTN_HAVE_AMX_FP16
// What amx_fp16 needs, except the instruction that multiplies tiles of fp16.
bool has_amx_avx512_fp16() {
  if (kInSoftware || !has_amx()) return has_amx();
  unsigned a, b, c, d;
  constexpr unsigned kAvx512Float16 = 1u << 23;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAvx512Float16) != 0;
}
bool has_amx_fp16() {
  if (kInSoftware || !has_amx_avx512_fp16()) return has_amx_avx512_fp16();
  unsigned a, b, c, d;
  constexpr unsigned kAmxFloat16 = 1u << 21;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAmxFloat16) != 0;
}
// The product of a tile (1, 2) and its right operand (3, 4), of one row each.
__attribute__((target("amx-tile"))) bool multiplies_fp16_tiles() {
  static constexpr baseline::UnitConfiguration kTiles = {1, 0, {}, {4, 4, 4}, {1, 1, 1}};
  static constexpr uint16_t kLeft[] = {0x3c00, 0x4000}, kRight[] = {0x4200, 0x4400};
  float product = 0;
  _tile_loadconfig(&kTiles);
  _tile_zero(0);
  _tile_loadd(1, kLeft, 4);
  _tile_loadd(2, kRight, 4);
  asm volatile(".byte 0xc4, 0xe2, 0x6b, 0x5c, 0xc1");  // tdpfp16ps %tmm2, %tmm1, %tmm0
  _tile_stored(0, &product, 4);
  _tile_release();
  return product == 1 * 3 + 2 * 4;
}
// Some virtual machines hide the instruction, so that they can move to hardware without it.
bool runs_amx_fp16() {
  if (!has_amx_avx512_fp16()) return false;  // also gets the child permission for tile registers
  static const bool runs = has_amx_fp16() || true_in_child(multiplies_fp16_tiles);
  return runs;
}
#endif

#define FASTATTN_PASSES(isa, score) {isa::score##_forward, isa::score##_backward}
#define FASTATTN_SCORES(isa) \
  {FASTATTN_PASSES(isa, sdpa), FASTATTN_PASSES(isa, additive), FASTATTN_PASSES(isa, gaussian)}
#define FASTATTN_VECTORS(isa, supported)                                             \
  {                                                                                  \
    #isa, supported, supported, isa::run_loop, FASTATTN_SCORES(isa), Unit::kNone, {} \
  }
// A set with a unit adds it to the vectors of AVX-512.
#define FASTATTN_UNIT(isa, kind, supported, runs) \
  {#isa,                                          \
   supported,                                     \
   runs,                                          \
   isa::run_loop,                                 \
   FASTATTN_SCORES(avx512),                       \
   Unit::kind,                                    \
   FASTATTN_PASSES(isa, unit)}

// Widest first.
constexpr Kernels kTable[] = {
#ifdef FASTATTN_HAVE_AMX_FP16
    FASTATTN_UNIT(amx_fp16, kFp16Tiles, has_amx_fp16, runs_amx_fp16),
#endif
#ifdef FASTATTN_HAVE_AMX
    FASTATTN_UNIT(amx, kTiles, has_amx, has_amx),
#endif
#ifdef FASTATTN_HAVE_AVX512_BF16
    FASTATTN_UNIT(avx512_bf16, kBFloat16, gains_by_avx512_bf16, has_avx512_bf16),
#endif
#ifdef FASTATTN_HAVE_AVX512
    FASTATTN_VECTORS(avx512, has_avx512),
#endif
#ifdef FASTATTN_HAVE_AVX2
    FASTATTN_VECTORS(avx2, has_avx2),
#endif
    FASTATTN_VECTORS(baseline, always),
};

// nullptr when the set was not built or this machine lacks it.
const Kernels* find(const char* name) {
  const bool any = std::strcmp(name, "auto") == 0;
  for (const Kernels& kernels : kTable) {
    const bool named = std::strcmp(name, kernels.name) == 0;
    if ((any && kernels.supported()) || (named && kernels.runs())) return &kernels;
  }
  return nullptr;
}

const Kernels*& selected() {
  static const Kernels* kernels = find("auto");
  return kernels;
}

// What the environment variable or select_path() names; "" where choose.h decides alone.
struct NamedPath {
  std::string name;
  ShortWays ways;
};

NamedPath& named_path() {
  static NamedPath path = [] {
    const char* const name = std::getenv("FASTATTN_CPU_PATH");
    return NamedPath{name == nullptr ? "" : name, short_ways(name)};
  }();
  return path;
}

Chooser chooser() { return {named_path().ways, selected()->unit}; }

}  // namespace

const char* selected_isa() { return selected()->name; }

bool select_isa(const char* name) {
  const Kernels* const kernels = find(name);
  if (kernels != nullptr) selected() = kernels;
  return kernels != nullptr;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels& kernels : kTable)
    if (kernels.runs()) names.push_back(kernels.name);
  return names;
}

bool select_path(const char* name) {
  const bool any = std::strcmp(name, "auto") == 0;
  const ShortWays ways = short_ways(name);
  if (any || ways.forced) named_path() = {any ? "" : name, ways};
  return any || ways.forced;
}

std::string path_of(const ForwardParams& params) {
  ForwardParams p = params;
  const NamedPath& named = named_path();
  const std::string path = name_of(choose_forward(&p, chooser()));
  if (named.name.empty()) return path;
  const char* const effect = named.ways.forced ? "" : ": no such path";
  return path + " (FASTATTN_CPU_PATH=" + named.name + effect + ")";
}

double run_loop(const LoopCall& call, const Parallel& parallel) {
  return selected()->run_loop(call, parallel);
}

int64_t forward_workspace_bytes(const ForwardParams& params) {
  ForwardParams p = params;
  return forward_bytes(p, choose_forward(&p, chooser()));
}
int64_t backward_workspace_bytes(const BackwardParams& params) {
  BackwardParams p = params;
  return plan_backward(p, choose_backward(&p, chooser())).workspace_bytes;
}

void forward(const ForwardParams& params, const Parallel& parallel) {
  ForwardParams p = params;
  const Path path = choose_forward(&p, chooser());
  selected()->passes(p, path).forward(p, path, parallel);
}
void backward(const BackwardParams& params, const Parallel& parallel) {
  BackwardParams p = params;
  const Path path = choose_backward(&p, chooser());
  selected()->passes(p, path).backward(p, path, parallel);
}

}  // namespace fastattn::cpu
