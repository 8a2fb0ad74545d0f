"""Holds the rows that are written to those that are read, whichever way the codes lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from exl3_files import random_layer, write_checkpoint
from trellis_format.checkpoint import Checkpoint, open_checkpoint
from trellis_format.errors import FormatValueError
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.files.arrays import MemoryArray
from trellis_format.plan_codes import plan_codes, scatter_sections
from trellis_format.slots import iterate_rows, row_bytes
from trellis_format.source import CodeLayout, TrellisSource, TrellisWeights
from trellis_format.writer import write_shard


def described(checkpoint: Checkpoint) -> tuple[TrellisSource, TrellisWeights]:
    return trellis_from_exl3(find_layer(checkpoint, 0))


def made(folder: Path, **options: Any) -> Path:
    rng = np.random.default_rng(0)
    bits = {"bits": lambda expert, word: (1.5, 2, 8)[(expert + len(word)) % 3], "codebook": "mul1"}
    return write_checkpoint(folder / "in", random_layer(rng, experts=3, hidden=384, **(bits | options)))


@pytest.mark.parametrize("padding", [0, 100])
@pytest.mark.parametrize("words", [("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")])
def test_linears_and_rows_give_the_same_file(tmp_path: Path, padding: int, words: tuple[str, ...]) -> None:
    with open_checkpoint(made(tmp_path, words=words)) as checkpoint:
        source, weights = described(checkpoint)
        stride = row_bytes(source) + padding
        rows = np.concatenate([band.copy() for band in iterate_rows(source, weights, stride)]).reshape(-1, stride)
        told: list[int] = []
        write_shard(tmp_path / "a.safetensors", [plan_codes(source, weights, stride)], on_bytes=told.append)
        found = load_file(tmp_path / "a.safetensors")["codes"]
        assert np.array_equal(found, rows)
        assert sum(told) == found.nbytes
        assert not found[:, row_bytes(source) :].any()
        slot_major = TrellisSource(**{**vars(source), "layout": CodeLayout.SLOT_MAJOR})
        again = TrellisWeights(**{**vars(weights), "codes": MemoryArray(found[:, : row_bytes(source)])})
        write_shard(tmp_path / "b.safetensors", [plan_codes(slot_major, again, stride)])
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_each_linear_is_read_once_and_whole(tmp_path: Path) -> None:
    with open_checkpoint(made(tmp_path)) as checkpoint:
        source, weights = described(checkpoint)
        before = checkpoint.bytes_read
        covered = sum(piece.nbytes for _, piece in scatter_sections(source, weights, row_bytes(source)))
        assert covered == source.code_bytes()
        assert checkpoint.bytes_read - before == source.code_bytes()


def test_a_stride_that_rows_do_not_fit_is_refused(tmp_path: Path) -> None:
    with open_checkpoint(made(tmp_path)) as checkpoint:
        source, weights = described(checkpoint)
        with pytest.raises(
            FormatValueError, match=rf"rows of {row_bytes(source)} bytes do not fit a stride of 8 bytes"
        ):
            plan_codes(source, weights, 8)
