"""SGLang's glue kernels beside our references, in a process in which Triton interprets: a script of the tests' own.

``python engine_glue_twins.py CASES`` with JSON ``{id: [function, arguments]}`` prints ``{id: names}``, the outputs that
are equal, or ``{id: text}`` where one is not. The interpreter acts on the whole process from the import of Triton on.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton
from sglang.kernels.ops.attention.metadata import normal_decode_set_metadata
from sglang.kernels.ops.speculative import cache_locs
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import copy_of
from sgl_mega_plugin.engine.peers import engine_peers
from sgl_mega_slots.glue.attn_metadata.cases import OPTIONAL, PAGES, arguments
from sgl_mega_slots.glue.attn_metadata.reference import attention_metadata
from sgl_mega_slots.glue.step_inputs import cases as step_cases
from sgl_mega_slots.glue.step_inputs.reference import step_inputs

Compared = list[str] | str


def _made(given: dict[str, Any], outputs: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments for our reference and equal ones for SGLang."""
    values = arguments("cpu", outputs=outputs, **given)
    if values["location_map"] is not None:
        values["location_map"] = values["location_map"].abs()  # SGLang keeps the -1 of a slot without a place
    return values, copy_of(values)


def _compare(found: dict[str, Tensor], values: dict[str, Any], reference: Any = attention_metadata) -> Compared:
    reference(**values)
    for name, value in found.items():
        if not torch.equal(value.long(), values[name].long()):
            return f"{name}: SGLang has {value.tolist()}, the reference {values[name].tolist()}"
    return sorted(found)


def flash_attention(**given: Any) -> Compared:
    """The one kernel that fills a graph's page tables, the window's too."""
    values, theirs = _made(given, PAGES)
    table = theirs["out_page_table"]
    normal_decode_set_metadata(
        theirs["out_kv_lens"],
        theirs["out_kv_indptr"],
        table,
        theirs["req_to_token"],
        theirs["req_pool_indices"],
        table.shape[1],
        theirs["seq_lens"],
        given["query_rows"],
        given["page_size"],
        theirs["out_window_page_table"],
        full_to_swa_index_mapping=theirs["location_map"],
    )
    return _compare({name: theirs[name] for name in ("out_kv_lens", "out_kv_indptr", *PAGES)}, values)


def flashinfer(**given: Any) -> Compared:
    """A verify's lists, of every token and of a window's."""
    window, rows = given["window"], given["query_rows"]
    values, theirs = _made(given, OPTIONAL if window else ("out_qo_indptr", "out_kv_indices"))
    table, seq_lens = theirs["req_to_token"], theirs["seq_lens"]

    def pack_read_stream(plan: None, **kwargs: Any) -> None:
        names = ("req_pool_indices", "seq_lens", "indptr", "kv_start_idx", "out")
        create_flashinfer_kv_indices_triton[(len(seq_lens),)](table, *(kwargs[name] for name in names), table.stride(0))

    def lists(prefix: Tensor, start: Tensor | None, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        listed, sums, queries, _ = DFlashVerifyInput.generate_attn_arg_prefill(
            SimpleNamespace(ragged_verify_layout=None, draft_token_num=rows, custom_mask=None),
            req_pool_indices=theirs["req_pool_indices"],
            paged_kernel_lens=prefix,
            paged_kernel_lens_sum=int(prefix.sum()),
            translator=SimpleNamespace(pack_read_stream=pack_read_stream),
            plan=None,
            kv_start_idx=start,
            kv_indices_buf=indices,
        )
        return queries, sums, listed

    names = ("out_qo_indptr", "out_kv_indptr", "out_kv_indices")
    found = dict(zip(names, lists(seq_lens, None, theirs["out_kv_indices"]), strict=True))
    if window:
        inside = seq_lens.clamp(max=window)
        _, sums, listed = lists(inside, seq_lens - inside, theirs["out_window_kv_indices"])
        found |= {"out_window_kv_indptr": sums, "out_window_kv_indices": listed}
    return _compare(found, values)


def metadata_peer(*, peer: str, outputs: tuple[str, ...], **given: Any) -> Compared:
    """A peer as the benchmark times it."""
    values, theirs = _made(given, tuple(outputs))
    (found,) = (found for found in engine_peers("attention_metadata") if found.name == peer)
    written = found.prepare(theirs)() or {
        name: value for name, value in theirs.items() if name.startswith("out_") and value is not None
    }
    return _compare(dict(written), values)


def sglangs_lengths(**given: Any) -> Compared:
    """What SGLang writes as lengths where a page table ends, and what we do."""
    values, theirs = _made(given, ("out_page_table",))
    (fused,) = (found for found in engine_peers("attention_metadata") if found.name == "engine-fused")
    fused.prepare(theirs)()
    attention_metadata(**values)
    same = torch.equal(theirs["out_page_table"], values["out_page_table"])
    return [str(theirs["out_kv_lens"].tolist()), str(values["out_kv_lens"].tolist()), f"tables equal: {same}"]


def verify_window(*, batches: list[int]) -> Compared:
    """Both peers of `step_inputs`, with SGLang's kernel."""
    compared: set[str] = set()
    for batch in batches:
        values = step_cases.arguments("cpu", seq_lens=[(7 * i + 3) % 50 for i in range(batch)], gamma=7)
        for peer in engine_peers("step_inputs"):
            found = _compare(dict(peer.prepare(values)() or {}), copy_of(values), step_inputs)
            if isinstance(found, str):
                return f"{peer.name} at B {batch}: {found}"
            compared |= set(found)
    return sorted(compared)


def main() -> None:
    cache_locs._is_cuda = True  # it has one branch for a GPU and one for a CPU; the interpreter runs the GPU's
    cases = json.loads(sys.argv[1])
    print(json.dumps({name: globals()[function](**given) for name, (function, given) in cases.items()}))


if __name__ == "__main__":
    main()
