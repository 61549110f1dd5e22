// Attention of the step's rows over the paged context: a unit is some query heads of one KV head over one part of a
// request's positions. Units of a group meet through memory: the last to finish puts their parts together.
//
// Keys and values of the context do not depend on the step, so their copies start before the queries are there. The
// step's own keys and values are normalised and rotated here, and stored where the engine said.
#pragma once

#include "operations.cuh"

namespace mega {

constexpr int kPositionWarps = kConsumerWarps / 2;  // 16 positions of a chunk each; the two halves take query tiles
constexpr int kPieces = kHeadDim / 8;               // of 16 bytes in a head
constexpr int kPerLane = kHeadDim / 32;             // values of a head that a lane holds: lane, lane + 32 ...

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
  u.prefix = static_cast<int>(b.p->prefix_lengths[u.request]);
  u.length = u.prefix + kTokens;
  const int part = ((u.length + kSplits - 1) / kSplits + 15) / 16 * 16;
  u.first = u.split * part < u.length ? u.split * part : u.length;
  u.end = u.first + part < u.length ? u.first + part : u.length;
  return u;
}

// Where a head of a position lies in the KV cache.
MEGA_FN int64_t cache_offset(int64_t place, int kv_head) { return (place * kKvHeads + kv_head) * kHeadDim; }
MEGA_FN int64_t place_of(const Block& b, const Unit& u, int position) {
  return b.p->token_table[b.p->request_rows[u.request] * b.p->token_table_stride + position];
}

struct Chunk {
  char *keys, *values;  // [head slabs][kChunk][64] bf16
  int first;            // position
};
MEGA_FN Chunk chunk_of(const Block& b, const Unit& u, int number) {
  char* at = b.s.slot(number & 1);
  return {at, at + kChunkBytes, u.first + number * kChunk};
}

// Start the copies of a chunk's earlier positions. Values that no copy or later store fills become zero: they meet
// probabilities of zero.
MEGA_FN void fetch(const Block& b, const Unit& u, int layer, const Chunk& chunk) {
  const uint16_t* keys = b.p->layers[layer].keys;
  const uint16_t* values = b.p->layers[layer].values;
  for (int v = b.warp * 32 + b.lane; v < kChunk * kPieces; v += kConsumers) {
    const int line = v / kPieces, column = v % kPieces * 8;
    const int position = chunk.first + line, to = tile_offset(kChunk, line, column);
    if (position < u.end && position < u.prefix) {
      const int64_t from = cache_offset(place_of(b, u, position), u.kv_head) + column;
      copy_16_bytes(chunk.keys + to, keys + from);
      copy_16_bytes(chunk.values + to, values + from);
    } else if (position >= u.end) {
      for (int word = 0; word < 4; ++word) reinterpret_cast<uint32_t*>(chunk.values + to)[word] = 0;
    }
  }
}

// A head's values, `kPerLane` a lane: scaled to unit rms and by `norm` where it is given, then rotated.
MEGA_FN void norm_and_rotate(const Block& b, float (&x)[kPerLane], const uint16_t* norm, int64_t position) {
  if (kQkNorm) {
    float sum = 0.0f;
    for (int i = 0; i < kPerLane; ++i) sum += x[i] * x[i];
    for (int mask = 16; mask > 0; mask >>= 1) sum += shuffle_xor(sum, mask);
    const float scale = inverse_root(sum * (1.0f / kHeadDim) + b.p->eps);
    for (int i = 0; i < kPerLane; ++i) x[i] *= scale * from_bf16(norm[b.lane + 32 * i]);
  }
  const float* cosines = b.p->rotary + position * kHeadDim;
  const float* sines = cosines + kHeadDim / 2;
  for (int i = 0; i < kPerLane / 2; ++i) {
    const float cosine = cosines[b.lane + 32 * i], sine = sines[b.lane + 32 * i];
    const float low = x[i], high = x[i + kPerLane / 2];
    x[i] = low * cosine - high * sine;
    x[i + kPerLane / 2] = high * cosine + low * sine;
  }
}

MEGA_FN const float* projected(const Block& b, int row, int column) {
  return b.p->qkv + static_cast<int64_t>(row) * Gemm<kQkv>::rows + column;
}

