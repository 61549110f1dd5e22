// The primitives of csrc/device.cuh on a CPU: the kernel's own source runs here, thread by thread.
//
// Each CUDA thread is a fiber of one OS thread, so an interleaving is decided by a seed and a failure repeats. The
// emulator is there to find wrong schedules and wrong indices, and it is hostile where the hardware may be:
// - warps run in a random order, and now and then one of them, or a whole block, stands still for long;
// - a copy first fills its target with NaN and delivers at a random later time, so that a read too early shows;
//   how late, and how often warps stand still, differs from seed to seed;
// - shared memory begins as NaN;
// - when nothing can run, it says who waits for what.
// It keeps the order of each thread's accesses: a missing fence does not show here.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define MEGA_FN inline
#define MEGA_GRID_CONSTANT
#define MEGA_BOUNDS
#define MEGA_KERNEL static void

namespace mega {

struct Barrier {
  uint16_t phase : 1, expected : 15;
  int16_t pending;
  int32_t bytes;
};
static_assert(sizeof(Barrier) == 8, "as large as the hardware's");
// What a tensor map says: `rows` x `slabs` lines of 64 values, `stride` bytes from row to row.
struct TensorMap {
  char* base;
  int64_t rows, slabs, stride;
  int32_t box_rows, box_slabs;
  int64_t unused[11];
};
static_assert(sizeof(TensorMap) == 128, "as large as the driver's");

namespace emulator {

constexpr int kLanes = 32;
constexpr int kIdleRounds = 500;  // without a store, copy or barrier: nobody will go on
constexpr size_t kStack = 128 * 1024;

struct Warp {
  int arrived = 0;
  uint64_t round = 0;
  // What the lanes of a collective bring and get.
  const void* address[kLanes];
  uint32_t in[kLanes][6];
  float sums[kLanes][4];
  float value[kLanes], result[kLanes];
  int mask[kLanes];
  uint32_t out[kLanes][4];
};
struct Named {
  int arrived = 0;
  uint64_t round = 0;
};
struct Block {
  std::vector<char> memory;
  char* shared;
  std::vector<Warp> warps;
  Named named[16];
};
struct Copy {
  const TensorMap* map;
  char* to;
  int row, slab;
  Barrier* bar;
};
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Piece {
  void* to;
  const void* from;
};
struct Fiber {
  std::deque<std::vector<Piece>> groups{1};  // of 16-byte copies; the last one is still open
  ucontext_t context;  // to begin with; then the jumps, which ask nothing of the system
  jmp_buf jump;
  bool begun = false;
  std::unique_ptr<char[]> stack;
  int block, thread;
  bool ended = false;
  const char* waits = nullptr;
  // Nothing to do while this still holds that value.
  const uint64_t* gate = nullptr;
  uint64_t closed = 0;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Block> blocks;
  std::deque<Copy> copies;
  ucontext_t scheduler;
  jmp_buf back;
  Fiber* running = nullptr;
  std::mt19937 random;
  uint64_t progress = 0;
  std::string failed;
  void (*body)() = nullptr;
};
inline Machine* machine = nullptr;

inline Fiber& self() { return *machine->running; }
inline Block& block() { return machine->blocks[self().block]; }
inline Warp& warp() { return block().warps[self().thread / kLanes]; }
inline int lane() { return self().thread % kLanes; }

inline void yield(const char* waits) {
  self().waits = waits;
  if (_setjmp(self().jump) == 0) _longjmp(machine->back, 1);
  if (!machine->failed.empty()) throw Failure(machine->failed);
  self().waits = nullptr;
}
inline void progressed() { ++machine->progress; }

// Hands over until a round has ended.
inline void wait_for_round(const uint64_t& round, uint64_t now, const char* waits) {
  self().gate = &round;
  self().closed = now;
  while (round == now) yield(waits);
  self().gate = nullptr;
}

// All lanes of a warp meet; the last to come runs `act`.
template <typename Act>
void collective(const char* what, Act act) {
  Warp& w = warp();
  const uint64_t round = w.round;
  if (++w.arrived == kLanes) {
    act(w);
    w.arrived = 0;
    ++w.round;  // no progress: whoever polls does this too
    return;
  }
  wait_for_round(w.round, round, what);
}

inline void complete_if_done(Barrier* bar) {
  if (bar->pending == 0 && bar->bytes == 0) {
    bar->phase ^= 1;
    bar->pending = static_cast<int16_t>(bar->expected);
    progressed();
  }
}
inline char* tile_line(const Copy& copy, int slab, int row) {
  return copy.to + (static_cast<int64_t>(slab) * copy.map->box_rows + row) * 128;
}
inline void deliver(const Copy& copy) {
  for (int slab = 0; slab < copy.map->box_slabs; ++slab) {
    for (int row = 0; row < copy.map->box_rows; ++row) {
      const bool inside = copy.row + row < copy.map->rows && copy.slab + slab < copy.map->slabs;
      const char* from = copy.map->base + (copy.row + row) * copy.map->stride + (copy.slab + slab) * 128;
      for (int piece = 0; piece < 8; ++piece) {
        char* to = tile_line(copy, slab, row) + ((piece ^ (row & 7)) << 4);
        if (inside)
          memcpy(to, from + piece * 16, 16);
        else
          memset(to, 0, 16);
      }
    }
  }
  copy.bar->bytes -= copy.map->box_slabs * copy.map->box_rows * 128;
  complete_if_done(copy.bar);
  progressed();
}

inline void entry() {
  try {
    machine->body();
  } catch (const Failure& failure) {
    if (machine->failed.empty()) machine->failed = failure.what();
  }
  self().ended = true;
  progressed();
  _longjmp(machine->back, 1);
}

// Runs a fiber until it hands over.
inline void resume(Fiber& fiber) {
  machine->running = &fiber;
  if (_setjmp(machine->back) != 0) return;
  if (fiber.begun) _longjmp(fiber.jump, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

inline void fail(const std::string& why) {
  machine->failed = why;
  throw Failure(why);
}

// Runs `body` as `blocks` blocks of `threads` threads; an empty string, or what went wrong.
inline std::string run(void (*body)(), int blocks, int threads, size_t shared_bytes, uint32_t seed) {
  Machine m;
  machine = &m;
  m.random.seed(seed);
  m.body = body;
  m.blocks.resize(blocks);
  for (Block& each : m.blocks) {
    each.memory.assign(shared_bytes + 1024, '\xff');
    each.shared = each.memory.data() + (1024 - reinterpret_cast<uintptr_t>(each.memory.data()) % 1024) % 1024;
    each.warps.resize(threads / kLanes);
  }
  m.fibers.resize(static_cast<size_t>(blocks) * threads);
  for (size_t i = 0; i < m.fibers.size(); ++i) {
    Fiber& fiber = m.fibers[i];
    fiber.block = static_cast<int>(i) / threads;
    fiber.thread = static_cast<int>(i) % threads;
    fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &m.scheduler;
    makecontext(&fiber.context, entry, 0);
  }
  const int warps = static_cast<int>(m.fibers.size()) / kLanes;
  std::vector<int> order(warps);
  for (int i = 0; i < warps; ++i) order[i] = i;
  // Rounds that a warp stands still, and how likely that and a copy's end are in this run.
  std::vector<int> still(warps, 0);
  const int warps_of_block = threads / kLanes;
  const uint32_t seldom = 1024u << m.random() % 3, slow = 1u << m.random() % 6;
  int idle = 0;
  for (size_t ended = 0; ended < m.fibers.size();) {
    const uint64_t before = m.progress;
    std::shuffle(order.begin(), order.end(), m.random);
    bool all = true;
    for (int each : order) {
      if (still[each] > 0 && idle == 0) {
        --still[each];
        all = false;
        continue;
      }
      if (m.random() % seldom == 0) still[each] = static_cast<int>(m.random() % 128);
      if (m.random() % (8 * seldom) == 0) {
        const int first = each / warps_of_block * warps_of_block;
        for (int other = first; other < first + warps_of_block; ++other) still[other] = 512;
      }
      for (int i = 0; i < kLanes; ++i) {
        Fiber& fiber = m.fibers[static_cast<size_t>(each) * kLanes + i];
        const bool shut = fiber.gate != nullptr && *fiber.gate == fiber.closed && m.failed.empty();
        if (!fiber.ended && !shut) resume(fiber);
      }
      // Copies end in any order, some time after they were asked for.
      if (!m.copies.empty() && m.random() % (4 * slow) == 0) {
        const size_t pick = m.random() % m.copies.size();
        const Copy copy = m.copies[pick];
        m.copies.erase(m.copies.begin() + static_cast<int64_t>(pick));
        deliver(copy);
      }
    }
    ended = static_cast<size_t>(std::count_if(m.fibers.begin(), m.fibers.end(), [](const Fiber& f) { return f.ended; }));
    idle = all && m.progress == before && m.copies.empty() ? idle + 1 : 0;
    if (idle > kIdleRounds && m.failed.empty()) {
      m.failed = "nothing can run:";
      int told = 0;
      for (const Fiber& fiber : m.fibers) {
        if (fiber.ended || fiber.waits == nullptr || ++told > 12) continue;
        m.failed += " block " + std::to_string(fiber.block) + " thread " + std::to_string(fiber.thread) + " at " + fiber.waits + ";";
      }
    }
  }
  machine = nullptr;
  return m.failed;
}

}  // namespace emulator

// --- the names of device.cuh

MEGA_FN int thread_id() { return emulator::self().thread; }
MEGA_FN int block_id() { return emulator::self().block; }
MEGA_FN int unknown(int x) { return x; }
MEGA_FN char* shared_memory() { return emulator::block().shared; }

MEGA_FN void sync_warp() {
  emulator::collective("sync_warp", [](emulator::Warp&) {});
}
MEGA_FN void sync_threads(int id, int count) {
  emulator::Named& named = emulator::block().named[id];
  const uint64_t round = named.round;
  if (++named.arrived == count) {
    named.arrived = 0;
    ++named.round;
    emulator::progressed();
    return;
  }
  emulator::wait_for_round(named.round, round, "sync_threads");
}
MEGA_FN void sync_block() { sync_threads(0, static_cast<int>(emulator::block().warps.size()) * emulator::kLanes); }
MEGA_FN void fence_barriers() {}

MEGA_FN uint32_t load_acquire(const uint32_t* p) { return *p; }
MEGA_FN uint32_t add_acquire_release(uint32_t* p, uint32_t by) {
  const uint32_t old = *p;
  *p += by;
  emulator::progressed();
  return old;
}
MEGA_FN void store_plain(uint32_t* p, uint32_t value) { *p = value; }

MEGA_FN void barrier_init(Barrier* bar, uint32_t count) {
  bar->phase = 0;
  bar->expected = static_cast<uint16_t>(count);
  bar->pending = static_cast<int16_t>(count);
  bar->bytes = 0;
}
MEGA_FN void barrier_arrive(Barrier* bar) {
  if (--bar->pending < 0) emulator::fail("more arrivals at a barrier than it expects");
  emulator::complete_if_done(bar);
}
MEGA_FN void barrier_expect(Barrier* bar, uint32_t bytes) {
  bar->bytes += static_cast<int32_t>(bytes);
  barrier_arrive(bar);
}
MEGA_FN bool barrier_passed(Barrier* bar, uint32_t parity) { return bar->phase != parity; }

MEGA_FN void copy_weights(void* to, const TensorMap* map, int row, int slab, Barrier* bar) {
  if (reinterpret_cast<uintptr_t>(to) % 1024 != 0) emulator::fail("a tile does not lie at a multiple of 1024");
  const emulator::Copy copy = {map, static_cast<char*>(to), row, slab, bar};
  memset(to, 0xff, static_cast<size_t>(map->box_rows) * map->box_slabs * 128);
  emulator::machine->copies.push_back(copy);
  emulator::progressed();
}
// These arrive as late as they may: when their thread waits for them.
MEGA_FN void copy_16_bytes(void* to, const void* from) {
  memset(to, 0xff, 16);
  emulator::self().groups.back().push_back({to, from});
}
MEGA_FN void copies_commit() { emulator::self().groups.emplace_back(); }
template <int kLeft>
MEGA_FN void copies_wait() {
  auto& groups = emulator::self().groups;
  while (groups.size() > kLeft + 1) {
    for (const emulator::Piece& piece : groups.front()) memcpy(piece.to, piece.from, 16);
    groups.pop_front();
  }
}

namespace emulator {
// Four 8 x 8 matrices of 16-bit values; lane l brings the row l % 8 of matrix l / 8.
inline void matrices(Warp& w, bool transposed) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int m = 0; m < 4; ++m) {
      uint16_t pair[2];
      for (int i = 0; i < 2; ++i) {
        const int line = lane / 4, column = lane % 4 * 2 + i;
        const auto* row = static_cast<const uint16_t*>(w.address[m * 8 + (transposed ? column : line)]);
        pair[i] = row[transposed ? line : column];
      }
      memcpy(&w.out[lane][m], pair, 4);
    }
  }
}
inline float bf16(uint32_t bits) {
  bits <<= 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline void multiply_all_lanes(Warp& w) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      for (int part = 0; part < 4; ++part)
        a[group + (part & 1) * 8][pair + i + (part >> 1) * 8] = bf16(w.in[lane][part] >> (16 * i) & 0xffff);
      for (int part = 0; part < 2; ++part) b[pair + i + part * 8][group] = bf16(w.in[lane][4 + part] >> (16 * i) & 0xffff);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i >> 1) * 8, column = lane % 4 * 2 + (i & 1);
      float sum = w.sums[lane][i];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      w.sums[lane][i] = sum;
    }
  }
}
}  // namespace emulator

