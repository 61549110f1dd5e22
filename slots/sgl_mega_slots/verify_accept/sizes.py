"""Sizes of the launches that read whole rows of logits. Used by the ``launch`` modules of the accepting slots."""

from __future__ import annotations

import triton

from sgl_mega_plugin.contract import Backend

#: Programs that fill an H200: 132 SMs of 16 programs.
ENOUGH = 2048
#: Rows from which reading and deciding are launches of their own. Small in the interpreter, so that cases do both.
_APART = {Backend.KERNEL: 48, Backend.INTERPRETER: 8}


def filling(least: int, larger: int, rows: int, vocab: int) -> int:
    """Ids a program reads, at most ``larger`` times the least, so that programs of so many rows fill the GPU."""
    block = least
    while block < least * larger and rows * triton.cdiv(vocab, block) > ENOUGH:
        block *= 2
    return block


def is_apart(backend: Backend, rows: int) -> bool:
    """Whether reading and deciding are launches of their own: no program then waits for its arrival to be seen."""
    return rows >= _APART[backend]


def parts_of(*, apart: bool) -> tuple[tuple[bool, bool], ...]:
    """The launches of a kernel that reads and decides: for each, whether it does the one and the other."""
    return ((True, False), (False, True)) if apart else ((True, True),)
