"""Which SM does what in a step, in which order, and what it waits for. Made once on the host; no torch here.

A step is a list of operations: the embedding, five operations a layer and the last norm or the LM head. Each SM has
a share of each: consecutive groups of eight weight rows, or attention units. Weights do not
depend on the step, so every SM streams its own in this order through a ring in shared memory and never waits for
another. Activations do depend on it: they are handed over in words that say themselves whether they are there
(``csrc/words.cuh``), so an operation waits for the values that it reads and the plan lists no dependencies.

The kernel (``csrc``) is compiled for a plan. :mod:`interpret` runs the same plan in torch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

from sgl_mega_slots.target.target_step.shape import GROUP, MAX_ROWS, SLAB, DenseShape, WeightKind

#: Shared memory of a block on sm_90, sm_100 and sm_103, and on sm_120.
SHARED_BYTES, SMALL_SHARED_BYTES = 227 * 1024, 99 * 1024
CONSUMER_WARPS = 8
#: Weight groups whose sums a warp keeps in registers.
BLOCK_GROUPS = 4
#: Slabs of one stage of the weight ring, best and most: pieces below 16 KB do not reach the memory's rate.
STAGE_SLABS, MOST_STAGE_SLABS = 16, 24
#: Most query rows of an attention unit: two tensor-core tiles.
UNIT_ROWS = 32
#: Positions that attention works on at once: what a tensor-core tile holds.
BLOCK_POSITIONS = 16
#: Times that a traced step notes of an operation.
MARK_TIMES = 4
#: Bytes of a lane's vector of the input of a matrix: eight bf16 values.
VECTOR_BYTES = 16
#: Bytes of weights under way to an SM: what the memory's rate needs. More would only make all other loads wait longer.
UNDER_WAY_BYTES = 48 * 1024
#: The same where a layer is small: there what SMs hand each other counts for more than the memory's rate.
SMALL_UNDER_WAY_BYTES, LARGE_LAYER_BYTES = 32 * 1024, 150_000_000


class Op(enum.IntEnum):
    """Operations of a layer in their order, then the step's last ones."""

    QKV = 0
    O = 1  # noqa: E741 - the projection's name in every model
    GATE_UP = 2
    DOWN = 3
    HEAD = 4
    ATTENTION = 5
    EMBED = 6
    FINAL = 7


#: The operations of one layer.
LAYER = (Op.QKV, Op.ATTENTION, Op.O, Op.GATE_UP, Op.DOWN)


