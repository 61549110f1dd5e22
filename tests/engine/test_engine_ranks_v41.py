"""Ranks that round differently still accept alike: SGLang's accepts of DeepSeek-V4.1 in two processes over gloo.

What ``SGLANG_SPEC_TP_SYNC`` costs and saves is written in docs/serving-deepseek-v4.1.md; these are its claims.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
from ranks_v41 import ACCEPTED, RANKS, outcomes

from sgl_mega_plugin.switch import MASTER_SWITCH, MASTER_VARIABLES, apply_master_switch

SECONDS = 300  # two spawned processes import SGLang's workers
SYNC, ONE_PLACE_LESS = "SGLANG_SPEC_TP_SYNC", "all,-dspark-accept-graph"


def _mastered() -> dict[str, str]:
    environ = {MASTER_SWITCH: "1"}
    apply_master_switch(environ, engine_has_own=False)
    return {name: environ[name] for name in MASTER_VARIABLES}


CASES: dict[str, dict[str, str]] = {
    "off": {},
    "sixteen": dict.fromkeys(MASTER_VARIABLES, "1"),
    "master": _mastered(),
    "no-broadcast": {SYNC: "off"},
    "off-one-place-less": {SYNC: ONE_PLACE_LESS},
    "sixteen-one-place-less": {SYNC: ONE_PLACE_LESS} | dict.fromkeys(MASTER_VARIABLES, "1"),
}
SYNCED = [("greedy", name) for name, case in CASES.items() if SYNC not in case]
SYNCED += [("sampled", name) for name, case in CASES.items() if case.get(SYNC) != "off"]

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """Each rank's outcomes by case."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    with multiprocessing.get_context("spawn").Pool(RANKS) as pool:
        running = [pool.apply_async(outcomes, (rank, folder, list(CASES.values()))) for rank in range(RANKS)]
        return [dict(zip(CASES, result.get(SECONDS), strict=True)) for result in running]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "case"), SYNCED)
def test_both_ranks_accept_what_rank_0_decided(part: str, case: str, ranks: list[dict[str, Outcome]]) -> None:
    first, second = (rank[case][part] for rank in ranks)
    assert first == second
    if part == "greedy":
        assert first["correct_len"] == list(ACCEPTED[: len(first["correct_len"])])


@pytest.mark.slow
def test_the_switches_change_no_ranks_outcome(ranks: list[dict[str, Outcome]]) -> None:
    for rank in ranks:
        assert rank["sixteen"]["greedy"] == rank["off"]["greedy"]
        assert rank["master"] == rank["sixteen"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["off-one-place-less", "sixteen-one-place-less"])
def test_without_the_broadcast_a_near_tie_parts_the_greedy_accepts(case: str, ranks: list[dict[str, Outcome]]) -> None:
    """The near ties are real: each rank's own argmax decides, so the agreement above is the broadcast's."""
    first, second = (rank[case]["greedy"] for rank in ranks)
    assert first["correct_len"] == list(ACCEPTED[: len(first["correct_len"])])
    assert second["correct_len"][0] == 0
    assert second["correct_len"][1] == ACCEPTED[1]
    assert second["bonus"][1] != first["bonus"][1]


@pytest.mark.slow
def test_without_any_broadcast_the_ranks_draws_part_the_sampled_accepts(ranks: list[dict[str, Outcome]]) -> None:
    first, second = (rank["no-broadcast"]["sampled"] for rank in ranks)
    assert (first["correct_len"], first["bonus"]) != (second["correct_len"], second["bonus"])


@pytest.mark.slow
def test_the_one_kernel_accept_is_declined_where_ranks_agree_in_the_graph(ranks: list[dict[str, Outcome]]) -> None:
    for rank in ranks:
        assert {case: outcome["one_kernel"] for case, outcome in rank.items()} == {
            "off": False,
            "sixteen": False,
            "master": False,
            "no-broadcast": False,
            "off-one-place-less": False,
            "sixteen-one-place-less": True,
        }
