"""`sampling_cutoffs`' kernels: each way to a cutoff gives the same one, and a row does not depend on its neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.verify_accept.sampling_cutoffs.cases import arguments, eighths, settled
from sgl_mega_slots.verify_accept.sampling_cutoffs.launch import SamplingCutoffs, SamplingCutoffsLaunch
from sgl_mega_slots.verify_accept.sampling_cutoffs.reference import sampling_cutoffs

_SMALL = {"block_g": 4, "block_h": 2, "block_j": 4, "steps": 4, "warps_g": 1, "warps_f": 1, "block_x": 64}
_WAYS = {
    "pairs": {"listed": 128, "pairs": 128},
    "list": {"listed": 128, "pairs": 2},
    "row": {"listed": 2, "pairs": 2},
    "no bound": {"listed": 128, "pairs": 128, "steps": 1},
    "larger groups": {"listed": 32, "pairs": 16, "size": 32},
}


def _values() -> dict[str, Any]:
    """A request for each kind of filter, and one for all of them."""
    logits = eighths(10, 90, 5, spread=1.5)
    return settled(
        arguments(logits, [1.0, 0.8, 0.7, 1.2, 1.0], [12, 0, 0, 30, 80], [1.0, 0.8, 1.0, 0.7, 0.9],
                  [0.0, 0.0, 0.1, 0.05, 0.0])
    )  # fmt: skip


@pytest.mark.parametrize("way", _WAYS)
def test_every_way_gives_the_same(way: str) -> None:
    values = _values()
    expected = {name: value.clone() for name, value in values.items()}
    sampling_cutoffs(**expected)
    slot = SamplingCutoffs(SlotSetup(backend=Backend.INTERPRETER, device="cpu", max_batch=5, gamma=1, vocab_size=90))
    options: dict[str, Any] = {"size": 8} | _SMALL | _WAYS[way]
    slot.use(SamplingCutoffsLaunch.of(options.pop("size"), vocab=90, **options))
    slot(**values)
    assert values["out_cutoffs"].tolist() == expected["out_cutoffs"].tolist()
    assert torch.isfinite(values["out_cutoffs"]).all()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    values = _values()
    setup = {"backend": Backend.INTERPRETER, "device": "cpu", "gamma": 1, "vocab_size": 90}
    SamplingCutoffs(SlotSetup(max_batch=5, **setup))(**values)
    few = {name: value[: 2 * (2 if len(value) == 10 else 1)].clone() for name, value in values.items()}
    few["out_cutoffs"].fill_(float("nan"))
    SamplingCutoffs(SlotSetup(max_batch=9, **setup))(**few)
    assert few["out_cutoffs"].tolist() == values["out_cutoffs"][:4].tolist()
