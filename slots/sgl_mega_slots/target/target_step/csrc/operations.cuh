// The operations of a layer but attention, as its consumers run them.
#pragma once

#include "gemm.cuh"

namespace mega {

// The consumers' state through a step.
struct Work {
  Place place;    // in the ring of weights
  int load;       // how many inputs were taken
  uint32_t normed;  // how many of them were normalised
};

// Row scales of the input being read. Every consumer calls it once an operation with a norm.
MEGA_FN void await_scales(const Block& b, Work& work, int layer) {
  await(b, b.s.scales_full(), work.normed & 1, kScales, layer, 0);
  ++work.normed;
}

// New residual columns of groups [block, block + groups): keep them, leave the next input scaled by its norm's weight
// (the row's 1 / rms follows after the product), the sums of squares, and the tap's copy where a draft reads it.
template <typename Value>
MEGA_FN void write_residual(const Block& b, int block, int groups, bool last, uint16_t* next, const uint16_t* norm,
                            float* squares, uint16_t* tap, Value value) {
  const Share share = b.s.shares()[kDown];
  for_values(b, groups, [&](int group, int row, int column) {
    const int at = ((block + group) * kRows + row) * kGroup + column;
    const int64_t hidden = static_cast<int64_t>(share.first + block + group) * kGroup + column;
    const float x = value(group, row, column, b.s.residual()[at], hidden);
    b.s.residual()[at] = x;
    next[static_cast<int64_t>(row) * kHidden + hidden] = to_bf16(x * from_bf16(norm[hidden]));
    if (tap != nullptr && row < kRealRows) tap[static_cast<int64_t>(row) * kTaps * kHidden + hidden] = to_bf16(x);
    float square = x * x;
    for (int mask = 1; mask < kGroup; mask <<= 1) square += shuffle_xor(square, mask);
    if (column == 0) b.s.squares()[(block + group) * kRows + row] = square;
  });
  finish_stores(b);
  if (b.warp != 0) return;
  if (last && b.lane < kRows) {
    float sum = 0.0f;
    for (int group = 0; group < block + groups; ++group) sum += b.s.squares()[group * kRows + b.lane];
    squares[b.sm * kRows + b.lane] = sum;
  }
  sync_warp();
}

// Tell the readers of these groups' columns, eight a group.
template <Op reader>
MEGA_FN void arrive_columns(const Block& b, Op writer, int layer, int first, int groups) {
  if (b.warp == 0 && b.lane < groups) {
    const int segment = (first + b.lane) * kGroup / kSlab / Gemm<reader>::segment_slabs;
    add_release(counter_at(b, counter_of(writer, layer, segment)), 1);
  }
}

// The tap that keeps the residual stream before `layer`, or null.
MEGA_FN uint16_t* tap_before(const Block& b, int layer) {
  for (int tap = 0; tap < kTaps; ++tap)
    if (b.p->taps[tap] == layer) return b.p->tapped + static_cast<int64_t>(tap) * kHidden;
  return nullptr;
}

MEGA_FN void embed(const Block& b) {
  const Share share = b.s.shares()[kEmbed];
  for (int block = 0; block < share.count; block += kBlockGroups) {
    const int left = share.count - block;
    const int groups = left < kBlockGroups ? left : kBlockGroups;
    write_residual(b, block, groups, left <= kBlockGroups, b.p->input, b.p->norms[0], b.p->squares_in, tap_before(b, 0),
                   [&](int, int row, int, float, int64_t hidden) {
                     if (row >= kRealRows) return 0.0f;
                     return from_bf16(b.p->embedding[b.p->input_ids[row] * kHidden + hidden]);
                   });
    arrive_columns<kQkv>(b, kEmbed, 0, share.first + block, groups);
  }
}

MEGA_FN int kv_head_of(int row) {
  constexpr int kQ = kQHeads * kHeadDim, kKv = kKvHeads * kHeadDim;
  return row < kQ ? row / kHeadDim / (kQHeads / kKvHeads) : (row - kQ) % kKv / kHeadDim;
}

MEGA_FN void qkv(const Block& b, Work& work, int layer) {
  const Share share = b.s.shares()[kQkv];
  multiply_all<kQkv>(b, work.place, work.load, layer, [&](int block, int groups) {
    if (block == 0) await_scales(b, work, layer);
    for_values(b, groups, [&](int group, int row, int column) {
      const int out = (share.first + block + group) * kGroup + column;
      float x = sum_of(b, group, row, column) * b.s.scales()[row];
      if (kQkvBias) x += from_bf16(b.p->layers[layer].qkv_bias[out]);
      b.p->qkv[static_cast<int64_t>(row) * Gemm<kQkv>::rows + out] = x;
    });
    finish_stores(b);
    if (b.warp == 0 && b.lane < groups)
      add_release(counter_at(b, counter_of(kQkv, layer, kv_head_of((share.first + block + b.lane) * kGroup))), 1);
  });
}

MEGA_FN void o(const Block& b, Work& work, int layer) {
  const Share share = b.s.shares()[kO];
  multiply_all<kO>(b, work.place, work.load, layer, [&](int block, int groups) {
    write_residual(b, block, groups, block + groups == share.count, b.p->middle,
                   b.p->norms[2 * layer + 1], b.p->squares_mid, nullptr,
                   [&](int group, int row, int column, float x, int64_t) { return x + sum_of(b, group, row, column); });
    arrive_columns<kGateUp>(b, kO, layer, share.first + block, groups);
  });
}

MEGA_FN void gate_up(const Block& b, Work& work, int layer) {
  const Share share = b.s.shares()[kGateUp];
  multiply_all<kGateUp>(b, work.place, work.load, layer, [&](int block, int groups) {
    if (block == 0) await_scales(b, work, layer);
    for_values(b, groups / 2, [&](int pair, int row, int column) {
      const float scale = b.s.scales()[row];
      const float gate = sum_of(b, 2 * pair, row, column) * scale;
      const float up = sum_of(b, 2 * pair + 1, row, column) * scale;
      const int64_t out = static_cast<int64_t>(share.first + block / 2 + pair) * kGroup + column;
      b.p->activated[static_cast<int64_t>(row) * kIntermediate + out] =
          to_bf16(divide(gate, 1.0f + exp2_of(-gate * kLog2e)) * up);
    });
    finish_stores(b);
    arrive_columns<kDown>(b, kGateUp, layer, share.first + block / 2, groups / 2);
  });
}

MEGA_FN void down(const Block& b, Work& work, int layer) {
  const Share share = b.s.shares()[kDown];
  multiply_all<kDown>(b, work.place, work.load, layer, [&](int block, int groups) {
    write_residual(b, block, groups, block + groups == share.count, b.p->input,
                   b.p->norms[2 * layer + 2], b.p->squares_in, tap_before(b, layer + 1),
                   [&](int group, int row, int column, float x, int64_t) { return x + sum_of(b, group, row, column); });
    arrive_columns<kQkv>(b, kDown, layer, share.first + block, groups);
  });
}

MEGA_FN void head(const Block& b, Work& work) {
  const Share share = b.s.shares()[kHead];
  multiply_all<kHead>(b, work.place, work.load, kLayers, [&](int block, int groups) {
    if (block == 0) await_scales(b, work, kLayers);
    for_values(b, groups, [&](int group, int row, int column) {
      if (row >= kRealRows) return;
      const int64_t id = static_cast<int64_t>(share.first + block + group) * kGroup + column;
      b.p->logits[row * static_cast<int64_t>(kVocab) + id] = to_bf16(sum_of(b, group, row, column) * b.s.scales()[row]);
    });
    sync_threads(kConsumerBarrier, kConsumers);  // the next block's sums take the place of these
  });
}

// The last norm of this SM's columns, where the LM head is somebody else's.
MEGA_FN void final_norm(const Block& b, Work& work) {
  const Share share = b.s.shares()[kFinal];
  if (share.count == 0) return;
  await_scales(b, work, kLayers);
  const uint16_t* norm = b.p->norms[2 * kLayers];
  for_values(b, share.count, [&](int group, int row, int column) {
    if (row >= kRealRows) return;
    const int64_t hidden = static_cast<int64_t>(share.first + group) * kGroup + column;
    const float x = b.s.residual()[(group * kRows + row) * kGroup + column];
    b.p->last_hidden[row * static_cast<int64_t>(kHidden) + hidden] =
        to_bf16(x * b.s.scales()[row] * from_bf16(norm[hidden]));
  });
}

}  // namespace mega
