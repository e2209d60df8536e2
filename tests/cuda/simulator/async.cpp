// The engine of asynchronous work of a block: async.h lists its checks.
#include "async.h"

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "products.h"
#include "schedule.h"

namespace cuda_on_cpu::async {
namespace {

constexpr int kWarp = 32, kWarps = 32, kWarpgroup = 128, kMaxTiles = 32;
constexpr int kRegisters = 64 << 10;  // of an SM
constexpr int kPoison = 0xff;         // every byte of it: NaN

struct Phases {
  int arrivals, missing, owner;
  int64_t bytes = 0;
  uint32_t done = 0;  // phases that are complete
  bool published = false, visible = false;
};

struct Copy {
  CUtensorMap map;  // a parameter of the kernel, of which each thread has its own here
  Corner first;
  uint32_t to, barrier;
};

// A product as all lanes of a warp issued it.
struct Product {
  uint64_t a, b;
  bool from_registers, transposed, keep, fp16;
  int tiles;
  size_t sum;
  const uint32_t* registers[kWarp];

  bool equals(const Product& x) const {
    return a == x.a && b == x.b && from_registers == x.from_registers && keep == x.keep &&
           transposed == x.transposed && fp16 == x.fp16 && tiles == x.tiles && sum == x.sum;
  }
};

// D of a warp while products are under way, [16][8 tiles].
struct Sum {
  float d[16][8 * kMaxTiles];
};

// Registers of a lane that products write.
struct Held {
  size_t sum;       // where they are while products are under way
  size_t last = 0;  // the number of the latest of these
  bool away = false;
};

struct Lane {
  size_t issued = 0;
  std::vector<size_t> groups;  // how many products were issued at the end of each
  bool fenced = false;
  std::map<float*, Held> held;
};

struct Warp {
  std::vector<Product> products;
  size_t done = 0;
  std::deque<Sum> sums;
  Lane lanes[kWarp];
};

char* memory = nullptr;
size_t memory_bytes = 0;
std::map<uint32_t, Phases> barriers;
std::vector<Copy> copies;
std::vector<Warp> warps;
std::vector<int> registers;
int free_registers = 0;
bool used = false;
uint64_t all_products = 0;
// Of a warp of the latest block that had any, and of the one before.
std::vector<Product> latest[2];

Warp& my_warp() {
  used = true;
  return warps[static_cast<size_t>(current_thread() / kWarp)];
}
Lane& my_lane() { return my_warp().lanes[lane()]; }

// ---- barriers ----

Phases& phases_of(const void* barrier, Site here) {
  used = true;
  const auto found = barriers.find(shared_address(barrier));
  if (found == barriers.end()) fail_block(here, "a barrier that was never initialised");
  if (!found->second.visible && found->second.owner != current_thread())
    fail_block(here, "a barrier that only its own thread can see yet");
  return found->second;
}

void end_phase_if_complete(Phases& phases) {
  if (phases.missing == 0 && phases.bytes == 0) ++phases.done, phases.missing = phases.arrivals;
}

// ---- copies ----

uint32_t box_bytes(const CUtensorMap& map) { return map.box[0] * map.box[1] * 2; }

// Where a byte of a row of 128 bytes goes.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

void finish(const Copy& copy) {
  const CUtensorMap& map = copy.map;
  const Corner& at = copy.first;
  const bool has_head = at.head < static_cast<int64_t>(map.size[2]);
  const bool has_batch = at.batch < static_cast<int64_t>(map.size[3]);
  const char* const from = map.data + static_cast<uint64_t>(at.head) * map.stride[2] +
                           static_cast<uint64_t>(at.batch) * map.stride[3];
  for (uint32_t r = 0; r < map.box[1]; ++r)
    for (uint32_t c = 0; c < map.box[0]; ++c) {
      const uint64_t row = static_cast<uint64_t>(at.row) + r;
      const uint64_t column = static_cast<uint64_t>(at.column) + c;
      const bool inside = row < map.size[1] && column < map.size[0] && has_head && has_batch;
      char* const to = memory + swizzled(copy.to + r * 128 + c * 2);
      if (inside) {
        std::memcpy(to, from + row * map.stride[1] + column * 2, 2);
      } else {
        std::memset(to, 0, 2);
      }
    }
  Phases& phases = barriers.at(copy.barrier);
  phases.bytes -= box_bytes(map);
  end_phase_if_complete(phases);
}

// ---- products ----

float to_float(uint16_t bits, bool fp16) {
  if (fp16) {
    _Float16 x;
    std::memcpy(&x, &bits, 2);
    return static_cast<float>(x);
  }
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float y;
  std::memcpy(&y, &wide, 4);
  return y;
}

// Element (row, k) of an operand in shared memory; for B, "rows" are columns.
float element(uint64_t descriptor, bool transposed, bool fp16, uint32_t row, uint32_t k) {
  const auto field = [&](int bit) {
    return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4;
  };
  const uint32_t start = field(0), panel = field(16), stretch = field(32);
  const uint32_t from =
      transposed ? start + row % 64 * 2 + row / 64 * panel + k % 8 * 128 + k / 8 * stretch
                 : start + row % 8 * 128 + row / 8 * stretch + k * 2;
  const uint32_t at = swizzled(from);
  uint16_t bits = 0x7fff;  // NaN, past the shared memory
  if (at + 2 <= memory_bytes) std::memcpy(&bits, memory + at, 2);
  return to_float(bits, fp16);
}

// The place of a lane's value in a fragment of 16 rows.
int row_of(int lane, int v) { return lane / 4 + v / 2 % 2 * 8; }
int column_of(int lane, int v) { return v / 4 * 8 + lane % 4 * 2 + v % 2; }

void load_a(const Product& p, int warp_in_group, float (&a)[16][16]) {
  for (int n = 0; n < kWarp && p.from_registers; ++n)
    for (int r = 0; r < 4; ++r)
      for (int half = 0; half < 2; ++half)
        a[n / 4 + r % 2 * 8][n % 4 * 2 + half + r / 2 * 8] =
            to_float(static_cast<uint16_t>(p.registers[n][r] >> 16 * half), p.fp16);
  for (unsigned r = 0; r < 16 && !p.from_registers; ++r)
    for (unsigned k = 0; k < 16; ++k)
      a[r][k] = element(p.a, false, p.fp16, static_cast<unsigned>(warp_in_group) * 16 + r, k);
}

void run_product(const Product& p, int warp_in_group, Sum& sum) {
  static float a[16][16], b[8 * kMaxTiles][16];
  const unsigned columns = 8 * static_cast<unsigned>(p.tiles);
  load_a(p, warp_in_group, a);
  for (unsigned c = 0; c < columns; ++c)
    for (unsigned k = 0; k < 16; ++k) b[c][k] = element(p.b, p.transposed, p.fp16, c, k);
  for (unsigned r = 0; r < 16; ++r) {
    float* const d = sum.d[r];
    if (!p.keep) std::memset(d, 0, columns * sizeof(float));
    for (unsigned c = 0; c < columns; ++c) d[c] = add_products(p.fp16, d[c], a[r], b[c]);
  }
}

// Runs the products of this warp up to number `end`. All lanes call this; one of them does it,
// while the others wait.
void run_products(size_t end, Site here) {
  exchange(~0u, 0, lane(), here);
  Warp& warp = my_warp();
  if (lane() == 0 && !schedule.in_turn() && !schedule.early_products())
    let_others_run(schedule.random() % (kPatience + 1), here);
  if (lane() == 0)
    for (; warp.done < end; ++warp.done) {
      const Product& p = warp.products[warp.done];
      run_product(p, current_thread() % kWarpgroup / kWarp, warp.sums[p.sum]);
      ++all_products;
    }
  exchange(~0u, 0, lane(), here);
}

// The sum that holds D from now on; the lane's registers move there, and are NaN meanwhile.
size_t hold(float* d, int tiles, size_t product) {
  Warp& warp = my_warp();
  Lane& mine = my_lane();
  Held& held = mine.held.try_emplace(d, Held{mine.held.size()}).first->second;
  if (warp.sums.size() <= held.sum) warp.sums.resize(held.sum + 1);
  held.last = product;
  if (held.away) return held.sum;
  Sum& sum = warp.sums[held.sum];
  for (int v = 0; v < 4 * tiles; ++v) sum.d[row_of(lane(), v)][column_of(lane(), v)] = d[v];
  std::memset(d, kPoison, static_cast<size_t>(4 * tiles) * sizeof(float));
  held.away = true;
  return held.sum;
}

// Gives the registers back whose products are done.
void give_back() {
  Warp& warp = my_warp();
  for (auto& [d, held] : my_lane().held) {
    if (!held.away || held.last >= warp.done) continue;
    const Sum& sum = warp.sums[held.sum];
    for (int v = 0; v < 4 * warp.products[held.last].tiles; ++v)
      d[v] = sum.d[row_of(lane(), v)][column_of(lane(), v)];
    held.away = false;
  }
}

std::string unequal_warps() {
  for (size_t n = 0; n < warps.size(); ++n) {
    const auto &mine = warps[n].products, &first = warps[n / 4 * 4].products;
    bool equal = mine.size() == first.size();
    for (size_t x = 0; equal && x < mine.size(); ++x) equal = mine[x].equals(first[x]);
    if (!equal) return "the warps of warpgroup " + std::to_string(n / 4) + " issued other products";
    for (const Lane& each : warps[n].lanes)
      if (warps[n].done != each.issued) return "products that nobody waits for";
  }
  return "";
}

std::string wrong_barriers() {
  for (const auto& [at, phases] : barriers)
    if (phases.bytes != 0) return "a barrier expects other bytes than came";
  return "";
}

std::string wrong_registers() {
  for (size_t n = 0; n < registers.size(); ++n)
    if (registers[n] != registers[n / kWarpgroup * kWarpgroup])
      return "not all threads of a warpgroup changed its registers";
  return "";
}

void set_registers(int count) {
  int& mine = registers[static_cast<size_t>(current_thread())];
  free_registers -= count - mine;
  mine = count;
}

}  // namespace

uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(static_cast<const char*>(at) - memory);
}

