// Attention of the step's rows over the paged context: a unit is some query heads of one KV head over one part of a
// request's positions. Units of a group meet through memory: each puts some of the values together as the parts of all
// come in.
//
// Keys and values of the context do not depend on the step, so their copies start before the queries are there. The
// step's own keys and values are normalised and rotated here, and stored where the engine said.
#pragma once

#include "operations.cuh"

namespace mega {

constexpr int kPositionWarps = kConsumerWarps / 2;  // 16 positions of a chunk each; the two halves take query tiles
constexpr int kPieces = kHeadDim / 8;               // of 16 bytes in a head
constexpr int kPairs = kHeadDim / 64;               // pairs of a head that a lane holds: columns 2 * lane, 64 further

struct Unit {
  int request, kv_head, first_head, split, group;
  int length, prefix;  // positions of the request with and without this step's
  int first, end;      // this unit's positions
  int row_token[2];    // token of this lane's two query rows, -1 where there is none
};

MEGA_FN Unit unit_of(const Block& b, int index) {
  constexpr int kPerRequest = kQHeads / kUnitHeads;
  Unit u;
  u.group = index / kSplits;
  u.split = index % kSplits;
  u.request = u.group / kPerRequest;
  u.first_head = u.group % kPerRequest * kUnitHeads;
  u.kv_head = u.first_head / (kQHeads / kKvHeads);
  u.prefix = static_cast<int>(b.p->seq_lens[u.request]);
  u.length = u.prefix + kTokens;
  const int part = ((u.length + kSplits - 1) / kSplits + 15) / 16 * 16;
  u.first = u.split * part < u.length ? u.split * part : u.length;
  u.end = u.first + part < u.length ? u.first + part : u.length;
  return u;
}

// Where a head of a position lies in the KV cache.
MEGA_FN int64_t cache_offset(int64_t place, int kv_head) { return (place * kKvHeads + kv_head) * kHeadDim; }

struct Chunk {
  char *keys, *values;  // [head slabs][kChunk][64] bf16
  int first;            // position
};
MEGA_FN Chunk chunk_of(const Block& b, const Unit& u, int number) {
  char* at = b.s.slot(number & 1);
  return {at, at + kChunkBytes, u.first + number * kChunk};
}

// Start the copies of a chunk's earlier positions. Values that no copy or later store fills become zero: they meet
// probabilities of zero. A thread has the same piece of several lines.
MEGA_FN void fetch(const Block& b, const Unit& u, int layer, const Chunk& chunk) {
  constexpr int kApart = kConsumers / kPieces, kTimes = (kChunk + kApart - 1) / kApart;
  const int thread = b.warp * 32 + b.lane, first = thread / kPieces, column = thread % kPieces * 8;
  const uint16_t* keys = b.p->layers[layer].keys + u.kv_head * kHeadDim + column;
  const uint16_t* values = b.p->layers[layer].values + u.kv_head * kHeadDim + column;
  const int32_t* places = b.p->req_to_token + b.p->req_pool_indices[u.request] * b.p->req_to_token_stride;
  const int to = tile_offset(kChunk, first, column);
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    const int line = first + i * kApart, position = chunk.first + line, at = to + i * kApart * kLine;
    if (line >= kChunk) break;
    if (position < u.end && position < u.prefix) {
      const int64_t from = static_cast<int64_t>(places[position]) * (kKvHeads * kHeadDim);
      copy_16_bytes(chunk.keys + at, keys + from);
      copy_16_bytes(chunk.values + at, values + from);
    } else if (position >= u.end) {
      store_vector(reinterpret_cast<uint32_t*>(chunk.values + at), {0, 0, 0, 0});
    }
  }
}

// What a lane holds of a head: its pairs. A rotation takes columns half a head apart: of 128 values both are the lane's,
// of 64 the other is sixteen lanes away.
struct Head {
  Pair pairs[kPairs];
};
struct Angles {
  Pair cosines, sines;
};
MEGA_FN Angles angles_of(const Block& b, int row) {
  const float* cosines = b.p->rotary + b.p->positions[row] * kHeadDim + (kPairs == 2 ? b.lane : b.lane & 15) * 2;
  return {*reinterpret_cast<const Pair*>(cosines), *reinterpret_cast<const Pair*>(cosines + kHeadDim / 2)};
}
MEGA_FN Pair rotated(const Pair& x, const Pair& other, const Angles& by, float sign) {
  return {x.first * by.cosines.first + sign * other.first * by.sines.first,
          x.second * by.cosines.second + sign * other.second * by.sines.second};
}

