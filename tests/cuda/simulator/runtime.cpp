// The scheduler: runs the blocks of a grid one after the other, and the threads of a block as
// fibers. cuda_runtime.h lists its checks.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "cuda_runtime.h"
#include "fibers.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Where the linker puts __shared__ variables; weak, because there may be none.
extern "C" __attribute__((weak)) char __start_cuda_shared[], __stop_cuda_shared[];

namespace cuda_on_cpu {
namespace {

constexpr int kWarp = 32, kMaxThreads = 1024;
constexpr size_t kSharedByDefault = 48 << 10;
constexpr int kUnwritten = 0xff;  // every byte of it: NaN as a float, -1 as an integer

enum class State { kReady, kBlock, kWarpWide, kDone };

struct Thread {
  Fiber fiber;
  State state = State::kDone;
  uint3 index;
  Op op;
  unsigned mask;
  uint64_t brought, seen;  // given to a collective; and what others see when it is complete
  int result;              // of a barrier
  Site site;
};

std::vector<Thread> threads;
int count = 0, current = 0;
char message[512] = "no error";
std::map<const void*, int> shared_allowed;
std::unique_ptr<char[]> shared;

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
}

// ---- blocks ----

cudaError_t divergence() {
  int returned = 0, at_barrier = 0, in_warp = 0;
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

// Runs the ready threads of a warp, in one direction; false if there were none.
bool run_ready(int first, bool upwards) {
  bool any = false;
  for (int lane = 0; lane < kWarp; ++lane) {
    current = first + (upwards ? lane : kWarp - 1 - lane);
    if (current >= count) continue;
    Thread& thread = threads[static_cast<size_t>(current)];
    if (thread.state != State::kReady) continue;
    any = true;
    threadIdx = thread.index;
    thread.fiber.resume();
    if (thread.fiber.finished()) thread.state = State::kDone;
  }
  return any;
}

// Runs each warp as far as it gets without the others. Values from other warps that no barrier
// guarantees are not there yet. False if no warp could run.
bool run_warps(bool upwards) {
  bool any = false;
  const int warps = (count + kWarp - 1) / kWarp;
  for (int n = 0; n < warps; ++n) {
    const int first = kWarp * (upwards ? n : warps - 1 - n);
    while (run_ready(first, upwards)) {
      any = true;
      release_warp(first);
    }
  }
  return any;
}

bool all_done() {
  for (int n = 0; n < count; ++n)
    if (threads[static_cast<size_t>(n)].state != State::kDone) return false;
  return true;
}

cudaError_t run_block(void (*body)(void*), void* context) {
  for (int n = 0; n < count; ++n) {
    Thread& thread = threads[static_cast<size_t>(n)];
    const unsigned linear = static_cast<unsigned>(n), row = linear / blockDim.x;
    thread.index = {linear % blockDim.x, row % blockDim.y, row / blockDim.y};
    thread.state = State::kReady;
    thread.fiber.start(body, context);
  }
  for (bool upwards = true; !all_done(); upwards = !upwards) {
    if (!run_warps(upwards)) return divergence();
    release_block();
  }
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
  constexpr int kOfABlock = 99 << 10;  // sm_86 and sm_89, which have the least from sm_80 on
  if (bytes < 0 || bytes > kOfABlock) return fail("%d bytes of shared memory", bytes);
  shared_allowed[kernel] = bytes;
  return cudaSuccess;
}

cudaError_t run_grid(const void* kernel, const cudaLaunchConfig_t& config, void (*body)(void*),
                     void* context) {
  if (check_launch(kernel, config) != cudaSuccess) return cudaErrorInvalidValue;
  gridDim = config.gridDim, blockDim = config.blockDim;
  count = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  if (threads.size() < static_cast<size_t>(count)) threads = std::vector<Thread>(kMaxThreads);
  shared.reset(new char[config.dynamicSmemBytes]);
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = {x, y, z};
        std::memset(shared.get(), kUnwritten, config.dynamicSmemBytes);
        if (__start_cuda_shared != nullptr)
          std::memset(__start_cuda_shared, kUnwritten,
                      static_cast<size_t>(__stop_cuda_shared - __start_cuda_shared));
        const cudaError_t error = run_block(body, context);
        if (error != cudaSuccess) return error;
      }
  return cudaSuccess;
}

}  // namespace cuda_on_cpu

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : cuda_on_cpu::message;
}
