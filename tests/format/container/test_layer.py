"""Holds the content of a container's layer to its manifest: every number that can be wrong, one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from slot_files import random_content, random_pair_content
from trellis_format.container.layer import ContainerLayer, check_content, check_shapes, payload_bytes
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import MemoryArray

SMALL = {"experts": 2, "hidden": 512, "intermediate": 256, "row_alignment": 5000}
PLAIN = random_content(**SMALL)
SHARED = random_content(**SMALL, per_expert=False)
SIGNED = random_content((4, 4), **SMALL, codebook="lut_e4m3", bits=2, transform=True)


def put(array: np.ndarray, index: tuple[int, ...], value: float) -> np.ndarray:
    changed = array.copy()
    changed[index] = value
    return changed


@pytest.mark.parametrize("content", [PLAIN, SHARED, SIGNED], ids=["plain", "shared", "signed"])
def test_sound_content_is_accepted(content: ContainerLayer) -> None:
    check_content(content)
    check_content(random_pair_content())


def test_payloads_are_what_the_rates_say() -> None:
    assert payload_bytes(PLAIN).tolist() == [2 * 3 * 32 * 64 * 3] * 8
    assert payload_bytes(random_content(experts=1, hidden=3584, intermediate=128)).tolist() == [129024] * 4


def test_payloads_of_pairs_differ_from_row_to_row() -> None:
    content = random_pair_content(seed=3)
    tiles = 128 // 16 * 32
    expected = []
    for slot in range(16):
        size = 0
        for expert in range(2):
            fc1, fc2 = int(content.rates_fc1[slot // 8, expert]), int(content.rates_fc2[slot // 8, expert])
            size += tiles * (2 * ((fc1 >> 4) + (fc1 & 15)) + (fc2 >> 4) + (fc2 & 15))
        expected.append(size)
    assert payload_bytes(content).tolist() == expected
    assert len(set(expected)) == 2


def test_rate_bytes_of_pairs_are_of_the_declared_kinds() -> None:
    content = random_pair_content()
    for name, byte in (("rates_fc1", 0x44), ("rates_fc2", 0x34)):
        changed = dataclasses.replace(content, **{name: put(getattr(content, name), (1, 0), byte)})
        text = f"layer 3: {name} of pair 1, expert 0 is 0x{byte:02X}; the manifest declares P24, P33, P43"
        with pytest.raises(FormatValueError, match=text):
            check_content(changed)
    with pytest.raises(FormatValueError, match=r"rates_fc1 has shape \[1, 2\], expected \[2, 2\]"):
        check_content(dataclasses.replace(content, rates_fc1=content.rates_fc1[:1]))
    with pytest.raises(FormatValueError, match="rates_fc2 must be uint8, got int64"):
        check_content(dataclasses.replace(content, rates_fc2=content.rates_fc2.astype(np.int64)))


CODES = PLAIN.codes.read()
PAYLOAD = int(payload_bytes(PLAIN)[0])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"codes": CODES.view(np.int8)}, "codes must be uint8, got int8"),
        ({"codes": CODES.reshape(-1)}, r"codes must be 2-D \[slots, row_stride\], got shape \[\d+\]"),
        ({"codes": CODES[:, ::2]}, r"codes must have contiguous rows, got strides \(\d+, 2\)"),
        ({"codes": np.asfortranarray(CODES)}, "codes must have contiguous rows"),
        ({"codes": CODES[:-1]}, "codes have 7 rows, one for each slot, the extent 8"),
        ({"codes": CODES[:, : PAYLOAD - 1]}, f"have {PAYLOAD - 1} bytes, the payload of slot 0 is {PAYLOAD}"),
        (
            {"codes": put(CODES, (5, PAYLOAD + 7), 0x1F)},
            f"padding of codes must be zero, slot 5 has 0x1F at byte {PAYLOAD + 7}, after a payload of {PAYLOAD}",
        ),
        ({"rotations": PLAIN.rotations[:, :, :2]}, r"rotations has shape \[8, 2, 2, 32\], expected \[8, 2, 3, 32\]"),
        ({"rotations": PLAIN.rotations.astype(np.float32)}, "rotations must be float16, got float32"),
        ({"gate_suh": PLAIN.gate_suh.astype(np.float64)}, "gate_suh must be float16, got float64"),
        (
            {"up_suh": PLAIN.up_suh[0]},
            r"up_suh has shape \[512\], expected \[E,H\] = \[2, 512\], .*is true \(\[H\] = \[512\] otherwise\)",
        ),
        ({"down_svh": PLAIN.down_svh[:, :-1]}, r"down_svh has shape \[2, 511\], expected \[E,H\] = \[2, 512\]"),
        ({"gate_suh": put(PLAIN.gate_suh, (1, 9), np.inf)}, r"gate_suh must be finite, got inf at \[1, 9\]"),
        ({"rotations": put(PLAIN.rotations, (7, 1, 2, 31), np.nan)}, r"rotations must be finite, got nan at \[7, 1, 2"),
        ({"sign_pattern": np.zeros(2, np.uint8)}, "sign_pattern without an intermediate Hadamard in the manifest"),
        (
            {"extent": TrellisExtent(global_intermediate_size=256, first_slot=1, slot_count=4)},
            "extent of first slot 1, count 4: .*alignment of 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(FormatValueError, match=text) as caught:
        check_content(dataclasses.replace(PLAIN, **changes))
    assert "extent" in changes or "layer 3: " in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (None, "layer 3: sign_pattern is required with the intermediate Hadamard"),
        (np.array([7, 8], np.uint8), r"layer 3: sign_pattern of expert 1 is 8; patterns are 0\.\.7"),
        (np.zeros(3, np.uint8), r"layer 3: sign_pattern must be uint8 \[2\]"),
        (np.zeros(2, np.int32), r"layer 3: sign_pattern must be uint8 \[2\], .*got int32"),
    ],
)
def test_signs_come_with_the_transform(pattern: np.ndarray | None, text: str) -> None:
    with pytest.raises(FormatValueError, match=text):
        check_content(dataclasses.replace(SIGNED, sign_pattern=pattern))


def test_hidden_tables_are_shared_where_the_manifest_says_so() -> None:
    with pytest.raises(FormatValueError, match=r"gate_suh has shape \[2, 512\], expected \[H\] = \[512\], .*is false"):
        check_content(dataclasses.replace(SHARED, gate_suh=PLAIN.gate_suh))


def test_with_one_expert_the_declaration_decides() -> None:
    own = random_content(experts=1, intermediate=128)
    shared = random_content(experts=1, intermediate=128, per_expert=False)
    assert (own.gate_suh.shape, shared.gate_suh.shape) == ((1, 512), (512,))
    for content, other in ((own, shared), (shared, own)):
        check_content(content)
        with pytest.raises(FormatValueError, match="gate_suh has shape"):
            check_content(dataclasses.replace(content, gate_suh=other.gate_suh))


def test_shapes_are_checked_without_reading() -> None:
    class Unread(MemoryArray):
        def read(self) -> np.ndarray:
            raise AssertionError("read")

    arrays = {name: Unread(table) for name, table in {**PLAIN.tables(), "codes": CODES}.items()}
    check_shapes(PLAIN.head, 3, 8, arrays)
    with pytest.raises(FormatValueError, match="layer 3: codes have 8 rows"):
        check_shapes(PLAIN.head, 3, 12, arrays)


@pytest.mark.parametrize(("name", "kind"), [("head", "ManifestHead"), ("layer", "int"), ("extent", "TrellisExtent")])
def test_fields_have_their_types(name: str, kind: str) -> None:
    with pytest.raises(FormatTypeError, match=f"{name} of a layer must be {kind}, got str"):
        dataclasses.replace(PLAIN, **{name: "3"})


def test_fields_are_arrays() -> None:
    for name in ("codes", "rotations", "gate_suh"):
        with pytest.raises(FormatTypeError, match=f"{name} must be an array, got list"):
            dataclasses.replace(PLAIN, **{name: [1, 2]})


def test_arrays_on_a_device_are_refused() -> None:
    class OnDevice:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    for name in ("codes", "rotations", "down_svh", "sign_pattern"):
        with pytest.raises(FormatValueError, match=f"{name} must be on the CPU, got DLPack device type 2"):
            dataclasses.replace(PLAIN, **{name: OnDevice()})
