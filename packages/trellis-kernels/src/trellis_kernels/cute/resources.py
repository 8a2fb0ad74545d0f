"""Owns what a compiled kernel costs: registers, stack, shared memory and code, read from its binary.

A cubin is an ELF image whose `.nv.info` sections hold (format, attribute, size, payload) records.  Reading them here
needs no CUDA tool, so the numbers are the same on every machine.  It must not know any kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from trellis_kernels.errors import KernelValueError

__all__ = ["Resources", "read_resources"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RECORD = struct.Struct("<BBH")
_PAIR = struct.Struct("<II")
_SIZED_VALUE = 4  # record format whose third field is a payload size; in all others it is the value itself
_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTER_COUNT = 0x11, 0x12, 0x2F
_INFO, _TEXT, _SHARED, _SYMBOLS = ".nv.info", ".text.", ".nv.shared.", ".symtab"


@dataclass(frozen=True)
class Resources:
    """What one kernel of a binary takes.

    Attributes:
        kernel: mangled name.
        registers: 32-bit registers of a thread.
        stack_bytes: local memory of a thread; anything above 0 is a spill or an array with a run-time index.
        shared_bytes: shared memory of a block that the binary declares, with the 1,024 that sm_90 and later reserve.
        code_bytes: machine code.
    """

    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    code_bytes: int


def read_resources(cubin: bytes) -> tuple[Resources, ...]:
    """The resources of every kernel in a binary, by name.

    Args:
        cubin: the ELF image.

    Raises:
        KernelValueError: if the image is not a 64-bit ELF, or a kernel in it has no register count.
    """
    sections = dict(_sections(cubin))
    symbols = _symbol_names(sections)
    counts: dict[tuple[int, str], int] = {}
    for attribute, payload in _records(sections.get(_INFO, (b"", 0))[0]):
        if attribute in (_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTER_COUNT):
            symbol, value = _PAIR.unpack(payload[: _PAIR.size])
            counts[attribute, symbols[symbol]] = value
    kernels = sorted(name.removeprefix(_TEXT) for name in sections if name.startswith(_TEXT))
    missing = [name for name in kernels if (_REGISTER_COUNT, name) not in counts]
    if missing or not kernels:
        raise KernelValueError(f"binary has {len(kernels)} kernels, of which these have no register count: {missing}")
    return tuple(
        Resources(
            kernel=name,
            registers=counts[_REGISTER_COUNT, name],
            stack_bytes=max(counts.get((_FRAME_SIZE, name), 0), counts.get((_MIN_STACK_SIZE, name), 0)),
            shared_bytes=sections.get(_SHARED + name, (b"", 0))[1],
            code_bytes=sections[_TEXT + name][1],
        )
        for name in kernels
    )


def _sections(cubin: bytes) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Name, bytes (none for a section without file contents) and size of every section."""
    if cubin[:5] != b"\x7fELF\x02" or len(cubin) < _HEADER.size:
        raise KernelValueError(f"a binary must be a 64-bit ELF image, got {cubin[:5]!r} and {len(cubin)} bytes")
    header = _HEADER.unpack_from(cubin)
    table, entry_size, count, names_index = header[6], header[11], header[12], header[13]
    entries = [_SECTION.unpack_from(cubin, table + index * entry_size) for index in range(count)]
    names = entries[names_index][4]
    for name, kind, _, _, offset, size, *_ in entries:
        no_bits = kind == 8
        yield _string(cubin, names + name), (b"" if no_bits else cubin[offset : offset + size], size)


def _symbol_names(sections: dict[str, tuple[bytes, int]]) -> list[str]:
    table, strings = sections[_SYMBOLS][0], sections[".strtab"][0]
    return [_string(strings, _SYMBOL.unpack_from(table, at)[0]) for at in range(0, len(table), _SYMBOL.size)]


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _RECORD.size <= len(info):
        kind, attribute, size = _RECORD.unpack_from(info, at)
        at += _RECORD.size
        payload = info[at : at + size] if kind == _SIZED_VALUE else b""
        at += len(payload)
        if payload:
            yield attribute, payload


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
