"""Random arguments of each seam: one function a seam, from a :class:`Draw`. Called by ``generate``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import turn_winners
from sgl_mega_plugin.contract import PADDING_SLOT, Requirements

Drawn = tuple[dict[str, Any], frozenset[str]]

_INF, _NAN = float("inf"), float("nan")
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_VOCABS = (1, 2, 3, 7, 31, 64, 97)
_LARGE_VOCABS = (1_000, 4_097)
_FAR = (-1, 0x7FFFFFFF, 1 << 45, -(1 << 40))  # ids and locations that are none
_NOTHING_KEPT: frozenset[str] = frozenset()

#: Seams whose rows draw tokens: their logits, each with the temperatures that say which rows those are.
SAMPLED_LOGITS = {
    "draft_block": {"base_logits": "temperatures"},
    "sampled_accept": {"target_logits": "target_temperatures", "draft_logits": "draft_temperatures"},
}


class Draw:
    """Random choices from one name, and what was chosen, in words."""

    def __init__(self, name: str, *, requires: Requirements, large: bool) -> None:
        self.random = random.Random(name)
        self.numbers = torch.Generator().manual_seed(self.random.getrandbits(62))
        self.facts: dict[str, object] = {}
        self._large = large
        self._most = min(17 if large else 5, requires.max_batch or 17)
        self._dtypes = sorted(requires.dtypes & _FLOATS.keys()) or sorted(_FLOATS)
        self._strided = self.chance(0.5)
        self._gap = self.random.randint(1, 5)  # one for all: an engine's buffers of one kind share their strides
        self.facts["layout"] = f"strided by {self._gap}" if self._strided else "contiguous"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def fact(self, name: str, value: Any) -> Any:
        """Note a choice under its letter or argument, and return it."""
        self.facts[name] = value
        return value

    def size(self, name: str, low: int, high: int) -> int:
        return int(self.fact(name, self.random.randint(low, high)))

    def batch(self) -> int:
        return self.size("B", 1, self._most)

    def vocab(self) -> int:
        return int(self.fact("V", self.random.choice(_VOCABS + (_LARGE_VOCABS if self._large else ()))))

    def dtype(self, name: str) -> torch.dtype:
        return _FLOATS[self.fact(name, self.random.choice(self._dtypes))]

    def index_dtype(self, name: str) -> torch.dtype:
        return torch.int32 if self.fact(name, self.random.choice(["int32", "int64"])) == "int32" else torch.int64

    def ints(self, count: int, low: int, high: int) -> list[int]:
        return [self.random.randint(low, high) for _ in range(count)]

    def lay(self, tensor: Tensor) -> Tensor:
        """The same values, in a strided case with gaps between the rows and a start that is not the memory's."""
        if not self._strided:
            return tensor.clone()
        shape = (*tensor.shape[:-1], tensor.shape[-1] + self._gap)
        view = torch.zeros(shape, dtype=tensor.dtype)[..., 1 : 1 + tensor.shape[-1]]
        view.copy_(tensor)
        return view

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return self.lay(torch.zeros(*shape, dtype=dtype))

    def eighths(self, *shape: int, reach: int) -> Tensor:
        """Multiples of 1/8 in [-reach, reach]: ties are common, and sums are exact in fp32 in any order."""
        return torch.randint(-8 * reach, 8 * reach + 1, shape, generator=self.numbers) / 8

    def logits(self, rows: int, vocab: int, dtype: torch.dtype, reach: int) -> Tensor:
        """[rows, V] eighths; one row in four has entries that are no number, or nothing else."""
        made = self.eighths(rows, vocab, reach=reach).to(dtype)
        odd = []
        for row in range(rows):
            if self.chance(0.25):
                value = self.random.choice([_NAN, -_INF, -_INF, _INF])
                count = vocab if self.chance(0.3) and value != _INF else max(1, vocab // 3)
                made[row, torch.randperm(vocab, generator=self.numbers)[:count]] = value
                odd.append(row)
        self.facts["odd rows"] = odd
        return made

    def temperatures(self, name: str, batch: int) -> Tensor:
        return torch.tensor(self.fact(name, [self.random.choice([0.0, 0.3, 0.7, 1.0, 1.5]) for _ in range(batch)]))


def draft_block(draw: Draw) -> Drawn:
    batch, gamma, vocab, rank = draw.batch(), draw.size("G", 1, 5), draw.vocab(), draw.random.choice([16, 24])
    draw.fact("R", rank)
    base, weights = draw.dtype("logits"), draw.dtype("weights")
    anchors = [draw.random.choice(_FAR) if draw.chance(0.15) else draw.random.randrange(vocab) for _ in range(batch)]
    step_dtype = torch.promote_types(base, weights)
    keep_logits = draw.fact("step logits", draw.chance(0.7))
    return {
        "base_logits": draw.lay(draw.logits(batch * gamma, vocab, base, 4).view(batch, gamma, vocab)),
        "anchor_tokens": draw.lay(torch.tensor(draw.fact("anchors", anchors))),
        "markov_w1": draw.lay(draw.eighths(vocab, rank, reach=1).to(weights)),
        "markov_w2": draw.lay(draw.eighths(vocab, rank, reach=1).to(weights)),
        "temperatures": draw.lay(draw.temperatures("temperatures", batch)),
        "noise_key": draw.random.getrandbits(64),
        "noise_offset": draw.lay(torch.tensor([draw.random.getrandbits(40)])),
        "out_draft_tokens": draw.zeros(batch, gamma),
        "out_step_logits": draw.zeros(batch, gamma, vocab, dtype=step_dtype) if keep_logits else None,
    }, _NOTHING_KEPT


def greedy_accept(draw: Draw) -> Drawn:
    return _accept(draw, draw.batch(), draw.size("T", 2, 6), draw.vocab()), _NOTHING_KEPT


def sampled_accept(draw: Draw) -> Drawn:
    batch, rows, vocab = draw.batch(), draw.size("T", 2, 6), draw.vocab()
    temperatures = draw.temperatures("temperatures", batch)
    q_temperatures = torch.where(temperatures > 0, temperatures, 1.0) if draw.chance(0.7) else torch.ones(batch)
    kept = draw.fact("draft logits", draw.chance(0.6))
    q = draw.logits(batch * (rows - 1), vocab, draw.dtype("q"), 4).view(batch, rows - 1, vocab) if kept else None
    values = _accept(draw, batch, rows, vocab)
    if q is not None:
        law = (torch.nan_to_num(q.float(), -_INF, 50.0, -_INF) / q_temperatures[:, None, None]).softmax(-1)
        drafts = torch.multinomial(law.nan_to_num(1.0).flatten(0, 1), 1, generator=draw.numbers).view(batch, -1)
        drawn = torch.rand(batch, 1, generator=draw.numbers) < 0.8  # other rows keep ids of any kind
        values["candidates"][:, 1:] = torch.where(drawn, drafts, values["candidates"][:, 1:])
    return values | {
        "draft_logits": None if q is None else draw.lay(q),
        "target_temperatures": draw.lay(temperatures),
        "draft_temperatures": draw.lay(q_temperatures),
        "noise_key": draw.random.getrandbits(64),
        "noise_offset": draw.lay(torch.tensor([draw.random.getrandbits(40)])),
    }, _NOTHING_KEPT


def _accept(draw: Draw, batch: int, rows: int, vocab: int) -> dict[str, Any]:
    """What both accepts take: drafts that mostly agree with the row before them."""
    logits = draw.logits(batch * rows, vocab, draw.dtype("logits"), 2)
    if draw.fact("near ties", draw.chance(0.5)):
        turn_winners(logits, torch.rand(len(logits), generator=draw.numbers) < 0.5)
    known = torch.where(logits.isnan(), -_INF, logits.float())
    candidates = torch.zeros(batch, rows, dtype=torch.int64)
    candidates[:, 1:] = known.argmax(-1).view(batch, rows)[:, :-1]
    for request in range(batch):
        if draw.chance(0.6):
            wrong = draw.random.choice([*_FAR, vocab, draw.random.randrange(vocab)])
            candidates[request, draw.random.randrange(1, rows)] = wrong
    seq_dtype = draw.index_dtype("seq_lens")
    lens = draw.fact("verify_lens", draw.ints(batch, 0, rows))
    return {
        "candidates": draw.lay(candidates),
        "target_logits": draw.lay(logits),
        "seq_lens": draw.lay(torch.tensor(draw.ints(batch, 0, 1 << 20), dtype=seq_dtype)),
        "verify_lens": draw.lay(torch.tensor(lens, dtype=torch.int32)),
        "out_correct_lens": draw.zeros(batch, dtype=torch.int32),
        "out_bonus_tokens": draw.zeros(batch),
        "out_commit_lens": draw.zeros(batch, dtype=torch.int32),
        "out_new_seq_lens": draw.zeros(batch, dtype=seq_dtype),
        "out_tokens": draw.zeros(batch, rows),
    }


def step_inputs(draw: Draw) -> Drawn:
    batch, gamma, columns = draw.batch(), draw.size("G", 1, 8), draw.size("C", 1, 40)
    pool_rows = batch + draw.random.randint(0, 3)
    index_dtype, last = draw.index_dtype("lengths"), draw.size("max_positions", 1, 40)
    table = draw.random.sample(range(1, 1 << 20), pool_rows * columns)
    return {
        "req_pool_indices": draw.lay(torch.tensor(draw.ints(batch, -1, pool_rows), dtype=index_dtype)),
        "req_to_token": draw.lay(torch.tensor(table, dtype=torch.int32).view(pool_rows, columns)),
        "seq_lens": draw.lay(torch.tensor(draw.fact("seq_lens", draw.ints(batch, -2, 42)), dtype=index_dtype)),
        "verify_lens": draw.lay(torch.tensor(draw.fact("verify_lens", draw.ints(batch, 0, gamma + 1))).int()),
        "anchor_tokens": draw.lay(torch.tensor(draw.ints(batch, 0, 99))),
        "mask_token": 100,
        "max_positions": last,
        "out_positions": draw.zeros(batch, gamma + 1),
        "out_cache_locs": draw.zeros(batch, gamma + 1),
        "out_draft_ids": draw.zeros(batch, gamma),
    }, _NOTHING_KEPT


def context_kv(draw: Draw) -> Drawn:
    batch, rows, layers = draw.batch(), draw.size("T", 2, 5), draw.size("L", 1, 3)
    heads, size = draw.size("H", 1, 4), draw.fact("D", draw.random.choice([32, 64, 96, 128]))
    slots, table_rows, dtype = batch * rows + 10, 32, draw.dtype("dtype")

    def normal(*shape: int) -> Tensor:
        return draw.lay(torch.randn(*shape, generator=draw.numbers).to(dtype))

    commit_lens = draw.fact("commit_lens", draw.ints(batch, 0, rows))
    projected = normal(batch * rows, layers, 2, heads, size)
    for request, commit in enumerate(commit_lens):
        projected[request * rows + commit : (request + 1) * rows] = _NAN
    # No two rows of a step share a location, but for those that are none.
    locations = draw.random.sample(range(1, slots), batch * rows)
    angles = torch.rand(table_rows, size // 2, generator=draw.numbers) * 6.3
    return {
        "projected_kv": projected,
        "k_norm_weights": normal(layers, size),
        "cos_sin": draw.lay(torch.cat([angles.cos(), angles.sin()], dim=-1)),
        "positions": draw.lay(torch.tensor(_or_none(draw, draw.ints(batch * rows, 0, table_rows - 1))).view(batch, -1)),
        "cache_locs": draw.lay(torch.tensor(_or_none(draw, locations)).view(batch, rows)),
        "commit_lens": draw.lay(torch.tensor(commit_lens, dtype=torch.int32)),
        "eps": draw.random.choice([1e-6, 1e-5]),
        "out_keys": [normal(slots, heads, size) for _ in range(layers)],
        "out_values": [normal(slots, heads, size) for _ in range(layers)],
    }, frozenset({"out_keys", "out_values"})


def _or_none(draw: Draw, values: Sequence[int]) -> list[int]:
    return [draw.random.choice([PADDING_SLOT, *_FAR]) if draw.chance(0.15) else value for value in values]


DRAWS: dict[str, Callable[[Draw], Drawn]] = {
    "draft_block": draft_block,
    "greedy_accept": greedy_accept,
    "sampled_accept": sampled_accept,
    "step_inputs": step_inputs,
    "context_kv": context_kv,
}
