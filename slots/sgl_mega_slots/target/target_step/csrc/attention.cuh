// Attention of the step's rows over the paged context: a unit is some query heads of one KV head over one part of a
// request's positions. Units of a group meet through memory: each puts some of the values together as the parts of all
// come in.
//
// A unit's positions come in blocks, which teams take in turn: a team is one warp for each tile of sixteen
// query rows, with its own memory, so teams need not wait for each other. Keys and values of the context do not depend
// on the step, and neither do their places on the layer: their copies start before the queries are there. The step's own
// keys and values are normalised and rotated here, stored where the engine said, and are the first block of their unit.
#pragma once

#include "operations.cuh"

namespace mega {

constexpr int kPieces = kHeadDim / 8;         // of 16 bytes in a head of bf16 values
constexpr int kKvPieces = kHeadDim * kKvBytes / 16;  // and of the cache's
constexpr int kTeamLanes = 32 * kQueryTiles;
constexpr int kTeamBytes = kSlots * kSlotBytes / kTeams;
constexpr int kFreshBlocks = (kTokens + kBlock - 1) / kBlock;  // of the step's own positions
constexpr int kCopies = kBlock * kKvPieces / kTeamLanes;       // lines of a block that a lane copies a piece of

struct Unit {
  int request, kv_head, first_head, split, group;
  int prefix;              // positions of the context
  int fresh, first_fresh;  // blocks of the step's own positions that are this unit's
  int first, blocks;       // its first block of the context, and how many it has with the fresh ones, which come first
};

constexpr int kUnitsOfRequest = kQHeads / kUnitHeads;
MEGA_FN int request_of(int index) { return index / kSplits / kUnitsOfRequest; }
MEGA_FN Unit unit_of(int index, int prefix) {
  Unit u;
  u.group = index / kSplits;
  u.split = index % kSplits;
  u.request = request_of(index);
  u.first_head = u.group % kUnitsOfRequest * kUnitHeads;
  u.kv_head = u.first_head / (kQHeads / kKvHeads);
  u.prefix = prefix;
  const int context = (prefix + kBlock - 1) / kBlock, all = context + kFreshBlocks;
  const int end = (u.split + 1) * all / kSplits;
  u.first = u.split * all / kSplits;
  u.blocks = end - u.first;
  u.first_fresh = u.first > context ? u.first - context : 0;
  u.fresh = end > context ? end - context - u.first_fresh : 0;
  return u;
}

MEGA_FN int team_of(const Block& b) { return b.warp / kQueryTiles; }
MEGA_FN int tile_of(const Block& b) { return b.warp % kQueryTiles; }
MEGA_FN void sync_team(const Block& b) {
  if (kQueryTiles == 1)
    sync_warp();
  else
    sync_threads(kConsumerBarrier + 1 + team_of(b), kTeamLanes);
}

// First position of block `number` of the unit, which is not a fresh one.
MEGA_FN int position_of(const Unit& u, int number) { return (u.first + number - u.fresh) * kBlock; }
// Keys of block `number` of a team; its values are kBlockBytes further.
MEGA_FN char* team_block(const Block& b, int team, int number) {
  return b.s.slot(0) + team * kTeamBytes + number % kTeamBlocks * (2 * kBlockBytes);
}
// A value of the cache: bf16, or e4m3 as a byte.
template <int bytes>
struct KvValue {
  using Type = uint16_t;
};
template <>
struct KvValue<1> {
  using Type = uint8_t;
};
using Kv = KvValue<kKvBytes>::Type;
MEGA_FN Kv* keys_of(const Block& b, int layer) { return reinterpret_cast<Kv*>(b.p->layers[layer].keys); }
MEGA_FN Kv* values_of(const Block& b, int layer) { return reinterpret_cast<Kv*>(b.p->layers[layer].values); }

// Where a piece of 16 bytes, given by its first column, of a position lies in a block of keys or of values: of eight
// positions the same pieces lie in different banks.
constexpr int kPieceColumns = 16 / kKvBytes;
MEGA_FN int block_offset(int line, int column) {
  if constexpr (!kKvFp8) return tile_offset(kBlock, line, column);
  const int turned = kHeadDim == 128 ? line & 7 : line >> 1 & 3;
  return line * kHeadDim + ((column / kPieceColumns ^ turned) << 4);
}

// Where a head of a position lies in the KV cache.
MEGA_FN int64_t cache_offset(int64_t place, int kv_head) { return (place * kKvHeads + kv_head) * kHeadDim; }

// What a unit needs of the step's inputs and no layer changes. Every consumer takes part.
MEGA_FN void prepare_unit(const Block& b, int index) {
  Table* table = b.s.table();
  const int request = request_of(index), thread = b.warp * 32 + b.lane;
  const int prefix = static_cast<int>(b.p->seq_lens[request]);
  const int32_t* places = b.p->req_to_token + b.p->req_pool_indices[request] * b.p->req_to_token_stride;
  const Unit u = unit_of(index, prefix);
  if (thread == 0) table->prefix = prefix;
  if (thread < kTokens) {
    table->positions[thread] = static_cast<int>(b.p->positions[request * kTokens + thread]);
    table->locations[thread] = static_cast<int>(b.p->cache_locs[request * kTokens + thread]);
  }
#pragma unroll 1
  for (int i = thread; i < kTeams * kTeamBlocks * kBlock; i += kConsumers) {
    const int number = i / kBlock / kTeamBlocks + i / kBlock % kTeamBlocks * kTeams;
    const int position = position_of(u, number) + i % kBlock;
    table->places[i] = number >= u.fresh && number < u.blocks && position < prefix ? places[position] : 0;
  }
  sync_threads(kConsumerBarrier, kConsumers);
}

// Lines of a block that a lane copies.
MEGA_FN int copied_line(const Block& b, int i) {
  return (tile_of(b) * 32 + b.lane) / kKvPieces + i * (kTeamLanes / kKvPieces);
}
// Start the copies of a team's block from these places of the cache. Values past the context become zero: they meet
// probabilities of zero.
MEGA_FN void copy_block(const Block& b, const Unit& u, int layer, int position, const int (&places)[kCopies], char* to) {
  const int column = b.lane % kKvPieces * kPieceColumns, head = u.kv_head * kHeadDim + column;
  const Kv *keys = keys_of(b, layer) + head, *values = values_of(b, layer) + head;
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int line = copied_line(b, i), at = block_offset(line, column);
    const int64_t from = static_cast<int64_t>(places[i]) * (kKvHeads * kHeadDim);
    if (position + line < u.prefix) {
      copy_16_bytes(to + at, keys + from);
      copy_16_bytes(to + kBlockBytes + at, values + from);
    } else {
      store_vector(reinterpret_cast<uint32_t*>(to + kBlockBytes + at), {0, 0, 0, 0});
    }
  }
}
// Blocks that fit the team's memory at once: their places are in the table.
MEGA_FN void copy_first_blocks(const Block& b, const Unit& u, int layer) {
  const int team = team_of(b);
#pragma unroll 1
  for (int turn = 0; turn < kTeamBlocks; ++turn) {
    const int number = team + turn * kTeams;
    if (team < kTeams && number >= u.fresh && number < u.blocks) {
      int places[kCopies];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) places[i] = b.s.table()->places[(team * kTeamBlocks + turn) * kBlock + copied_line(b, i)];
      copy_block(b, u, layer, position_of(u, number), places, team_block(b, team, turn));
    }
    copies_commit();
  }
}

