// A weight matrix times the step's rows on the tensor cores, and what becomes of the sums.
//
// The eight warps divide the values of each stage among them, in halves of a slab. Their sums meet in shared memory, in
// the order of warps, so results do not depend on timing. Loops over stages stay loops: all of a layer's code is read
// anew for each layer, by every SM, beside the weights.
#pragma once

#include "words.cuh"

namespace mega {

// Sums of a tile of rows with eight weight rows, in two parts. With eight rows the tile's lower half takes other values
// of the same rows: a part's own half is right then, the other one meets the wrong weights and is not read.
constexpr int kParts = kTiles == 1 ? 2 : 1;
using Sums = float[kBlockGroups][kTiles][kParts][4];

// A warp works on half slabs of 32 bf16 or 64 fp8 values: half `warp`, then eight further, of each stage.
template <Op op>
struct Halves {
  static constexpr int stages = (Gemm<op>::segment_slabs + Gemm<op>::stage_slabs - 1) / Gemm<op>::stage_slabs;
  static constexpr int most = (2 * Gemm<op>::stage_slabs + kConsumerWarps - 1) / kConsumerWarps;
  // Whether every warp has as many, in every stage.
  static constexpr bool even = 2 * Gemm<op>::stage_slabs % kConsumerWarps == 0 && Gemm<op>::slabs % Gemm<op>::stage_slabs == 0;
  static constexpr bool fp8 = Gemm<op>::weights != kBf16;
  // Of four words: a lane's part of a half slab of all rows.
  static constexpr int vectors = (kRows == 8 ? 1 : 2 * kTiles) * (fp8 ? 2 : 1);
};

MEGA_FN int slab_of(const Block& b, int number) { return (b.warp >> 1) + number * (kConsumerWarps / 2); }
template <Op op>
MEGA_FN bool has_half(const Block& b, int number, int slabs) {
  return Halves<op>::even || slab_of(b, number) < (slabs < Gemm<op>::stage_slabs ? slabs : Gemm<op>::stage_slabs);
}

// An input of several segments is kept in two halves, so that a segment comes while the one before it is multiplied,
// where a half holds a stage.
constexpr int kHalfVectors = kSlots * kSlotBytes / (kConsumers * 16) / 2;
template <Op op>
constexpr bool kAhead =
    Gemm<op>::segments > 1 && Halves<op>::stages * Halves<op>::most * Halves<op>::vectors <= kHalfVectors;

// Where a lane keeps its own vectors of a segment of the input: nobody else reads them.
MEGA_FN uint32_t* kept_vector(const Block& b, int vector) {
  return reinterpret_cast<uint32_t*>(b.s.slot(0)) + (vector * kConsumers + b.warp * 32 + b.lane) * 4;
}

// Vectors of this warp's part of a segment of `slabs` slabs, in the order in which it multiplies them.
template <Op op>
struct Part {
  static constexpr int vectors = Halves<op>::vectors, stage = Halves<op>::most * vectors;
  static constexpr int count = Halves<op>::stages * stage;
  // Whether this warp has vector `v`; false for a whole warp or for none of its lanes.
  MEGA_FN static bool has(const Block& b, int v, int slabs) {
    const int left = slabs - v / stage * Gemm<op>::stage_slabs;
    return left > 0 && has_half<op>(b, v % stage / vectors, left);
  }
  // Where it lies in the input, from the lane's own first vector on.
  MEGA_FN static int place(int v) {
    const int half = v / stage * 2 * Gemm<op>::stage_slabs + v % stage / vectors * kConsumerWarps;
    return (half * vectors + v % vectors) * 128;
  }
};

// Start the copies of a segment, whether or not all of it is there.
template <Op op>
MEGA_FN void copy_ahead(const Block& b, const uint32_t* from, int slabs, int to) {
#pragma unroll
  for (int v = 0; v < Part<op>::count; ++v)
    if (Part<op>::has(b, v, slabs)) copy_16_bytes(kept_vector(b, to + v), from + Part<op>::place(v));
  copies_commit();
}
// Whether all of it was.
template <Op op>
MEGA_FN bool came(const Block& b, int slabs, int at) {
  copies_wait<0>();
  bool there = true;
#pragma unroll
  for (int v = 0; v < Part<op>::count; ++v) {
    if (!Part<op>::has(b, v, slabs)) continue;
    uint32_t x[4];
    load_vector(x, kept_vector(b, at + v));
    there = there && are_there(x);
  }
  return all_lanes(there);
}

// This warp's part of a segment of the input. All of it is asked for at once, and again what was not there: all SMs read
// the same words, so whoever asks for more than it misses delays the others.
template <Op op>
MEGA_FN void bring_input(const Block& b, const uint32_t* from, int slabs, int to, int layer) {
  constexpr int kCount = Part<op>::count;
  uint64_t deadline = 0;
  uint32_t x[kCount][4];
  auto has = [&](int v) { return Part<op>::has(b, v, slabs); };
  if (!has(0)) return;
#pragma unroll
  for (int v = 0; v < kCount; ++v)
    if (has(v)) load_words(x[v], from + Part<op>::place(v));
  for (;;) {
    bool there = true;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (!has(v) || are_there(x[v])) continue;
      there = false;
      load_words(x[v], from + Part<op>::place(v));
    }
    if (all_lanes(there)) break;
    look_again(b, deadline, place_of_wait(kArrivals, layer, op), kNothing);
  }
#pragma unroll
  for (int v = 0; v < kCount; ++v)
    if (has(v)) store_vector(kept_vector(b, to + v), x[v]);
}

