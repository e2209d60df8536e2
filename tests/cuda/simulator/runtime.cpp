// The scheduler: runs the blocks of a grid one after the other, and the threads of a block as
// fibers. cuda_runtime.h lists its checks.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "async.h"
#include "fibers.h"
#include "schedule.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Where the linker puts __shared__ variables; weak, because there may be none.
extern "C" __attribute__((weak)) char __start_cuda_shared[], __stop_cuda_shared[];

namespace cuda_on_cpu {

int current_gpu = 0, gpu_of_tensors = 0;
thread_local bool has_context = false;
uint64_t visited_tiles[2] = {};
uint64_t masked_tiles = 0;
uint64_t score_tiles[2] = {};
uint32_t latest_grids[2] = {};

namespace {

constexpr int kWarp = 32, kWarpgroup = 128, kMaxThreads = 1024;
constexpr std::align_val_t kSharedAlignment{1024};  // of the dynamic shared memory
constexpr size_t kOfABlock = 99 << 10;  // sm_86 and sm_89, which have the least from sm_80 on
constexpr size_t kOfABlockSm90 = 227 << 10;
constexpr size_t kSharedByDefault = 48 << 10;
constexpr int kUnwritten = 0xff;  // every byte of it: NaN as a float, -1 as an integer

enum class State { kReady, kBlock, kWarpWide, kUntil, kFailed, kDone };

struct Thread {
  Fiber fiber;
  State state = State::kDone;
  uint3 index;
  Op op;
  unsigned mask;
  uint64_t brought, seen;       // given to a collective; and what others see when it is complete
  int result;                   // of a barrier
  std::function<bool()> ready;  // what kUntil waits for
  Site site;
};

struct FreeShared {
  void operator()(char* p) const { ::operator delete[](p, kSharedAlignment); }
};

std::vector<Thread> threads;
int count = 0, current = 0;
char message[512] = "no error";
std::map<const void*, int> shared_allowed;
std::unique_ptr<char[], FreeShared> shared;
bool failed = false;

[[gnu::format(printf, 1, 2)]] cudaError_t fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof(message), format, args);
  va_end(args);
  return cudaErrorLaunchFailure;
}

void wait(State state, Op op, Site here) {
  Thread& self = threads[static_cast<size_t>(current)];
  self.state = state, self.op = op, self.site = here;
  self.fiber.wait();
}

// ---- collectives, once all threads have come ----

bool in_mask(unsigned mask, int lane) { return (mask >> lane & 1) != 0; }

bool together(const Thread& a, const Thread& b) {
  return a.state == b.state && a.op == b.op && a.site.line == b.site.line &&
         std::strcmp(a.site.file, b.site.file) == 0 && a.mask == b.mask;
}

// Whether all lanes of thread n's collective have reached it.
bool warp_complete(int n) {
  const Thread& thread = threads[static_cast<size_t>(n)];
  if (thread.state != State::kWarpWide || !in_mask(thread.mask, n % kWarp)) return false;
  for (int lane = 0; lane < kWarp; ++lane) {
    const int other = n / kWarp * kWarp + lane;
    if (!in_mask(thread.mask, lane)) continue;
    if (other >= count || !together(thread, threads[static_cast<size_t>(other)])) return false;
  }
  return true;
}

// Resumes the warp that begins at thread `first`, if all lanes of a collective have come.
void release_warp(int first) {
  for (int n = first; n < count && n < first + kWarp; ++n) {
    if (!warp_complete(n)) continue;
    const unsigned mask = threads[static_cast<size_t>(n)].mask;
    for (int lane = 0; lane < kWarp; ++lane) {
      if (!in_mask(mask, lane)) continue;
      Thread& member = threads[static_cast<size_t>(first + lane)];
      member.seen = member.brought;
      member.state = State::kReady;
    }
  }
}

