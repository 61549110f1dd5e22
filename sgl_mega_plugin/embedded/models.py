"""The demo pair: SmolLM2-135M-Instruct and the DSpark draft that ships with this package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_mega_plugin.embedded.draft import DraftModel
from sgl_mega_plugin.embedded.layers import place
from sgl_mega_plugin.embedded.target import TargetModel
from sgl_mega_plugin.embedded.tokenizer import DemoTokenizer
from sgl_mega_plugin.embedded.weights import model_file, read_config, read_weights

NAME = "SmolLM2-135M-Instruct"
DRAFT_FOLDER = Path(__file__).with_name("smollm2_dspark")


@dataclass(frozen=True)
class DemoModels:
    """A target, its draft and its tokenizer, on one device."""

    name: str
    target: TargetModel
    draft: DraftModel
    tokenizer: DemoTokenizer


def load_target(taps: tuple[int, ...], file: Path | None = None) -> tuple[TargetModel, DemoTokenizer]:
    """The target in fp32 on the CPU, and its tokenizer."""
    from gguf import GGUFReader

    reader = GGUFReader(str(model_file(file)))
    config = read_config(reader)
    target = TargetModel(config, taps)
    target.load_state_dict(read_weights(reader, config))
    return target, DemoTokenizer(reader)


def load_demo(
    device: str = "cpu", dtype: torch.dtype = torch.float32, *, file: Path | None = None, draft: Path = DRAFT_FOLDER
) -> DemoModels:
    """The demo pair on a device; a missing target file or draft checkpoint raises FileNotFoundError."""
    draft_model = DraftModel.load(draft)
    target, tokenizer = load_target(draft_model.config.target_layer_ids, file)
    for model in (target, draft_model):
        place(model, device, dtype)
        model.requires_grad_(False).eval()
    return DemoModels(NAME, target, draft_model, tokenizer)
