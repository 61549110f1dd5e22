"""Files of prompts, JSON lines ``{"turns": [...]}``, as the tools read them."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def prompts_argument(text: str) -> Path:
    """A file of prompts of a command line, for ``argparse``."""
    if not Path(text).is_file():
        raise ArgumentTypeError(f"{text!r} is no file: JSON lines of prompts are wanted")
    return Path(text)


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """All prompts of a file; some have an ``answer`` besides."""
    with file.open(encoding="utf-8") as lines:  # str.splitlines would cut a prompt at U+2028, which JSON allows
        return [json.loads(line) for line in lines if line.strip()]


def first_turns(files: Iterable[Path]) -> list[str]:
    """First turns of all prompts of some files."""
    return [row["turns"][0] for file in files for row in read_prompts(file)]
