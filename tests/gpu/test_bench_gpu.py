"""The benchmark's timer on a GPU: rates, node counts and times of calls whose cost is known beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible"),
]

if torch.cuda.is_available():
    from sgl_mega_plugin.bench.timer import Timer


@pytest.fixture(scope="module")
def timer() -> Timer:
    return Timer("cuda", repetitions=30, calls=8)


def test_rates_are_plausible(timer: Timer) -> None:
    rates = timer.rates()
    assert 0.1 < rates.read_tb_s < 20, "from a small card to several times an H200"
    assert rates.copy_tb_s < 1.2 * rates.read_tb_s
    assert 0 < rates.empty_launch_us < 10
    # The flush streams too, though from a buffer that is small enough for its ramps to count.
    assert rates.flush_us > 0.8 * rates.flush_bytes / rates.read_tb_s * 1e-6


def test_a_copy_from_cold_memory_takes_the_time_of_its_bytes(timer: Timer) -> None:
    """32 MiB fit the L2 of a large GPU: with a warm one the copy would be faster than the memory's rate."""
    rates = timer.rates()
    sets = [torch.randn(8 << 20, device="cuda") for _ in range(4)]
    target = torch.empty_like(sets[0])
    series = timer.in_graph([lambda source=source: target.copy_(source) for source in sets])  # type: ignore[misc]
    floor = 2 * (32 << 20) / rates.read_tb_s * 1e-6
    median = sorted(series.first)[len(series.first) // 2]
    assert 0.8 * floor < median < 4 * floor


def test_nodes_are_counted(timer: Timer) -> None:
    value = torch.randn(1000, device="cuda")
    other = torch.empty(1000, device="cuda")
    series = timer.in_graph([lambda: (value.add_(1), value.mul_(2), other.copy_(value))])
    assert (series.launches, series.copies) == (2, 1)


def test_a_call_that_waits_is_not_captured(timer: Timer) -> None:
    value = torch.randn(1000, device="cuda")
    assert timer.capturable(lambda: value.add_(1))
    assert not timer.capturable(lambda: value.sum().item())
    assert not timer.capturable(lambda: value.nonzero())
    with pytest.raises(RuntimeError, match="out of luck"):
        timer.capturable(lambda: _fail())


def _fail() -> None:
    raise RuntimeError("out of luck")


def test_two_series_agree(timer: Timer) -> None:
    value = torch.randn(1 << 20, device="cuda")
    series = timer.in_graph([lambda: value.add_(1)])
    first, again = (sorted(samples)[len(samples) // 2] for samples in (series.first, series.again))
    assert abs(first - again) < 2.0, f"{first} and {again} us for the same 4 MiB"


def test_a_call_from_python_includes_the_host(timer: Timer) -> None:
    value = torch.randn(1000, device="cuda")
    call = [lambda: value.sum().item()]
    assert min(timer.called(call).first) > 1.0


def test_a_run_writes_its_folder(tmp_path: Path) -> None:
    from sgl_mega_plugin.bench.files import read
    from sgl_mega_plugin.cli import app

    arguments = ["bench", "step_inputs", "--quick", "--batch", "4", "--peers", "eager", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = read(tmp_path)
    (found,) = report.results
    slot, eager = found.entries
    assert (report.ok, slot.launches, eager.agreement) == (True, 1, 1.0)
    assert slot.timing is not None
    assert 0 < slot.timing.median_us < 50