MEGA_FN void load_matrices_as(uint32_t (&r)[4], const void* row, bool transposed) {
  emulator::Warp& w = emulator::warp();
  const int lane = emulator::lane();
  w.address[lane] = row;
  emulator::collective("load_matrices", [&](emulator::Warp& all) { emulator::matrices(all, transposed); });
  memcpy(r, w.out[lane], sizeof(r));
  sync_warp();
}
MEGA_FN void load_matrices(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, const void* row) {
  uint32_t r[4];
  load_matrices_as(r, row, false);
  r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}
MEGA_FN void load_matrices_transposed(uint32_t (&r)[4], const void* row) { load_matrices_as(r, row, true); }
MEGA_FN void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulator::Warp& w = emulator::warp();
  const int lane = emulator::lane();
  const uint32_t in[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(w.in[lane], in, sizeof(in));
  memcpy(w.sums[lane], c, sizeof(c));
  emulator::collective("multiply", emulator::multiply_all_lanes);
  memcpy(c, w.sums[lane], sizeof(c));
  sync_warp();
}
MEGA_FN float shuffle_from(float value, int from) {
  emulator::Warp& w = emulator::warp();
  const int lane = emulator::lane();
  w.value[lane] = value;
  w.mask[lane] = from;
  emulator::collective("shuffle_from", [](emulator::Warp& all) {
    for (int each = 0; each < emulator::kLanes; ++each) all.result[each] = all.value[all.mask[each] & 31];
  });
  const float result = w.result[lane];
  sync_warp();
  return result;
}
MEGA_FN float shuffle_xor(float value, int mask) {
  emulator::Warp& w = emulator::warp();
  const int lane = emulator::lane();
  w.value[lane] = value;
  w.mask[lane] = mask;
  emulator::collective("shuffle_xor", [](emulator::Warp& all) {
    for (int each = 0; each < emulator::kLanes; ++each) all.result[each] = all.value[each ^ all.mask[each]];
  });
  const float result = w.result[lane];
  sync_warp();
  return result;
}