// --- fp8 weights

// Two e4m3 values of a word as bf16 ones 2^-120 as large, exactly: sign, exponent and mantissa at their places in bf16
// make the exponent 120 too small, and subnormal numbers of e4m3 are subnormal there too. The two NaNs of e4m3, which
// checkpoints do not hold, become 480 and -480. The selector picks both values, and the first one's sign between them:
// a shift then fills the places before each value with its sign.
MEGA_FN uint32_t spread_two(uint32_t four, uint32_t selector) {
  return static_cast<uint32_t>(static_cast<int32_t>(pick_bytes(four, selector)) >> 4) & 0x87f087f0u;
}
constexpr uint32_t kFirstTwo = 0x1800, kLastTwo = 0x3a20, kEvenTwo = 0x2800, kOddTwo = 0x3910;
// As they are, which takes a product more.
MEGA_FN uint32_t widen_two(uint32_t four, uint32_t selector) {
  constexpr uint32_t kTwoTo120 = 0x7b807b80u;
  return multiply_bf16(spread_two(four, selector), kTwoTo120);
}
MEGA_FN void widen_fp8(uint32_t four, uint32_t& low, uint32_t& high) {
  low = widen_two(four, kFirstTwo);
  high = widen_two(four, kLastTwo);
}

// The scale of fp8 weights that a lane keeps for its warp, of the block's group lane / 8: of the group's row lane % 8,
// or of the warp's half lane % 8 of a segment, in the order in which it multiplies them.
constexpr int kScalesOfGroup = 32 / kBlockGroups;
template <Op op>
MEGA_FN float scale_of(const Block& b, int layer, int block, int groups, int segment) {
  if (!Halves<op>::fp8) return 0.0f;
  constexpr int kMost = Halves<op>::most;
  constexpr bool kOneEach = Halves<op>::stages * kMost <= kScalesOfGroup;
  static_assert(Gemm<op>::weights != kFp8Block || kOneEach, "a lane keeps one scale");
  const int group = block + b.lane / kScalesOfGroup, number = b.lane % kScalesOfGroup;
  const int first = (b.s.shares()[op].first + (Gemm<op>::pair ? group >> 1 : group)) * kGroup;
  const int row = Gemm<op>::pair && (group & 1) ? first + Gemm<op>::rows / 2 : first;
  const float* scales = b.p->scales[layer * kLayerMaps + op];
  if (group >= groups) return 0.0f;
  if (Gemm<op>::weights == kFp8Channel) return load_constant(scales + row + number);
  const int within = slab_of(b, number % kMost);
  const int slab = segment * Gemm<op>::segment_slabs + number / kMost * Gemm<op>::stage_slabs + within;
  if (number >= Halves<op>::stages * kMost || within >= Gemm<op>::stage_slabs || slab >= Gemm<op>::slabs) return 0.0f;
  return load_constant(scales + row / kScaleBlock * Gemm<op>::slabs + slab);
}

// --- products

