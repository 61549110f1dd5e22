// The two warps that work ahead: one streams weights in the plan's order as fast as the ring drains, one puts the scales
// of norms together.
#pragma once

#include "words.cuh"

namespace mega {

// --- weights: one lane, which waits for nothing but room in the ring

// Where the stream stands: the next stage to fill, and the oldest that may still be under way. Copies beyond those that
// the memory's rate needs only make everybody's loads wait longer.
struct Stream {
  Place next, oldest;
  int under_way;
};

// What the stream has to know of an operation; one loop serves all of them.
struct Streamed {
  int op, slabs, stage_slabs, segment_slabs, pair_rows;  // rows from a gate to its up, or 0
};
template <Op op>
MEGA_FN Streamed streamed() {
  return {op, Gemm<op>::slabs, Gemm<op>::stage_slabs, Gemm<op>::segment_slabs, Gemm<op>::pair ? Gemm<op>::rows / 2 : 0};
}
MEGA_FN Streamed streamed_of(int op) {
  switch (op) {
    case kQkv: return streamed<kQkv>();
    case kO: return streamed<kO>();
    case kGateUp: return streamed<kGateUp>();
    case kDown: return streamed<kDown>();
    default: return streamed<kHead>();
  }
}

// One stage, once there is room.
MEGA_FN void stream_stage(const Block& b, Stream& at, const Streamed& of, const TensorMap* map, int row, int slab, int layer) {
  await(b, b.s.empty(at.next.slot), at.next.parity ^ 1, kWeightsEmpty, layer, of.op);
  if (at.under_way == kUnderWay) {
    await(b, b.s.full(at.oldest.slot), at.oldest.parity, kWeightsFull, layer, of.op);
    advance(at.oldest);
  } else {
    ++at.under_way;
  }
  Barrier* full = b.s.full(at.next.slot);
  barrier_expect(full, of.stage_slabs * kGroup * kLine);
  copy_weights(b.s.stage(at.next.slot), map, row, slab, full);
  advance(at.next);
}

// The order in which multiply_all takes them.
MEGA_FN void stream_weights(const Block& b) {
  Stream at = {{0, 0}, {0, 0}, 0};
  constexpr int kMaps = kLayers * kLayerMaps + kWithHead;
#pragma unroll 1
  for (int number = 0; number < kMaps; ++number) {
    const int layer = number / kLayerMaps;
    const Streamed of = streamed_of(number < kLayers * kLayerMaps ? number % kLayerMaps : kHead);
    const Share share = b.s.shares()[of.op];
    const int pair = of.pair_rows > 0;
    const int groups = share.count << pair;
#pragma unroll 1
    for (int block = 0; block < groups; block += kBlockGroups) {
      const int end = groups < block + kBlockGroups ? groups : block + kBlockGroups;
#pragma unroll 1
      for (int segment = 0; segment < of.slabs; segment += of.segment_slabs) {
        const int last = segment + of.segment_slabs < of.slabs ? segment + of.segment_slabs : of.slabs;
        const int slabs = (last - segment + of.stage_slabs - 1) / of.stage_slabs, stages = (end - block) * slabs;
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) {
          const int group = block + (kGroupsTogether ? stage % (end - block) : stage / slabs);
          const int slab = segment + (kGroupsTogether ? stage / (end - block) : stage % slabs) * of.stage_slabs;
          const int row = (share.first + (group >> pair)) * kGroup + (group & pair) * of.pair_rows;
          stream_stage(b, at, of, b.p->weight_maps + number, row, slab, layer);
        }
      }
    }
  }
}

// --- scales: one warp

// 1 / rms of each row from the squares that SMs left of their columns: a lane sums four rows of some SMs. `number` is how
// many were brought before.
MEGA_FN void bring_scales(const Block& b, const uint64_t* squares, int layer, uint32_t number) {
  constexpr int kFours = kRows / 4, kCount = (kRanks * kFours + 31) / 32;
  const int four = b.lane % kFours;
  const uint32_t tag = tag_of(b, layer);
  uint64_t deadline = 0;
  float sums[4] = {};
#pragma unroll 1
  for (int from = 0; from < kCount; from += kScalesAtOnce) {
    uint64_t pairs[kScalesAtOnce][2];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < kScalesAtOnce; ++i) {
        const int rank = ((from + i) * 32 + b.lane) / kFours;
        load_longs(pairs[i], squares + (rank < kRanks ? rank : 0) * (kRows / 2) + four * 2);
      }
#pragma unroll
      for (int i = 0; i < kScalesAtOnce; ++i) there = there && has_tag(pairs[i][0], tag) && has_tag(pairs[i][1], tag);
      if (!there) look_again(b, deadline, place_of_wait(kArrivals, layer, kFinal), tag);
    } while (!all_lanes(there));
#pragma unroll
    for (int i = 0; i < kScalesAtOnce; ++i) {
      if (((from + i) * 32 + b.lane) / kFours >= kRanks) continue;
      for (int half = 0; half < 2; ++half) {
        sums[half * 2] += first_of(pairs[i][half]);
        sums[half * 2 + 1] += second_of(pairs[i][half]);
      }
    }
  }
  await(b, b.s.scales_empty(), (number & 1) ^ 1, kScales, layer, kFinal);
  for (int row = 0; row < 4; ++row) {
    for (int mask = 16; mask >= kFours; mask >>= 1) sums[row] += shuffle_xor(sums[row], mask);
    if (b.lane < kFours) b.s.scales()[four * 4 + row] = inverse_root(sums[row] * (1.0f / kHidden) + b.p->eps);
  }
  sync_warp();
  if (b.lane == 0) barrier_arrive(b.s.scales_full());
}

// In the order in which this SM needs them; an SM without a share of an operation needs none for it.
MEGA_FN void bring_all_scales(const Block& b) {
  uint32_t brought = 0;
#pragma unroll 1
  for (int number = 0; number <= 2 * kLayers; ++number) {
    const int layer = number >> 1;
    const int op = number == 2 * kLayers ? (kWithHead ? kHead : kFinal) : number & 1 ? kGateUp : kQkv;
    if (b.s.shares()[op].count > 0) bring_scales(b, number & 1 ? b.p->squares_mid : b.p->squares_in, layer, brought++);
  }
}

}  // namespace mega
