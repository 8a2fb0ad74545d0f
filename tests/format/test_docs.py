"""Holds the numbers of docs/exl3-format.md to what the package computes."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trellis_format.codebooks import EXL3_CODEBOOKS, StateCodebook
from trellis_format.codebooks.mul1 import BIAS_BITS, BYTE_BASE, SCALE_BITS, Mul1
from trellis_format.codebooks.summed_halves import FIELD_MASK, FIELD_XOR, MCG, ThreeInst
from trellis_format.exl3.names import PROJECTION_NAMES
from trellis_format.rates import ALL_RATES, Rate
from trellis_format.ring import unpack_states
from trellis_format.source import Projection
from trellis_format.tiles import COLUMN, ROW, decode_inner

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/exl3-format.md"
CHECKED = re.compile(r"^<!-- check: (?P<name>.+) -->\n(?P<table>(?:\|.*\n)+)", re.MULTILINE)
K3 = Rate.of(3)
Row = tuple[str, ...]


def cells(line: str) -> Row:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


TEXT = DOCUMENT.read_text()
PROSE = TEXT.replace("\n", " ")
TABLES = {match["name"]: list(map(cells, match["table"].splitlines())) for match in CHECKED.finditer(TEXT)}


def words(rate: Rate) -> np.ndarray:
    index = np.arange(rate.tile_words16, dtype=np.uint32)
    return (index * 40503 + 12345 & 0xFFFF).astype(np.uint16)


def ring(rate: Rate) -> str:
    return "".join(f"{word:032b}" for word in words(rate).view("<u4"))


def crc(array: np.ndarray) -> str:
    return f"{zlib.crc32(array.tobytes()):08X}"


def rates() -> list[Row]:
    return [
        (
            str(rate),
            str(rate.tile_words16),
            str(rate.tile_bytes),
            str(rate.ring_bits),
            ", ".join(map(str, rate.advances()[:2])),
            ", ".join(name for name, codebook in EXL3_CODEBOOKS.items() if rate in codebook.legal_rates),
        )
        for rate in ALL_RATES
    ]


def codebooks() -> list[Row]:
    rows = []
    for name, codebook in EXL3_CODEBOOKS.items():
        values = codebook.table.astype(np.float64)
        numbers = values.min(), values.max(), f"{values.std():.6f}", len(np.unique(values)), crc(codebook.table)
        rows.append((name, *map(str, numbers)))
    return rows


def shown_words() -> list[Row]:
    places = [int(place) for place in TABLES["words"][0][1:]]
    return [("word(i)", *(f"{words(K3)[place]:04X}" for place in places))]


def shown_ring() -> list[Row]:
    rows = []
    for span, _ in TABLES["ring"][2:]:
        first, last = map(int, span.split(" to "))
        bits = ring(K3)[first : last + 1]
        rows.append((span, " ".join(bits[place : place + 4] for place in range(0, 16, 4))))
    return rows


def shown_states() -> list[Row]:
    states = unpack_states(words(K3), K3)
    rows = []
    for place, *_ in TABLES["states"][2:]:
        t = int(place)
        end = int(K3.ends()[t])
        values = (str(codebook.value(int(states[t]))) for codebook in EXL3_CODEBOOKS.values())
        span = f"{(end - 16) % K3.ring_bits} to {end - 1}"
        rows.append((place, span, f"{states[t]:04X}", str(ROW[t]), str(COLUMN[t]), *values))
    return rows


def shown_values() -> list[Row]:
    state = int(unpack_states(words(K3), K3)[0])
    rows = []
    for codebook in (ThreeInst(), MCG()):
        x = (codebook.hash_multiplier * state + codebook.hash_addend) % 2**32
        y = x & FIELD_MASK ^ FIELD_XOR
        low, high = struct.unpack("<2e", struct.pack("<I", y))
        steps = f"x = {x:08X}, y = {y:08X}, low half {low}, high half {high}"
        rows.append((codebook.name, steps, bits_of(codebook, state), str(codebook.value(state))))
    x = Mul1.multiplier * state % 2**32
    total = sum(x.to_bytes(4, "little"))
    steps = f"x = {x:08X}, S = {total}, 1024 + S has bits {BYTE_BASE + total:04X}"
    return [*rows, ("mul1", steps, bits_of(Mul1(), state), str(Mul1().value(state)))]


def bits_of(codebook: StateCodebook, state: int) -> str:
    return f"{codebook.evaluate(np.array([state], np.uint16)).view(np.uint16)[0]:04X}"


def tiles() -> list[Row]:
    rows = []
    for rate in ALL_RATES:
        states = unpack_states(words(rate), rate)
        trellis = words(rate).view(np.int16)[None, None]
        decoded = (
            crc(decode_inner(trellis, codebook, rate)) if rate in codebook.legal_rates else "-"
            for codebook in EXL3_CODEBOOKS.values()
        )
        first = " ".join(f"{state:04X}" for state in states[:4])
        rows.append((str(rate), first, f"{states[255]:04X}", crc(states), *decoded))
    return rows


def projections() -> list[Row]:
    return [
        (str(projection), ", ".join(word for word, means in PROJECTION_NAMES.items() if means is projection))
        for projection in Projection
    ]


CHECKS: dict[str, Callable[[], list[Row]]] = {
    "rates": rates,
    "codebooks": codebooks,
    "words": shown_words,
    "ring": shown_ring,
    "states": shown_states,
    "values": shown_values,
    "tiles": tiles,
    "words of projections": projections,
}


@pytest.mark.parametrize("name", CHECKS)
def test_tables_are_what_the_package_computes(name: str) -> None:
    assert TABLES[name][2:] == CHECKS[name]()


def test_every_marked_table_is_checked() -> None:
    assert list(TABLES) == list(CHECKS)


def test_numbers_in_the_prose_of_the_worked_tile() -> None:
    first, last = words(K3).view("<u4")[[0, -1]]
    assert f"The first 32-bit word is 0x{first:08X} and the last one 0x{last:08X}" in PROSE
    end, begin = ring(K3)[-13:], ring(K3)[:3]
    groups = " ".join((end[0], end[1:5], end[5:9], end[9:]))
    assert f"the last 13 bits of the ring, {groups}, and the first three, {begin}" in PROSE
    states = unpack_states(words(K3), K3)
    assert int(end + begin, 2) == states[0]
    assert f"0x{states[0]:04X}. Three bits further, state 1 is 0x{states[1]:04X}" in PROSE
    assert f"One state in full, s = 0x{states[0]:04X}" in PROSE


def test_constants_in_the_prose_are_those_of_the_codebooks() -> None:
    for codebook in EXL3_CODEBOOKS.values():
        if codebook.multiplier is not None:
            assert f"0x{codebook.multiplier:08X} for {codebook.name}" in PROSE
            assert f"x = 0x{codebook.multiplier:08X} s" in PROSE
    three = ThreeInst()
    assert f"x = {three.hash_multiplier} s + {three.hash_addend}," in PROSE
    assert f"y = (x AND 0x{FIELD_MASK:08X}) XOR 0x{FIELD_XOR:08X}" in PROSE
    for bits in (SCALE_BITS, BIAS_BITS):
        value = np.array(bits, np.uint16).view(np.float16)[()]
        assert f"{float(value)} (0x{bits:04X})" in PROSE
