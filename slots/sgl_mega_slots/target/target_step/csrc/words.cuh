// What SMs hand each other: words that say themselves whether they are there. A reader polls for the values it needs and
// nothing else, so a dependency costs one store and one load, without counters or fences.
//
// Two kinds, each read and written whole:
// - a pair of bf16 values in 32 bits. No pair is kNothing, which memory holds before it is written. Each layer has its
//   own, in two copies: a step writes the one that it uses and empties the other, which the step before it used;
// - a pair of floats in 64 bits with a tag, 28 bits each (19 of the 23 bits behind the point). A tag differs from the
//   one that was there before, a layer earlier, so one copy serves all layers.
#pragma once

#include "pipeline.cuh"

namespace mega {

constexpr uint32_t kNothing = 0xffffffffu;  // two NaNs that no rounding gives

// --- inputs of matrices, [copies][layers][words]

// Where the pair that holds (row, column) lies: as a lane of the tensor cores reads four of them at once. An fp8 matrix
// reads its input in another order: a lane has four weights in a word, so it takes four columns beside each other, as
// the tensor cores' values 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, and half a line is 64 columns.
template <bool kOfFp8>
MEGA_FN int word_of(int row, int column) {
  if constexpr (kOfFp8) {
    const int half = column >> 6, piece = column >> 4 & 3, second = column >> 1 & 1;
    const int lane = (row & 7) * 4 + (column >> 2 & 3);
    if (kRows == 8) return (((half * 2 + (piece >> 1)) * 32 + lane) << 2) + second * 2 + (piece & 1);
    return ((((half * kTiles + (row >> 4)) * 4 + piece) * 32 + lane) << 2) + second * 2 + (row >> 3 & 1);
  }
  const int half = column >> 5, eight = column >> 3 & 3, lane = (row & 7) * 4 + (column >> 1 & 3);
  if (kRows == 8) return ((half * 32 + lane) << 2) + eight;
  return ((((half * kTiles + (row >> 4)) * 2 + (eight >> 1)) * 32 + lane) << 2) + (eight & 1) * 2 + (row >> 3 & 1);
}
MEGA_FN uint32_t* words_of(uint32_t* words, int width, int layers, int layer, uint32_t step) {
  return words + (static_cast<int64_t>(step & 1) * layers + layer) * (static_cast<int64_t>(width) * kRows / 2);
}

// Weights of fp8 matrices are multiplied as 2^-120 of themselves (gemm.cuh), their inputs as 2^60 of themselves, and the
// scales of weights make the results right: no value of either leaves the range of bf16, and none is rounded otherwise.
constexpr float kOfFp8Input = 0x1p60f, kOfFp8Result = 0x1p60f;

// An input's place of this step, to write to: pairs at even columns, in the order of the matrix that reads it.
struct Written {
  uint32_t *now, *next;
  bool of_fp8;
  MEGA_FN void put(int row, int column, float first, float second) const {
    const bool fp8 = kFp8 && of_fp8;
    const int at = fp8 ? word_of<true>(row, column) : word_of<false>(row, column);
    store_word(now + at, fp8 ? pack_bf16(first * kOfFp8Input, second * kOfFp8Input) : pack_bf16(first, second));
    store_word(next + at, kNothing);
  }
};
MEGA_FN Written written(const Block& b, uint32_t* words, int width, int layers, int layer, bool of_fp8 = kFp8) {
  return {words_of(words, width, layers, layer, b.step), words_of(words, width, layers, layer, b.step + 1), of_fp8};
}

MEGA_FN bool are_there(const uint32_t (&w)[4]) {
  return w[0] != kNothing && w[1] != kNothing && w[2] != kNothing && w[3] != kNothing;
}

// --- pairs of floats

MEGA_FN uint32_t tag_of(const Block& b, int layer) {
  return 1 + (b.step * static_cast<uint32_t>(kLayers + 1) + static_cast<uint32_t>(layer)) % 255;
}
MEGA_FN uint64_t tagged(float first, float second, uint32_t tag) {
  return static_cast<uint64_t>(bits_of(first) >> 4) << 36 | static_cast<uint64_t>(bits_of(second) >> 4) << 8 | tag;
}
MEGA_FN bool has_tag(uint64_t word, uint32_t tag) { return (static_cast<uint32_t>(word) & 255) == tag; }
MEGA_FN float first_of(uint64_t word) { return float_of(static_cast<uint32_t>(word >> 36) << 4); }
MEGA_FN float second_of(uint64_t word) { return float_of(static_cast<uint32_t>(word >> 8) << 4); }

// Where the pair at a column of a row of projections lies: both pairs of a head that a lane holds are beside each other.
MEGA_FN int projected_word(int column) {
  const int pair = column % kHeadDim / 2;
  return column / kHeadDim * (kHeadDim / 2) + pair % 32 * kHeadPairs + pair / 32;
}

}  // namespace mega
