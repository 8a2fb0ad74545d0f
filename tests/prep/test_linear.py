"""Holds one linear's preparation to exact bytes, to its bound, and to reading each byte once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from exl3_files import random_linear, write_shard
from trellis_format.decoded import StoredLinear
from trellis_format.errors import FormatValueError
from trellis_format.exl3.linear import describe_linear
from trellis_format.files.arrays import FileArray, ShardReader
from trellis_format.files.header import read_header
from trellis_format.rates import Rate
from trellis_prep import PrepStateError, PrepTypeError, PrepValueError, StagingBuffer, TrellisStaging, prepare_linear
from trellis_prep.linear import plan_linear

SHAPES = [(384, 256), (128, 640)]
K = [1, 2.5, 8]


def stored(folder: Path, tensors: dict[str, np.ndarray]) -> tuple[StoredLinear, ShardReader]:
    """A linear `m` in a file, and the reader of that file."""
    reader = ShardReader(read_header(write_shard(folder / "in.safetensors", tensors)))
    arrays = {name.rpartition(".")[2]: FileArray(reader, entry) for name, entry in reader.header.entries.items()}
    return StoredLinear.of_exl3(describe_linear("m", arrays)), reader


def make(bits: float, k: int, n: int, *, bias: bool = False) -> dict[str, np.ndarray]:
    kind = np.float32 if bias else None
    return dict(random_linear(np.random.default_rng(3), "m", k, n, bits=bits, codebook="mul1", bias=kind))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("bits", K)
@pytest.mark.parametrize("bound", ["tile", "two tiles", "odd", "plenty"])
def test_every_byte_arrives_through_any_bound(
    tmp_path: Path, bound: str, bits: float, k: int, n: int, bias: bool
) -> None:
    tensors = make(bits, k, n, bias=bias)
    linear, reader = stored(tmp_path, tensors)
    tile = linear.rate.tile_bytes
    most = {"tile": tile, "two tiles": 2 * tile, "odd": 5 * tile + 16, "plenty": 1 << 20}[bound]
    seen: list[tuple[int, int]] = []
    found = prepare_linear(
        linear, staging=TrellisStaging(max_bytes=most), poison=True, progress=lambda *at: seen.append(at)
    )
    assert np.array_equal(found.codes.numpy(), tensors["m.trellis"])
    assert np.array_equal(found.input_scale.numpy()[0], tensors["m.suh"])
    assert np.array_equal(found.output_scale.numpy()[0], tensors["m.svh"])
    if bias:
        assert found.bias is not None
        assert np.array_equal(found.bias.numpy()[0], tensors["m.bias"].astype(np.float16))
    else:
        assert found.bias is None
    assert (found.k, found.n, found.rate, found.codebook) == (k, n, Rate.of(bits), "mul1")
    assert seen[-1] == (found.nbytes, found.nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert reader.bytes_read == sum(tensor.nbytes for name, tensor in tensors.items() if name != "m.mul1")


def test_a_buffer_serves_one_linear_after_another(tmp_path: Path) -> None:
    with StagingBuffer("cpu") as buffer:
        for bits, k in ((3, 384), (8, 256), (1, 128)):
            folder = tmp_path / str(k)
            folder.mkdir()
            tensors = make(bits, k, 256)
            found = prepare_linear(stored(folder, tensors)[0], buffer=buffer, poison=True)
            assert np.array_equal(found.codes.numpy(), tensors["m.trellis"])
        assert 0 < buffer.nbytes <= TrellisStaging().max_bytes
        buffer.close()
        with pytest.raises(PrepStateError, match="is closed"):
            prepare_linear(stored(tmp_path / "128", tensors)[0], buffer=buffer)


@pytest.mark.parametrize("bound", [256, 300, 4096, 1 << 20])
def test_slots_stay_within_the_bound(tmp_path: Path, bound: int) -> None:
    plan = plan_linear(stored(tmp_path, make(8, 256, 256))[0], staging=TrellisStaging(max_bytes=bound))
    assert plan.slots * plan.slot_bytes <= bound
    assert plan.slot_bytes >= 256


def test_a_bound_below_one_tile_is_refused_with_both_numbers(tmp_path: Path) -> None:
    linear, reader = stored(tmp_path, make(8, 128, 128))
    with pytest.raises(PrepValueError, match=r"staging of 255 bytes is insufficient: .* tiles of 256 bytes"):
        prepare_linear(linear, staging=TrellisStaging(max_bytes=255))
    assert reader.bytes_read == 0


def test_arguments_of_another_type_are_refused() -> None:
    with pytest.raises(PrepTypeError, match="must be a StoredLinear, got str"):
        prepare_linear("m")  # type: ignore[arg-type]  # what the test is about


def test_a_scale_that_is_not_finite_frees_everything(tmp_path: Path) -> None:
    tensors = make(3, 128, 128)
    tensors["m.svh"][7] = np.inf
    with pytest.raises(FormatValueError, match="must be finite; value inf at index 7"):
        prepare_linear(stored(tmp_path, tensors)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("bits", K)
def test_a_gpu_gets_the_same_bytes(tmp_path: Path, bits: float) -> None:
    linear, _ = stored(tmp_path, make(bits, 384, 256, bias=True))
    here = prepare_linear(linear)
    there = prepare_linear(linear, device="cuda", staging=TrellisStaging(max_bytes=3 * linear.rate.tile_bytes))
    for name in ("codes", "input_scale", "output_scale", "bias"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name))