// What a lane holds of a head: its pairs. A rotation takes columns half a head apart: of 128 values both are the lane's,
// of 64 the other is sixteen lanes away.
struct Head {
  Pair pairs[kHeadPairs];
};
struct Angles {
  Pair cosines, sines;
};
MEGA_FN Angles angles_of(const Block& b, int token) {
  const float* cosines = b.p->rotary + static_cast<int64_t>(b.s.table()->positions[token]) * kHeadDim +
                         (kHeadPairs == 2 ? b.lane : b.lane & 15) * 2;
  return {*reinterpret_cast<const Pair*>(cosines), *reinterpret_cast<const Pair*>(cosines + kHeadDim / 2)};
}
MEGA_FN Pair rotated(const Pair& x, const Pair& other, const Angles& by, float sign) {
  return {x.first * by.cosines.first + sign * other.first * by.sines.first,
          x.second * by.cosines.second + sign * other.second * by.sines.second};
}

// A lane's part of the weights of a head's norm.
struct NormPairs {
  uint32_t pairs[kHeadPairs];
};
MEGA_FN NormPairs norm_pairs(const Block& b, const uint16_t* norm) {
  NormPairs found = {};
  if (kQkNorm)
    for (int i = 0; i < kHeadPairs; ++i) found.pairs[i] = *reinterpret_cast<const uint32_t*>(norm + 64 * i + 2 * b.lane);
  return found;
}