void init_barrier(const void* barrier, int arrivals, Site) {
  used = true;
  barriers[shared_address(barrier)] = {arrivals, arrivals, current_thread()};
}

void publish_barriers() {
  for (auto& [at, phases] : barriers)
    if (phases.owner == current_thread()) phases.published = true;
}

void arrive(const void* barrier, uint32_t bytes, Site here) {
  Phases& phases = phases_of(barrier, here);
  phases.bytes += bytes;
  if (--phases.missing < 0) fail_block(here, "more arrivals at a barrier than it counts");
  end_phase_if_complete(phases);
  if (!schedule.in_turn() && schedule.chance(2))  // others see it before this thread goes on
    let_others_run(schedule.random() % (kPatience + 1), here);
}

void wait_for_phase(const void* barrier, uint32_t parity, Site here) {
  const Phases* const phases = &phases_of(barrier, here);
  wait_until([=] { return (phases->done & 1) != parity; }, here);
}

void load_box(void* to, const CUtensorMap& map, const void* barrier, Corner first, Site here) {
  phases_of(barrier, here);
  const uint32_t at = shared_address(to);
  if (at % 1024 != 0) fail_block(here, "a box goes to an address that is no multiple of 1024");
  if (at + box_bytes(map) > memory_bytes) fail_block(here, "a box past the shared memory");
  std::memset(to, kPoison, box_bytes(map));
  copies.push_back({map, first, at, shared_address(barrier)});
}

