"""The commit stage's kernels in the interpreter, where cases from call to call and single numbers count."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.commit.context_kv import cases as context_cases
from sgl_mega_slots.commit.context_kv.kernel import mean_of, reciprocal_root
from sgl_mega_slots.commit.deferred_kv.cases import staged
from sgl_mega_slots.commit.deferred_kv.launch import DeferredKv
from sgl_mega_slots.common.fp8 import round_to_fp8

_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@triton.jit
def _round(source_ptr, target_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    index = tl.arange(0, SIZE)
    tl.store(target_ptr + index, round_to_fp8(tl.load(source_ptr + index), target_ptr.dtype.element_ty))


@triton.jit
def _root(source_ptr, target_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    index = tl.arange(0, SIZE)
    tl.store(target_ptr + index, reciprocal_root(tl.load(source_ptr + index)))


@triton.jit
def _mean(source_ptr, target_ptr, SIZE: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    index = tl.arange(0, SIZE)
    tl.store(target_ptr + index, mean_of(tl.load(source_ptr + index), COUNT))


def _every_step(dtype: torch.dtype) -> Tensor:
    """Every finite number of an fp8 type, the midpoints between neighbours, and what lies beside each in fp32."""
    held = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    held = held[held.isfinite()].unique()
    odd = torch.cat([held, (held[1:] + held[:-1]) / 2, torch.tensor([464.0, 480.0, 61440.0, 65536.0, 3e38, 1e-45])])
    odd = torch.cat([odd, odd.nextafter(torch.tensor(math.inf)), odd.nextafter(torch.tensor(-math.inf))])
    odd = torch.cat([odd, -odd, torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])])
    return torch.cat([odd, torch.zeros(4096 - len(odd))])


@pytest.mark.parametrize("name", list(_FP8))
def test_fp8_is_rounded_as_torch_does(name: str) -> None:
    """e4m3 as torch does behind a clamp to its range; NaN is compared as NaN, its sign aside."""
    dtype = _FP8[name]
    source = _every_step(dtype)
    found = torch.zeros(len(source)).to(dtype)
    _round[(1,)](source, found, len(source))
    expected = (source.clamp(-448.0, 448.0) if name == "e4m3" else source).to(dtype)
    wrong = (found.view(torch.uint8) != expected.view(torch.uint8)) & ~source.isnan()
    assert not wrong.any(), [(source[i].item(), found[i].item(), expected[i].item()) for i in wrong.nonzero()[:3, 0]]
    assert found[source.isnan()].float().isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of infinity's Newton steps, which are dropped
def test_the_root_is_that_of_the_reference() -> None:
    draw = torch.Generator().manual_seed(5)
    source = torch.exp(torch.rand(1 << 16, generator=draw) * 150 - 68)
    source[:4] = torch.tensor([1e-30, 3.4e38, math.inf, 1.0])
    found = torch.zeros_like(source)
    _root[(1,)](source, found, len(source))
    expected = (1.0 / torch.sqrt(source.double())).float()
    assert torch.equal(found, expected), (source[found != expected][:3], found[found != expected][:3])


@pytest.mark.parametrize("count", [2, 96, 128])
def test_the_mean_is_that_of_the_reference(count: int) -> None:
    source = torch.rand(1024, dtype=torch.float64, generator=torch.Generator().manual_seed(count)) * 1e3
    found = torch.zeros(1024)
    _mean[(1,)](source, found, len(source), count)
    assert torch.equal(found, (source / count).float())


def test_a_replay_without_a_new_staging_writes_nothing() -> None:
    """Three calls of one instance: the first writes, the second finds a disarmed staging, the third a new one."""
    setup = SlotSetup(backend=Backend.INTERPRETER, device="cpu", max_batch=3, gamma=2, vocab_size=1)
    slot = DeferredKv(setup)
    values = staged(context_cases.arguments("cpu", locations=[[10, 11, 12], [20, 21, 22]], commit_lens=[2, 1]))
    lengths, values_of = values["out_commit_lens"], values["out_values"][0]
    before = values_of.clone()
    slot(**values)
    assert lengths.tolist() == [0, 0]
    assert (values_of != before).flatten(1).any(1).nonzero().flatten().tolist() == [10, 11, 20]
    sentinel = values_of[10].clone().fill_(7.0)
    values_of[10] = sentinel
    slot(**values)
    assert torch.equal(values_of[10], sentinel)
    lengths.copy_(torch.tensor([0, 3]))
    slot(**values)
    assert lengths.tolist() == [0, 0]
    assert (values_of != before).flatten(1).any(1).nonzero().flatten().tolist() == [10, 11, 20, 21, 22]
    assert torch.equal(values_of[10], sentinel)
    assert slot._arrivals.tolist() == [0, 0, 0]