@dataclass(frozen=True)
class Gemm:
    """One weight matrix applied to the step's rows: ``[rows, slabs * 64]`` bf16, or ``[rows, slabs * 128]`` fp8."""

    op: Op
    rows: int
    slabs: int
    stage_slabs: int
    segment_slabs: int
    pair: bool = False  # rows r and r + rows / 2 belong together: gate and up
    weights: WeightKind = WeightKind.BF16

    @property
    def segments(self) -> int:
        return -(-self.slabs // self.segment_slabs)

    @property
    def shares(self) -> int:
        """What is dealt out to SMs: groups of rows, or pairs of them."""
        return self.rows // GROUP // (2 if self.pair else 1)

    @property
    def scaled(self) -> bool:
        """Whether its input is normalised."""
        return self.op in (Op.QKV, Op.GATE_UP, Op.HEAD)


@dataclass(frozen=True)
class Share:
    """Units ``first .. first + count - 1`` of an operation."""

    first: int
    count: int


@dataclass(frozen=True)
class Unit:
    """A piece of a layer's attention: some query heads of one KV head over one part of a request's context."""

    request: int
    kv_head: int
    first_head: int
    split: int
    group: int  # units with the same group cover the same rows and heads


@dataclass(frozen=True)
class StepPlan:
    """A step of ``requests`` times ``tokens`` rows on ``sms`` SMs.

    Raises:
        ValueError: the shape or the number of rows is not covered, with every reason.
    """

    shape: DenseShape
    requests: int
    tokens: int
    sms: int
    taps: tuple[int, ...] = ()  # residual streams before these layers are kept; ``layers`` is the last one's output
    head: bool = True  # the LM head is part of the step
    causal: bool = True  # a row sees the rows of its request up to itself; else all of them, as in a draft's block
    shared_bytes: int = SHARED_BYTES
    trace: bool = False  # the kernel notes when each SM began and ended what; see trace.py

    def __post_init__(self) -> None:
        if reasons := self.reasons():
            raise ValueError(f"{self.name} does not cover this step: " + "; ".join(reasons))

    def reasons(self) -> list[str]:
        """Why this step is not covered; empty when it is."""
        reasons = self.shape.reasons()
        if not 1 <= self.rows <= MAX_ROWS:
            reasons.append(f"{self.rows} rows are not 1 to {MAX_ROWS}")
        if self.tokens > self.most_unit_rows:
            reasons.append(f"{self.tokens} tokens a request are more than {self.most_unit_rows}")
        if not reasons and self.stages < 2:
            reasons.append(f"{self.shared_bytes} bytes of shared memory leave no room for two stages of weights")
        reasons += [
            f"tap {tap} is not 0 to {self.shape.layers}" for tap in self.taps if not 0 <= tap <= self.shape.layers
        ]
        return reasons

    @property
    def name(self) -> str:
        """The slot that has such plans, for messages."""
        return "target_step" if self.causal else "draft_step"

    @property
    def rows(self) -> int:
        return self.requests * self.tokens

    @property
    def padded_rows(self) -> int:
        """Rows of the activation buffers: what the tensor cores take at once."""
        return next(size for size in (8, 16, MAX_ROWS) if self.rows <= size) if self.rows <= MAX_ROWS else self.rows

    @property
    def slot_bytes(self) -> int:
        """Bytes of one of the two slots in which attention keeps keys and values of the context."""
        return (16 if self.small else 32) * 1024

    @property
    def input_vectors(self) -> int:
        """Vectors of the input of a matrix that a lane keeps in the two slots."""
        return 2 * self.slot_bytes // (CONSUMER_WARPS * 32 * VECTOR_BYTES)

    @property
    def small(self) -> bool:
        """Whether a block has the shared memory of sm_120."""
        return self.shared_bytes < SHARED_BYTES

    @property
    def most_unit_rows(self) -> int:
        """Query rows of an attention unit: each team's result of them lies in its part of the two slots."""
        return UNIT_ROWS // 2 if self.small else UNIT_ROWS

    @property
    def block_bytes(self) -> int:
        """Keys and values of the positions that attention works on at once."""
        return BLOCK_POSITIONS * 2 * self.shape.head_dim * (1 if self.shape.kv_fp8 else 2)

    @property
    def teams(self) -> int:
        """Teams of an attention unit, a warp for each query tile, that have memory for a block of positions, and for
        the result that takes its place.
        """
        result = self.unit_rows * self.shape.head_dim * 4
        return min(CONSUMER_WARPS // (self.unit_rows // 16), 2 * self.slot_bytes // max(self.block_bytes, result))

    @property
    def team_blocks(self) -> int:
        """Blocks of positions that a team's memory holds."""
        return 2 * self.slot_bytes // self.teams // self.block_bytes

    def _gemm(self, op: Op, rows: int, columns: int, *, pair: bool = False) -> Gemm:
        kind = WeightKind.BF16 if op is Op.HEAD else self.shape.weights
        slabs = columns // kind.slab
        vectors = max(1, self.padded_rows // 8) * (kind.slab // SLAB)  # of a lane, for half a slab
        stage = _stage_slabs(slabs, min(CONSUMER_WARPS * self.input_vectors // (2 * vectors), MOST_STAGE_SLABS))
        halves = -(-2 * stage // CONSUMER_WARPS)  # of a warp in a stage
        segment = self.input_vectors // (halves * vectors)
        if slabs > segment * stage:  # in halves, where one holds a stage: a segment comes while another is multiplied
            segment = max(1, segment // 2)
        return Gemm(op, rows, slabs, stage, min(segment * stage, slabs), pair, kind)

    @cached_property
    def gemms(self) -> dict[Op, Gemm]:
        shape = self.shape
        found = [
            self._gemm(Op.QKV, shape.qkv_size, shape.hidden),
            self._gemm(Op.O, shape.hidden, shape.q_size),
            self._gemm(Op.GATE_UP, 2 * shape.intermediate, shape.hidden, pair=True),
            self._gemm(Op.DOWN, shape.hidden, shape.intermediate),
            self._gemm(Op.HEAD, shape.vocab, shape.hidden),
        ]
        return {gemm.op: gemm for gemm in found}

    # --- attention

    @property
    def unit_heads(self) -> int:
        """Query heads of a unit: the most that share the KV head evenly and fit the tiles."""
        group = self.shape.q_heads // self.shape.kv_heads
        return max(
            heads for heads in range(1, group + 1) if group % heads == 0 and heads * self.tokens <= self.most_unit_rows
        )

    @property
    def unit_rows(self) -> int:
        """Query rows of a unit, whole tensor-core tiles."""
        return -(-self.unit_heads * self.tokens // 16) * 16

    @property
    def unit_groups(self) -> int:
        """Units of a layer before its contexts are split."""
        return self.requests * self.shape.q_heads // self.unit_heads

    @property
    def splits(self) -> int:
        """Parts of a context, so that about every SM has one."""
        return max(1, min(32, self.sms // self.unit_groups))

    def unit(self, index: int) -> Unit:
        group, split = divmod(index, self.splits)
        per_request = self.shape.q_heads // self.unit_heads
        request, block = divmod(group, per_request)
        first_head = block * self.unit_heads
        per_kv = self.shape.q_heads // self.shape.kv_heads
        return Unit(request=request, kv_head=first_head // per_kv, first_head=first_head, split=split, group=group)

    # --- who does what

    def units_of(self, op: Op) -> int:
        """How many units are dealt out to SMs in an operation."""
        if op is Op.ATTENTION:
            return self.unit_groups * self.splits
        if op in (Op.EMBED, Op.FINAL):
            return self.gemms[Op.DOWN].shares  # who keeps a column's residual does whatever is done to it
        return self.gemms[op].shares

    def share(self, op: Op, sm: int) -> Share:
        units = self.units_of(op)
        first, end = sm * units // self.sms, (sm + 1) * units // self.sms
        return Share(first, end - first)

    @property
    def residual_groups(self) -> int:
        """Most groups of residual columns that an SM keeps."""
        return max(self.share(Op.DOWN, sm).count for sm in range(self.sms))

    @property
    def marks(self) -> int:
        """What a traced step notes a line of times for: the step itself, each layer's operations, the LM head."""
        return 1 + self.shape.layers * len(LAYER) + 1

    # --- shared memory

    @property
    def sum_places(self) -> int:
        """Places for a block's sums: with two, nobody waits for those that still read the last block's."""
        return 2 if self.padded_rows <= (8 if self.small else 16) else 1

    @property
    def reduction_bytes(self) -> int:
        """Sums of the eight warps, and in attention the queries with each row's maximum and sum."""
        sums = self.sum_places * CONSUMER_WARPS * BLOCK_GROUPS * self.padded_rows * GROUP * 4
        attention = self.unit_rows * (self.shape.head_dim * 2 + self.teams * 8)
        return _aligned(max(sums, attention))

    @property
    def barrier_bytes(self) -> int:
        """Barriers and this SM's shares."""
        return 512

    @property
    def small_bytes(self) -> int:
        """Barriers, residual columns with their squares, each row's scale, and what attention needs of the inputs."""
        residual = self.residual_groups * self.padded_rows * (GROUP + 1) * 4
        table = 4 * (1 + 2 * self.tokens + self.teams * self.team_blocks * BLOCK_POSITIONS)
        return _aligned(self.barrier_bytes + residual + self.padded_rows * 4 + table)

    @property
    def stage_bytes(self) -> int:
        return max(gemm.stage_slabs for gemm in self.gemms.values()) * GROUP * SLAB * 2

    @property
    def stages(self) -> int:
        left = self.shared_bytes - 2 * self.slot_bytes - self.reduction_bytes - self.small_bytes
        return min(16, left // self.stage_bytes)

    @property
    def under_way(self) -> int:
        """Stages of weights that may be under way to an SM at once. The bounds were tuned for bf16 weights, not fp8."""
        layer = self.shape.weight_bytes(head=False) // self.shape.layers
        most = UNDER_WAY_BYTES if layer >= LARGE_LAYER_BYTES else SMALL_UNDER_WAY_BYTES
        return max(2, min(self.stages, most // self.stage_bytes))

    @property
    def groups_together(self) -> bool:
        """Whether weights come group by group for the same values of the input, so that these are read once for all
        groups of a block. With eight rows that saves less than memory loses: a group's rows lie one behind the other.
        Tuned for bf16 weights, not fp8.
        """
        return self.padded_rows > 8

    @property
    def dynamic_shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + 2 * self.slot_bytes + self.reduction_bytes + self.small_bytes


def _stage_slabs(slabs: int, most: int) -> int:
    """Slabs of a stage: a divisor near the best size where there is one, so that no stage is part empty."""
    if divisors := [size for size in range(STAGE_SLABS // 2, most + 1) if slabs % size == 0]:
        return min(divisors, key=lambda size: abs(size - STAGE_SLABS))
    return min(slabs, most, STAGE_SLABS)


def _aligned(size: int) -> int:
    return -(-size // 1024) * 1024