void release_block() {
  int any = 0, all = 1, sum = 0;
  for (int n = 0; n < count; ++n) {
    const Thread& thread = threads[static_cast<size_t>(n)];
    if (thread.state != State::kBlock || !together(thread, threads[0])) return;
    const bool value = thread.brought != 0;
    any |= value, all &= value, sum += value;
  }
  for (int n = 0; n < count; ++n) {
    Thread& thread = threads[static_cast<size_t>(n)];
    thread.result = thread.op == Op::kBarrierOr ? any : thread.op == Op::kBarrierAnd ? all : sum;
    thread.state = State::kReady;
  }
  async::pass_block_barrier();
}

// ---- blocks ----

// Where each warpgroup waits, if a thread of the block waits for what others do.
std::string where_they_wait() {
  std::string all;
  bool any = false;
  for (int first = 0; first < count; first += kWarpgroup) {
    std::map<std::string, int> sites;
    for (int n = first; n < std::min(count, first + kWarpgroup); ++n) {
      const Thread& thread = threads[static_cast<size_t>(n)];
      any |= thread.state == State::kUntil;
      const bool done = thread.state == State::kDone;
      const char* const slash = done ? nullptr : std::strrchr(thread.site.file, '/');
      ++sites[done ? "returned" : std::string(slash + 1) + ":" + std::to_string(thread.site.line)];
    }
    all += "; warpgroup " + std::to_string(first / kWarpgroup) + ":";
    for (const auto& [site, waiting] : sites) all += " " + std::to_string(waiting) + " " + site;
  }
  return any ? all : "";
}

cudaError_t divergence() {
  int returned = 0, at_barrier = 0, in_warp = 0;
  const std::string waits = where_they_wait();
  if (!waits.empty()) return fail("deadlock in block %u%s", blockIdx.x, waits.c_str());
  Site somewhere{};
  for (int n = 0; n < count; ++n) {
    const State state = threads[static_cast<size_t>(n)].state;
    returned += state == State::kDone;
    at_barrier += state == State::kBlock;
    in_warp += state == State::kWarpWide;
    if (state != State::kDone) somewhere = threads[static_cast<size_t>(n)].site;
  }
  return fail(
      "divergence in block %u: %d of %d threads returned, %d wait at a barrier, %d in a warp "
      "collective that others do not reach, such as the one in %s:%d",
      blockIdx.x, returned, count, at_barrier, in_warp, somewhere.file, somewhere.line);
}

bool can_run(Thread& thread) {
  if (thread.state == State::kUntil && thread.ready()) thread.state = State::kReady;
  return thread.state == State::kReady;
}

// Runs the ready threads of a warp, in one direction; false if there were none. A thread that waits
// for other warps may leave lanes behind it (`apart`), until these have run.
bool run_ready(int first, bool upwards, bool& apart) {
  bool any = false;
  for (int lane = 0; lane < kWarp && !failed; ++lane) {
    current = first + (upwards ? lane : kWarp - 1 - lane);
    if (current >= count) continue;
    Thread& thread = threads[static_cast<size_t>(current)];
    if (!can_run(thread)) continue;
    any = true;
    threadIdx = thread.index;
    thread.fiber.resume();
    if (thread.fiber.finished()) thread.state = State::kDone;
    apart = thread.state == State::kUntil && !schedule.in_turn() && schedule.chance(4);
    if (apart) break;
  }
  return any;
}

bool run_warp(int first, bool upwards) {
  bool any = false, apart = false;
  while (!apart && run_ready(first, upwards, apart)) {
    any = true;
    release_warp(first);
  }
  return any;
}

// The first threads of the warps, in the order of the schedule.
std::vector<int> warps_in_order(bool upwards) {
  std::vector<int> order;
  for (int first = 0; first < count; first += kWarp) order.push_back(first);
  if (!upwards) std::reverse(order.begin(), order.end());
  if (!schedule.in_turn()) std::shuffle(order.begin(), order.end(), schedule.random);
  return order;
}

