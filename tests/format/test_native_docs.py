"""Holds the numbers and the JSON of docs/native-format.md to what the package computes."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trellis_format.codebooks import get_codebook
from trellis_format.codebooks.lut_e4m3 import LutE4M3
from trellis_format.codebooks.lut_fp16 import SEGMENTS, LutFp16, _segment
from trellis_format.codebooks.lut_rank import rank_of
from trellis_format.container.manifest import CONTAINER_BITS, PAIR_KINDS
from trellis_format.container.manifest import parse_manifest as parse_container
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import MemoryArray
from trellis_format.native.config import RateConfig, parse_config
from trellis_format.native.manifest import parse_manifest as parse_native
from trellis_format.rate_bytes import pack_rates
from trellis_format.rate_table import RateTable
from trellis_format.rates import ALL_RATES, Rate
from trellis_format.ring import unpack_states
from trellis_format.signs import SignAxis, pattern_seed, pattern_signs
from trellis_format.slots import BAND_BYTES, read_linear, row_bytes, section_bytes, section_offsets
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights
from trellis_format.tiles import decode_inner

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/native-format.md"
TEXT = DOCUMENT.read_text()
TABLE = re.compile(r"^<!-- check: (?P<name>.+) -->\n(?P<table>(?:\|.*\n)+)", re.MULTILINE)
OBJECT = re.compile(r"^<!-- check: (?P<name>[^\n]+) -->\n```json\n(?P<json>[^`]*)```", re.MULTILINE)
Row = tuple[str, ...]


def cells(line: str) -> Row:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


TABLES = {match["name"]: list(map(cells, match["table"].splitlines()))[2:] for match in TABLE.finditer(TEXT)}
OBJECTS = {match["name"]: match["json"] for match in OBJECT.finditer(TEXT)}
RATES = ((3, 3, 4), (1.5, 2.5, 8))


def example() -> tuple[TrellisSource, TrellisWeights]:
    """The layer of section 1, its codes filled by the rule of section 1.1."""
    source = TrellisSource(
        codebook="mul1",
        geometry=ExpertGeometry(
            num_experts=2,
            hidden_size=128,
            intermediate_size=128,
            padded_hidden_size=128,
            padded_intermediate_size=128,
        ),
        rates=RateTable.of([[Rate.of(bits) for bits in row] for row in RATES]),
        layout=CodeLayout.SLOT_MAJOR,
        extent=TrellisExtent.whole(128),
    )
    row, byte = np.arange(4)[:, None], np.arange(row_bytes(source))[None]
    codes = (37 * byte + 101 * row + 11 & 0xFF).astype(np.uint8)
    ones = np.ones((2, 3, 128), np.float16)
    weights = TrellisWeights(
        codes=MemoryArray(codes),
        rate=source.rates.rate_bytes(),
        input_scales=ones[:, :2],
        intermediate_scales=ones,
        output_scales=ones[:, 0],
        biases={},
    )
    return source, weights


def sections() -> list[Row]:
    source, _ = example()
    offsets = section_offsets(source).tolist()
    rows = []
    for index in range(6):
        expert, projection = divmod(index, 3)
        rate = source.rates.rate(expert, projection)
        size = section_bytes(128, rate)
        assert size == offsets[index + 1] - offsets[index]
        rows.append((str(expert), list(Projection)[projection].value, str(rate), str(size), str(offsets[index])))
    assert f"A row of that layer has {offsets[-1]} bytes." in TEXT
    return rows


def tile() -> list[Row]:
    source, weights = example()
    rate = Rate.of(2.5)
    begin = int(section_offsets(source)[4]) + (8 + 5) * rate.tile_bytes
    assert "5888 + (8 + 5) * 80" in TEXT
    raw = weights.codes.read()[1, begin : begin + rate.tile_bytes]  # type: ignore[union-attr]
    words = raw.copy().view(np.uint16)
    found = read_linear(source, weights, 1, 1)
    assert np.array_equal(found[80 // 16, 48 // 16].view(np.uint16), words)
    states = unpack_states(words.view(np.int16), rate)
    inner = decode_inner(found, get_codebook("mul1"), rate)
    block = np.ascontiguousarray(inner[80:96, 48:64])
    return [
        ("first byte in row 1", str(begin)),
        ("first four 16-bit words", " ".join(f"{word:04X}" for word in words[:4])),
        ("states at positions 0 to 3", " ".join(f"{state:04X}" for state in states[:4])),
        ("state at position 255", f"{states[255]:04X}"),
        ("CRC-32 of the 256 states, as uint16 in position order", f"{zlib.crc32(states.tobytes()):08X}"),
        ("weight at input 80, output 48", repr(float(inner[80, 48]))),
        ("weight at input 81, output 48", repr(float(inner[81, 48]))),
        ("CRC-32 of the 16 x 16 weights, as float16, input-major", f"{zlib.crc32(block.tobytes()):08X}"),
    ]


def nibbles() -> list[Row]:
    rates = sorted(ALL_RATES, key=lambda rate: rate.nibble)
    return [(str(rate.nibble), str(rate), f"0x{pack_rates(rate, rate):02X}") for rate in rates]


def tables() -> list[Row]:
    states = np.arange(1 << 16, dtype=np.uint16)
    e4m3, fp16 = LutE4M3(), LutFp16()
    stored = {
        "lut_e4m3, T12": e4m3.compact_bytes,
        "lut_e4m3, K = 2, a byte for each state": e4m3.evaluate_bytes(states, Rate.of(2)),
        "lut_e4m3, K = 3": e4m3.evaluate_bytes(states, Rate.of(3)),
        "lut_e4m3, K = 4": e4m3.evaluate_bytes(states, Rate.of(4)),
        "lut_fp16, 104 segments, base then slope": np.array(SEGMENTS, dtype="<u2"),
        "lut_fp16, K = 5, float16 for each state": fp16.table_for(Rate.of(5)),
        "lut_fp16, K = 6": fp16.table_for(Rate.of(6)),
    }
    return [(name, str(array.nbytes), hashlib.sha256(array.tobytes()).hexdigest()) for name, array in stored.items()]


def ranks() -> list[Row]:
    rows = []
    for name, bits, shown, *_ in TABLES["ranks"]:
        rate, state = Rate.of(bits), int(shown, 16)
        rank = rank_of(state, rate)
        if name == "lut_e4m3":
            law: LutE4M3 | LutFp16 = LutE4M3()
            place = f"0x{int(LutE4M3().compact_bytes[rank >> 4]):02X}"
        else:
            law = LutFp16()
            folded = rank & 0x7FFF if rank >= 0x8000 else ~rank & 0x7FFF
            place = "{}, {}".format(*_segment(65535 - 2 * folded))
        rows.append((name, bits, shown, f"0x{rank:04X}", place, repr(law.value(state, rate))))
    return rows


def signs() -> list[Row]:
    rows = []
    for pattern in (1, 7):
        for axis in SignAxis:
            first = pattern_signs(pattern, axis, 3072)[:16]
            text = "".join("+" if sign > 0 else "-" for sign in first)
            rows.append((str(pattern), str(int(axis)), f"0x{pattern_seed(pattern, axis):016X}", text))
    return rows


def shapes() -> list[Row]:
    rows = []
    for granularity, group, *_ in TABLES["shapes"]:
        rate = RateConfig(granularity=granularity, group_size=int(group) if group else None)  # type: ignore[arg-type]
        model, layer = rate.model_shape(75, 256, 2048), rate.layer_shape(256, 2048)
        rows.append((granularity, group, ", ".join(map(str, model)), ", ".join(map(str, layer))))
    return rows


COMPUTED: dict[str, Callable[[], list[Row]]] = {
    "sections": sections, "tile": tile, "nibbles": nibbles, "tables": tables, "ranks": ranks, "signs": signs,
    "shapes": shapes,
}  # fmt: skip
PARSED: dict[str, Callable[[Any], Any]] = {
    "config": parse_config, "native manifest": parse_native, "exl3-v1 manifest": parse_container,
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTED)
def test_tables_are_what_the_package_computes(name: str) -> None:
    assert TABLES[name] == COMPUTED[name]()


@pytest.mark.parametrize("name", PARSED)
def test_json_is_accepted_and_emitted_again(name: str) -> None:
    data = json.loads(OBJECTS[name])
    assert PARSED[name](data).to_json() == data


def test_every_marked_table_is_checked() -> None:
    assert set(TABLES) == set(COMPUTED)
    assert set(OBJECTS) == set(PARSED)
    assert len(re.findall("<!-- check:", TEXT)) == len(COMPUTED) + len(PARSED)


def test_limits_in_prose_are_the_packages() -> None:
    prose = TEXT.replace("\n", " ")
    assert CONTAINER_BITS == {"mcg": (3, 4, 5, 6), "lut_e4m3": (2, 3, 4), "lut_fp16": (5, 6)}
    assert "`mcg` (K 3 to 6), `lut_e4m3` (2 to 4) and `lut_fp16` (5, 6)" in prose
    assert f"distinct ones of {', '.join(PAIR_KINDS)}" in prose
    assert f"at most {BAND_BYTES >> 20} MiB" in prose
