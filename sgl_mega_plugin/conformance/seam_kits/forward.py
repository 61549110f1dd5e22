"""Kits of the forwards."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.conformance.seam_kits.draw import NAN, Draw, Drawn
from sgl_mega_plugin.conformance.seam_kits.kit import Arguments, SeamKit
from sgl_mega_plugin.contract import SEAMS

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
_SCALE_BLOCK = 128  # rows and columns that share a scale
_ALIGNMENT = 16  # bytes; of weights and caches, as every allocator of a GPU gives


def target_forward(draw: Draw) -> Drawn:
    """A decoder of one or two layers whose activations stay near one, over contexts in scattered slots."""
    batch, rows, layers = draw.size("B", 1, 3), draw.size("T", 2, 8), draw.size("L", 1, 2)
    size, heads = draw.fact("D", draw.random.choice([64, 64, 128])), draw.size("H", 1, 2)
    kind = draw.fact("weights", draw.random.choice(["bf16", "bf16", "fp8-channel", "fp8-block"]))
    queries = heads * draw.size("A/H", 1, 4)
    if kind != "bf16" and queries * size % _SCALE_BLOCK:
        queries *= 2
    unit = 64 if kind == "bf16" else _SCALE_BLOCK
    hidden, inner = unit * draw.size(f"E/{unit}", 1, 3), unit * draw.size(f"F/{unit}", 1, 3)
    vocab = 8 * draw.size("V/8", 1, 9)
    prefixes = draw.fact("seq_lens", draw.ints(batch, 0, 70))
    columns, table_rows = max(prefixes) + rows, batch + 1
    slots = 2 * table_rows * columns

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw.numbers) * scale).to(_BF16)

    def each(*shape: int, scale: float | None = None) -> list[Tensor]:
        return [normal(*shape, scale=shape[-1] ** -0.5 if scale is None else scale) for _ in range(layers)]

    def matrices(name: str, outputs: int, inputs: int) -> dict[str, list[Tensor] | None]:
        """A weight of each layer, with its scales: they are the weight's deviation, times 0.5 to 1.5."""
        if kind == "bf16":
            return {f"{name}_weights": each(outputs, inputs), f"{name}_scales": None}
        of_layer = (outputs,) if kind == "fp8-channel" else (-(-outputs // _SCALE_BLOCK), inputs // _SCALE_BLOCK)
        values = [torch.randn(outputs, inputs, generator=draw.numbers).mul(8).to(_FP8) for _ in range(layers)]
        scales = [0.5 + torch.rand(of_layer, generator=draw.numbers) for _ in range(layers)]
        return {f"{name}_weights": values, f"{name}_scales": [scale * inputs**-0.5 / 8 for scale in scales]}

    def norms(width: int) -> list[Tensor]:
        return [1 + weight for weight in each(width, scale=0.2)]

    table = torch.tensor(draw.random.sample(range(1, slots), table_rows * columns)).view(table_rows, columns)
    owners = torch.tensor(draw.random.sample(range(table_rows), batch))
    positions = torch.tensor([prefix + row for prefix in prefixes for row in range(rows)])
    cache_locs = table[owners.repeat_interleave(rows), positions]
    cache_locs[
        torch.rand(batch * rows, generator=draw.numbers) < draw.fact("padding", draw.random.choice([0, 0, 0.3]))
    ] = 0
    read = torch.cat([table[owner, :prefix] for owner, prefix in zip(owners, prefixes, strict=True)])

    def caches() -> list[Tensor]:
        made = [torch.full((slots, heads, size), NAN, dtype=_BF16) for _ in range(layers)]
        for cache in made:
            cache[read] = normal(len(read), heads, size)
        return made

    angles = torch.rand(columns, size // 2, generator=draw.numbers) * 6.3
    biased, normed = draw.fact("bias", draw.chance(0.4)), draw.fact("qk norm", draw.chance(0.6))
    taps = draw.fact("taps", sorted(draw.random.sample(range(layers + 1), draw.random.randint(0, layers))))
    logits = draw.fact("logits", draw.chance(0.6))
    outputs = (queries + 2 * heads) * size
    return {
        "input_ids": torch.tensor(draw.ints(batch * rows, 0, vocab - 1)),
        "positions": positions,
        "cache_locs": cache_locs,
        "seq_lens": torch.tensor(prefixes),
        "req_pool_indices": owners,
        "req_to_token": draw.lay(table.int()),
        "embedding": normal(vocab, hidden),
        "input_norms": norms(hidden),
        **matrices("qkv", outputs, hidden),
        "qkv_biases": each(outputs, scale=0.1) if biased else None,
        "q_norms": norms(size) if normed else None,
        "k_norms": norms(size) if normed else None,
        **matrices("output", hidden, queries * size),
        "mlp_norms": norms(hidden),
        **matrices("gate_up", 2 * inner, hidden),
        **matrices("down", hidden, inner),
        "final_norm": norms(hidden)[0],
        "lm_head_weight": normal(vocab, hidden, scale=hidden**-0.5),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "eps": draw.random.choice([1e-6, 1e-5]),
        "taps": taps,
        "out_keys": caches(),
        "out_values": caches(),
        "out_tapped": torch.zeros(batch * rows, len(taps) * hidden, dtype=_BF16) if taps else None,
        "out_hidden": None if logits else torch.zeros(batch * rows, hidden, dtype=_BF16),
        "out_logits": torch.zeros(batch * rows, vocab, dtype=_BF16) if logits else None,
    }, frozenset({"out_keys", "out_values"})


def draft_forward(draw: Draw) -> Drawn:
    """A step of the target's kind, of which a draft wants the last hidden states alone."""
    made, kept = target_forward(draw)
    made |= {"out_hidden": torch.zeros(len(made["input_ids"]), made["embedding"].shape[1], dtype=_BF16)}
    return {name: made[name] for name in SEAMS["draft_forward"].parameters}, kept


def _sizes(arguments: Arguments) -> tuple[int, int, int]:
    batch = arguments["seq_lens"].numel()
    return batch, arguments["input_ids"].numel() // batch - 1, arguments["embedding"].shape[0]


def _block_sizes(arguments: Arguments) -> tuple[int, int, int]:
    """A row a token that is drafted."""
    batch, others, vocab = _sizes(arguments)
    return batch, others + 1, vocab


KITS = (
    SeamKit("target_forward", target_forward, _sizes, alignment=_ALIGNMENT),
    SeamKit("draft_forward", draft_forward, _block_sizes, alignment=_ALIGNMENT),
)
