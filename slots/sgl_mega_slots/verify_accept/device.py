# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton device functions that the kernels of this stage share: logits, arrival, an accept's outputs."""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import winner_of

LARGEST = tl.constexpr(1e30)  # logits above it count as it: times the largest scale it is still finite
_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST_SCALE = tl.constexpr(1e8)  # of a temperature of 1.4e-8


@triton.jit
def usable(logits):
    """fp32 logits, NaN as -inf, at most LARGEST."""
    return tl.minimum(tl.maximum(logits.to(tl.float32), -float("inf")), LARGEST)  # of NaN and a number the number


@triton.jit
def block_winner(row_ptr, start, V, BLOCK_V: tl.constexpr, GROUP: tl.constexpr):  # noqa: N803
    """Greatest of a row's BLOCK_V logits from ``start`` on, as fp32, and the lowest id that holds it. NaN never wins.

    The maximum of each GROUP, the 16 bytes that a thread reads at once, is found first: which id it was is asked of one
    group, read again, and not of every logit.
    """
    groups = tl.arange(0, BLOCK_V // GROUP)
    each = tl.arange(0, GROUP)
    ids = start + groups[:, None] * GROUP + each[None, :]
    value = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
    best, group = winner_of(tl.max(tl.maximum(value, -float("inf")), axis=1), groups, 0)
    held = start + group * GROUP + each
    again = tl.load(row_ptr + held, mask=held < V, other=-float("inf")).to(tl.float32)
    return best, tl.min(tl.where(again == best, held, 0x7FFFFFFF), axis=0)


@triton.jit
def log2_scale(temperature):
    """``log2(e) / temperature``, finite and positive; of temperature 1 where there is none."""
    scale = tl.div_rn(tl.full((), _LOG2_E, tl.float32), tl.where(temperature > 0, temperature, 1.0))
    return tl.minimum(tl.maximum(scale, 1e-30), _LARGEST_SCALE)


@triton.jit
def finite(top):
    """A row's greatest logit, 0 where the row has none."""
    return tl.where(top > -float("inf"), top, 0.0)


@triton.jit
def last_of(arrived_ptr, programs):
    """Whether this is the last of ``programs`` to arrive: it sees what all of them stored. Leaves the count at 0."""
    tl.debug_barrier()  # the atomic is one thread's: the stores of the others come before it
    before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    last = before == programs - 1
    if last:
        tl.store(arrived_ptr, 0)
    tl.debug_barrier()
    return last


@triton.jit
def simulated_length(simulated_ptr, verify_len):
    """Accepted drafts of a row under simulation."""
    wanted = tl.load(simulated_ptr).to(tl.int64)
    return tl.maximum(tl.minimum(wanted, verify_len - 1), 0).to(tl.int32)


@triton.jit
def write_accept(
    request,
    verify_len,
    correct,
    bonus,
    draft,
    column,
    vocab,
    seq_lens_ptr,
    correct_ptr,
    bonus_ptr,
    commit_ptr,
    new_seq_ptr,
    tokens_ptr,
    tokens_stride,
    T,  # noqa: N803
):
    """Every output of a request whose drafts are ``draft`` [BLOCK_T]; ``correct`` and ``bonus`` are 0 on padding."""
    commit = tl.where(verify_len > 0, correct + 1, 0)
    tl.store(correct_ptr + request, correct)
    tl.store(bonus_ptr + request, bonus)
    tl.store(commit_ptr + request, commit)
    tl.store(new_seq_ptr + request, tl.load(seq_lens_ptr + request) + commit)
    known = tl.where((draft >= 0) & (draft < vocab), draft, 0)
    tokens = tl.where(column < correct, known, tl.where(column == correct, bonus, 0))
    tl.store(tokens_ptr + request * tokens_stride + column, tokens, mask=column < T)
