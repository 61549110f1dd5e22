"""Batched generation with the demo target on one GPU: the text that the draft is trained on.

Used by ``train_draft.py`` only. Rows are left-padded so that every row writes its keys at the
same index, and one decode step is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from sgl_mega_plugin.embedded.target import TargetModel

_PREFILL_ROWS = 128  # bounds the attention mask of a prefill to about 100 MB


@dataclass(frozen=True)
class Answer:
    """One sequence: prompt and answer ids, and where the answer starts."""

    ids: list[int]
    start: int
    temperature: float


class Generator:
    """Generates with ``rows`` sequences at once, each up to ``length`` ids long."""

    def __init__(self, target: TargetModel, *, rows: int, length: int, stop_ids: frozenset[int]) -> None:
        config, device = target.config, target.embed_tokens.weight.device
        self.target, self.rows, self.length, self.stop_ids = target, rows, length, stop_ids
        shape = (config.layers, rows, config.kv_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.values = torch.zeros_like(self.keys)
        self.pad = torch.zeros(rows, dtype=torch.int64, device=device)
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(rows, 1, device=device)
        self.columns = torch.arange(length, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def answers(self, prompts: Sequence[tuple[list[int], float]], new_tokens: int) -> Iterator[Answer]:
        """Answer (prompt ids, temperature) pairs; each answer ends with its stop id or at ``new_tokens``."""
        order = sorted(prompts, key=lambda prompt: len(prompt[0]))
        for first in range(0, len(order), self.rows):
            yield from self._batch(order[first : first + self.rows], new_tokens)

    @torch.no_grad()
    def _batch(self, prompts: Sequence[tuple[list[int], float]], new_tokens: int) -> list[Answer]:
        width = max(len(ids) for ids, _ in prompts)
        if width + new_tokens > self.length:
            raise ValueError(f"prompt of {width} ids and {new_tokens} new ones exceed the length {self.length}")
        self._prefill(prompts, width)
        out = [self.ids.clone()]
        for step in range(1, new_tokens):
            self._replay()
            out.append(self.ids.clone())
            if step % 32 == 0 and self._ended(out, len(prompts)):
                break
        columns = torch.stack(out, dim=1).tolist()
        return [
            Answer(ids + self._trim(answer), len(ids), temperature)
            for (ids, temperature), answer in zip(prompts, columns, strict=False)
        ]

    def _ended(self, out: list[Tensor], live: int) -> bool:
        stops = torch.tensor(sorted(self.stop_ids), device=self.ids.device)
        done = torch.isin(torch.stack(out, dim=1)[:live], stops).any(dim=1)
        return bool(done.float().mean() > 0.98)

    def _trim(self, answer: list[int]) -> list[int]:
        for index, token in enumerate(answer):
            if token in self.stop_ids:
                return answer[: index + 1]
        return answer

    def _prefill(self, prompts: Sequence[tuple[list[int], float]], width: int) -> None:
        device, config = self.ids.device, self.target.config
        padded = [*prompts, *[prompts[-1]] * (self.rows - len(prompts))]
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in padded], device=device)
        self.pad.copy_(torch.tensor([width - len(p) for p, _ in padded], device=device))
        self.temperatures.copy_(torch.tensor([[t] for _, t in padded], device=device))
        for first in range(0, self.rows, _PREFILL_ROWS):
            rows = slice(first, min(first + _PREFILL_ROWS, self.rows))
            count = ids[rows].shape[0]
            positions = (self.columns[:width] - self.pad[rows, None]).clamp(min=0)
            causal = self.columns[:width, None] >= self.columns[:width]
            real = (self.columns[:width] >= self.pad[rows, None])[:, None, :]
            mask = (causal & real) | torch.eye(width, dtype=torch.bool, device=device)

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = (x.unflatten(0, (count, width)).transpose(1, 2) for x in (q, k, v))  # noqa: B023
                self.keys[layer, rows, :, :width], self.values[layer, rows, :, :width] = k, v  # noqa: B023
                groups = config.heads // config.kv_heads
                k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])  # noqa: B023
                return out.transpose(1, 2).flatten(0, 1)

            last = torch.arange(count, device=device) * width + width - 1
            logits, _ = self.target(ids[rows].flatten(), positions.flatten(), attend, rows=last)
            self.ids[rows] = self._sample(logits, self.temperatures[rows])
        self.index.fill_(width)

    def _sample(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().log()
        scores = torch.where(temperatures > 0, logits.float() / temperatures.clamp(min=1e-5) + noise, logits.float())
        return scores.argmax(dim=-1)

    def _step(self) -> None:
        config = self.target.config
        groups = config.heads // config.kv_heads
        seen = (self.columns <= self.index) & (self.columns >= self.pad[:, None])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer].index_copy_(2, self.index, k.unsqueeze(2))
            self.values[layer].index_copy_(2, self.index, v.unsqueeze(2))
            grouped = q.unflatten(1, (config.kv_heads, groups))
            mask = seen[:, None, None].expand(-1, config.kv_heads, groups, -1)
            out = F.scaled_dot_product_attention(grouped, self.keys[layer], self.values[layer], attn_mask=mask)
            return out.flatten(1, 2)

        logits, _ = self.target(self.ids, self.index - self.pad, attend)
        self.ids.copy_(self._sample(logits, self.temperatures))
        self.index.add_(1)

    def _replay(self) -> None:
        if self.ids.device.type != "cuda":
            return self._step()
        if self.graph is None:
            saved = [x.clone() for x in (self.ids, self.index)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
            for static, value in zip((self.ids, self.index), saved, strict=True):
                static.copy_(value)
        self.graph.replay()
        return None