// A lane's vectors of the input for half a slab.
template <Op op>
using Input = uint32_t[Halves<op>::vectors][4];

// Half a slab: 32 bf16 or 64 fp8 values of eight weight rows with the same values of all the step's rows.
template <Op op>
MEGA_FN void multiply_half(float (&sums)[kTiles][kParts][4], const Input<op>& x, const uint32_t (&w)[4]) {
  if constexpr (Halves<op>::fp8) {
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {  // sixteen values; of eight rows the tile's lower half has the odd pieces
      const uint32_t low = spread_two(w[piece], kFirstTwo), high = spread_two(w[piece], kLastTwo);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t(&a)[4] = x[kRows == 8 ? piece >> 1 : tile * 4 + piece];
        multiply(sums[tile][(piece & 1) * (kParts - 1)], a[0], a[1], a[2], a[3], low, high);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < Halves<op>::vectors; ++i) {
      const uint32_t(&a)[4] = x[i];
      if constexpr (kRows == 8) {  // values 0-7, 8-15, 16-23, 24-31; the weights' come as 0-7, 16-23, 8-15, 24-31
        multiply(sums[0][0], a[0], a[1], a[2], a[3], w[0], w[1]);
        multiply(sums[0][kParts - 1], a[0], a[1], a[2], a[3], w[2], w[3]);
      } else {
        multiply(sums[i >> 1][(i & 1) * (kParts - 1)], a[0], a[1], a[2], a[3], w[(i & 1) * 2], w[(i & 1) * 2 + 1]);
      }
    }
  }
}

// The same times the scale of the warp's half `number` of the segment, where blocks have scales.
template <Op op>
MEGA_FN void add_half(float (&sums)[kTiles][kParts][4], const Input<op>& x, const uint32_t (&w)[4], float scales,
                      int group, int number) {
  if constexpr (Gemm<op>::weights != kFp8Block) {
    multiply_half<op>(sums, x, w);
  } else {
    float products[kTiles][kParts][4] = {};
    multiply_half<op>(products, x, w);
    const float scale = shuffle_from(scales, group * kScalesOfGroup + number);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < (kRows == 8 ? 2 : 4); ++i) {  // both parts at once; see share_sums
        float product = products[tile][0][i];
        if (kTiles == 1) product += products[tile][kParts - 1][kRows == 8 ? i + 2 : i];
        sums[tile][0][i] += scale * product;
      }
    }
  }
}

// The lane's vectors of the input for a half slab.
template <int kCount>
MEGA_FN void load_kept(const Block& b, uint32_t (&x)[kCount][4], int vector) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) load_vector(x[i], kept_vector(b, vector + i));
}

MEGA_FN void release(const Block& b, int slot) {
  if (b.lane == 0) barrier_arrive(b.s.empty(slot));
}