// Queries of the unit as rows (head, token) of a bf16 tile; rows past the last are zero.
MEGA_FN void load_queries(const Block& b, const Unit& u, int layer, char* queries) {
  for (int line = b.warp; line < kUnitRows; line += kConsumerWarps) {
    float x[kPerLane] = {};
    if (line < kUnitHeads * kTokens) {
      const int row = u.request * kTokens + line % kTokens;
      const float* from = projected(b, row, (u.first_head + line / kTokens) * kHeadDim);
      for (int i = 0; i < kPerLane; ++i) x[i] = load_shared_by_sms(from + b.lane + 32 * i);
      norm_and_rotate(b, x, b.p->layers[layer].q_norm, b.p->positions[row]);
    }
    for (int i = 0; i < kPerLane; ++i)
      *reinterpret_cast<uint16_t*>(queries + tile_offset(kUnitRows, line, b.lane + 32 * i)) = to_bf16(x[i]);
  }
}

// The step's own keys and values that lie in a chunk: into it, and into the cache by the KV head's first unit.
MEGA_FN void add_new(const Block& b, const Unit& u, int layer, const Chunk& chunk) {
  const int first = chunk.first > u.prefix ? chunk.first : u.prefix;
  const int end = chunk.first + kChunk < u.end ? chunk.first + kChunk : u.end;
  const bool store = u.first_head % (kQHeads / kKvHeads) == 0;
  for (int position = first + b.warp; position < end; position += kConsumerWarps) {
    const int row = u.request * kTokens + position - u.prefix, line = position - chunk.first;
    const int64_t to = cache_offset(b.p->out_cache_loc[row], u.kv_head);
    const float* from = projected(b, row, (kQHeads + u.kv_head) * kHeadDim);
    float key[kPerLane], value[kPerLane];
    for (int i = 0; i < kPerLane; ++i) {
      key[i] = load_shared_by_sms(from + b.lane + 32 * i);
      value[i] = load_shared_by_sms(from + kKvHeads * kHeadDim + b.lane + 32 * i);
    }
    norm_and_rotate(b, key, b.p->layers[layer].k_norm, b.p->positions[row]);
    for (int i = 0; i < kPerLane; ++i) {
      const int column = b.lane + 32 * i, at = tile_offset(kChunk, line, column);
      const uint16_t k = to_bf16(key[i]), v = to_bf16(value[i]);
      *reinterpret_cast<uint16_t*>(chunk.keys + at) = k;
      *reinterpret_cast<uint16_t*>(chunk.values + at) = v;
      if (store) {
        b.p->layers[layer].keys[to + column] = k;
        b.p->layers[layer].values[to + column] = v;
      }
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
    load_matrices(q, queries + tile_offset(kUnitRows, (quarter & 1) * 8 + low, step * 16 + (quarter >> 1) * 8));
    load_matrices(k, chunk.keys + tile_offset(kChunk, line + (quarter >> 1) * 8 + low, step * 16 + (quarter & 1) * 8));
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

// One value of `parts` softmax parts put together: each part has its maximum, its sum and its unscaled value.
struct Joined {
  float best, total, out;
};
template <typename Stats, typename Out>
MEGA_FN Joined join(int parts, Stats stats, Out out) {
  Joined all = {minus_infinity(), 0.0f, 0.0f};
  for (int part = 0; part < parts; ++part) all.best = fmaxf(all.best, stats(part, 0));
  if (all.best == minus_infinity()) return all;  // nothing was seen: a row without positions
  for (int part = 0; part < parts; ++part) {
    const float weight = exp2_of(stats(part, 0) - all.best);
    all.total += weight * stats(part, 1);
    all.out += weight * out(part);
  }
  return all;
}

MEGA_FN void write_attended(const Block& b, const Unit& u, int line, int column, const Joined& all) {
  const int64_t row = u.request * kTokens + line % kTokens;
  const int head = u.first_head + line / kTokens;
  b.p->attended[row * (kQHeads * kHeadDim) + head * kHeadDim + column] =
      to_bf16(all.total > 0.0f ? all.out / all.total : 0.0f);
}

// The finished rows of a unit group are there: tell the o projection, by the columns they fill.
MEGA_FN void arrive_attended(const Block& b, const Unit& u, int layer) {
  finish_stores(b);
  if (b.warp != 0 || b.lane != 0) return;
  const int first = u.first_head * kHeadDim / kSlab / Gemm<kO>::segment_slabs;
  const int last = ((u.first_head + kUnitHeads) * kHeadDim / kSlab - 1) / Gemm<kO>::segment_slabs;
  for (int segment = first; segment <= last; ++segment)
    add_release(counter_at(b, counter_of(kAttention, layer, segment)), 1);
}

// A call of its own: inlined, its values and the matrices' do not fit the registers together.
MEGA_CALL void attend_unit(const Block& b, int layer, int index) {
  Unit u = unit_of(b, index);
  const int position_warp = b.warp % kPositionWarps, tile = b.warp / kPositionWarps;
  for (int half = 0; half < 2; ++half) {
    const int line = tile * 16 + (b.lane >> 2) + half * 8;
    u.row_token[half] = line < kUnitHeads * kTokens ? line % kTokens : -1;
  }
  char* queries = b.s.sums();
  float* stats = reinterpret_cast<float*>(b.s.sums() + kUnitRows * kHeadDim * 2);
  const int chunks = (u.end - u.first + kChunk - 1) / kChunk;

  fetch(b, u, layer, chunk_of(b, u, 0));
  copies_commit();
  if (b.warp == 0 && b.lane == 0) await_arrivals(b, counter_of(kQkv, layer, u.kv_head), kQkvArrivals, layer);
  sync_threads(kConsumerBarrier, kConsumers);
  load_queries(b, u, layer, queries);

  Running run = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}, {}};
  for (int number = 0; number < chunks; ++number) {
    if (number + 1 < chunks) fetch(b, u, layer, chunk_of(b, u, number + 1));
    copies_commit();
    copies_wait<1>();
    const Chunk chunk = chunk_of(b, u, number);
    add_new(b, u, layer, chunk);
    sync_threads(kConsumerBarrier, kConsumers);
    const int line = position_warp * 16;
    if (tile < kQueryTiles && line < kChunk && chunk.first + line < u.end)
      attend(b, u, chunk, line, queries + tile * 16 * kLine, run);
    sync_threads(kConsumerBarrier, kConsumers);
  }
  copies_wait<0>();
  sync_threads(kConsumerBarrier, kConsumers);
  if (tile < kQueryTiles) leave_part(b, position_warp, tile, run, stats);
  sync_threads(kConsumerBarrier, kConsumers);

  const float* out = reinterpret_cast<const float*>(b.s.slot(0));
  float* parts = b.p->parts + static_cast<int64_t>(u.group) * kSplits * kUnitRows * (kHeadDim + 2);
  constexpr int kValues = kUnitHeads * kTokens * kHeadDim;
  for (int v = b.warp * 32 + b.lane; v < kValues; v += kConsumers) {
    const int line = v / kHeadDim, column = v % kHeadDim;
    const Joined all = join(
        kPositionWarps, [&](int part, int which) { return stats[(part * kUnitRows + line) * 2 + which]; },
        [&](int part) { return out[(part * kUnitRows + line) * kHeadDim + column]; });
    if (kSplits == 1) {
      write_attended(b, u, line, column, all);
      continue;
    }
    float* part = parts + (u.split * kUnitRows + line) * (kHeadDim + 2);
    part[2 + column] = all.out;
    if (column == 0) {
      part[0] = all.best;
      part[1] = all.total;
    }
  }
  if (kSplits > 1) {
    sync_threads(kConsumerBarrier, kConsumers);
    if (b.warp == 0 && b.lane == 0) {
      uint32_t* done = b.p->unit_counters + static_cast<int64_t>(u.group) * kCounterWords;
      const bool last = add_acquire_release(done, 1) == kSplits - 1;
      if (last) store_plain(done, 0);  // for the next layer, which cannot begin before this group is told
      *b.s.last() = last;
    }
    sync_threads(kConsumerBarrier, kConsumers);
    if (*b.s.last() == 0) return;
    for (int v = b.warp * 32 + b.lane; v < kValues; v += kConsumers) {
      const int line = v / kHeadDim, column = v % kHeadDim;
      const float* from = parts + line * (kHeadDim + 2);
      const Joined all = join(
          kSplits,
          [&](int part, int which) { return load_shared_by_sms(from + part * kUnitRows * (kHeadDim + 2) + which); },
          [&](int part) { return load_shared_by_sms(from + part * kUnitRows * (kHeadDim + 2) + 2 + column); });
      write_attended(b, u, line, column, all);
    }
  }
  arrive_attended(b, u, layer);
}

MEGA_FN void attention(const Block& b, Work& work, int layer) {
  const Share share = b.s.shares()[kAttention];
  if (share.count == 0) return;
  for (int i = 0; i < kSlots; ++i) {
    const Place place = input_place(work.load + i);
    await(b, b.s.input_full(place.slot), place.parity, kInputFull, layer, kAttention);
  }
  for (int unit = 0; unit < share.count; ++unit) {
    attend_unit(b, layer, share.first + unit);
    sync_threads(kConsumerBarrier, kConsumers);  // the next unit's chunks take the place of this one's parts
  }
  fence_copies();  // the slots were written by threads, the next writer is a copy
  sync_warp();
  if (b.lane == 0)
    for (int slot = 0; slot < kSlots; ++slot) barrier_arrive(b.s.input_empty(slot));
  work.load += kSlots;
}

}  // namespace mega