void multiply(OperandA a, uint64_t b, bool transposed, bool keep, bool fp16, int tiles, float* d,
              Site here) {
  Warp& warp = my_warp();
  Lane& mine = my_lane();
  if (!mine.fenced) fail_block(here, "a product without a fence before its group");
  const size_t number = mine.issued++;
  Product issued = {a.descriptor, b,     a.registers != nullptr, transposed, keep,
                    fp16,         tiles, hold(d, tiles, number), {}};
  if (number == warp.products.size()) warp.products.push_back(issued);
  Product& known = warp.products[number];
  if (!known.equals(issued)) fail_block(here, "the lanes of a warp issue different products");
  known.registers[lane()] = a.registers;
}

void fence_products() { my_lane().fenced = true; }

void commit_products(Site here) {
  Lane& mine = my_lane();
  mine.fenced = false;
  mine.groups.push_back(mine.issued);
  if (schedule.early_products()) run_products(mine.issued, here);
}

void wait_for_products(int pending, Site here) {
  const Lane& mine = my_lane();
  const size_t kept = static_cast<size_t>(pending), groups = mine.groups.size();
  run_products(groups > kept ? mine.groups[groups - kept - 1] : 0, here);
  give_back();
}

void take_registers(int count, Site here) {
  used = true;
  const int more = count - registers[static_cast<size_t>(current_thread())];
  if (more < 0) fail_block(here, "%d registers fewer, by taking", -more);
  wait_until([=] { return free_registers >= more; }, here);
  set_registers(count);
}

