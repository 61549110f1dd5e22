"""Imports go one way, and importing does no work.

The lint reads every import statement of the tree, inside functions too, so it holds for files
that no other test touches.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "sgl_mega_plugin").rglob("*.py"), *(ROOT / "slots").rglob("*.py")])
HEAVY = ("torch", "triton", "sglang", "transformers", "numpy", "gguf", "tokenizers")

CORE = {"registry", "switch", "plan", "deferral"}
#: What each part of sgl_mega_plugin may import of the others, besides contract, core and itself.
PARTS: dict[str, set[str]] = {
    "engine": set(),
    "embedded": set(),
    "conformance": set(),
    "bench": {"conformance", "embedded", "engine"},
    "cli": {"engine", "embedded", "conformance", "bench"},
}
#: What the parts of the core may import of each other.
CORE_IMPORTS = {"registry": set[str](), "switch": set[str](), "plan": {"registry", "switch"}, "deferral": set[str]()}


def imported(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, only for type checkers) of every import of a module, ``import_module("...")`` included."""
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" if not node.level else "." for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        for name in names:
            yield getattr(node, "lineno", 0), name, id(node) in typing_only


def violation(module: str, name: str, typing_only: bool) -> str | None:
    """Why a module may not import a name, or None."""
    top, *rest = name.split(".")
    package, *parts = module.split(".")
    part = parts[0] if parts else ""
    if top == "":
        return "imports are absolute"
    if top == "sglang":
        return None if package == "sgl_mega_plugin" and part == "engine" else "only engine/ imports sglang"
    if package == "sgl_mega_slots":
        if top == "sgl_mega_plugin" and rest[:1] != ["contract"]:
            return "slots import only sgl_mega_plugin.contract and themselves"
        return None
    if top == "sgl_mega_slots":
        return "nothing in sgl_mega_plugin imports slots by name"
    if part in CORE | {"contract"} and top in HEAVY and not typing_only:
        return "contract and core import nothing heavy"
    target = rest[0] if top == "sgl_mega_plugin" and rest else ""
    if target in ("", "__version__", "contract", part):
        return None
    if part == "contract":
        return "contract imports nothing of ours outside contract"
    allowed = CORE_IMPORTS.get(part, CORE | PARTS.get(part, set()))
    return None if target in allowed else f"{part or package} imports none of {target}"


def module_of(path: Path) -> str:
    base = ROOT / "slots" if path.is_relative_to(ROOT / "slots") else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


def test_the_scan_sees_the_tree() -> None:
    modules = {module_of(path) for path in SOURCES}
    assert {"sgl_mega_plugin", "sgl_mega_plugin.contract.slot", "sgl_mega_plugin.plan", "sgl_mega_slots"} <= modules
    parts = {module.split(".")[1] for module in modules if module.startswith("sgl_mega_plugin.")}
    assert parts <= {"contract", *CORE, *PARTS}, "a new part needs its line in PARTS"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_go_one_way(path: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: {why}"
        for line, name, typing_only in imported(ast.parse(path.read_text()))
        if (why := violation(module_of(path), name, typing_only))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("sgl_mega_plugin.embedded.engine", "def f():\n    import sglang.srt", "only engine/"),
        ("sgl_mega_plugin.cli.doctor", "from sglang import srt", "only engine/"),
        ("sgl_mega_slots.draft.markov", "import_module('sglang.srt')", "only engine/"),
        ("sgl_mega_slots.draft.markov", "from sgl_mega_plugin.registry import Registry", "slots import only"),
        ("sgl_mega_slots.draft.markov", "from sgl_mega_plugin import plan", "slots import only"),
        ("sgl_mega_plugin.cli.run", "import sgl_mega_slots", "slots by name"),
        ("sgl_mega_plugin.cli.run", "importlib.import_module('sgl_mega_slots.draft')", "slots by name"),
        ("sgl_mega_plugin.contract.slot", "from sgl_mega_plugin.plan import make_plan", "outside contract"),
        ("sgl_mega_plugin.contract.slot", "from sgl_mega_plugin import registry", "outside contract"),
        ("sgl_mega_plugin.contract.slot", "import torch", "nothing heavy"),
        ("sgl_mega_plugin.plan", "from torch import Tensor", "nothing heavy"),
        ("sgl_mega_plugin.registry", "from sgl_mega_plugin.plan import make_plan", "none of plan"),
        ("sgl_mega_plugin.embedded.engine", "from sgl_mega_plugin.engine import hooks", "none of engine"),
        ("sgl_mega_plugin.engine.entry", "from sgl_mega_plugin.cli import main", "none of cli"),
        ("sgl_mega_plugin.engine.entry", "from . import specs", "absolute"),
        ("sgl_mega_plugin.engine.entry", "from sglang.srt.environ import envs", None),
        ("sgl_mega_plugin.contract.seams", "if TYPE_CHECKING:\n    from torch import Tensor", None),
        ("sgl_mega_plugin.embedded.engine", "from sgl_mega_plugin.plan import make_plan", None),
        ("sgl_mega_plugin.cli.run", "from sgl_mega_plugin import __version__, embedded", None),
        ("sgl_mega_slots.draft.markov", "from sgl_mega_slots.common import philox\nimport torch", None),
    ],
)
def test_the_lint_sees_each_violation(module: str, source: str, says: str | None) -> None:
    found = [why for _, name, typing in imported(ast.parse(source)) if (why := violation(module, name, typing))]
    assert len(found) == (says is not None), found
    assert says is None or says in found[0]


@pytest.mark.parametrize(
    "module",
    [
        "sgl_mega_plugin",
        "sgl_mega_plugin.contract",
        "sgl_mega_plugin.contract.selection",
        "sgl_mega_plugin.contract.upstream_names",
        "sgl_mega_plugin.registry",
        "sgl_mega_plugin.switch",
        "sgl_mega_plugin.plan",
        "sgl_mega_plugin.deferral",
        "sgl_mega_slots",
    ],
)
def test_importing_does_no_work(module: str) -> None:
    """No heavy module comes along, and the environment stays as it was."""
    program = f"""
import os, sys
before = dict(os.environ)
import {module}
loaded = sorted(set({HEAVY!r}) & set(sys.modules))
assert not loaded, f"{module} imports {{loaded}}"
assert dict(os.environ) == before, "{module} changes the environment"
"""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "slots"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