// Scaled to unit rms and by `norm` where it is given, then rotated.
MEGA_FN void norm_and_rotate(const Block& b, Head& x, const NormPairs& norm, const Angles& by) {
  if (kQkNorm) {
    float sum = 0.0f;
    for (int i = 0; i < kHeadPairs; ++i) sum += x.pairs[i].first * x.pairs[i].first + x.pairs[i].second * x.pairs[i].second;
    for (int mask = 16; mask > 0; mask >>= 1) sum += shuffle_xor(sum, mask);
    const float scale = inverse_root(sum * (1.0f / kHeadDim) + b.p->eps);
    for (int i = 0; i < kHeadPairs; ++i) {
      const Pair weights = unpack_bf16(norm.pairs[i]);
      x.pairs[i] = {x.pairs[i].first * scale * weights.first, x.pairs[i].second * scale * weights.second};
    }
  }
  if constexpr (kHeadPairs == 2) {
    const Pair low = x.pairs[0], high = x.pairs[1];
    x.pairs[0] = rotated(low, high, by, -1.0f);
    x.pairs[1] = rotated(high, low, by, 1.0f);
  } else {
    const Pair other = {shuffle_xor(x.pairs[0].first, 16), shuffle_xor(x.pairs[0].second, 16)};
    x.pairs[0] = rotated(x.pairs[0], other, by, b.lane < 16 ? -1.0f : 1.0f);
  }
}

MEGA_FN Head head_of(const uint64_t (&words)[kHeadPairs]) {
  Head x;
  for (int i = 0; i < kHeadPairs; ++i) x.pairs[i] = {first_of(words[i]), second_of(words[i])};
  return x;
}
MEGA_FN void to_tile(const Block& b, char* tile, int lines, int line, const Head& x) {
  for (int i = 0; i < kHeadPairs; ++i)
    *reinterpret_cast<uint32_t*>(tile + tile_offset(lines, line, 64 * i + 2 * b.lane)) =
        pack_bf16(x.pairs[i].first, x.pairs[i].second);
}
// A pair of values as the cache has them, rounded to bf16 first where it is fp8.
MEGA_FN void to_pair(void* pair, const Pair& x) {
  const uint32_t rounded = pack_bf16(x.first, x.second);
  if constexpr (kKvFp8) {
    const Pair bf16 = unpack_bf16(rounded);
    *static_cast<uint16_t*>(pair) = pack_fp8(bf16.first, bf16.second);
  } else {
    *static_cast<uint32_t*>(pair) = rounded;
  }
}
// A head to a line of a block of keys or of values.
MEGA_FN void to_block(const Block& b, char* block, int line, const Head& x) {
  if constexpr (!kKvFp8) return to_tile(b, block, kBlock, line, x);
  for (int i = 0; i < kHeadPairs; ++i) {
    const int column = 64 * i + 2 * b.lane;
    to_pair(block + block_offset(line, column) + column % kPieceColumns, x.pairs[i]);
  }
}
MEGA_FN void to_cache(const Block& b, Kv* head, const Head& x) {
  for (int i = 0; i < kHeadPairs; ++i) to_pair(head + 64 * i + 2 * b.lane, x.pairs[i]);
}

// What a warp reads of the projections: query rows (head, token) `warp`, eight further ..., and where the unit has fresh
// blocks the keys and values of tokens `warp`, eight further ...
constexpr int kLines = kUnitRows / kConsumerWarps;
constexpr int kAngles = kConsumerWarps % kTokens == 0 ? 1 : kLines;  // all of a warp's lines are of one token, or not
constexpr int kFreshLines = kFreshBlocks * kBlock / kConsumerWarps;
constexpr int kWarpTokens = (kTokens + kConsumerWarps - 1) / kConsumerWarps;
MEGA_FN unsigned line_of(const Block& b, int i) { return static_cast<unsigned>(b.warp) + i * kConsumerWarps; }
MEGA_FN bool is_query(const Block& b, int i) { return line_of(b, i) < kUnitHeads * kTokens; }
MEGA_FN bool is_fresh(const Block& b, const Unit& u, int i) {
  const int number = static_cast<int>(line_of(b, i)) / kBlock - u.first_fresh;
  return number >= 0 && number < u.fresh;
}