// Scaled to unit rms and by `norm` where it is given, then rotated.
MEGA_FN void norm_and_rotate(const Block& b, Head& x, const uint16_t* norm, const Angles& by) {
  if (kQkNorm) {
    float sum = 0.0f;
    for (int i = 0; i < kPairs; ++i) sum += x.pairs[i].first * x.pairs[i].first + x.pairs[i].second * x.pairs[i].second;
    for (int mask = 16; mask > 0; mask >>= 1) sum += shuffle_xor(sum, mask);
    const float scale = inverse_root(sum * (1.0f / kHeadDim) + b.p->eps);
    for (int i = 0; i < kPairs; ++i) {
      const uint16_t* weights = norm + 64 * i + 2 * b.lane;
      x.pairs[i] = {x.pairs[i].first * scale * from_bf16(weights[0]), x.pairs[i].second * scale * from_bf16(weights[1])};
    }
  }
  if constexpr (kPairs == 2) {
    const Pair low = x.pairs[0], high = x.pairs[1];
    x.pairs[0] = rotated(low, high, by, -1.0f);
    x.pairs[1] = rotated(high, low, by, 1.0f);
  } else {
    const Pair other = {shuffle_xor(x.pairs[0].first, 16), shuffle_xor(x.pairs[0].second, 16)};
    x.pairs[0] = rotated(x.pairs[0], other, by, b.lane < 16 ? -1.0f : 1.0f);
  }
}

MEGA_FN Head head_of(const uint64_t* pairs) {
  Head x;
  for (int i = 0; i < kPairs; ++i) x.pairs[i] = {first_of(pairs[i]), second_of(pairs[i])};
  return x;
}
MEGA_FN void to_tile(const Block& b, char* tile, int lines, int line, int i, uint32_t pair) {
  *reinterpret_cast<uint32_t*>(tile + tile_offset(lines, line, 64 * i + 2 * b.lane)) = pair;
}

// Queries of the unit, rows (head, token): a warp's are the lines `warp`, eight further ... The angles are known before
// the projections are.
constexpr int kLines = kUnitRows / kConsumerWarps;
struct Queries {
  Angles angles[kLines];
};
MEGA_FN bool is_query(const Block& b, int i) { return b.warp + i * kConsumerWarps < kUnitHeads * kTokens; }
MEGA_FN void expect_queries(const Block& b, const Unit& u, Queries& queries) {
#pragma unroll
  for (int i = 0; i < kLines; ++i)
    queries.angles[i] = angles_of(b, u.request * kTokens + (is_query(b, i) ? (b.warp + i * kConsumerWarps) % kTokens : 0));
}
// From the warp's pairs to a bf16 tile; lines past the last are zero.
MEGA_FN void take_queries(const Block& b, int layer, const Queries& queries, const uint64_t* pairs, char* to) {
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    Head x = {};
    if (is_query(b, i)) {
      x = head_of(pairs + i * kPairs);
      norm_and_rotate(b, x, b.p->layers[layer].q_norm, queries.angles[i]);
    }
    for (int j = 0; j < kPairs; ++j)
      to_tile(b, to, kUnitRows, b.warp + i * kConsumerWarps, j, pack_bf16(x.pairs[j].first, x.pairs[j].second));
  }
}

// The step's own keys and values that this warp sees to: tokens `warp`, eight further ...
constexpr int kNewTokens = (kTokens + kConsumerWarps - 1) / kConsumerWarps;
struct NewTokens {
  Angles angles[kNewTokens];
  int64_t places[kNewTokens];
  uint32_t keys[kNewTokens][kPairs], values[kNewTokens][kPairs];  // bf16
};
// Whether the token is the warp's, and within this unit's positions.
MEGA_FN bool is_new(const Block& b, const Unit& u, int i) {
  const int token = b.warp + i * kConsumerWarps;
  return token < kTokens && u.prefix + token >= u.first && u.prefix + token < u.end;
}
MEGA_FN void expect_new(const Block& b, const Unit& u, NewTokens& tokens) {
#pragma unroll
  for (int i = 0; i < kNewTokens; ++i) {
    if (!is_new(b, u, i)) continue;
    const int row = u.request * kTokens + b.warp + i * kConsumerWarps;
    tokens.angles[i] = angles_of(b, row);
    tokens.places[i] = b.p->cache_locs[row];
  }
}
// Normalised, rotated and rounded; into the cache by the KV head's first unit.
MEGA_FN void take_new(const Block& b, const Unit& u, int layer, const uint64_t* pairs, NewTokens& tokens) {
  const bool store = u.first_head % (kQHeads / kKvHeads) == 0;
#pragma unroll
  for (int i = 0; i < kNewTokens; ++i) {
    if (!is_new(b, u, i)) continue;
    Head key = head_of(pairs + i * 2 * kPairs);
    const Head value = head_of(pairs + (i * 2 + 1) * kPairs);
    norm_and_rotate(b, key, b.p->layers[layer].k_norm, tokens.angles[i]);
    const int64_t to = cache_offset(tokens.places[i], u.kv_head) + 2 * b.lane;
    for (int j = 0; j < kPairs; ++j) {
      tokens.keys[i][j] = pack_bf16(key.pairs[j].first, key.pairs[j].second);
      tokens.values[i][j] = pack_bf16(value.pairs[j].first, value.pairs[j].second);
      if (!store || tokens.places[i] <= 0) continue;  // 0 is the padding slot
      *reinterpret_cast<uint32_t*>(b.p->layers[layer].keys + to + 64 * j) = tokens.keys[i][j];
      *reinterpret_cast<uint32_t*>(b.p->layers[layer].values + to + 64 * j) = tokens.values[i][j];
    }
  }
}

