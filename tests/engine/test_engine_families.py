"""The tables of families against SGLang's models, read as source so that none has to be imported."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from sgl_mega_plugin.engine import families

CAPTURES = ("set_dflash_layers_to_capture", "set_dspark_layers_to_capture")


class Scan:
    """Classes of ``sglang.srt.models`` with their bases and methods, and the architectures among them."""

    def __init__(self) -> None:
        self.bases: dict[tuple[str, str], list[str]] = {}
        self.methods: dict[tuple[str, str], set[str]] = {}
        self.entries: list[tuple[str, str]] = []
        found = importlib.util.find_spec("sglang")
        assert found is not None
        assert found.origin is not None
        for path in sorted((Path(found.origin).parent / "srt" / "models").rglob("*.py")):
            self._read(path)

    def _read(self, path: Path) -> None:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                key = (path.stem, node.name)
                self.bases[key] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                self.methods[key] = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "EntryClass" for t in node.targets
            ):
                listed = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
                self.entries += [(path.stem, item.id) for item in listed if isinstance(item, ast.Name)]

    def lineage(self, module: str, name: str) -> list[tuple[str, str]]:
        """The class and its ancestors; a base of another module is found by its name alone."""
        keys = [(module, name)] if (module, name) in self.bases else [key for key in self.bases if key[1] == name]
        return keys + [
            up for key in keys for base in self.bases[key] if base != name for up in self.lineage(key[0], base)
        ]

    def with_method(self, method: str) -> set[str]:
        return {n for m, n in self.entries if any(method in self.methods[key] for key in self.lineage(m, n))}

    def below(self, base: str) -> set[str]:
        return {n for m, n in self.entries if any(key[1] == base for key in self.lineage(m, n))}


@pytest.fixture(scope="module")
def scan() -> Scan:
    return Scan()


def test_every_model_that_can_be_a_target_is_decided(scan: Scan) -> None:
    decided = set(families.ALL_TARGETS) | set(families.LEFT_OUT)
    found = {name for method in CAPTURES for name in scan.with_method(method)}
    assert sorted(found - decided) == [], "SGLang's models that no table names"
    assert sorted(decided - found) == [], "names that no model of SGLang has"


def test_every_dense_draft_is_decided(scan: Scan) -> None:
    decided = set(families.DRAFTS) | set(families.DRAFTS_LEFT_OUT)
    assert scan.below("DSparkDraftMixin") == decided


def test_no_family_is_decided_twice() -> None:
    assert not set(families.ALL_TARGETS) & set(families.LEFT_OUT)
    assert not set(families.ALL_DRAFTS) & set(families.DRAFTS_LEFT_OUT)
    assert len(set(families.ALL_TARGETS)) == len(families.ALL_TARGETS)
    assert len(set(families.ALL_DRAFTS)) == len(families.ALL_DRAFTS)


def test_a_bundled_draft_is_a_model_of_its_own(scan: Scan) -> None:
    models = {name for _, name in scan.entries}
    assert set(families.BUNDLED_DRAFTS) == set(families.BUNDLED_TARGETS)
    assert set(families.BUNDLED_DRAFTS.values()) <= models
    assert not set(families.BUNDLED_DRAFTS.values()) & scan.below("DSparkDraftMixin"), "SGLang's dense draft model"


def test_served_drafts_are_one_class_with_aliases() -> None:
    from sglang.srt.models import dspark

    for name in families.DRAFTS:
        model = getattr(dspark, name)
        assert issubclass(model, dspark.DSparkDraftModel)
        own = {key for key in vars(model) if not key.startswith("__")}
        assert name == "DSparkDraftModel" or own == set(), f"{name} changes {sorted(own)}"