struct Projected {
  uint64_t queries[kLines][kHeadPairs], keys[kWarpTokens][kHeadPairs], values[kWarpTokens][kHeadPairs];
};
template <int kCount>
MEGA_FN void load_head(const Block& b, uint64_t (&words)[kCount], int row, int head) {
  const uint64_t* from = b.p->qkv + (row * Gemm<kQkv>::rows + head * kHeadDim) / 2 + b.lane * kCount;
  if constexpr (kCount == 2)
    load_longs(words, from);
  else
    words[0] = load_long(from);
}
MEGA_FN bool have_tag(const uint64_t (&words)[kHeadPairs], uint32_t tag) {
  bool have = true;
  for (int i = 0; i < kHeadPairs; ++i) have = have && has_tag(words[i], tag);
  return have;
}
// All is asked for at once; while some is missing, again.
MEGA_FN void await_projected(const Block& b, const Unit& u, int layer, Projected& x) {
  const uint32_t tag = tag_of(b, layer);
  uint64_t deadline = 0;
  const int row = u.request * kTokens;
  for (;;) {
    bool there = true;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const int line = is_query(b, i) ? static_cast<int>(line_of(b, i)) : 0;
      load_head(b, x.queries[i], row + line % kTokens, u.first_head + line / kTokens);
    }
    if (u.fresh > 0) {
#pragma unroll
      for (int i = 0; i < kWarpTokens; ++i) {
        const int token = line_of(b, i) < kTokens ? static_cast<int>(line_of(b, i)) : 0;
        load_head(b, x.keys[i], row + token, kQHeads + u.kv_head);
        load_head(b, x.values[i], row + token, kQHeads + kKvHeads + u.kv_head);
      }
      for (int i = 0; i < kWarpTokens; ++i) there = there && have_tag(x.keys[i], tag) && have_tag(x.values[i], tag);
    }
#pragma unroll
    for (int i = 0; i < kLines; ++i) there = there && have_tag(x.queries[i], tag);
    if (all_lanes(there)) return;
    look_again(b, deadline, place_of_wait(kArrivals, layer, kQkv), tag);
  }
}

// For a unit without positions: return once the layer has begun, which its first projection tells. Only then has every
// SM read the parts of the layer before, whose place this unit's take; an SM may have no other work that waits for them.
MEGA_FN void await_layer(const Block& b, const Unit& u, int layer) {
  const uint32_t tag = tag_of(b, layer);
  const uint64_t* from = b.p->qkv + (u.request * kTokens * Gemm<kQkv>::rows + u.first_head * kHeadDim) / 2;
  uint64_t deadline = 0;
  while (!all_lanes(has_tag(load_long(from), tag))) look_again(b, deadline, place_of_wait(kArrivals, layer, kQkv), tag);
}

// A query to its line. Where keys are fp8, its columns stand as the tensor cores take four keys in a word: columns 4 q
// to 4 q + 3 of sixteen as their values 2 q, 2 q + 1, 2 q + 8 and 2 q + 9.
MEGA_FN void to_queries(const Block& b, char* tile, int line, const Head& x) {
  if constexpr (!kKvFp8) return to_tile(b, tile, kUnitRows, line, x);
  for (int i = 0; i < kHeadPairs; ++i) {
    const int column = 64 * i + 2 * b.lane, place = (column & ~15) + (column >> 2 & 3) * 2 + (column >> 1 & 1) * 8;
    *reinterpret_cast<uint32_t*>(tile + tile_offset(kUnitRows, line, place)) =
        pack_bf16(x.pairs[i].first, x.pairs[i].second);
  }
}