// Sums of a block's groups over one segment of the input. With more rows than eight, stages come group by group for the
// same values, so that a vector of the input is read once for all groups, and a stage is given back once the next one's
// matrices were asked for: its own were multiplied then. Else a group's stages come one after the other, as they lie in
// memory.
template <Op op>
MEGA_FN void multiply_segment(const Block& b, Place& place, Sums& sums, float scales, int groups, int slabs, int kept,
                              int layer) {
  constexpr int kMost = Halves<op>::most, kVectors = Halves<op>::vectors;
  const int line = b.lane & 7;
  // See multiply_half.
  const int quarter = kRows == 8 && !Halves<op>::fp8 ? (b.lane >> 3 & 1) * 2 + (b.lane >> 4) : b.lane >> 3;
  const int within = line * kLine + ((((b.warp & 1) * 4 + quarter) ^ line) << 4);
  auto stage = [&] {
    await(b, b.s.full(place.slot), place.parity, kWeightsFull, layer, op);
    return b.s.stage(place.slot) + within;
  };
  if constexpr (kGroupsTogether) {
    int before = -1;
#pragma unroll 1
    for (int first = 0, vector = kept; first < slabs; first += Gemm<op>::stage_slabs, vector += kMost * kVectors) {
      uint32_t x[kMost][kVectors][4];
#pragma unroll
      for (int number = 0; number < kMost; ++number) {
        if (!has_half<op>(b, number, slabs - first)) break;
        load_kept(b, x[number], vector + number * kVectors);
      }
#pragma unroll
      for (int group = 0; group < kBlockGroups; ++group) {
        if (group >= groups) break;
        const char* weights = stage();
        uint32_t w[kMost][4];
#pragma unroll
        for (int number = 0; number < kMost; ++number) {
          if (!has_half<op>(b, number, slabs - first)) break;
          load_four_matrices(w[number], weights + slab_of(b, number) * kGroup * kLine);
        }
        if (before >= 0) release(b, before);
#pragma unroll
        for (int number = 0; number < kMost; ++number) {
          if (!has_half<op>(b, number, slabs - first)) break;
          add_half<op>(sums[group], x[number], w[number], scales, group, (vector - kept) / kVectors + number);
        }
        before = place.slot;
        advance(place);
      }
    }
    finish_reads();
    sync_warp();
    if (before >= 0) release(b, before);
  } else {
#pragma unroll
    for (int group = 0; group < kBlockGroups; ++group) {
      if (group >= groups) break;
#pragma unroll 1
      for (int first = 0, vector = kept; first < slabs; first += Gemm<op>::stage_slabs, vector += kMost * kVectors) {
        const char* weights = stage();
#pragma unroll
        for (int number = 0; number < kMost; ++number) {
          if (!has_half<op>(b, number, slabs - first)) break;
          uint32_t x[kVectors][4], w[4];
          load_four_matrices(w, weights + slab_of(b, number) * kGroup * kLine);
          load_kept(b, x, vector + number * kVectors);
          add_half<op>(sums[group], x, w, scales, group, (vector - kept) / kVectors + number);
        }
        finish_reads();  // the next copy may overwrite them as soon as the last warp says so
        sync_warp();
        release(b, place.slot);
        advance(place);
      }
    }
  }
}

struct alignas(8) Pair {
  float first, second;
};
MEGA_FN Pair unpack_bf16(uint32_t pair) {
  return {from_bf16(static_cast<uint16_t>(pair)), from_bf16(static_cast<uint16_t>(pair >> 16))};
}
MEGA_FN Pair plus(const Pair& x, const Pair& y) { return {x.first + y.first, x.second + y.second}; }

// This warp's sums to shared memory, [warp][group][row][8], times the scales of weight rows where they have some; then
// every consumer sees all of them.
template <Op op>
MEGA_FN void share_sums(const Block& b, const Sums& sums, float scales, int groups, uint32_t block) {
  float* to = b.s.sums(block) + b.warp * (kBlockGroups * kRows * kGroup);
  const int row = b.lane >> 2, column = (b.lane & 3) * 2;
#pragma unroll
  for (int group = 0; group < kBlockGroups; ++group) {
    if (group >= groups) break;
    Pair scale = {1.0f, 1.0f};
    if constexpr (Gemm<op>::weights == kFp8Channel) {
      const int from = group * kScalesOfGroup + column;
      scale = {shuffle_from(scales, from), shuffle_from(scales, from + 1)};
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float* at = to + (group * kRows + tile * 16 + row) * kGroup + column;
#pragma unroll
      for (int half = 0; half < (kRows > 8 ? 2 : 1); ++half) {
        const float(&first)[4] = sums[group][tile][0];
        Pair sum = {first[half * 2], first[half * 2 + 1]};
        if (kRows == 8) sum = plus(sum, Pair{sums[group][tile][kParts - 1][2], sums[group][tile][kParts - 1][3]});
        if (kRows == 16) sum = plus(sum, Pair{sums[group][tile][kParts - 1][half * 2], sums[group][tile][kParts - 1][half * 2 + 1]});
        if constexpr (Gemm<op>::weights == kFp8Channel) sum = {sum.first * scale.first, sum.second * scale.second};
        *reinterpret_cast<Pair*>(at + half * 8 * kGroup) = sum;
      }
    }
  }
  sync_threads(kConsumerBarrier, kConsumers);
}

// Values `column` and `column + 1` of group `group` and row `row`: the warps' sums in their order.
MEGA_FN Pair sum_of(const float* sums, int group, int row, int column) {
  const Pair* from = reinterpret_cast<const Pair*>(sums + (group * kRows + row) * kGroup + column);
  Pair sum = from[0];
#pragma unroll
  for (int warp = 1; warp < kConsumerWarps; ++warp) sum = plus(sum, from[warp * (kBlockGroups * kRows * kGroup / 2)]);
  return sum;
}

