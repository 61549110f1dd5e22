"""Small random models, and plans of the built-in slots, for the tests of the embedded engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_mega_plugin.contract import Backend, Host, Plan, Provided
from sgl_mega_plugin.embedded import UNCALLED
from sgl_mega_plugin.embedded.draft import DraftConfig, DraftModel
from sgl_mega_plugin.embedded.target import TargetConfig, TargetModel
from sgl_mega_plugin.plan import make_plan
from sgl_mega_plugin.registry import Registry
from sgl_mega_slots import SLOTS

EOS = 1
PROVIDED = [Provided(slot=slot, distribution="sgl-mega-plugin", version="0") for slot in SLOTS]

torch.set_num_threads(1)  # a second thread only costs at these sizes


class LetterTokenizer:
    """Token i is one letter: 'a' + i. Decoding is cheap, and stop strings cross tokens."""

    eos_ids = frozenset({EOS})

    def chat(self, *turns: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in "".join(turns)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


@dataclass(frozen=True)
class TinyModels:
    name: str
    target: TargetModel
    draft: DraftModel
    tokenizer: LetterTokenizer


def tiny_models(seed: int = 0, *, vocab_size: int = 24, max_positions: int = 64, gamma: int = 7) -> TinyModels:
    """A target of 2 layers and a draft of 1, whose weights are random: nearly every draft is refused."""
    torch.manual_seed(seed)
    shape = {"hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 24, "rms_eps": 1e-5}
    rest = {"vocab_size": vocab_size, "rope_theta": 10_000.0, "max_positions": max_positions}
    target = TargetModel(TargetConfig(**shape, **rest, layers=2), (0, 1))
    draft = DraftModel(
        DraftConfig(
            **shape, **rest, layers=2, gamma=gamma, mask_token=vocab_size - 1, markov_rank=4,
            target_layers=2, target_layer_ids=(0, 1),
        )
    )  # fmt: skip
    for model in (target, draft):
        model.requires_grad_(False).eval()
        for name, weight in model.named_parameters():
            if name.endswith("proj.weight") and "layers" in name:
                weight.mul_(4)  # layers outweigh the tied embedding, or outputs would repeat their input
    return TinyModels("tiny", target, draft, LetterTokenizer())


def slots_plan(
    names: str = "default", *, backend: Backend = Backend.REFERENCE, runtime: Any = "embedded", isa: str = "cpu"
) -> Plan:
    """A plan of the built-in slots that needs no installed distribution."""
    return make_plan(
        registry=Registry.of(PROVIDED),
        environ={"SGLANG_NVIDIA_MEGAKERNEL_SLOTS": names},
        host=Host(runtime=runtime, isa=isa, backend=backend, closed_seams=UNCALLED),
    )
