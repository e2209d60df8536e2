// Asynchronous copies, barriers in shared memory and products of a warpgroup, on the CPU: what
// csrc/cuda/base/ptx_{async,wgmma}.cuh call. async.cpp has them.
//
// Every schedule that the documentation allows may run, as schedule.h draws it. Mistakes that show
// on some GPU on some day then show here, as an error or as a wrong number:
//
// - A copy fills its box with NaN when it starts, and with numbers at a time that the schedule
//   picks. A copy that nobody waits for fails the block.
// - A barrier that is used before others may see it, or that gets more arrivals than it counts,
//   fails the block. So does one whose bytes differ from those expected. Others may run right after
//   an arrival.
// - A warp's products run when their group is committed, or as late as when it is waited for. They
//   read shared memory and the registers of A then. D is NaN from the product to the wait.
// - Products without a fence before their group, products that differ between the lanes or the
//   warps, and groups that nobody waits for fail the block.
// - A block begins with as many registers a thread as there are, in steps of 8. Who takes more
//   waits until others have given enough back. Who takes to have fewer, or gives to have more,
//   fails the block.
// - Where every thread waits and no copy is under way, the launch fails, and says for each
//   warpgroup where it waits.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace cuda_on_cpu::async {

// The address as the instructions have it: from the beginning of the shared memory.
uint32_t shared_address(const void* at);

void init_barrier(const void* barrier, int arrivals, Site here);
void publish_barriers();
void arrive(const void* barrier, uint32_t bytes, Site here);
void wait_for_phase(const void* barrier, uint32_t parity, Site here);

struct Corner {
  int column, row, head, batch;
};
void load_box(void* to, const CUtensorMap& map, const void* barrier, Corner first, Site here);

struct OperandA {
  const uint32_t* registers;  // [4], or nullptr: in shared memory
  uint64_t descriptor;
};
// D [64][8 * tiles] += A B. transposed: B is MN-major.
void multiply(OperandA a, uint64_t b, bool transposed, bool keep, bool fp16, int tiles, float* d,
              Site here);
void fence_products();
void commit_products(Site here);
void wait_for_products(int pending, Site here);

// What a thread has from now on.
void take_registers(int count, Site here);
void give_registers(int count, Site here);

// ---- for the scheduler ----

void begin_block(char* shared, size_t bytes, int threads);
void pass_block_barrier();
bool finish_a_copy();     // false if there is none under way
const char* end_block();  // what is wrong at the end of a block, or nullptr
bool needs_sm90();        // whether the block used anything of this file
void use_sm90();
uint64_t products_so_far();
int latest_descriptors(uint64_t* pairs, int most, int blocks_before);

}  // namespace cuda_on_cpu::async
