// The operations of a layer but attention, as its consumers run them.
#pragma once

#include "gemm.cuh"

namespace mega {

// The input of a layer, or of the LM head, which is bf16 always.
MEGA_FN Written input_of(const Block& b, int layer) {
  return written(b, b.p->input, kHidden, kLayers + 1, layer, kFp8 && layer < kLayers);
}

// Weights of the norm that follows new residual columns. This thread's first pair of them is asked for before the
// product is waited for: the memory's answer would stand between two operations.
struct NextNorm {
  const uint16_t* weights;
  uint32_t first;
};
MEGA_FN NextNorm next_norm(const Block& b, const uint16_t* weights) {
  const Share share = b.s.shares()[kDown];
  const int thread = b.warp * 32 + b.lane, group = thread / (kRows * kGroup / 2), column = thread % (kGroup / 2) * 2;
  const bool has = group < share.count && group < kBlockGroups;
  return {weights, has ? *reinterpret_cast<const uint32_t*>(weights + (share.first + group) * kGroup + column) : 0};
}
// Of columns `hidden` and the one after it, which are this thread's first pair or not.
MEGA_FN Pair weights_of(const NextNorm& norm, int hidden, bool first) {
  return unpack_bf16(first ? norm.first : *reinterpret_cast<const uint32_t*>(norm.weights + hidden));
}

// New residual columns of groups [block, block + groups): keep them, leave the next input scaled by its norm's weight
// (the row's 1 / rms follows after the product), and the tap's copy where a draft reads it. After the last of them, the
// sums of this SM's squares, by row.
template <typename Value>
MEGA_FN void write_residual(const Block& b, int block, int groups, const Written& next, int next_layer,
                            const NextNorm& norm, uint64_t* squares, uint16_t* tap, Value value) {
  const Share share = b.s.shares()[kDown];
  for_pairs(b, groups, [&](int group, int row, int column) {
    Pair* kept = reinterpret_cast<Pair*>(b.s.residual() + ((block + group) * kRows + row) * kGroup + column);
    const int hidden = (share.first + block + group) * kGroup + column;
    const Pair x = value(group, row, column, *kept, hidden);
    *kept = x;
    const Pair weights = weights_of(norm, hidden, block == 0 && (group * kRows + row) * (kGroup / 2) < kConsumers);
    next.put(row, hidden, x.first * weights.first, x.second * weights.second);
    if (tap != nullptr && row < kRealRows)
      *reinterpret_cast<uint32_t*>(tap + static_cast<int64_t>(row) * kTaps * kHidden + hidden) = pack_bf16(x.first, x.second);
    float square = x.first * x.first + x.second * x.second;
    for (int mask = 1; mask < kGroup / 2; mask <<= 1) square += shuffle_xor(square, mask);
    if (column == 0) b.s.squares()[(block + group) * kRows + row] = square;
  });
  if (block + groups < share.count) return;
  sync_threads(kConsumerBarrier, kConsumers);
  if (b.warp != 0 || b.lane >= kRows / 2) return;
  float sums[2] = {};
#pragma unroll 1
  for (int group = 0; group < share.count; ++group)
    for (int i = 0; i < 2; ++i) sums[i] += b.s.squares()[group * kRows + b.lane * 2 + i];
  store_long(squares + rank_of(b.sm, share) * (kRows / 2) + b.lane, tagged(sums[0], sums[1], tag_of(b, next_layer)));
}

// The tap that keeps the residual stream before `layer`, or null.
MEGA_FN uint16_t* tap_before(const Block& b, int layer) {
#pragma unroll 1
  for (int tap = 0; tap < kTaps; ++tap)
    if (b.p->taps[tap] == layer) return b.p->tapped + static_cast<int64_t>(tap) * kHidden;
  return nullptr;
}

MEGA_FN void embed(const Block& b) {
  const Share share = b.s.shares()[kEmbed];
  const Written next = input_of(b, 0);
  const NextNorm norm = next_norm(b, b.p->layers[0].input_norm);
#pragma unroll 1
  for (int block = 0; block < share.count; block += kBlockGroups) {
    const int left = share.count - block;
    write_residual(b, block, left < kBlockGroups ? left : kBlockGroups, next, 0, norm, b.p->squares_in,
                   tap_before(b, 0), [&](int, int row, int, Pair, int hidden) {
                     if (row >= kRealRows) return Pair{0.0f, 0.0f};
                     const uint16_t* from = b.p->embedding + b.p->input_ids[row] * kHidden + hidden;
                     return Pair{from_bf16(from[0]), from_bf16(from[1])};
                   });
  }
}

MEGA_FN void qkv(const Block& b, Work& work, int layer) {
  const Share share = b.s.shares()[kQkv];
  const uint32_t tag = tag_of(b, layer);
  const uint32_t* input = input_of(b, layer).now;
  multiply_all<kQkv>(b, work, input, layer, [&](const float* sums, int block, int groups) {
    for_pairs(b, groups, [&](int group, int row, int column) {
      const int out = (share.first + block + group) * kGroup + column;
      const float scale = b.s.scales()[row];
      Pair x = sum_of(sums, group, row, column);
      x = {x.first * scale, x.second * scale};
      if (kQkvBias) {
        const uint16_t* bias = b.p->layers[layer].qkv_bias + out;
        x = {x.first + from_bf16(bias[0]), x.second + from_bf16(bias[1])};
      }
      store_long(b.p->qkv + row * (Gemm<kQkv>::rows / 2) + projected_word(out), tagged(x.first, x.second, tag));
    });
  });
}

MEGA_FN void o(const Block& b, Work& work, int layer) {
  const uint32_t* input = words_of(b.p->attended, kQHeads * kHeadDim, kLayers, layer, b.step);
  const Written next = written(b, b.p->middle, kHidden, kLayers, layer);
  const NextNorm norm = next_norm(b, b.p->layers[layer].middle_norm);
  multiply_all<kO>(b, work, input, layer, [&](const float* sums, int block, int groups) {
    write_residual(b, block, groups, next, layer, norm, b.p->squares_mid, nullptr,
                   [&](int group, int row, int column, Pair x, int) { return plus(x, sum_of(sums, group, row, column)); });
  });
}

MEGA_FN float gated(float gate, float up) { return divide(gate, 1.0f + exp2_of(-gate * kLog2e)) * up; }

MEGA_FN void gate_up(const Block& b, Work& work, int layer) {
  const Share share = b.s.shares()[kGateUp];
  const uint32_t* input = words_of(b.p->middle, kHidden, kLayers, layer, b.step);
  const Written next = written(b, b.p->activated, kIntermediate, kLayers, layer);
  multiply_all<kGateUp>(b, work, input, layer, [&](const float* sums, int block, int groups) {
    for_pairs(b, groups / 2, [&](int pair, int row, int column) {
      const float scale = b.s.scales()[row];
      const Pair gate = sum_of(sums, 2 * pair, row, column), up = sum_of(sums, 2 * pair + 1, row, column);
      next.put(row, (share.first + block / 2 + pair) * kGroup + column, gated(gate.first * scale, up.first * scale),
               gated(gate.second * scale, up.second * scale));
    });
  });
}

MEGA_FN void down(const Block& b, Work& work, int layer) {
  const uint32_t* input = words_of(b.p->activated, kIntermediate, kLayers, layer, b.step);
  const Written next = input_of(b, layer + 1);
  const NextNorm norm = next_norm(b, layer + 1 < kLayers ? b.p->layers[layer + 1].input_norm : b.p->final_norm);
  uint16_t* tap = tap_before(b, layer + 1);
  multiply_all<kDown>(b, work, input, layer, [&](const float* sums, int block, int groups) {
    write_residual(b, block, groups, next, layer + 1, norm, b.p->squares_in, tap,
                   [&](int group, int row, int column, Pair x, int) { return plus(x, sum_of(sums, group, row, column)); });
  });
}

MEGA_FN void head(const Block& b, Work& work) {
  const Share share = b.s.shares()[kHead];
  const uint32_t* input = input_of(b, kLayers).now;
  multiply_all<kHead>(b, work, input, kLayers, [&](const float* sums, int block, int groups) {
    for_pairs(b, groups, [&](int group, int row, int column) {
      if (row >= kRealRows) return;
      const int64_t id = static_cast<int64_t>(share.first + block + group) * kGroup + column;
      const float scale = b.s.scales()[row];
      const Pair x = sum_of(sums, group, row, column);
      *reinterpret_cast<uint32_t*>(b.p->logits + row * static_cast<int64_t>(kVocab) + id) =
          pack_bf16(x.first * scale, x.second * scale);
    });
  });
}

// The last norm of this SM's columns, where the LM head is somebody else's.
MEGA_FN void final_norm(const Block& b, Work& work) {
  const Share share = b.s.shares()[kFinal];
  if (share.count == 0) return;
  await_scales(b, work, kLayers);
  const uint16_t* norm = b.p->final_norm;
  for_pairs(b, share.count, [&](int group, int row, int column) {
    if (row >= kRealRows) return;
    const int64_t hidden = static_cast<int64_t>(share.first + group) * kGroup + column;
    const float* kept = b.s.residual() + (group * kRows + row) * kGroup + column;
    const float scale = b.s.scales()[row];
    *reinterpret_cast<uint32_t*>(b.p->last_hidden + row * static_cast<int64_t>(kHidden) + hidden) =
        pack_bf16(kept[0] * scale * from_bf16(norm[hidden]), kept[1] * scale * from_bf16(norm[hidden + 1]));
  });
}

}  // namespace mega
