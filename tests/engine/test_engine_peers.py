"""SGLang's functions as the benchmark calls them, on the CPU: each computes what the seam's reference does.

A peer with a wrong argument may be fast because it does something else. On the CPU SGLang's own torch twins stand in
for its kernels. The commit stage's peers have tests of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative import cache_locs
from sglang.kernels.ops.speculative.dspark.dspark_accept import AcceptSampling
from torch import Tensor

from sgl_mega_plugin.bench.peers import peers_of
from sgl_mega_plugin.bench.records import Size
from sgl_mega_plugin.bench.workloads import WORKLOADS, sizes
from sgl_mega_plugin.engine import version
from sgl_mega_plugin.engine.peers import PeerUnavailableError, engine_peers
from sgl_mega_plugin.engine.peers import verify_accept as accepts
from sgl_mega_plugin.registry import Registry, load_reference

_REAL_LOCATIONS = cache_locs.assign_extend_cache_locs_uniform_func
_SLOTS = {"greedy_accept": "accept_tail", "draft_block": "markov", "step_inputs": "step_inputs"}


def _arguments(seam: str, variant: str = "") -> dict[str, Any]:
    shows = WORKLOADS[seam].shows_vocab
    size = Size(seam=seam, variant=variant, batch=5, vocab=97 if shows else None, dtype="float32" if shows else None)
    return WORKLOADS[seam].sets(size, "cpu", 1)[0]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@pytest.fixture(autouse=True)
def _small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV pool of 0.7 GB takes seconds to fill on a CPU."""
    monkeypatch.setattr(sizes, "KV_SLOTS", 300)


def _locations(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device,
    positions_out: Tensor | None = None,
    anchor_src: Tensor | None = None,
    anchor_out: Tensor | None = None,
) -> Tensor:
    """What SGLang's window kernel writes; on a CPU it has no code of its own."""
    positions = start_offset[:, None] + torch.arange(draft_token_num)
    assert (batch_size, device) == (len(start_offset), start_offset.device)
    if positions_out is not None:
        positions_out.copy_(positions)
    if anchor_src is not None and anchor_out is not None:
        anchor_out[:, 0] = anchor_src
    return req_to_token[req_pool_indices[:, None], positions].long().flatten()


def test_the_stand_in_takes_what_sglangs_function_takes() -> None:
    ours, theirs = (inspect.signature(call).parameters for call in (_locations, _REAL_LOCATIONS))
    assert ours.keys() <= theirs.keys()


#: A forward of SGLang is a loaded model with its attention backend, not a function of tensors: it is measured
#: on a server.
WITHOUT_PEERS = {"target_forward", "draft_forward"}


def test_every_seam_has_peers_that_do_not_miss_anything_here() -> None:
    for seam in WORKLOADS.keys() - WITHOUT_PEERS:
        found = engine_peers(seam)
        assert found, f"seam {seam!r} is compared with nothing of SGLang's"
        assert [peer.missing() for peer in found] == [None] * len(found)
        names = [peer.name for peer in peers_of(seam)]
        assert len(set(names)) == len(names)
        assert names[:1] == ["eager"]


@pytest.mark.parametrize(
    ("seam", "variant", "name"),
    [
        ("greedy_accept", "", "engine-eager"),
        ("greedy_accept", "", "engine-switches"),
        ("greedy_accept", "argmax", "engine-switches"),
        ("draft_block", "greedy", "engine"),
        ("draft_block", "sampled", "engine"),
        ("step_inputs", "", "engine-eager"),
        ("step_inputs", "", "engine-switches"),
    ],
)
def test_a_peer_computes_what_the_slot_does(
    monkeypatch: pytest.MonkeyPatch, seam: str, variant: str, name: str
) -> None:
    monkeypatch.setattr(cache_locs, "assign_extend_cache_locs_uniform_func", _locations)
    arguments = _arguments(seam, variant)
    (peer,) = (peer for peer in engine_peers(seam) if peer.name == name)
    expected = {key: _copy(value) for key, value in arguments.items()}
    load_reference(Registry.discover().get(_SLOTS[seam]))(**expected)
    with torch.no_grad():
        found = peer.prepare(arguments)()
    assert found, "nothing to compare"
    for key, value in found.items():
        same = value.long() == expected[key].long()
        assert same.all(), f"{key}: {value[~same][:3].tolist()} where {expected[key][~same][:3].tolist()} is expected"


