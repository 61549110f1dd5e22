// What the roles of a block share: the plan's constants, shared memory, waits that end, and who has which share.
#pragma once

#include "platform.cuh"
#include "plan.cuh"

namespace mega {

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = kConsumerWarps * 32;
constexpr int kProducerWarps = 2;  // one streams weights, one brings activations
constexpr int kThreads = kConsumers + 32 * kProducerWarps;
constexpr int kConsumerBarrier = 1;
constexpr int kGroup = 8;       // weight rows of a tile
constexpr int kSlab = 64;       // values of one 128-byte line
constexpr int kLine = 128;      // bytes of it
constexpr int kSlots = 2;       // for activations
constexpr float kLog2e = 1.4426950408889634f;

constexpr int kOps = 8;

constexpr int kTiles = kRows <= 16 ? 1 : kRows / 16;  // of 16 rows for the tensor cores
constexpr int kQueryTiles = (kUnitHeads * kTokens + 15) / 16;
constexpr int kUnitRows = 16 * kQueryTiles;
constexpr int kChunkBytes = kChunk * kHeadDim * 2;  // of keys, and as many of values

// Why a wait did not end: what the host prints. Kept in step with Wait in launch.py by a test.
enum Wait { kWeightsFull = 1, kWeightsEmpty = 2, kInputFull = 3, kInputEmpty = 4, kScales = 5, kArrivals = 6 };

struct Share {
  int first, count;
};

// Everything of a block in shared memory, in the order of the plan's sizes. Only the base is kept: the rest are
// constants, and registers are scarce.
struct Shared {
  char* base;

  MEGA_FN char* stage(int slot) const { return base + slot * kStageBytes; }
  MEGA_FN char* slot(int number) const { return base + kSlotsAt + number * kSlotBytes; }
  MEGA_FN char* sums() const { return base + kSumsAt; }  // of the warps; in attention the queries
  MEGA_FN Barrier* full(int slot) const { return barriers() + slot; }
  MEGA_FN Barrier* empty(int slot) const { return barriers() + kStages + slot; }
  MEGA_FN Barrier* input_full(int slot) const { return barriers() + 2 * kStages + slot; }
  MEGA_FN Barrier* input_empty(int slot) const { return barriers() + 2 * kStages + kSlots + slot; }
  MEGA_FN Barrier* scales_full() const { return barriers() + 2 * kStages + 2 * kSlots; }
  MEGA_FN Share* shares() const { return reinterpret_cast<Share*>(scales_full() + 1); }
  // Whether this block is the last of an attention unit's splits.
  MEGA_FN uint32_t* last() const { return reinterpret_cast<uint32_t*>(shares() + kOps); }
  // [residual groups][rows][8] fp32: this SM's columns of the residual stream.
  MEGA_FN float* residual() const { return reinterpret_cast<float*>(base + kBarriersAt + kBarrierBytes); }
  // [residual groups][rows] of those columns.
  MEGA_FN float* squares() const { return residual() + kResidualGroups * kRows * kGroup; }
  // [rows]: 1 / rms of the input being read.
  MEGA_FN float* scales() const { return squares() + kResidualGroups * kRows; }