// Queries to a tile; lines past the last are zero.
MEGA_FN void take_queries(const Block& b, const NormPairs& norm, const Angles (&angles)[kAngles], const Projected& x, char* to) {
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    Head query = {};
    if (is_query(b, i)) {
      query = head_of(x.queries[i]);
      norm_and_rotate(b, query, norm, angles[i % kAngles]);
    }
    to_queries(b, to, static_cast<int>(line_of(b, i)), query);
  }
}
// Keys and values of the step to the blocks of the first teams, and into the cache by the KV head's first unit.
MEGA_FN void take_fresh(const Block& b, const Unit& u, int layer, const NormPairs& norm, const Projected& x) {
  const bool store = u.first_head % (kQHeads / kKvHeads) == 0;
#pragma unroll
  for (int i = 0; i < kFreshLines; ++i) {
    if (!is_fresh(b, u, i)) continue;
    const int token = static_cast<int>(line_of(b, i));
    char* keys = team_block(b, token / kBlock - u.first_fresh, 0);
    if (token >= kTokens) {
      to_block(b, keys + kBlockBytes, token % kBlock, Head{});
      continue;
    }
    Head key = head_of(x.keys[i < kWarpTokens ? i : 0]);
    const Head value = head_of(x.values[i < kWarpTokens ? i : 0]);
    norm_and_rotate(b, key, norm, angles_of(b, token));
    to_block(b, keys, token % kBlock, key);
    to_block(b, keys + kBlockBytes, token % kBlock, value);
    const int place = b.s.table()->locations[token];
    if (!store || place <= 0) continue;  // 0 is the padding slot
    to_cache(b, keys_of(b, layer) + cache_offset(place, u.kv_head), key);
    to_cache(b, values_of(b, layer) + cache_offset(place, u.kv_head), value);
  }
}

// Running softmax of a warp's query tile over its positions. Lane holds rows lane / 4 and lane / 4 + 8.
struct Running {
  float best[2], total[2];
  float out[kPieces][4];
};

MEGA_FN float quad_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}

using Scores = float[kBlock / 8][4];

// Scores of a query tile with a block's keys.
MEGA_FN void multiply_keys(Scores& scores, const char* block, const char* queries, int quarter, int low) {
  auto load_query = [&](uint32_t (&q)[4], int step) {
    load_four_matrices(q, queries + tile_offset(kUnitRows, (quarter & 1) * 8 + low, step * 16 + (quarter >> 1) * 8));
  };
  if constexpr (kKvFp8) {
#pragma unroll
    for (int piece = 0; piece < kKvPieces; piece += 2) {  // sixteen columns: of both eights of positions, then the next
      uint32_t k[4];
      load_four_matrices(k, block + block_offset((quarter & 1) * 8 + low, (piece + (quarter >> 1)) * kPieceColumns));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t q[4];
        load_query(q, piece + half);
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
          uint32_t first, second;
          widen_fp8(k[half * 2 + eight], first, second);
          multiply(scores[eight], q[0], q[1], q[2], q[3], first, second);
        }
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t q[4];
      load_query(q, step);
#pragma unroll
      for (int i = 0; i < kBlock / 8; i += 2) {
        uint32_t k[4];
        load_four_matrices(k, block + tile_offset(kBlock, (i + (quarter >> 1)) * 8 + low, step * 16 + (quarter & 1) * 8));
        multiply(scores[i], q[0], q[1], q[2], q[3], k[0], k[1]);
        multiply(scores[i + 1], q[0], q[1], q[2], q[3], k[2], k[3]);
      }
    }
  }
}

// Two fp8 values of a word whose bytes are two columns of two positions: the pair of an even column, or of an odd one.
template <bool kOdd>
MEGA_FN uint32_t widen_column(uint32_t word) {
  return widen_two(word, kOdd ? kOddTwo : kEvenTwo);
}

// Which pair of columns of a result is pair `number` of a lane's, and its values of the lane's row `half`.
MEGA_FN int column_pair(const Block& b, int number) {
  if constexpr (kKvFp8) return number / 2 * 8 + (b.lane & 3) * 2 + number % 2;
  return number * 4 + (b.lane & 3);
}
MEGA_FN Pair pair_of(const float (&out)[kPieces][4], int number, int half) {
  if constexpr (kKvFp8) {
    const int first = number / 2 * 2, at = half * 2 + number % 2;
    return {out[first][at], out[first + 1][at]};
  }
  return {out[number][half * 2], out[number][half * 2 + 1]};
}

