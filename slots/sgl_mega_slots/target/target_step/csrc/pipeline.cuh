// What the roles of a block share: the plan's constants, shared memory, waits that end, and who has which share.
#pragma once

#include "platform.cuh"
#include "plan.cuh"

namespace mega {

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = kConsumerWarps * 32;
constexpr int kOtherWarps = 2;  // one streams weights, one sees to the scales of norms
constexpr int kThreads = kConsumers + 32 * kOtherWarps;
constexpr int kConsumerBarrier = 1;
constexpr int kGroup = 8;       // weight rows of a tile
constexpr int kSlab = 64;       // bf16 values of one 128-byte line
constexpr int kLine = 128;      // bytes of it
constexpr int kScaleBlock = 128;  // rows and columns of fp8 weights that share a scale
constexpr bool kFp8 = kWeights != kBf16;
constexpr int kSlots = 2;       // for keys and values, and for inputs of matrices
constexpr uint32_t kStepNumbers = 510;  // of tags and copies: a multiple of 255 and of 2
constexpr float kLog2e = 1.4426950408889634f;

constexpr int kOps = 8;
constexpr int kScalesAtOnce = 9;  // loads of a lane for the scales of a norm

constexpr int kTiles = kRows <= 16 ? 1 : kRows / 16;  // of 16 rows for the tensor cores
constexpr int kQueryTiles = (kUnitHeads * kTokens + 15) / 16;
constexpr int kUnitRows = 16 * kQueryTiles;
constexpr int kHeadPairs = kHeadDim / 64;  // pairs of a head that a lane holds: columns 2 * lane, 64 further
constexpr int kBlock = 16;                          // positions that a team of attention works on at once
constexpr int kKvBytes = kKvFp8 ? 1 : 2;            // of a value of the cache
constexpr int kBlockBytes = kBlock * kHeadDim * kKvBytes;  // of their keys, and as many of their values

// Why a wait did not end: what the host prints. Kept in step with Wait in driver.py by a test.
enum Wait { kWeightsFull = 1, kWeightsEmpty = 2, kScales = 3, kArrivals = 4 };

struct Share {
  int first, count;
};

// What attention needs of the step's inputs in every layer.
struct Table {
  int prefix;  // positions of the request before the step
  int positions[kTokens], locations[kTokens];
  int places[kTeams * kTeamBlocks * kBlock];  // in the cache, of the blocks that fit the teams' memory at once
};

// Everything of a block in shared memory, in the order of the plan's sizes. Only the base is kept: the rest are
// constants, and registers are scarce.
struct Shared {
  char* base;

  MEGA_FN char* stage(int slot) const { return base + slot * kStageBytes; }
  MEGA_FN char* slot(int number) const { return base + kSlotsAt + number * kSlotBytes; }
  // Of the warps, [places] by block; in attention the queries.
  MEGA_FN float* sums(uint32_t block) const {
    return reinterpret_cast<float*>(base + kSumsAt) + (block & (kSumPlaces - 1)) * (kConsumerWarps * kBlockGroups * kRows * kGroup);
  }
  MEGA_FN Barrier* full(int slot) const { return barriers() + slot; }
  MEGA_FN Barrier* empty(int slot) const { return barriers() + kStages + slot; }
  MEGA_FN Barrier* scales_full() const { return barriers() + 2 * kStages; }
  MEGA_FN Barrier* scales_empty() const { return scales_full() + 1; }
  MEGA_FN Share* shares() const { return reinterpret_cast<Share*>(scales_empty() + 1); }
  // [residual groups][rows][8] fp32: this SM's columns of the residual stream.
  MEGA_FN float* residual() const { return reinterpret_cast<float*>(base + kBarriersAt + kBarrierBytes); }
  // [residual groups][rows] of those columns.
  MEGA_FN float* squares() const { return residual() + kResidualGroups * kRows * kGroup; }
  // [rows]: 1 / rms of the input being read.
  MEGA_FN float* scales() const { return squares() + kResidualGroups * kRows; }
  MEGA_FN Table* table() const { return reinterpret_cast<Table*>(scales() + kRows); }

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

// SMs that keep columns of the residual, by number: all of them, or those with one group each.
constexpr int kRanks = kHidden / kGroup < kSms ? kHidden / kGroup : kSms;
MEGA_FN int rank_of(int sm, const Share& columns) { return kRanks < kSms ? columns.first : sm; }

// What every thread has at hand.
struct Block {
  const Params* p;
  Shared s;
  int sm, warp, lane;
  uint32_t step;  // its number, which begins again after kStepNumbers
};

// What is noted of an operation, for whoever wants to see where the time goes.
enum Mark { kBegan = 0, kInputThere = 1, kMultiplied = 2, kEnded = 3 };
constexpr int kMarksOfLayer = 5;  // operations by number, attention as the fifth
constexpr int kMarks = 1 + kLayers * kMarksOfLayer + 1;  // the step itself first, the LM head last
MEGA_FN void note(const Block& b, int layer, int op, Mark mark) {
  if (!kTrace || b.warp != 0 || b.lane != 0) return;
  const int at = 1 + (op == kHead ? kLayers * kMarksOfLayer : layer * kMarksOfLayer + (op == kAttention ? 4 : op));
  b.p->marks[(static_cast<int64_t>(b.sm) * kMarks + at) * 4 + mark] = now_clocks();
}
// The step's beginning and end in both clocks: those of SMs are not the same, and the other is coarse.
MEGA_FN void note_step(const Block& b, int end) {
  if (!kTrace || b.warp != 0 || b.lane != 0) return;
  uint64_t* at = b.p->marks + static_cast<int64_t>(b.sm) * kMarks * 4 + 2 * end;
  at[0] = now_clocks();
  at[1] = now_ns();
}

// Where a wait is: what for, in which layer, at which operation.
MEGA_FN uint32_t place_of_wait(Wait wait, int layer, int op) {
  return static_cast<uint32_t>(wait) << 24 | static_cast<uint32_t>(layer) << 8 | static_cast<uint32_t>(op);
}
// Between two looks at what is waited for, the first of which sets the deadline: past the deadline, records which wait it is and stops the kernel. No call and
// little code: waits are everywhere, calls cost their surroundings the registers, and all of a layer's code is read anew
// for each layer.
MEGA_FN void look_again(const Block& b, uint64_t& deadline, uint32_t where, uint32_t seen) {
  pause();
  const uint64_t now = now_ns();
  if (deadline == 0) deadline = now + b.p->deadline_ns;
  if (now < deadline) return;
  record_failure(b.p->failure, where, static_cast<uint32_t>(block_id()), seen);
  stop();
}

MEGA_FN void await(const Block& b, Barrier* bar, uint32_t parity, Wait wait, int layer, int op) {
  uint64_t deadline = 0;
  while (!barrier_passed(bar, parity)) look_again(b, deadline, place_of_wait(wait, layer, op), parity);
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
// Groups of weight rows that an SM's share of an operation is, and the blocks they are worked in.
template <Op op>
MEGA_FN int groups_of(const Share& share) {
  return share.count * (Gemm<op>::pair ? 2 : 1);
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

MEGA_FN void load_four_matrices(uint32_t (&r)[4], const void* row) { load_matrices(r[0], r[1], r[2], r[3], row); }

}  // namespace mega
