// A weight matrix times the step's rows on the tensor cores, and what becomes of the sums.
//
// The eight warps divide the values of each stage among them: warp w takes slabs w, w + 8 ... of a group of eight
// weight rows. Their sums meet in shared memory, in the order of warps, so results do not depend on timing.
#pragma once

#include "pipeline.cuh"

namespace mega {

using Sums = float[kBlockGroups][kTiles][4];

// One slab: 64 values of eight weight rows with the same values of all the step's rows.
MEGA_FN void multiply_slab(float (&sums)[kTiles][4], const char* weights, const char* input, int lane) {
  const int line = lane & 7, quarter = lane >> 3;
  uint32_t w[2][4];
  for (int half = 0; half < 2; ++half)
    load_matrices(w[half], weights + line * kLine + (((half * 4 + quarter) ^ line) << 4));
  if constexpr (kRows == 8) {  // the tile's lower eight rows do not exist
    for (int half = 0; half < 2; ++half) {
      uint32_t x[4];
      load_matrices(x, input + line * kLine + (((half * 4 + quarter) ^ line) << 4));
      multiply(sums[0], x[0], 0, x[1], 0, w[half][0], w[half][1]);
      multiply(sums[0], x[2], 0, x[3], 0, w[half][2], w[half][3]);
    }
  } else {
    for (int tile = 0; tile < kTiles; ++tile) {
      const char* rows = input + (tile * 16 + (quarter & 1) * 8 + line) * kLine;
      for (int step = 0; step < 4; ++step) {  // 16 values each
        uint32_t x[4];
        load_matrices(x, rows + (((step * 2 + (quarter >> 1)) ^ line) << 4));
        multiply(sums[tile], x[0], x[1], x[2], x[3], w[step >> 1][(step & 1) * 2], w[step >> 1][(step & 1) * 2 + 1]);
      }
    }
  }
}

// Sums of a block's groups over one segment of the input.
template <Op op>
MEGA_FN void multiply_segment(const Block& b, Place& place, Sums& sums, int groups, int segment, const char* input,
                              int layer) {
  const int slabs = slabs_in<op>(segment);
#pragma unroll
  for (int group = 0; group < kBlockGroups; ++group) {
    if (group >= groups) break;
    for (int first = 0; first < slabs; first += Gemm<op>::stage_slabs) {
      await(b, b.s.full(place.slot), place.parity, kWeightsFull, layer, op);
      const char* stage = b.s.stage(place.slot);
#pragma unroll
      for (int slab = b.warp; slab < Gemm<op>::stage_slabs; slab += kConsumerWarps) {
        if (first + slab < slabs)
          multiply_slab(sums[group], stage + slab * kGroup * kLine, input + (first + slab) * kRows * kLine, b.lane);
      }
      sync_warp();
      if (b.lane == 0) barrier_arrive(b.s.empty(place.slot));
      advance(place);
    }
  }
}

// This warp's sums to shared memory, [warp][group][row][8]; then every consumer sees all of them.
MEGA_FN void share_sums(const Block& b, const Sums& sums, int groups) {
  float* to = reinterpret_cast<float*>(b.s.sums()) + b.warp * (kBlockGroups * kRows * kGroup);
  const int row = b.lane >> 2, column = (b.lane & 3) * 2;
#pragma unroll
  for (int group = 0; group < kBlockGroups; ++group) {
    if (group >= groups) break;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float* at = to + (group * kRows + tile * 16 + row) * kGroup + column;
      at[0] = sums[group][tile][0];
      at[1] = sums[group][tile][1];
      if (kRows > 8) {
        at[8 * kGroup] = sums[group][tile][2];
        at[8 * kGroup + 1] = sums[group][tile][3];
      }
    }
  }
  sync_threads(kConsumerBarrier, kConsumers);
}

// Value `column` of group `group` and row `row`: the warps' sums in their order.
MEGA_FN float sum_of(const Block& b, int group, int row, int column) {
  const float* from = reinterpret_cast<const float*>(b.s.sums()) + (group * kRows + row) * kGroup + column;
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kConsumerWarps; ++warp) sum += from[warp * (kBlockGroups * kRows * kGroup)];
  return sum;
}

// Calls each(group, row, column) for the values of `groups` groups; whole warps take part or none of one.
template <typename Each>
MEGA_FN void for_values(const Block& b, int groups, Each each) {
  for (int v = b.warp * 32 + b.lane; v < groups * kRows * kGroup; v += kConsumers)
    each(v / (kRows * kGroup), v / kGroup % kRows, v % kGroup);
}

// All of an operation's work of this SM: epilogue(block, groups) reads the sums of groups block .. block + groups.
template <Op op, typename Epilogue>
MEGA_FN void multiply_all(const Block& b, Place& place, int& load, int layer, Epilogue epilogue) {
  const int groups = groups_of<op>(b.s.shares()[op]);
  const int blocks = blocks_of<op>(b.s.shares()[op]);
  const bool resident = Gemm<op>::resident && blocks > 1;
  for (int block = 0; block < blocks; ++block) {
    const int left = groups - block * kBlockGroups;
    const int here = left < kBlockGroups ? left : kBlockGroups;
    Sums sums = {};
    for (int segment = 0; segment < Gemm<op>::segments; ++segment) {
      const int number = load + segment + (resident ? 0 : block * Gemm<op>::segments);
      const Place input = input_place(number);
      if (block == 0 || !resident) await(b, b.s.input_full(input.slot), input.parity, kInputFull, layer, op);
      multiply_segment<op>(b, place, sums, here, segment, b.s.slot(input.slot), layer);
      if (block == blocks - 1 || !resident) {
        sync_warp();
        if (b.lane == 0) barrier_arrive(b.s.input_empty(input.slot));
      }
    }
    share_sums(b, sums, here);
    epilogue(block * kBlockGroups, here);
  }
  load += loads_of<op>(b.s.shares()[op]);
}

// After the stores of an epilogue: they are visible, also to copies, before a counter says so.
MEGA_FN void finish_stores(const Block& b) {
  fence_copies();
  sync_threads(kConsumerBarrier, kConsumers);
}

}  // namespace mega