// A block for one query tile: of its positions the lane's two rows see the first `seen`.
MEGA_FN void attend(const Block& b, const char* block, const char* queries, const int (&seen)[2], Running& run) {
  constexpr int kEights = kBlock / 8;
  const int lane = unknown(b.lane), quarter = lane >> 3, low = lane & 7;
  Scores scores = {};
  multiply_keys(scores, block, queries, quarter, low);
  const float scale = b.p->softmax_scale * kLog2e;
  const int column = (lane & 3) * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // rows lane / 4, then eight further
    float best = run.best[half];
#pragma unroll
    for (int i = 0; i < 2 * kEights; ++i) {
      float& score = scores[i >> 1][half * 2 + (i & 1)];
      score = column + (i >> 1) * 8 + (i & 1) < seen[half] ? score * scale : minus_infinity();
      best = fmaxf(best, score);
    }
    best = quad_max(best);
    const float base = best == minus_infinity() ? 0.0f : best;
    const float rescale = exp2_of(run.best[half] - base);
    run.best[half] = best;
    run.total[half] *= rescale;
#pragma unroll
    for (int i = 0; i < 2 * kEights; ++i) {
      float& score = scores[i >> 1][half * 2 + (i & 1)];
      score = exp2_of(score - base);
      run.total[half] += score;
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      run.out[piece][half * 2] *= rescale;
      run.out[piece][half * 2 + 1] *= rescale;
    }
  }
#pragma unroll
  for (int i = 0; i < kEights; i += 2) {
    const uint32_t p0 = pack_bf16(scores[i][0], scores[i][1]), p1 = pack_bf16(scores[i][2], scores[i][3]);
    const uint32_t p2 = pack_bf16(scores[i + 1][0], scores[i + 1][1]), p3 = pack_bf16(scores[i + 1][2], scores[i + 1][3]);
#pragma unroll
    for (int piece = 0; piece < kKvPieces; piece += 2) {
      uint32_t v[4];
      const int at = block_offset((i + (quarter & 1)) * 8 + low, (piece + (quarter >> 1)) * kPieceColumns);
      load_matrices_transposed(v, block + kBlockBytes + at);
      if constexpr (kKvFp8) {  // of sixteen columns the even ones are an eight of the result, the odd ones the next
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t first = v[half * 2], second = v[half * 2 + 1];
          float(&even)[4] = run.out[(piece + half) * 2], (&odd)[4] = run.out[(piece + half) * 2 + 1];
          multiply(even, p0, p1, p2, p3, widen_column<false>(first), widen_column<false>(second));
          multiply(odd, p0, p1, p2, p3, widen_column<true>(first), widen_column<true>(second));
        }
      } else {
        multiply(run.out[piece], p0, p1, p2, p3, v[0], v[1]);
        multiply(run.out[piece + 1], p0, p1, p2, p3, v[2], v[3]);
      }
    }
  }
}

// Where pair `pair` of a line of a team's result lies, in pairs: lines begin in different banks.
MEGA_FN int part_pair(int line, int pair) { return line * (kHeadDim / 2) + (pair ^ (line & 7) << 2); }

// All blocks of the team for this warp's query tile, and the result to the team's memory as [unit rows][head dim] fp32,
// maxima and sums beside it.
MEGA_FN void attend_blocks(const Block& b, const Unit& u, int layer, const char* queries, Pair* stats) {
  const int team = team_of(b), first_row = tile_of(b) * 16 + (b.lane >> 2);
  const int32_t* places = b.p->req_to_token + b.p->req_pool_indices[u.request] * b.p->req_to_token_stride;
  Running run = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}, {}};
  int turn = 0, number = team;
#pragma unroll 1
  do {
    char* block = team_block(b, team, turn);
    const int later = number + kTeamBlocks * kTeams, position = position_of(u, later);
    int ahead[kCopies];
    if (later < u.blocks) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int at = position + copied_line(b, i);
        ahead[i] = at < u.prefix ? places[at] : 0;
      }
    }
    copies_wait<kTeamBlocks - 1>();
    sync_team(b);
    int seen[2];
    for (int half = 0; half < 2; ++half) {
      const int own = kCausal ? (first_row + half * 8) % kTokens + 1 : kTokens;  // of the step's positions
      seen[half] = number < u.fresh ? own - (u.first_fresh + number) * kBlock : u.prefix - position_of(u, number);
    }
    attend(b, block, queries + tile_of(b) * 16 * kLine, seen, run);
    sync_team(b);
    if (later < u.blocks) copy_block(b, u, layer, position, ahead, block);
    copies_commit();
    ++turn, number += kTeams;
  } while (number < u.blocks);
  Pair* out = reinterpret_cast<Pair*>(b.s.slot(0) + team * kTeamBytes);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = first_row + half * 8;
    float total = run.total[half] + shuffle_xor(run.total[half], 1);
    total += shuffle_xor(total, 2);
    if ((b.lane & 3) == 0) stats[team * kUnitRows + line] = {run.best[half], total};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      out[part_pair(line, column_pair(b, piece))] = pair_of(run.out, piece, half);
  }
}