@pytest.mark.parametrize("variant", ["sampled", "one_hot"])
def test_the_eager_sampled_accept_gets_both_probabilities(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """SGLang's rejection kernel has no twin on the CPU, so its call is looked at."""
    seen: list[dict[str, Any]] = []

    def execute(**kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(kwargs)
        return torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)

    monkeypatch.setattr(AcceptSampling, "execute", execute)
    arguments = _arguments("sampled_accept", variant)
    (peer,) = (peer for peer in engine_peers("sampled_accept") if peer.name == "engine-eager")
    assert peer.prepare(arguments)() == {}
    (call,) = seen
    assert call["draft_probs"].shape == (5, 7, 97)
    # Each row of 97 fp32 probabilities, every one rounded once: 97 * 2**-24 of the sum, 1.
    torch.testing.assert_close(call["draft_probs"].sum(-1), torch.ones(5, 7), rtol=0, atol=97 * 2.0**-24)
    if variant == "one_hot":
        assert (call["draft_probs"].argmax(-1) == arguments["candidates"][:, 1:]).all()
    assert (call["gamma"], call["verify_num_draft_tokens"]) == (7, 8)
    assert call["sampling_info"].temperatures.shape == (5, 1)


@pytest.mark.parametrize("variant", ["sampled", "one_hot"])
def test_blockwise_rejection_runs(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Its law is SGLang's own; here only that it takes the workload and accepts some drafts but not all."""
    arguments = _arguments("sampled_accept", variant)
    lengths: list[Tensor] = []

    def seen(arguments: Any, accept: Callable[[], tuple[Tensor, Tensor, Tensor]], **kwargs: Any) -> Any:
        def call() -> dict[str, Tensor]:
            lengths.append(accept()[0])
            return whole() or {}

        whole = finalized(arguments, accept, **kwargs)
        return call

    finalized = accepts._finalized
    monkeypatch.setattr(accepts, "_finalized", seen)
    (peer,) = (peer for peer in engine_peers("sampled_accept") if peer.name == "engine-switches")
    call = peer.prepare(arguments)
    for _ in range(8):
        call()
    accepted = torch.cat(lengths)
    assert accepted.min() >= 0
    assert accepted.max() <= 7
    assert 0 < accepted.float().mean() < 7


@pytest.mark.parametrize(
    ("release", "says"), [(None, "SGLang is not installed"), ("0.5.99", "SGLang 0.5.99 is not supported")]
)
def test_another_sglang_is_a_reason(monkeypatch: pytest.MonkeyPatch, release: str | None, says: str) -> None:
    monkeypatch.setattr(version, "engine_version", lambda: release)
    assert says in (engine_peers("greedy_accept")[0].missing() or "")


def test_what_a_peer_of_the_accepts_does_not_take_is_a_reason() -> None:
    for seam, variant, says in (
        ("greedy_accept", "argmax", "takes logits, not their argmax"),
        ("sampling_cutoffs", "min_p", "leaves min_p out"),
    ):
        (peer,) = (peer for peer in engine_peers(seam) if peer.name == "engine-eager")
        with pytest.raises(PeerUnavailableError, match=says):
            peer.prepare(_arguments(seam, variant))()


@pytest.mark.parametrize("variant", ["top_k_top_p", "top_p"])
def test_the_eager_filter_gets_the_requests_parameters(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Its probabilities are those of the logits that our cutoffs keep: a test of the twins compares them."""
    from sglang.srt.speculative import dflash_utils

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(dflash_utils, "build_speculative_verify_target_probs", lambda **kwargs: seen.append(kwargs))
    arguments = _arguments("sampling_cutoffs", variant)
    (peer,) = (peer for peer in engine_peers("sampling_cutoffs") if peer.name == "engine-eager")
    assert peer.prepare(arguments)() == {}
    (call,) = seen
    info = call["sampling_info"]
    assert (info.need_top_k_sampling, info.need_top_p_sampling) == (variant == "top_k_top_p", True)
    assert (call["draft_token_num"], call["bs"]) == (8, 5)
    assert call["next_token_logits"] is arguments["target_logits"]
    assert (info.top_ps < 1).all()
