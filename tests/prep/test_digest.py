"""Holds the digest of a source to change with all that decides prepared bytes, and with nothing else."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prep.samples import Layer, extent_of, hooked, open_layer, random_layer, write_checkpoint
from trellis_format.activations import Activation
from trellis_format.files.arrays import MemoryArray
from trellis_format.source import CodeLayout
from trellis_prep import PrepReadError, digest
from trellis_prep.digest import share_key, source_digest


def flip_code(layer: Layer) -> Layer:
    tiles = layer[1].code_view(2, 1).read().copy()
    tiles[3, 5, 7] ^= 1
    rows = [list(row) for row in layer[1].codes]
    rows[2][1] = MemoryArray(tiles)
    return layer[0], dataclasses.replace(layer[1], codes=tuple(tuple(row) for row in rows))


def nudge(name: str) -> Callable[[Layer], Layer]:
    def change(layer: Layer) -> Layer:
        array = getattr(layer[1], name).copy()
        array.view(np.uint16)[..., -1] ^= 1
        return layer[0], dataclasses.replace(layer[1], **{name: array})

    return change


def same_bytes_as(**fields: Any) -> Callable[[Layer], Layer]:
    return lambda layer: (dataclasses.replace(layer[0], **fields), layer[1])


@pytest.mark.parametrize(
    "change",
    [
        flip_code,
        nudge("input_scales"),
        nudge("intermediate_scales"),
        nudge("output_scales"),
        same_bytes_as(codebook="3inst"),
        same_bytes_as(layout=CodeLayout.SLOT_MAJOR),
        same_bytes_as(shared_input_scales=True),
        same_bytes_as(joint_input_scales=True),
    ],
)
def test_each_change_of_what_is_prepared_changes_it(change: Callable[[Layer], Layer]) -> None:
    layer = random_layer(rates=("1", "4"))
    assert source_digest(*change(layer)) != source_digest(*layer)


@pytest.mark.parametrize("change", [same_bytes_as(up_divisor=128.0), same_bytes_as(activation=Activation("situ"))])
def test_what_is_not_prepared_does_not_change_it(change: Callable[[Layer], Layer]) -> None:
    layer = random_layer()
    assert source_digest(*change(layer)) == source_digest(*layer)


def test_equal_layers_have_one_digest() -> None:
    assert source_digest(*random_layer()) == source_digest(*random_layer())
    assert source_digest(*random_layer(seed=1)) != source_digest(*random_layer())


def test_key_is_of_source_extent_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer()
    keys = {share_key(*layer, extent_of(384, first, count)) for first, count in ((0, 3), (0, 1), (1, 1), (1, 2))}
    assert len(keys) == 4
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in keys)
    before = share_key(*layer, layer[0].extent)
    monkeypatch.setattr(digest, "LAYOUT_VERSION", digest.LAYOUT_VERSION + 1)
    assert share_key(*layer, layer[0].extent) != before


def test_content_in_bands_is_content_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer()
    before = source_digest(*layer)
    monkeypatch.setattr(digest, "_BAND_BYTES", 1000)
    assert source_digest(*layer) == before


def test_codes_in_a_file_are_not_read(tmp_path: Path) -> None:
    checkpoint, source, weights = open_layer(write_checkpoint(tmp_path, random_layer()))
    with checkpoint:
        before = checkpoint.bytes_read
        source_digest(source, weights)
        assert checkpoint.bytes_read == before


def test_file_that_was_touched_has_another_digest(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, random_layer())
    shard = path / "model.safetensors"
    checkpoint, source, weights = open_layer(path)
    with checkpoint:
        before = source_digest(source, weights)
        assert source_digest(source, weights) == before
        os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
        assert source_digest(source, weights) != before


def test_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, random_layer())
    checkpoint, source, weights = open_layer(path)
    with checkpoint:
        (path / "model.safetensors").unlink()
        with pytest.raises(PrepReadError, match=r"model\.safetensors: cannot be identified: No such file"):
            source_digest(source, weights)


def test_other_views_are_read_for_their_content() -> None:
    layer = random_layer()
    reads: list[int] = []
    assert source_digest(*hooked(layer, 0, 0, lambda: reads.append(1))) == source_digest(*layer)
    assert reads


def test_codes_in_one_array_are_digested_too() -> None:
    source, weights = random_layer()
    rows = np.arange(12 * 50, dtype=np.int64).astype(np.uint8).reshape(12, 50)
    slots = dataclasses.replace(source, layout=CodeLayout.SLOT_MAJOR)
    digests = set()
    for change in range(2):
        rows[-1, -1] ^= change
        digests.add(source_digest(slots, dataclasses.replace(weights, codes=MemoryArray(rows))))
    assert len(digests) == 2
