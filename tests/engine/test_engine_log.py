"""The table of SGLang's lines about its switches against SGLang's source, read as text so that nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sgl_mega_plugin.engine.log.lines import ACCEPTED, LINES, SILENT, STARTED, Line, Silence
from sgl_mega_plugin.switch import ENGINE_SLOTS

LEVELS = ("info", "warning", "error", "critical", "exception")
VARIABLES = {slot.name: str(slot.engine_switch) for slot in ENGINE_SLOTS}
#: What else these files print at these levels, by how it starts. A file is here if most of it is about the switches.
OTHERS = {
    "srt/speculative/dspark_components/dspark_worker_v2.py": (
        "Initialized DSpark draft runner.",
        "DSpark draft uses its checkpoint-local embedding",
        "DSpark prefill target-hidden projection",
        "Disable DSpark draft cuda graph",
    ),
    "srt/speculative/dspark_components/dspark_verify.py": (),
    "srt/speculative/dspark_components/dspark_sampling_accept_graph.py": (),
    "srt/speculative/dspark_components/dspark_deferred_commit.py": (
        # Both follow, for each graph, from the line that the worker prints.
        "DSpark draft graph bs=%d: deferred context-KV commit forked",
        "DSpark draft graph: deferred context-KV commit joined",
    ),
    "srt/model_executor/runner/early_verify_metadata.py": (
        "Staged target verify metadata did not match the replay",  # one step of many
    ),
    "srt/model_executor/runner_utils/forked_metadata_prep.py": (),
    "srt/model_executor/runner/decode_cuda_graph_runner.py": (
        "Draft metadata glue graph off",  # the draft's, which has no switch
        "Draft metadata prep through the glue graph",
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH is incompatible",  # another switch
        "Decode graph replay: ",
        "Saved trace for ",
        "%s: capture trace flushed",
        "",  # progress of the capture, no constant
    ),
}


def _package() -> Path:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@cache
def logged(file: str) -> tuple[tuple[str, str], ...]:
    """(level, text) of every call of a logger in a file; the text of an f-string is its first constant piece."""
    return tuple(_calls(ast.parse((_package() / file).read_text())))


def _calls(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "logger" and node.args):
            continue
        text = node.args[0]
        pieces = text.values if isinstance(text, ast.JoinedStr) else [text]
        constant = isinstance(pieces[0], ast.Constant) and isinstance(pieces[0].value, str)
        yield node.func.attr, str(pieces[0].value) if constant else ""  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.slot}-{line.says}")
def test_sglang_prints_each_line_of_the_table(line: Line) -> None:
    assert (line.level, line.text) in logged(line.file)


@pytest.mark.parametrize("silence", SILENT, ids=lambda silence: silence.slot)
def test_sglang_prints_nothing_about_a_silent_switch(silence: Silence) -> None:
    variable = VARIABLES[silence.slot]
    source = (_package() / silence.file).read_text()
    assert f"envs.{variable}.get()" in source, "read somewhere else now"
    assert [text for _, text in logged(silence.file) if variable in text] == []


def test_no_other_file_reads_a_silent_switch_and_could_tell() -> None:
    readers: dict[str, set[str]] = {silence.slot: set() for silence in SILENT}
    for path in (_package() / "srt").rglob("*.py"):
        source = path.read_text()
        for slot in readers:
            if f"envs.{VARIABLES[slot]}.get()" in source:
                readers[slot].add(path.relative_to(_package()).as_posix())
    # The worker reads this one to hand the n-gram hasher to the epilogue, whose file is in the table.
    readers["post_forward_cuda_graph"].discard("srt/speculative/dspark_components/dspark_worker_v2.py")
    assert readers == {silence.slot: {silence.file} for silence in SILENT}


def test_each_switch_has_lines_or_is_silent() -> None:
    told, silent = {line.slot for line in LINES}, {silence.slot for silence in SILENT}
    assert told | silent == set(VARIABLES)
    assert not told & silent
    assert len(SILENT) == len(silent)


@pytest.mark.parametrize("file", OTHERS)
def test_a_line_that_nobody_has_looked_at_shows(file: str) -> None:
    known = {line.text for line in LINES if line.file == file}
    new = [
        text
        for _, text in logged(file)
        if text not in known and not any(text.startswith(start) if start else text == "" for start in OTHERS[file])
    ]
    assert new == [], "read them, then put them into the table or into OTHERS"


def test_every_file_of_the_table_is_looked_at_for_new_lines() -> None:
    assert {line.file for line in LINES} <= set(OTHERS)


def test_a_scheduler_reports_itself_after_its_graphs() -> None:
    assert ("info", STARTED.text) in logged(STARTED.file)
    source = (_package() / STARTED.file).read_text()
    body = source[source.index("    def init_model_worker(self):") :]
    body = body[: body.index("\n    def ", 10)]
    assert 0 < body.index("self.init_all_cuda_graphs()") < body.index(STARTED.text)


def test_the_accepted_flag_is_worded_as_the_reader_expects() -> None:
    from sglang.kernels.plugin_kernels.nvidia.spec import FLAG

    from sgl_mega_plugin.engine.specs import TARGET

    file = "srt/kernel_plugins/nvidia/binding.py"
    assert ("info", "%s: %s on %s") in logged(file)
    assert f"{FLAG}: {TARGET.name} on " == ACCEPTED
