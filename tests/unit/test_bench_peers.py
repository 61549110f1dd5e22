"""Peers of the benchmark that need no SGLang: plain torch, and what FlashInfer and sgl_kernel are handed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.bench import peers
from sgl_mega_plugin.bench.peers import peers_of
from sgl_mega_plugin.bench.records import QUICK, Size
from sgl_mega_plugin.bench.workloads import WORKLOADS
from sgl_mega_plugin.embedded import stages
from sgl_mega_plugin.engine.peers import Peer


def arguments_of(seam: str, variant: str = "") -> dict[str, Any]:
    shows = WORKLOADS[seam].shows_vocab
    size = Size(seam=seam, variant=variant, batch=3, vocab=41 if shows else None, dtype="float32" if shows else None)
    return WORKLOADS[seam].sets(size, "cpu", 1)[0]


def peer_of(seam: str, name: str) -> Peer:
    (peer,) = (peer for peer in peers_of(seam) if peer.name == name)
    return peer


@pytest.mark.parametrize("seam", ["greedy_accept", "step_inputs"])
def test_eager_is_the_embedded_engines_stage(seam: str) -> None:
    arguments = arguments_of(seam)
    expected = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    getattr(stages, seam)(**expected)
    assert peer_of(seam, "eager").prepare(arguments)() is None
    for name, value in arguments.items():
        if name.startswith("out_") and value is not None:
            assert torch.equal(value, expected[name]), name


def test_a_seam_without_a_stage_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer_of("greedy_accept", "eager").missing() is None
    monkeypatch.delattr(stages, "greedy_accept")
    assert peer_of("greedy_accept", "eager").missing() == "the embedded engine has no stage 'greedy_accept'"


@pytest.mark.parametrize(("name", "module"), [("flashinfer", "flashinfer"), ("sgl_kernel", "sgl_kernel")])
def test_a_library_that_is_not_installed_is_a_reason(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda found: None if found == module else object())
    assert "is not installed" in (peer_of("sampled_accept", name).missing() or "")
    other = "sgl_kernel" if name == "flashinfer" else "flashinfer"
    assert peer_of("sampled_accept", other).missing() is None


@pytest.mark.parametrize("variant", ["sampled", "one_hot"])
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer-probs"])
def test_flashinfer_gets_probabilities_of_both(monkeypatch: pytest.MonkeyPatch, name: str, variant: str) -> None:
    seen: list[tuple[Any, ...]] = []
    module = ModuleType("flashinfer.sampling")
    monkeypatch.setattr(module, "chain_speculative_sampling", lambda *a, **k: seen.append(a), raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    arguments = arguments_of("sampled_accept", variant)
    assert peer_of("sampled_accept", name).prepare(arguments)() == {}
    ((draft, ids, target),) = seen
    assert (draft.shape, ids.shape, target.shape) == ((3, 7, 41), (3, 7), (3, 8, 41))
    assert (draft.dtype, ids.dtype, target.dtype) == (torch.float32, torch.int32, torch.float32)
    for probabilities in (draft, target):
        # 41 fp32 probabilities, each rounded once.
        torch.testing.assert_close(
            probabilities.sum(-1), torch.ones(probabilities.shape[:2]), rtol=0, atol=41 * 2.0**-24
        )
    if variant == "one_hot":
        assert (draft.argmax(-1) == ids).all()


def test_the_tree_is_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    module = ModuleType("sgl_kernel")
    monkeypatch.setattr(module, "verify_tree_greedy", lambda *a: seen.append(a), raising=False)
    monkeypatch.setattr(module, "tree_speculative_sampling_target_only", lambda *a: seen.append(a), raising=False)
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)
    greedy, sampled = arguments_of("greedy_accept"), arguments_of("sampled_accept", "sampled")
    found = peer_of("greedy_accept", "sgl_kernel").prepare(greedy)()
    assert peer_of("sampled_accept", "sgl_kernel").prepare(sampled)() == {}
    (_, accept_index, accepted, candidates, index, following, sibling, predicted), sampling = seen
    assert found == {"out_correct_lens": accepted}
    assert candidates is greedy["candidates"]
    assert index.tolist() == [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    assert following.tolist() == [[1, 2, 3, 4, 5, 6, 7, -1]] * 3
    assert sibling.tolist() == [[-1] * 8] * 3
    assert (accept_index.dtype, accept_index.shape) == (torch.int32, (3, 8))
    assert (predicted.view(-1) == greedy["target_logits"].argmax(-1)).all()
    coins, last, target, draft = sampling[7:11]
    assert (coins.shape, last.shape, target.shape) == ((3, 8), (3,), (3, 8, 41))
    assert not draft.any()
    assert sampling[11:] == (1.0, 1.0, True)


def test_quick_names_peers_that_there_are() -> None:
    known = {peer.name for seam in WORKLOADS for peer in peers_of(seam)}
    assert set(QUICK.peers or ()) <= known