// Calls each(group, row, column) for pairs of values at even columns of `groups` groups; whole warps take part or none
// of one.
template <typename Each>
MEGA_FN void for_pairs(const Block& b, int groups, Each each) {
  constexpr int kPairs = kGroup / 2;
#pragma unroll 1
  for (int v = b.warp * 32 + b.lane; v < groups * kRows * kPairs; v += kConsumers)
    each(v / (kRows * kPairs), v / kPairs % kRows, v % kPairs * 2);
}

// The consumers' state through a step.
struct Work {
  Place place;      // in the ring of weights
  uint32_t normed;  // how many inputs were normalised
  uint32_t blocks;  // how many blocks of sums there were
};

// Row scales of the input being read. Every consumer calls it once an operation with a norm, and then, once it has read
// them, the other.
MEGA_FN void await_scales(const Block& b, Work& work, int layer) {
  await(b, b.s.scales_full(), work.normed & 1, kScales, layer, 0);
  ++work.normed;
}
MEGA_FN void release_scales(const Block& b) {
  sync_warp();
  if (b.lane == 0) barrier_arrive(b.s.scales_empty());
}

// All of an operation's work of this SM: epilogue(sums, block, groups) reads what groups block .. block + groups of the
// share have become. With two places for sums, no warp waits for those that still read the last block's. An input of one
// segment is brought once for all blocks.
template <Op op, typename Epilogue>
MEGA_FN void multiply_all(const Block& b, Work& work, const uint32_t* input, int layer, Epilogue epilogue) {
  constexpr int kSegments = Gemm<op>::segments, kVectors = Halves<op>::vectors;
  const int groups = groups_of<op>(b.s.shares()[op]);
  auto at = [&](int segment) { return input + ((segment * 2 * Gemm<op>::segment_slabs * kVectors + b.warp * kVectors) * 32 + b.lane) * 4; };
  note(b, layer, op, kBegan);
  int half = 0;
  [[maybe_unused]] float next_scales = scale_of<op>(b, layer, 0, groups, 0);
#pragma unroll 1
  for (int block = 0; block < groups; block += kBlockGroups) {
    const int here = groups - block < kBlockGroups ? groups - block : kBlockGroups;
    Sums sums = {};
    [[maybe_unused]] float scales = 0.0f;
#pragma unroll 1
    for (int segment = 0; segment < kSegments; ++segment) {
      const int slabs = slabs_in<op>(segment), kept = half * kHalfVectors;
      const bool first = block == 0 && segment == 0;
      if (first || (kSegments > 1 && !(kAhead<op> && came<op>(b, slabs, kept)))) bring_input<op>(b, at(segment), slabs, kept, layer);
      if (first) note(b, layer, op, kInputThere);
      if constexpr (kAhead<op>) {
        half ^= 1;
        const int next = segment + 1 < kSegments ? segment + 1 : 0;
        if (next > 0 || block + kBlockGroups < groups) copy_ahead<op>(b, at(next), slabs_in<op>(next), half * kHalfVectors);
      }
      if constexpr (Halves<op>::fp8) {  // a block's or a segment's ahead, before the products that hide the wait
        constexpr bool kOfSegment = Gemm<op>::weights == kFp8Block;
        if (kOfSegment || segment == 0) {
          scales = next_scales * kOfFp8Result;
          const int next = kOfSegment && segment + 1 < kSegments ? segment + 1 : 0;
          next_scales = scale_of<op>(b, layer, next > 0 ? block : block + kBlockGroups, groups, next);
        }
      }
      multiply_segment<op>(b, work.place, sums, scales, here, slabs, kept, layer);
    }
    if (Gemm<op>::scaled && block == 0) await_scales(b, work, layer);
    if (kSumPlaces == 1) sync_threads(kConsumerBarrier, kConsumers);  // the last block's sums were read
    share_sums<op>(b, sums, scales, here, work.blocks);
    if (block + kBlockGroups >= groups) note(b, layer, op, kMultiplied);
    epilogue(b.s.sums(work.blocks), block, here);
    ++work.blocks;
  }
  if (Gemm<op>::scaled && groups > 0) release_scales(b);
  note(b, layer, op, kEnded);
}

}  // namespace mega