void give_registers(int count, Site here) {
  used = true;
  const int more = count - registers[static_cast<size_t>(current_thread())];
  if (more > 0) fail_block(here, "%d registers more, by giving", more);
  set_registers(count);
}

void begin_block(char* shared, size_t bytes, int threads) {
  memory = shared, memory_bytes = bytes;
  barriers.clear(), copies.clear();
  if (warps.empty() || used) warps = std::vector<Warp>(kWarps);
  const int each = std::min(kRegisters / threads, 255) / 8 * 8;
  registers.assign(static_cast<size_t>(threads), each);
  free_registers = 0;  // the rest of the SM is no block's
  used = false;
}

void pass_block_barrier() {
  for (auto& [at, phases] : barriers) phases.visible = phases.published;
}

bool finish_a_copy() {
  if (copies.empty()) return false;
  const size_t n = schedule.in_turn() ? 0 : schedule.random() % copies.size();
  const Copy copy = copies[n];
  copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(n));
  finish(copy);
  return true;
}

const char* end_block() {
  if (!warps[0].products.empty()) {
    latest[1] = std::move(latest[0]);
    latest[0] = warps[0].products;
  }
  static std::string wrong;
  wrong = copies.empty() ? "" : "the block ends while a copy is under way";
  if (wrong.empty()) wrong = unequal_warps();
  if (wrong.empty()) wrong = wrong_barriers();
  if (wrong.empty()) wrong = wrong_registers();
  return wrong.empty() ? nullptr : wrong.c_str();
}

bool needs_sm90() { return used; }
void use_sm90() { used = true; }

uint64_t products_so_far() { return all_products; }

int latest_descriptors(uint64_t* pairs, int most, int blocks_before) {
  int count = 0;
  for (const Product& p : latest[blocks_before]) {
    if (count == most) break;
    pairs[2 * count] = p.a, pairs[2 * count + 1] = p.b;
    ++count;
  }
  return count;
}

}  // namespace cuda_on_cpu::async

// Makes the driver refuse tensor maps, or make them again; for tests.
static bool refuses_maps = false;
extern "C" void shim_refuse_maps(bool refuse) { refuses_maps = refuse; }

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data,
                                const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  if (!cuda_on_cpu::has_context) return CUDA_ERROR_INVALID_CONTEXT;  // cuda.h lists it
  bool valid = !refuses_maps && rank == 4 && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
               box[0] * 2 == 128;
  *map = {static_cast<const char*>(data), {}, {2}, {}};
  for (cuuint32_t n = 0; n < 4; ++n) {
    valid &= sizes[n] >= 1 && sizes[n] <= uint64_t{1} << 32 && box[n] >= 1 && box[n] <= 256;
    valid &= steps[n] == 1;
    map->size[n] = sizes[n], map->box[n] = box[n];
    if (n == 0) continue;
    const uint64_t stride = strides[n - 1];
    valid &= stride >= 16 && stride % 16 == 0 && stride < uint64_t{1} << 40;
    map->stride[n] = stride;
  }
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// The products of warps so far; for tests.
extern "C" uint64_t shim_products() { return cuda_on_cpu::async::products_so_far(); }

// (A, B) of at most so many products of a warp of the latest block that had any, or of the one
// before; how many.
extern "C" int shim_descriptors(uint64_t* pairs, int most, int blocks_before) {
  return cuda_on_cpu::async::latest_descriptors(pairs, most, blocks_before);
}
