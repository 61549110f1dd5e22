"""Workloads of the commit stage: an fp8 cache, a staging that is armed again, and their bytes."""

from __future__ import annotations

import pytest
import torch

from sgl_mega_plugin.bench.records import Size
from sgl_mega_plugin.bench.workloads import WORKLOADS, sizes
from sgl_mega_plugin.embedded import stages


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV pool of 0.7 GB takes seconds to fill on a CPU."""
    monkeypatch.setattr(sizes, "KV_SLOTS", 300)
    monkeypatch.setattr(sizes, "ROPE_POSITIONS", 700)


def test_every_call_finds_the_staging_armed() -> None:
    """A call clears its commit lengths, so timed calls would write nothing but for what runs before each."""
    workload = WORKLOADS["staged_kv"]
    arguments = workload.sets(Size(seam="staged_kv", batch=5), "cpu", 1)[0]
    lengths = arguments["out_commit_lens"].clone()
    assert set(lengths.tolist()) <= set(range(1, 9))
    seen = []

    def call() -> None:
        seen.append(arguments["out_commit_lens"].clone())
        stages.staged_kv(**arguments)

    first, again = (workload.ready(arguments, call) for _ in range(2))
    for timed in (first, first, again):
        timed()
        assert arguments["out_commit_lens"].tolist() == [0] * 5
    assert all(torch.equal(found, lengths) for found in seen)


def test_other_calls_have_nothing_before_them() -> None:
    def call() -> None: ...

    assert WORKLOADS["context_kv"].ready({}, call) is call


def test_an_fp8_cache_is_written_in_half_the_bytes() -> None:
    costs = []
    for variant in ("", "fp8"):
        arguments = WORKLOADS["context_kv"].sets(Size(seam="context_kv", variant=variant, batch=3), "cpu", 1)[0]
        arguments["commit_lens"] = torch.tensor([1, 0, 8], dtype=torch.int32)
        costs.append(WORKLOADS["context_kv"].cost(arguments))
    row = 5 * 2 * 8 * 128
    assert [cost.bytes_written for cost in costs] == [9 * row * 2, 9 * row]
    assert costs[1].bytes_read - costs[0].bytes_read == 5 * 2 * 4, "the scales"


def test_bytes_of_a_staging_and_of_a_history() -> None:
    staging = WORKLOADS["kv_staging"].sets(Size(seam="kv_staging", batch=3), "cpu", 1)[0]
    cost = WORKLOADS["kv_staging"].cost(staging)
    assert (cost.bytes_read, cost.bytes_written) == (3 * 8 * 16 + 3 * 4, 64 * 8 * 16 + 64 * 4)
    history = WORKLOADS["history_commit"].sets(Size(seam="history_commit", batch=3), "cpu", 1)[0]
    history["commit_lens"] = torch.tensor([1, 3, 8], dtype=torch.int32)
    cost = WORKLOADS["history_commit"].cost(history)
    # Of three ids: one, three and three are tokens, two, none and none are old ones.
    assert (cost.bytes_read, cost.bytes_written) == (7 * 8 + 2 * 4 + 3 * (8 + 4), 3 * 3 * 4)