MEGA_FN void load_vector(uint32_t (&to)[4], const uint32_t* from) { memcpy(to, from, 16); }
MEGA_FN void store_vector(uint32_t* to, const uint32_t (&from)[4]) { memcpy(to, from, 16); }
MEGA_FN void finish_reads() {}
MEGA_FN bool all_lanes(bool holds) {
  emulator::Warp& w = emulator::warp();
  const int lane = emulator::lane();
  w.mask[lane] = holds;
  emulator::collective("all_lanes", [](emulator::Warp& all) {
    int held = 1;
    for (int each = 0; each < emulator::kLanes; ++each) held &= all.mask[each];
    for (int each = 0; each < emulator::kLanes; ++each) all.result[each] = static_cast<float>(held);
  });
  const bool result = w.result[lane] != 0.0f;
  sync_warp();
  return result;
}

MEGA_FN uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
MEGA_FN uint32_t pack_bf16(float low, float high) { return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16; }
MEGA_FN float from_bf16(uint16_t value) { return emulator::bf16(value); }
MEGA_FN uint8_t to_fp8(float value) {
  if (value != value) return 0x7f;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float size = std::fabs(value);
  if (size >= 448.0f) return sign | 0x7e;
  int exponent;
  std::frexp(size, &exponent);  // size is 2 ** (exponent - 1) or more, and less than twice that
  exponent = exponent - 1 < -6 || size == 0.0f ? -6 : exponent - 1;
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));  // of 2 ** (exponent - 3)
  return sign | static_cast<uint8_t>(steps < 8 ? steps : ((exponent + 7) << 3) + (steps - 8));
}
MEGA_FN uint16_t pack_fp8(float low, float high) { return to_fp8(low) | static_cast<uint16_t>(to_fp8(high)) << 8; }
MEGA_FN uint32_t multiply_bf16(uint32_t x, uint32_t y) {
  const float low = emulator::bf16(x & 0xffff) * emulator::bf16(y & 0xffff);
  return pack_bf16(low, emulator::bf16(x >> 16) * emulator::bf16(y >> 16));
}
MEGA_FN uint32_t pick_bytes(uint32_t x, uint32_t selector) {
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> (4 * i) & 15, byte = (digit & 4 ? 0 : x) >> (8 * (digit & 3)) & 255;
    picked |= (digit < 8 ? byte : byte & 128 ? 255 : 0) << (8 * i);
  }
  return picked;
}
MEGA_FN float exp2_of(float x) { return std::exp2(x); }
MEGA_FN float minus_infinity() { return -INFINITY; }
MEGA_FN float inverse_root(float x) { return 1.0f / std::sqrt(x); }
MEGA_FN float divide(float x, float y) { return x / y; }
MEGA_FN uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
MEGA_FN float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
MEGA_FN float load_constant(const float* from) { return *from; }
MEGA_FN void load_words(uint32_t (&to)[4], const uint32_t* from) { memcpy(to, from, 16); }
MEGA_FN void store_word(uint32_t* to, uint32_t word) {
  *to = word;
  emulator::progressed();
}
MEGA_FN uint64_t load_long(const uint64_t* from) { return *from; }
MEGA_FN void load_longs(uint64_t (&to)[2], const uint64_t* from) { memcpy(to, from, 16); }
MEGA_FN void store_long(uint64_t* to, uint64_t word) {
  *to = word;
  emulator::progressed();
}
MEGA_FN uint64_t now_ns() { return 0; }
MEGA_FN uint64_t now_clocks() {
  static uint64_t clocks = 0;
  return ++clocks;
}
MEGA_FN void pause() { emulator::yield("a flag or barrier"); }
MEGA_FN void record_failure(uint32_t* to, uint32_t where, uint32_t sm, uint32_t seen) {
  to[0] = 1, to[1] = where, to[2] = sm, to[3] = seen;
}
MEGA_FN void stop() { emulator::fail("the kernel stopped itself"); }

}  // namespace mega