// A pair of values of softmax parts put together: each part has its maximum, its sum and its unscaled values.
struct Joined {
  float best, total;
  Pair out;
};
MEGA_FN Joined join(const Joined& x, const Joined& y) {
  const float best = fmaxf(x.best, y.best), base = best == minus_infinity() ? 0.0f : best;
  const float of_x = exp2_of(x.best - base), of_y = exp2_of(y.best - base);
  return {best, of_x * x.total + of_y * y.total,
          {of_x * x.out.first + of_y * y.out.first, of_x * x.out.second + of_y * y.out.second}};
}

MEGA_FN void write_attended(const Unit& u, const Written& next, int line, int column, const Pair& sum, float total) {
  const float scale = total > 0.0f ? divide(1.0f, total) : 0.0f;
  next.put(u.request * kTokens + line % kTokens, (u.first_head + line / kTokens) * kHeadDim + column, sum.first * scale,
           sum.second * scale);
}

// Parts of the teams put together, lines `warp`, eight further ...: the result where the context is one part, else this
// split's part.
constexpr int kUnitPairs = kUnitHeads * kTokens * kHeadDim / 2;
constexpr int kPartPairs = kHeadDim / 2 + 2;  // a row's values, its maximum and sum; rows begin at multiples of 16 bytes
MEGA_FN void join_teams(const Block& b, const Unit& u, const Written& next, const Pair* stats, uint64_t* parts, uint32_t tag) {
  const int teams = u.blocks < kTeams ? u.blocks : kTeams;
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    if (!is_query(b, i)) break;
    const int line = static_cast<int>(line_of(b, i));
    Pair stat[kTeams];
    float best = minus_infinity();
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      stat[team] = team < teams ? stats[team * kUnitRows + line] : Pair{minus_infinity(), 0.0f};
      best = fmaxf(best, stat[team].first);
    }
    const float base = best == minus_infinity() ? 0.0f : best;
    float total = 0.0f;
    Pair sums[kHeadPairs] = {};
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      if (team >= teams) break;
      const float weight = exp2_of(stat[team].first - base);
      total += weight * stat[team].second;
      const Pair* from = reinterpret_cast<const Pair*>(b.s.slot(0) + team * kTeamBytes);
      for (int j = 0; j < kHeadPairs; ++j) {
        const Pair x = from[part_pair(line, b.lane * kHeadPairs + j)];
        sums[j] = {sums[j].first + weight * x.first, sums[j].second + weight * x.second};
      }
    }
    uint64_t* part = parts + (u.split * kUnitRows + line) * kPartPairs;
    for (int j = 0; j < kHeadPairs; ++j) {
      const int pair = b.lane * kHeadPairs + j;
      if (kSplits == 1)
        write_attended(u, next, line, 2 * pair, sums[j], total);
      else
        store_long(part + pair, tagged(sums[j].first, sums[j].second, tag));
    }
    if (kSplits > 1 && b.lane == 0) store_long(part + kHeadDim / 2, tagged(best, total, tag));
  }
}

// This split's share of the group's values, from the parts of all splits. Some lanes share a pair of values and take
// some splits each, as many as leave one round of work.
constexpr int kShare = (kUnitPairs + kSplits - 1) / kSplits;
constexpr int kSharing = kSplits >= 4 && 4 * kShare <= kConsumers ? 4 : kSplits >= 2 && 2 * kShare <= kConsumers ? 2 : 1;
constexpr int kEach = (kSplits + kSharing - 1) / kSharing;
MEGA_FN void join_splits(const Block& b, const Unit& u, const Written& next, const uint64_t* parts, uint32_t tag, int layer) {
  constexpr int kRounds = (kShare * kSharing + kConsumers - 1) / kConsumers;
  uint64_t deadline = 0;
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const int first = (round * kConsumers + b.warp * 32) / kSharing, number = first + b.lane / kSharing;
    // A warp without values must not wait: nobody waits for it, so the parts may be the next layer's before it looks.
    if (first >= kShare || u.split * kShare + first >= kUnitPairs) break;
    const int pair = u.split * kShare + number;
    const bool mine = number < kShare && pair < kUnitPairs;
    const int line = mine ? pair / (kHeadDim / 2) : 0, column = mine ? pair % (kHeadDim / 2) * 2 : 0;
    const uint64_t* from = parts + line * kPartPairs;
    uint64_t words[kEach][2];  // values, then maximum and sum
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int split = i * kSharing + b.lane % kSharing;
        const uint64_t* part = from + (split < kSplits ? split : 0) * (kUnitRows * kPartPairs);
        words[i][0] = load_long(part + column / 2);
        words[i][1] = load_long(part + kHeadDim / 2);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) there = there && has_tag(words[i][0], tag) && has_tag(words[i][1], tag);
      if (!there) look_again(b, deadline, place_of_wait(kArrivals, layer, kAttention), tag);
    } while (!all_lanes(there));
    float best = minus_infinity();