// All that this warp reads of the step's projections: its queries', then its new tokens' keys and values. A warp without
// such a line or token asks for the first one again.
constexpr int kQueryPairs = kLines * kPairs, kPairsRead = kQueryPairs + kNewTokens * 2 * kPairs;
MEGA_FN const uint64_t* pair_read(const Block& b, const Unit& u, int i) {
  const int number = i < kQueryPairs ? i / kPairs : 0, line = is_query(b, number) ? b.warp + number * kConsumerWarps : 0;
  int token = line % kTokens, head = u.first_head + line / kTokens;
  const int fresh = (i - kQueryPairs) / (2 * kPairs);
  if (i >= kQueryPairs && is_new(b, u, fresh)) {
    token = b.warp + fresh * kConsumerWarps;
    head = kQHeads + (i - kQueryPairs) / kPairs % 2 * kKvHeads + u.kv_head;
  }
  return b.p->qkv + ((u.request * kTokens + token) * Gemm<kQkv>::rows + head * kHeadDim) / 2 + i % kPairs * 32 + b.lane;
}

MEGA_FN void add_new(const Block& b, const Unit& u, const NewTokens& tokens, const Chunk& chunk) {
#pragma unroll
  for (int i = 0; i < kNewTokens; ++i) {
    const int line = u.prefix + b.warp + i * kConsumerWarps - chunk.first;
    if (!is_new(b, u, i) || line < 0 || line >= kChunk) continue;
    for (int j = 0; j < kPairs; ++j) {
      to_tile(b, chunk.keys, kChunk, line, j, tokens.keys[i][j]);
      to_tile(b, chunk.values, kChunk, line, j, tokens.values[i][j]);
    }
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

// Sixteen positions of a chunk, from line `line` on, for one query tile.
MEGA_FN void attend(const Block& b, const Unit& u, const Chunk& chunk, int line, const char* queries, Running& run) {
  const int quarter = b.lane >> 3, low = b.lane & 7;
  float scores[2][4] = {};
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t q[4], k[4];
    load_four_matrices(q, queries + tile_offset(kUnitRows, (quarter & 1) * 8 + low, step * 16 + (quarter >> 1) * 8));
    load_four_matrices(k, chunk.keys + tile_offset(kChunk, line + (quarter >> 1) * 8 + low, step * 16 + (quarter & 1) * 8));
    multiply(scores[0], q[0], q[1], q[2], q[3], k[0], k[1]);
    multiply(scores[1], q[0], q[1], q[2], q[3], k[2], k[3]);
  }
  const float scale = b.p->softmax_scale * kLog2e;
  const int position = chunk.first + line + (b.lane & 3) * 2;
  for (int half = 0; half < 2; ++half) {  // rows lane / 4, then eight further
    const int token = u.row_token[half];
    float best = run.best[half];
    for (int tile = 0; tile < 2; ++tile) {
      for (int i = 0; i < 2; ++i) {
        const int at = position + tile * 8 + i;
        const bool seen = token >= 0 && at < u.end && at <= u.prefix + token;
        float& score = scores[tile][half * 2 + i];
        score = seen ? score * scale : minus_infinity();
        best = fmaxf(best, score);
      }
    }
    best = quad_max(best);
    const float base = best == minus_infinity() ? 0.0f : best;
    const float rescale = exp2_of(run.best[half] - base);
    run.best[half] = best;
    run.total[half] *= rescale;
    for (int tile = 0; tile < 2; ++tile) {
      for (int i = 0; i < 2; ++i) {
        float& score = scores[tile][half * 2 + i];
        score = exp2_of(score - base);
        run.total[half] += score;
      }
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      run.out[piece][half * 2] *= rescale;
      run.out[piece][half * 2 + 1] *= rescale;
    }
  }
  const uint32_t p0 = pack_bf16(scores[0][0], scores[0][1]), p1 = pack_bf16(scores[0][2], scores[0][3]);
  const uint32_t p2 = pack_bf16(scores[1][0], scores[1][1]), p3 = pack_bf16(scores[1][2], scores[1][3]);
#pragma unroll
  for (int piece = 0; piece < kPieces; piece += 2) {
    uint32_t v[4];
    load_matrices_transposed(
        v, chunk.values + tile_offset(kChunk, line + (quarter & 1) * 8 + low, (piece + (quarter >> 1)) * 8));
    multiply(run.out[piece], p0, p1, p2, p3, v[0], v[1]);
    multiply(run.out[piece + 1], p0, p1, p2, p3, v[2], v[3]);
  }
}

// A warp's result to shared memory: out as [position warp][unit rows][head dim] in the slots, maxima and sums beside.
MEGA_FN void leave_part(const Block& b, int position_warp, int tile, Running& run, float* stats) {
  float* out = reinterpret_cast<float*>(b.s.slot(0)) + position_warp * kUnitRows * kHeadDim;
  for (int half = 0; half < 2; ++half) {
    const int line = tile * 16 + (b.lane >> 2) + half * 8;
    float total = run.total[half] + shuffle_xor(run.total[half], 1);
    total += shuffle_xor(total, 2);
    if ((b.lane & 3) == 0) {
      stats[(position_warp * kUnitRows + line) * 2] = run.best[half];
      stats[(position_warp * kUnitRows + line) * 2 + 1] = total;
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      float* at = out + line * kHeadDim + piece * 8 + (b.lane & 3) * 2;
      at[0] = run.out[piece][half * 2];
      at[1] = run.out[piece][half * 2 + 1];
    }
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

MEGA_FN void write_attended(const Unit& u, const Written& next, int line, int column, const Joined& all) {
  const float scale = all.total > 0.0f ? divide(1.0f, all.total) : 0.0f;
  next.put(u.request * kTokens + line % kTokens, (u.first_head + line / kTokens) * kHeadDim + column, all.out.first * scale,
           all.out.second * scale);
}

// Parts of the position warps put together: the result where the context is one part, else this split's part.
constexpr int kUnitPairs = kUnitHeads * kTokens * kHeadDim / 2;
constexpr int kPartPairs = kHeadDim / 2 + 2;  // a row's values, its maximum and sum; rows begin at multiples of 16 bytes
MEGA_FN void join_warps(const Block& b, const Unit& u, const Written& next, const float* stats, uint64_t* parts, uint32_t tag) {
  constexpr int kApart = kConsumers / (kHeadDim / 2);  // lines from one of a thread's pairs to the next
  const int thread = b.warp * 32 + b.lane, column = thread % (kHeadDim / 2) * 2;
  const float* out = reinterpret_cast<const float*>(b.s.slot(0)) + column;
#pragma unroll 2
  for (int line = thread / (kHeadDim / 2); line < kUnitHeads * kTokens; line += kApart) {
    Joined all = {minus_infinity(), 0.0f, {0.0f, 0.0f}};
#pragma unroll
    for (int part = 0; part < kPositionWarps; ++part) {
      const int at = part * kUnitRows + line;
      const Pair stat = reinterpret_cast<const Pair*>(stats)[at];
      all = join(all, {stat.first, stat.second, *reinterpret_cast<const Pair*>(out + at * kHeadDim)});
    }
    if (kSplits == 1) {
      write_attended(u, next, line, column, all);
      continue;
    }
    uint64_t* part = parts + (u.split * kUnitRows + line) * kPartPairs;
    store_long(part + column / 2, tagged(all.out.first, all.out.second, tag));
    if (column == 0) store_long(part + kHeadDim / 2, tagged(all.best, all.total, tag));
  }
}

// This split's share of the group's values, from the parts of all splits. Some lanes share a pair of values and take
// some splits each.
constexpr int kSharing = kSplits >= 8 ? 4 : kSplits >= 2 ? 2 : 1, kEach = (kSplits + kSharing - 1) / kSharing;
MEGA_FN void join_splits(const Block& b, const Unit& u, const Written& next, const uint64_t* parts, uint32_t tag, int layer) {
  constexpr int kShare = (kUnitPairs + kSplits - 1) / kSplits;
  constexpr int kRounds = (kShare * kSharing + kConsumers - 1) / kConsumers;
  const uint64_t deadline = deadline_of(b);
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const int number = (round * kConsumers + b.warp * 32 + b.lane) / kSharing;
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
    Joined all = {minus_infinity(), 0.0f, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i * kSharing + b.lane % kSharing >= kSplits) continue;
      all = join(all, {first_of(words[i][1]), second_of(words[i][1]), {first_of(words[i][0]), second_of(words[i][0])}});
    }
#pragma unroll
    for (int mask = 1; mask < kSharing; mask <<= 1) {
      const Joined other = {shuffle_xor(all.best, mask), shuffle_xor(all.total, mask),
                            {shuffle_xor(all.out.first, mask), shuffle_xor(all.out.second, mask)}};
      // The same order in all lanes, so that they have the same result.
      all = b.lane & mask ? join(other, all) : join(all, other);
    }
    if (mine && b.lane % kSharing == 0) write_attended(u, next, line, column, all);
  }
}

// A call of its own: inlined, its values and the matrices' do not fit the registers together.
MEGA_CALL void attend_unit(const Block b, int layer, int index) {
  Unit u = unit_of(b, index);
  const int position_warp = b.warp % kPositionWarps, tile = b.warp / kPositionWarps;
  for (int half = 0; half < 2; ++half) {
    const int line = tile * 16 + (b.lane >> 2) + half * 8;
    u.row_token[half] = line < kUnitHeads * kTokens ? line % kTokens : -1;
  }
  char* queries = reinterpret_cast<char*>(b.s.sums(0));
  float* stats = reinterpret_cast<float*>(queries + kUnitRows * kHeadDim * 2);
  uint64_t* parts = b.p->parts + static_cast<int64_t>(u.group) * kSplits * kUnitRows * kPartPairs;
  const int chunks = (u.end - u.first + kChunk - 1) / kChunk;

  // All that does not depend on the projections, before they are waited for.
#pragma unroll 1
  for (int number = 0; number < kSlots; ++number) {
    if (number < chunks) fetch(b, u, layer, chunk_of(b, u, number));
    copies_commit();
  }
  Queries expected;
  expect_queries(b, u, expected);
  NewTokens tokens;
  expect_new(b, u, tokens);
  sync_threads(kConsumerBarrier, kConsumers);  // the queries take the place of sums that were read
  uint64_t pairs[kPairsRead];
  await_pairs(b, pairs, tag_of(b, layer), layer, kQkv, [&](int i) { return pair_read(b, u, i); });
  take_queries(b, layer, expected, pairs, queries);
  take_new(b, u, layer, pairs + kQueryPairs, tokens);
  note(b, layer, kAttention, kInputThere);

  Running run = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}, {}};
