// Asynchronous copies of boxes of a tensor into shared memory (TMA, sm_90), and the barriers in
// shared memory that count their bytes. PTX ISA 9.0, "mbarrier" and "cp.async.bulk.tensor".
// tests/cuda/simulator/async.h has the meaning of each in plain C++.
//
// A barrier goes through phases. A phase is complete when all arrivals have come and as many bytes
// as were expected; the next one then begins. Phases have parity 0, 1, 0, ... A wait for a parity
// ends when the phase of that parity is complete: before the first one, parity 1 counts as
// complete.
#pragma once

#include <cuda.h>

#include "cuda/base/ptx_mma.cuh"

#if defined(FASTATTN_CUDA_ON_CPU)
#include <async.h>
// The simulator names the line that calls an instruction.
#define FASTATTN_SITE Site here = {__builtin_FILE(), __builtin_LINE()}
#define FASTATTN_HERE , FASTATTN_SITE
#else
#define FASTATTN_SITE
#define FASTATTN_HERE
#endif

namespace fastattn::cuda {

using Barrier = uint64_t;  // in shared memory

// The dynamic shared memory of the block, aligned as load_box() needs it.
FASTATTN_DEVICE void* shared_boxes() {
#if defined(FASTATTN_CUDA_ON_CPU)
  return cuda_on_cpu::dynamic_shared();
#else
  extern __shared__ __align__(1024) char fastattn_shared_boxes[];
  return fastattn_shared_boxes;
#endif
}

// One thread calls this. A phase ends after `arrivals` arrivals.
FASTATTN_DEVICE void init_barrier(Barrier* barrier, int arrivals FASTATTN_HERE) {
#if defined(FASTATTN_CUDA_ON_CPU)
  async::init_barrier(barrier, arrivals, here);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
#endif
}

// The same thread calls this after init_barrier(), and a barrier of the block must follow. After
// both, other threads and copies see the initialised barriers.
FASTATTN_DEVICE void publish_barriers() {
#if defined(FASTATTN_CUDA_ON_CPU)
  async::publish_barriers();
#else
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
#endif
}

FASTATTN_DEVICE void arrive(Barrier* barrier FASTATTN_HERE) {
#if defined(FASTATTN_CUDA_ON_CPU)
  async::arrive(barrier, 0, here);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(barrier))
               : "memory");
#endif
}

// Also makes the phase wait for so many bytes of copies.
FASTATTN_DEVICE void arrive_and_expect(Barrier* barrier, uint32_t bytes FASTATTN_HERE) {
#if defined(FASTATTN_CUDA_ON_CPU)
  async::arrive(barrier, bytes, here);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

FASTATTN_DEVICE void wait_for_phase(Barrier* barrier, uint32_t parity FASTATTN_HERE) {
#if defined(FASTATTN_CUDA_ON_CPU)
  async::wait_for_phase(barrier, parity, here);
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra AGAIN;\n"
      "DONE:\n"
      "}"
      :
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
}

// Starts copying the box of `map` (tensor_map.h) whose first element is (batch, head, row, column).
// What lies outside the tensor becomes 0, and counts as bytes. 16-byte chunks of a row of 128 bytes
// are permuted by the row: the address of a chunk has bits 4 to 6 xor bits 7 to 9. `to` is aligned
// to 1024 bytes.
FASTATTN_DEVICE void load_box(void* to, const CUtensorMap& map, Barrier* barrier, int column,
                              int row, int head, int batch FASTATTN_HERE) {
#if defined(FASTATTN_CUDA_ON_CPU)
  async::load_box(to, map, barrier, {column, row, head, batch}, here);
#else
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];"
      :
      : "r"(shared_address(to)), "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch),
        "r"(shared_address(barrier))
      : "memory");
#endif
}

}  // namespace fastattn::cuda
