// A decode step's target forward as one persistent kernel: one block an SM, all of them resident.
//
// A block is one warp that streams weights, one that sees to the scales of norms, and eight that multiply. What each SM
// does is the plan's (plan.py), its constants come in plan.cuh; what waits for what is in words.cuh.
#include "attention.cuh"
#include "producers.cuh"

namespace mega {

MEGA_FN void consume(const Block& b) {
  Work work = {{0, 0}, 0, 0};
  note_step(b, 0);
  if (b.s.shares()[kAttention].count == 1) prepare_unit(b, b.s.shares()[kAttention].first);
  embed(b);
#pragma unroll 1
  for (int layer = 0; layer < kLayers; ++layer) {
    qkv(b, work, layer);
    attention(b, layer);
    o(b, work, layer);
    gate_up(b, work, layer);
    down(b, work, layer);
  }
  if (kWithHead)
    head(b, work);
  else
    final_norm(b, work);
  note_step(b, 1);
}

MEGA_FN void prepare(const Shared& s, int sm) {
  if (thread_id() == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(s.full(stage), 1);
      barrier_init(s.empty(stage), kConsumerWarps);
    }
    barrier_init(s.scales_full(), 1);
    barrier_init(s.scales_empty(), kConsumerWarps);
    fence_barriers();
    for (int op = 0; op < kOps; ++op) s.shares()[op] = share_of(op, sm);
  }
  sync_block();
}

// The last block to end a step counts it: until then every block has read the old number.
MEGA_FN void count_step(const Block& b) {
  sync_block();
  if (thread_id() != 0) return;
  if (add_acquire_release(b.p->finished, 1) != kSms - 1) return;
  store_plain(b.p->finished, 0);
  store_plain(b.p->steps, b.step);
}

}  // namespace mega

MEGA_KERNEL MEGA_BOUNDS target_step(MEGA_GRID_CONSTANT const mega::Params params) {
  using namespace mega;
  const int warp = thread_id() / 32;
  const Shared s = {shared_memory()};
  const int sm = block_id();
  prepare(s, sm);
  const Block b = {&params, s, sm, warp - kOtherWarps, thread_id() % 32, (load_acquire(params.steps) + 1) % kStepNumbers};
  if (warp == 0) {
    if (b.lane == 0) stream_weights(b);
  } else if (warp == 1) {
    bring_all_scales(b);
  } else {
    consume(b);
  }
  count_step(b);
}