 private:
  static constexpr int kSlotsAt = kStages * kStageBytes;
  static constexpr int kSumsAt = kSlotsAt + kSlots * kSlotBytes;
  static constexpr int kBarriersAt = kSumsAt + kReductionBytes;
  MEGA_FN Barrier* barriers() const { return reinterpret_cast<Barrier*>(base + kBarriersAt); }
};

// The share of an SM: units dealt out evenly and in order, as StepPlan.share does.
MEGA_FN int64_t units_of(int op) {
  switch (op) {
    case kQkv: return Gemm<kQkv>::rows / kGroup;
    case kGateUp: return Gemm<kGateUp>::rows / kGroup / 2;
    case kHead: return Gemm<kHead>::rows / kGroup;
    case kAttention: return kUnitGroups * kSplits;
    default: return kHidden / kGroup;  // whoever keeps a column of the residual does what is done to it
  }
}
MEGA_FN Share share_of(int op, int sm) {
  const int64_t units = units_of(op);
  const int first = static_cast<int>(sm * units / kSms);
  return {first, static_cast<int>((sm + 1) * units / kSms) - first};
}

// What every thread has at hand.
struct Block {
  const Params* p;
  Shared s;
  int sm, warp, lane;
  uint32_t step;  // how many steps are done, this one included
};

// Record which wait did not end and stop the kernel; the first to fail is the one that is told.
MEGA_FN void fail(const Block& b, Wait wait, int layer, int index, uint32_t seen) {
  if (first_to_fail(b.p->failure)) {
    b.p->failure[1] = wait;
    b.p->failure[2] = static_cast<uint32_t>(b.sm);
    b.p->failure[3] = static_cast<uint32_t>(layer);
    b.p->failure[4] = static_cast<uint32_t>(index);
    b.p->failure[5] = seen;
  }
  stop();
}

MEGA_FN void await(const Block& b, Barrier* bar, uint32_t parity, Wait wait, int layer, int index) {
  if (barrier_passed(bar, parity)) return;
  const uint64_t start = now_ns();
  while (!barrier_passed(bar, parity)) {
    pause();
    if (now_ns() - start > b.p->deadline_ns) fail(b, wait, layer, index, parity);
  }
}

MEGA_FN uint32_t* counter_at(const Block& b, int index) { return b.p->counters + static_cast<int64_t>(index) * kCounterWords; }

// One thread waits until a counter holds this step's arrivals. Counters are never reset: they count all steps.
MEGA_FN void await_arrivals(const Block& b, int counter, uint32_t arrivals, int layer) {
  const uint32_t wanted = b.step * arrivals;
  const uint32_t* at = counter_at(b, counter);
  uint32_t seen = load_acquire(at);
  if (static_cast<int32_t>(seen - wanted) >= 0) return;
  const uint64_t start = now_ns();
  do {
    pause();
    seen = load_acquire(at);
    if (now_ns() - start > b.p->deadline_ns) fail(b, kArrivals, layer, counter, seen);
  } while (static_cast<int32_t>(seen - wanted) < 0);
}

// Places in a ring: a slot, and the parity of its barriers' current round.
struct Place {
  int slot;
  uint32_t parity;
};
MEGA_FN void advance(Place& place) {
  if (++place.slot == kStages) {
    place.slot = 0;
    place.parity ^= 1;
  }
}
MEGA_FN Place input_place(int load) { return {load & 1, static_cast<uint32_t>(load >> 1) & 1u}; }

// Groups of weight rows that an SM's share of an operation is, and the blocks they are worked in.
template <Op op>
MEGA_FN int groups_of(const Share& share) {
  return share.count * (Gemm<op>::pair ? 2 : 1);
}
template <Op op>
MEGA_FN int blocks_of(const Share& share) {
  return (groups_of<op>(share) + kBlockGroups - 1) / kBlockGroups;
}
// How often an input segment is brought to this SM in an operation.
template <Op op>
MEGA_FN int loads_of(const Share& share) {
  const int blocks = blocks_of<op>(share);
  return Gemm<op>::segments * (Gemm<op>::resident && blocks > 1 ? 1 : blocks);
}
template <Op op>
MEGA_FN int weight_row(const Share& share, int group) {
  if (!Gemm<op>::pair) return (share.first + group) * kGroup;
  return (share.first + group / 2) * kGroup + (group & 1) * (Gemm<op>::rows / 2);
}
template <Op op>
MEGA_FN int slabs_in(int segment) {
  const int left = Gemm<op>::slabs - segment * Gemm<op>::segment_slabs;
  return left < Gemm<op>::segment_slabs ? left : Gemm<op>::segment_slabs;
}

// Where column `column` of row `row` lies in a tile of bf16 lines [slab][lines][64], its pieces swizzled by line.
MEGA_FN int tile_offset(int lines, int line, int column) {
  const int piece = (column & (kSlab - 1)) >> 3;
  return (column / kSlab) * lines * kLine + line * kLine + ((piece ^ (line & 7)) << 4) + (column & 7) * 2;
}

// Counters: the embedding's first, then each layer's in the order of its operations, as StepPlan.counter has them.
constexpr int kLayerCounters = kKvHeads + Gemm<kO>::segments + Gemm<kGateUp>::segments + Gemm<kDown>::segments +
                               Gemm<kQkv>::segments;
MEGA_FN int counter_of(Op op, int layer, int index) {
  if (op == kEmbed) return index;
  int at = Gemm<kQkv>::segments + layer * kLayerCounters + index;
  if (op == kQkv) return at;
  at += kKvHeads;
  if (op == kAttention) return at;
  at += Gemm<kO>::segments;
  if (op == kO) return at;
  at += Gemm<kGateUp>::segments;
  if (op == kGateUp) return at;
  return at + Gemm<kDown>::segments;
}
// Arrivals that complete segment `segment` of an input of `reader` whose writer's groups have eight columns each.
template <Op reader>
MEGA_FN uint32_t column_arrivals(int segment) {
  return static_cast<uint32_t>(slabs_in<reader>(segment) * (kSlab / kGroup));
}
// Attention units, all of a column range, that overlap segment `segment` of the o projection's input.
MEGA_FN uint32_t attention_arrivals(int segment) {
  constexpr int kWidth = kUnitHeads * kHeadDim;
  const int first = segment * Gemm<kO>::segment_slabs * kSlab;
  const int end = first + slabs_in<kO>(segment) * kSlab;
  return static_cast<uint32_t>(((end + kWidth - 1) / kWidth - first / kWidth) * kRequests);
}
constexpr uint32_t kQkvArrivals = static_cast<uint32_t>((kQHeads / kKvHeads + 2) * kHeadDim / kGroup);

}  // namespace mega
