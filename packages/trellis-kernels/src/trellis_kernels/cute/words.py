"""Owns 32-bit integers in shared and global memory: loads, stores, additions and the block's barrier, as inline PTX.

It must not know what the words mean.  All keep their order in a thread.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

__all__ = [
    "add_shared",
    "load_global",
    "load_shared",
    "store_four_global",
    "store_global",
    "store_shared",
    "sync_block",
    "sync_warp",
]


def load_global(address: Int64) -> Int32:
    """One word of global memory."""
    return cute.arch.inline_ptx("ld.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def store_global(address: Int64, value: Int32) -> None:
    """One word to global memory."""
    cute.arch.inline_ptx("st.global.s32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_four_global(address: Int64, value: Int32) -> None:
    """Four copies of a word to global memory, at a multiple of 16 bytes."""
    cute.arch.inline_ptx("st.global.v4.s32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};", read_only_args=[address, value])


def load_shared(address: Int32) -> Int32:
    """One word of shared memory."""
    return cute.arch.inline_ptx("ld.shared.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def store_shared(address: Int32, value: Int32) -> None:
    """One word to shared memory."""
    cute.arch.inline_ptx("st.shared.s32 [{$r0}], {$r1};", read_only_args=[address, value])


def add_shared(address: Int32, value: Int32) -> Int32:
    """Add to a word of shared memory atomically; returns what it was."""
    return cute.arch.inline_ptx(
        "atom.shared.add.s32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[address, value]
    )


def sync_block() -> None:
    """Order the block's memory accesses before this point with those after it."""
    cute.arch.inline_ptx("barrier.sync 0;")


def sync_warp() -> None:
    """Order the warp's memory accesses before this point with those after it."""
    cute.arch.inline_ptx("bar.warp.sync 0xFFFFFFFF;")
