"""The glue stage's references against SGLang's own functions: its kernels in the interpreter, the rest as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.dspark_components.dspark_draft import DraftParams, resolve_draft_params
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_mega_plugin.engine.peers import engine_peers
from sgl_mega_slots.glue.params_once import cases as params_cases
from sgl_mega_slots.glue.params_once.reference import step_params
from sgl_mega_slots.glue.relay import cases as relay_cases
from sgl_mega_slots.glue.relay.reference import relay

_PAGES = {"out_page_table", "out_window_page_table"}
_LISTS = ("out_kv_indices", "out_mask_indptr", "out_qo_indptr")
_WINDOW_LISTS = ("out_window_kv_indptr", "out_window_kv_indices", "out_window_kv_offsets")
_PAGED = {"seq_lens": [1, 300, 47, 16], "query_rows": 8, "columns": 332}
_LISTED = {"seq_lens": [1, 60, 20, 21], "query_rows": 8}

#: Function of ``engine_glue_twins``, its arguments, and the outputs that have to be among those compared.
_CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    f"flash-attention-page-{size}": ("flash_attention", _PAGED | {"page_size": size, "map_slots": 4000}, _PAGES)
    for size in (1, 16)
} | {
    "flashinfer": ("flashinfer", _LISTED | {"window": 0}, {"out_qo_indptr", "out_kv_indptr", "out_kv_indices"}),
    "flashinfer-window": ("flashinfer", _LISTED | {"window": 20}, {"out_window_kv_indptr", "out_window_kv_indices"}),
    "triton": (
        "metadata_peer",
        _LISTED | {"peer": "engine-triton", "kv_rows": 0, "outputs": _LISTS},
        {"out_kv_indptr", *_LISTS},
    ),
    "triton-window": (
        "metadata_peer",
        _LISTED
        | {"peer": "engine-triton", "kv_rows": 0, "window": 20, "map_slots": 700, "outputs": _LISTS + _WINDOW_LISTS},
        {"out_kv_indptr", *_LISTS, *_WINDOW_LISTS},
    ),
    "peer-eager": (
        "metadata_peer",
        _PAGED | {"peer": "engine-eager", "page_size": 16, "outputs": ["out_page_table"]},
        {"out_kv_lens", "out_kv_indptr"},
    ),
    "peer-fused": (
        "metadata_peer",
        _PAGED | {"peer": "engine-fused", "page_size": 1, "outputs": ["out_page_table"]},
        {"out_kv_lens", "out_kv_indptr", "out_page_table"},
    ),
    "verify-window": (
        "verify_window",
        {"batches": [1, 2, 4, 8, 16, 32]},
        {"out_positions", "out_cache_locs", "out_draft_ids"},
    ),
    # Context 64, T 8, 60 committed: SGLang's length is 68 where its page table has 64 columns; ours stops there.
    "context-end": (
        "sglangs_lengths",
        {"seq_lens": [60], "query_rows": 8, "columns": 76, "pages": 64},
        {"[68]", "[64]", "tables equal: True"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def compared() -> dict[str, list[str] | str]:
    """Every case of ``_CASES`` in one process, for SGLang takes some ten seconds to import."""
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    cases = json.dumps({name: (function, given) for name, (function, given, _) in _CASES.items()})
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("engine_glue_twins.py")), cases]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str] | str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", _CASES)
def test_sglangs_kernels_and_the_references_agree(compared: dict[str, list[str] | str], case: str) -> None:
    found = compared[case]
    assert isinstance(found, list), found
    assert _CASES[case][2] <= set(found)


@pytest.mark.parametrize("given", [3, 5], ids=["smaller-batch", "whole-graph"])
def test_params_once_is_sglangs_staging(given: int) -> None:
    """The live rows; SGLang leaves those beyond them as they were."""
    temperatures = [1.0, 0.7, 1e-7, 1.4, 0.2][:given]
    top_ks = [1, params_cases.ALL, 50, 1, 2][:given]
    values = params_cases.arguments("cpu", temperatures=temperatures, top_ks=top_ks, batch=5, column=True)
    theirs = DraftParams(torch.full((5,), 9.0), torch.zeros(5, dtype=torch.bool), torch.full((5,), 9.0))
    info = SimpleNamespace(temperatures=values["temperatures"], top_ks=values["top_ks"])
    resolve_draft_params(sampling_info=info, bs=given, out=theirs)
    step_params(**values)
    assert torch.equal(values["out_temperatures"][:given], theirs.temperatures[:given])
    assert torch.equal(values["out_greedy"][:given], theirs.greedy_mask[:given])
    assert torch.equal(values["out_step_temperatures"][:given], theirs.step_temperatures[:given])
    assert theirs.step_temperatures[given:].tolist() == [9.0] * (5 - given)
    assert values["out_step_temperatures"][given:].tolist() == [0.0] * (5 - given)


def test_params_once_departs_from_sglang_where_a_temperature_is_none() -> None:
    """0, below 0 and NaN: SGLang samples at 1e-5, or at NaN; here the row is greedy."""
    odd = [0.0, -1.0, float("nan")]
    values = params_cases.arguments("cpu", temperatures=odd, top_ks=[params_cases.ALL] * 3, column=True)
    info = SimpleNamespace(temperatures=values["temperatures"], top_ks=values["top_ks"])
    theirs = resolve_draft_params(sampling_info=info, bs=3, device=torch.device("cpu"))
    step_params(**values)
    assert theirs.greedy_mask.tolist() == [False] * 3
    assert theirs.step_temperatures[2].isnan()
    assert values["out_greedy"].tolist() == [True] * 3
    assert values["out_step_temperatures"].tolist() == [0.0] * 3


def _future_map(values: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        _relay=None,
        new_seq_lens_buf=values["out_relay_lens"].clone(),
        output_tokens_buf=values["out_relay_tokens"].clone(),
        needs_confidence_relay=False,
        spec_algo=SpeculativeAlgorithm.NONE,
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_relay_is_sglangs_future_map(dtype: torch.dtype) -> None:
    values = relay_cases.arguments("cpu", pool=[5, 1, 8], lens=[7, 0, 40], index_dtype=dtype)
    tables, rows = _future_map(values), values["req_pool_indices"].long()
    FutureMap.publish(tables, rows, values["new_seq_lens"])
    FutureMap.stash_bonus_tokens(tables, rows, values["bonus_tokens"])
    relay(**values)
    assert torch.equal(values["out_relay_lens"], tables.new_seq_lens_buf)
    assert torch.equal(values["out_relay_tokens"], tables.output_tokens_buf)
    assert torch.equal(values["out_next_seq_lens"].long(), tables.new_seq_lens_buf[rows])
    assert torch.equal(values["out_next_anchors"], tables.output_tokens_buf[rows])


def test_relay_departs_from_sglang_in_padding_rows() -> None:
    """SGLang's padding writes table row 0; here it writes nothing, wherever it points."""
    values = relay_cases.arguments("cpu", pool=[5, 0], lens=[7, 1], verify_lens=[4, 0])
    tables = _future_map(values)
    FutureMap.publish(tables, values["req_pool_indices"], values["new_seq_lens"])
    relay(**values)
    assert tables.new_seq_lens_buf.tolist()[:2] == [1, 1001]
    assert values["out_relay_lens"].tolist()[:2] == [1000, 1001]


@pytest.mark.parametrize(("seam", "slot"), [("relay", relay), ("step_params", step_params)])
def test_other_peers(seam: str, slot: Any) -> None:
    made = {
        "relay": lambda: relay_cases.arguments("cpu", pool=[5, 1], lens=[7, 9]),
        "step_params": lambda: params_cases.arguments("cpu", temperatures=[0.7, 1.0], top_ks=[9, 1], column=True),
    }[seam]
    ours, theirs = made(), made()
    slot(**ours)
    (peer,) = engine_peers(seam)
    found = peer.prepare(theirs)() or {name: value for name, value in theirs.items() if name.startswith("out_")}
    assert set(found) == {name for name in ours if name.startswith("out_")}
    for name, value in found.items():
        assert torch.equal(value, ours[name]), name
