"""The demo model's tokenizer, built from the tables in its GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from sgl_mega_plugin.embedded.weights import field

# SmolLM2's own default; its chat template adds it where a conversation has no system turn.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_CONTROL = 3  # GGUF's token type of special tokens


class DemoTokenizer:
    """Byte-level BPE with SmolLM2's chat format."""

    def __init__(self, reader: Any) -> None:
        model, pre = field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre")
        if (model, pre) != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {model!r} with pre-tokenizer {pre!r} is not ('gpt2', 'smollm')")
        tokens = field(reader, "tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in field(reader, "tokenizer.ggml.merges")]
        self._tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        types = field(reader, "tokenizer.ggml.token_type")
        special = [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL
        ]
        self._tokenizer.add_special_tokens(special)
        self.eos_ids = frozenset({field(reader, "tokenizer.ggml.eos_token_id"), tokens.index("<|endoftext|>")})
        self.vocab_size = len(tokens)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def save(self, file: str) -> None:
        """Write ``tokenizer.json``."""
        self._tokenizer.save(file)

    def chat(self, *turns: str) -> list[int]:
        """Ids of a conversation whose turns alternate from the user's, open for the answer to the last."""
        text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        for index, turn in enumerate(turns):
            text += f"<|im_start|>{'assistant' if index % 2 else 'user'}\n{turn}<|im_end|>\n"
        return self.encode(text + "<|im_start|>assistant\n")