#pragma unroll 1
  for (int number = 0; number < chunks; ++number) {
    copies_wait<kSlots - 1>();
    const Chunk chunk = chunk_of(b, u, number);
    add_new(b, u, tokens, chunk);
    sync_threads(kConsumerBarrier, kConsumers);
    const int line = position_warp * 16;
    if (tile < kQueryTiles && line < kChunk && chunk.first + line < u.end)
      attend(b, u, chunk, line, queries + tile * 16 * kLine, run);
    sync_threads(kConsumerBarrier, kConsumers);
    if (number + kSlots < chunks) fetch(b, u, layer, chunk_of(b, u, number + kSlots));
    copies_commit();
  }
  copies_wait<0>();
  if (tile < kQueryTiles) leave_part(b, position_warp, tile, run, stats);
  sync_threads(kConsumerBarrier, kConsumers);
  note(b, layer, kAttention, kMultiplied);
  const uint32_t tag = tag_of(b, layer);
  const Written next = written(b, b.p->attended, kQHeads * kHeadDim, kLayers, layer);
  join_warps(b, u, next, stats, parts, tag);
  if (kSplits > 1) join_splits(b, u, next, parts, tag, layer);
}

MEGA_FN void attention(const Block& b, int layer) {
  const Share share = b.s.shares()[kAttention];
  if (share.count == 0) return;
  note(b, layer, kAttention, kBegan);
#pragma unroll 1
  for (int unit = 0; unit < share.count; ++unit) {
    attend_unit(b, layer, share.first + unit);
    sync_threads(kConsumerBarrier, kConsumers);  // what comes next takes the place of this one's parts
  }
  note(b, layer, kAttention, kEnded);
}

}  // namespace mega