#pragma unroll
    for (int i = 0; i < kEach; ++i) best = fmaxf(best, first_of(words[i][1]));
    const float base = best == minus_infinity() ? 0.0f : best;
    Joined all = {best, 0.0f, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i * kSharing + b.lane % kSharing >= kSplits) continue;
      const float weight = exp2_of(first_of(words[i][1]) - base);
      all.total += weight * second_of(words[i][1]);
      all.out.first += weight * first_of(words[i][0]);
      all.out.second += weight * second_of(words[i][0]);
    }
#pragma unroll
    for (int mask = 1; mask < kSharing; mask <<= 1) {
      const Joined other = {shuffle_xor(all.best, mask), shuffle_xor(all.total, mask),
                            {shuffle_xor(all.out.first, mask), shuffle_xor(all.out.second, mask)}};
      // The same order in all lanes, so that they have the same result.
      all = b.lane & mask ? join(other, all) : join(all, other);
    }
    if (mine && b.lane % kSharing == 0) write_attended(u, next, line, column, all.out, all.total);
  }
}

MEGA_FN void attend_unit(const Block& b, int layer, int index) {
  const Unit u = unit_of(index, b.s.table()->prefix);
  char* queries = reinterpret_cast<char*>(b.s.sums(0));
  Pair* stats = reinterpret_cast<Pair*>(queries + kUnitRows * kHeadDim * 2);
  const uint32_t tag = tag_of(b, layer);
  if (u.blocks > 0) {
    copy_first_blocks(b, u, layer);
    const NormPairs query_norm = norm_pairs(b, b.p->layers[layer].q_norm);
    const NormPairs key_norm = norm_pairs(b, b.p->layers[layer].k_norm);
    Angles angles[kAngles];
#pragma unroll
    for (int i = 0; i < kAngles; ++i) angles[i] = angles_of(b, static_cast<int>(line_of(b, i) % kTokens));
    sync_threads(kConsumerBarrier, kConsumers);  // the queries take the place of sums that were read
    Projected projected;
    await_projected(b, u, layer, projected);
    take_queries(b, query_norm, angles, projected, queries);
    if (u.fresh > 0) take_fresh(b, u, layer, key_norm, projected);
    sync_threads(kConsumerBarrier, kConsumers);
    note(b, layer, kAttention, kInputThere);
    if (team_of(b) < kTeams && team_of(b) < u.blocks) attend_blocks(b, u, layer, queries, stats);
    copies_wait<0>();
    sync_threads(kConsumerBarrier, kConsumers);
  } else {
    await_layer(b, u, layer);
    note(b, layer, kAttention, kInputThere);
  }
  note(b, layer, kAttention, kMultiplied);
  uint64_t* parts = b.p->parts + static_cast<int64_t>(u.group) * kSplits * kUnitRows * kPartPairs;
  const Written next = written(b, b.p->attended, kQHeads * kHeadDim, kLayers, layer);
  join_teams(b, u, next, stats, parts, tag);
  if (kSplits > 1) join_splits(b, u, next, parts, tag, layer);
}

MEGA_FN void attention(const Block& b, int layer) {
  const Share share = b.s.shares()[kAttention];
  if (share.count == 0) return;
  note(b, layer, kAttention, kBegan);
#pragma unroll 1
  for (int unit = 0; unit < share.count; ++unit) {
    const Block here = {b.p, b.s, b.sm, unknown(b.warp), unknown(b.lane), b.step};
    if (share.count > 1) prepare_unit(here, share.first + unit);
    attend_unit(here, layer, share.first + unit);
    sync_threads(kConsumerBarrier, kConsumers);  // what comes next takes the place of this one's parts
  }
  note(b, layer, kAttention, kEnded);
}

}  // namespace mega