// Runs each warp as far as it gets without the others. Values from other warps that no barrier
// guarantees are not there yet. False if no warp could run.
bool run_warps(bool upwards) {
  bool any = false;
  for (const int first : warps_in_order(upwards)) {
    if (first == schedule.victim) continue;
    if (!schedule.in_turn() && schedule.chance(2)) continue;  // others get ahead
    if (schedule.early_copies() && schedule.chance(4)) any |= async::finish_a_copy();
    any |= run_warp(first, upwards);
  }
  for (const int first : warps_in_order(upwards))  // those left out, if nobody else could run
    if (!any && first != schedule.victim) any = run_warp(first, upwards);
  if (!any) any = async::finish_a_copy();
  return any || (schedule.victim >= 0 && run_warp(schedule.victim, upwards));
}

bool all_done() {
  for (int n = 0; n < count; ++n)
    if (threads[static_cast<size_t>(n)].state != State::kDone) return false;
  return true;
}

cudaError_t run_block(size_t bytes, void (*body)(void*), void* context) {
  async::begin_block(shared.get(), bytes, count);
  schedule.begin(blockIdx.x, count);
  for (int n = 0; n < count; ++n) {
    Thread& thread = threads[static_cast<size_t>(n)];
    const unsigned linear = static_cast<unsigned>(n), row = linear / blockDim.x;
    thread.index = {linear % blockDim.x, row % blockDim.y, row / blockDim.y};
    thread.state = State::kReady;
    thread.fiber.start(body, context);
  }
  for (bool upwards = blockIdx.x % 2 == 0; !all_done(); upwards = !upwards) {
    bool any = false;
    for (unsigned n = 0; n <= kPatience && !any; ++n) any = run_warps(upwards);
    if (!any) return divergence();
    if (failed) return cudaErrorLaunchFailure;
    release_block();
  }
  if (const char* wrong = async::end_block()) return fail("block %u: %s", blockIdx.x, wrong);
  if (bytes > kOfABlock && !async::needs_sm90()) return fail("%zu bytes of shared memory", bytes);
  return cudaSuccess;
}

cudaError_t check_launch(const void* kernel, const cudaLaunchConfig_t& config) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
      grid.z > 65535)
    return fail("invalid grid (%u, %u, %u)", grid.x, grid.y, grid.z);
  if (block.x * block.y * block.z == 0 || block.x * block.y * block.z > kMaxThreads)
    return fail("invalid block (%u, %u, %u)", block.x, block.y, block.z);
  const auto found = shared_allowed.find(kernel);
  const size_t limit =
      found == shared_allowed.end() ? kSharedByDefault : static_cast<size_t>(found->second);
  if (config.dynamicSmemBytes > limit)
    return fail("%zu bytes of shared memory, of %zu allowed", config.dynamicSmemBytes, limit);
  return cudaSuccess;
}

}  // namespace

Schedule schedule;

int current_thread() { return current; }

void wait_until(std::function<bool()> ready, Site here) {
  if (ready() && (schedule.in_turn() || schedule.chance(2))) return;  // others may go first
  threads[static_cast<size_t>(current)].ready = std::move(ready);
  wait(State::kUntil, Op::kBarrier, here);
}

void let_others_run(unsigned times, Site here) {
  threads[static_cast<size_t>(current)].ready = [times]() mutable { return times-- == 0; };
  wait(State::kUntil, Op::kBarrier, here);
}

void fail_block(Site here, const char* format, ...) {
  char text[256];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  fail("block %u: %s, in %s:%d", blockIdx.x, text, here.file, here.line);
  failed = true;
  for (;;) wait(State::kFailed, Op::kBarrier, here);
}

void require_aligned(const void* at, size_t bytes, Site here) {
  if (reinterpret_cast<uintptr_t>(at) % bytes != 0)
    fail_block(here, "an address that is no multiple of %zu", bytes);
}

int lane() { return current % kWarp; }

void* dynamic_shared() { return shared.get(); }

int barrier(Op op, int value, Site here) {
  Thread& self = threads[static_cast<size_t>(current)];
  self.brought = value != 0, self.mask = 0;
  wait(State::kBlock, op, here);
  return self.result;
}

