// The two warps that bring data: weights in the plan's order as fast as the ring drains, inputs when they are ready.
#pragma once

#include "pipeline.cuh"

namespace mega {

// --- weights: one lane, which waits for nothing but room in the ring

template <Op op>
MEGA_FN void stream(const Block& b, Place& place, const TensorMap* map, int layer) {
  const Share share = b.s.shares()[op];
  const int groups = groups_of<op>(share);
  for (int block = 0; block < groups; block += kBlockGroups) {
    const int end = groups < block + kBlockGroups ? groups : block + kBlockGroups;
    for (int segment = 0; segment < Gemm<op>::segments; ++segment) {
      const int slabs = slabs_in<op>(segment);
      for (int group = block; group < end; ++group) {
        const int row = weight_row<op>(share, group);
        for (int slab = 0; slab < slabs; slab += Gemm<op>::stage_slabs) {
          await(b, b.s.empty(place.slot), place.parity ^ 1, kWeightsEmpty, layer, op);
          Barrier* full = b.s.full(place.slot);
          barrier_expect(full, Gemm<op>::stage_slabs * kGroup * kLine);
          copy_weights(b.s.stage(place.slot), map, row, segment * Gemm<op>::segment_slabs + slab, full);
          advance(place);
        }
      }
    }
  }
}

MEGA_FN void stream_weights(const Block& b) {
  Place place = {0, 0};
  for (int layer = 0; layer < kLayers; ++layer) {
    const TensorMap* maps = b.p->weight_maps + layer * kLayerMaps;
    stream<kQkv>(b, place, maps + kQkv, layer);
    stream<kO>(b, place, maps + kO, layer);
    stream<kGateUp>(b, place, maps + kGateUp, layer);
    stream<kDown>(b, place, maps + kDown, layer);
  }
  if (kWithHead) stream<kHead>(b, place, b.p->weight_maps + kLayers * kLayerMaps, kLayers);
}

// --- inputs: one warp

// 1 / rms of each row from the squares that every SM left of its columns, summed in the order of SMs.
MEGA_FN void bring_scales(const Block& b, const float* squares) {
  for (int row = 0; row < kRows; ++row) {
    float sum = 0.0f;
    for (int sm = b.lane; sm < kSms; sm += 32) sum += load_shared_by_sms(squares + sm * kRows + row);
    for (int mask = 16; mask > 0; mask >>= 1) sum += shuffle_xor(sum, mask);
    if (b.lane == 0) b.s.scales()[row] = inverse_root(sum * (1.0f / kHidden) + b.p->eps);
  }
  sync_warp();
  if (b.lane == 0) barrier_arrive(b.s.scales_full());
}

// `counter` is the writer's first counter, `squares` those of the writer where the input still has to be normalised.
template <Op op, typename Arrivals>
MEGA_FN void bring(const Block& b, int& load, const TensorMap* map, int counter, Arrivals arrivals, const float* squares,
                   int layer) {
  const int loads = loads_of<op>(b.s.shares()[op]);
  for (int i = 0; i < loads; ++i, ++load) {
    const int segment = i % Gemm<op>::segments;
    const Place place = input_place(load);
    if (b.lane == 0) {
      await(b, b.s.input_empty(place.slot), place.parity ^ 1, kInputEmpty, layer, op);
      await_arrivals(b, counter + segment, arrivals(segment), layer);
      fence_copies();
      Barrier* full = b.s.input_full(place.slot);
      barrier_expect(full, Gemm<op>::segment_slabs * kRows * kLine);
      copy_tile(b.s.slot(place.slot), map, 0, segment * Gemm<op>::segment_slabs, full);
    }
    sync_warp();
    if (squares != nullptr && i == Gemm<op>::segments - 1) bring_scales(b, squares);
  }
}

// Attention keeps its keys and values in the slots itself: it gets both, empty.
MEGA_FN void lend_slots(const Block& b, int& load, int layer) {
  if (b.s.shares()[kAttention].count == 0) return;
  for (int i = 0; i < kSlots; ++i, ++load) {
    const Place place = input_place(load);
    if (b.lane == 0) {
      await(b, b.s.input_empty(place.slot), place.parity ^ 1, kInputEmpty, layer, kAttention);
      barrier_arrive(b.s.input_full(place.slot));
    }
  }
  sync_warp();
}

MEGA_FN void bring_inputs(const Block& b) {
  int load = 0;
  const TensorMap* maps = b.p->input_maps;
  for (int layer = 0; layer < kLayers; ++layer) {
    const int before = layer == 0 ? counter_of(kEmbed, 0, 0) : counter_of(kDown, layer - 1, 0);
    bring<kQkv>(b, load, maps + kQkv, before, column_arrivals<kQkv>, b.p->squares_in, layer);
    lend_slots(b, load, layer);
    bring<kO>(b, load, maps + kO, counter_of(kAttention, layer, 0), attention_arrivals, nullptr, layer);
    bring<kGateUp>(b, load, maps + kGateUp, counter_of(kO, layer, 0), column_arrivals<kGateUp>, b.p->squares_mid, layer);
    bring<kDown>(b, load, maps + kDown, counter_of(kGateUp, layer, 0), column_arrivals<kDown>, nullptr, layer);
  }
  const int last = counter_of(kDown, kLayers - 1, 0);
  if (kWithHead) {
    bring<kHead>(b, load, maps + kQkv, last, column_arrivals<kHead>, b.p->squares_in, kLayers);
    return;
  }
  if (b.s.shares()[kFinal].count == 0) return;
  if (b.lane == 0) {
    for (int segment = 0; segment < Gemm<kQkv>::segments; ++segment)
      await_arrivals(b, last + segment, column_arrivals<kQkv>(segment), kLayers);
  }
  sync_warp();
  bring_scales(b, b.p->squares_in);
}

}  // namespace mega