// The value of a lane of the running warp. CUDA leaves it undefined for a lane outside the mask.
static uint64_t seen_from(unsigned mask, int lane) {
  const int thread = current / kWarp * kWarp + lane;
  return in_mask(mask, lane) ? threads[static_cast<size_t>(thread)].seen : ~uint64_t{0};
}

uint64_t exchange(unsigned mask, uint64_t value, int source, Site here) {
  Thread& self = threads[static_cast<size_t>(current)];
  self.brought = value, self.mask = mask;
  wait(State::kWarpWide, Op::kExchange, here);
  return seen_from(mask, source);
}

void exchange_all(uint64_t value, uint64_t (&all)[kWarp], Site here) {
  exchange(~0u, value, lane(), here);
  for (int from = 0; from < kWarp; ++from) all[from] = seen_from(~0u, from);
}

unsigned ballot(unsigned mask, bool value, Site here) {
  exchange(mask, value, lane(), here);
  unsigned lanes = 0;
  for (int from = 0; from < kWarp; ++from)
    lanes |= in_mask(mask, from) && seen_from(mask, from) == 1 ? 1u << from : 0u;
  return lanes;
}

cudaError_t allow_shared(const void* kernel, int bytes) {
  has_context = true;
  if (bytes < 0 || static_cast<size_t>(bytes) > kOfABlockSm90)
    return fail("%d bytes of shared memory", bytes);
  int& allowed = shared_allowed.try_emplace(kernel, bytes).first->second;
  if (bytes < allowed)  // CUDA allows it, but another thread may be about to launch with more
    return fail("%d bytes of shared memory, after %d", bytes, allowed);
  allowed = bytes;
  return cudaSuccess;
}

cudaError_t run_grid(const void* kernel, const cudaLaunchConfig_t& config, void (*body)(void*),
                     void* context) {
  has_context = true;
  if (check_launch(kernel, config) != cudaSuccess) return cudaErrorInvalidValue;
  gridDim = config.gridDim, blockDim = config.blockDim;
  latest_grids[1] = latest_grids[0], latest_grids[0] = gridDim.x;
  count = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  if (threads.size() < static_cast<size_t>(count)) threads = std::vector<Thread>(kMaxThreads);
  shared.reset(static_cast<char*>(
      ::operator new[](std::max<size_t>(1, config.dynamicSmemBytes), kSharedAlignment)));
  failed = false;
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = {x, y, z};
        std::memset(shared.get(), kUnwritten, config.dynamicSmemBytes);
        if (__start_cuda_shared != nullptr)
          std::memset(__start_cuda_shared, kUnwritten,
                      static_cast<size_t>(__stop_cuda_shared - __start_cuda_shared));
        const cudaError_t error = run_block(config.dynamicSmemBytes, body, context);
        if (error != cudaSuccess) return error;
      }
  return cudaSuccess;
}

}  // namespace cuda_on_cpu

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : cuda_on_cpu::message;
}

// The GPU of all tensors; for tests.
extern "C" void shim_place_tensors(int gpu) { cuda_on_cpu::gpu_of_tensors = gpu; }

// Tiles that kernels have visited, inside the mask and outside, and masked ones; for tests.
extern "C" uint64_t shim_visited(int outside) { return cuda_on_cpu::visited_tiles[outside]; }
extern "C" uint64_t shim_masked() { return cuda_on_cpu::masked_tiles; }
// Those of additive scores, from factors and direct.
extern "C" uint64_t shim_scored(int direct) { return cuda_on_cpu::score_tiles[direct]; }

// Blocks of the latest launch, or of the one before it; for tests.
extern "C" uint32_t shim_blocks(int before) { return cuda_on_cpu::latest_grids[before]; }

// 0 for the ordinary order; for tests.
extern "C" void shim_schedule(unsigned number) { cuda_on_cpu::schedule.number = number; }
