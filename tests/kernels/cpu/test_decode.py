"""Holds the torch decode to the numpy law, bit for bit: every codebook and rate, every state, every output dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_cases import PAIRS, as_bits, poisoned, random_codes
from trellis_format.codebooks import STATES, get_codebook
from trellis_format.errors import FormatValueError
from trellis_format.rates import Rate
from trellis_format.ring import unpack_states
from trellis_format.tiles import decode_inner
from trellis_kernels import KernelTypeError, KernelValueError
from trellis_kernels.cpu import decode as module
from trellis_kernels.cpu.decode import decode

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
K3 = Rate.of(3)


@pytest.mark.parametrize(("codebook", "rate"), PAIRS)
def test_random_tiles_decode_to_the_law(codebook: str, rate: Rate) -> None:
    codes = random_codes(2, 3, 5, rate=rate)
    wanted = np.stack([decode_inner(part, get_codebook(codebook), rate) for part in codes])
    out = poisoned(2, 48, 80, dtype=torch.float16)
    assert decode(torch.from_numpy(codes), codebook=codebook, rate=rate, out=out) is out
    np.testing.assert_array_equal(as_bits(out), as_bits(torch.from_numpy(wanted)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_dtype_is_the_fp16_value_converted(dtype: torch.dtype) -> None:
    codes = random_codes(1, 7, rate=K3)
    wanted = torch.from_numpy(decode_inner(codes, get_codebook("mcg"), K3)).to(dtype)
    out = poisoned(16, 112, dtype=dtype)
    decode(torch.from_numpy(codes), codebook="mcg", rate=K3, out=out)
    np.testing.assert_array_equal(as_bits(out), as_bits(wanted))


def test_all_states_occur_in_the_tiles_tested() -> None:
    codes = random_codes(4096, 1, rate=Rate.of(8))
    assert np.unique(unpack_states(codes, Rate.of(8))).size == STATES
    out = poisoned(65536, 16, dtype=torch.float32)
    decode(torch.from_numpy(codes), codebook="3inst", rate=Rate.of(8), out=out)
    wanted = decode_inner(codes, get_codebook("3inst"), Rate.of(8)).astype(np.float32)
    np.testing.assert_array_equal(out.numpy(), wanted)


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "_CHUNK_TILES", chunk)
    codes = random_codes(5, 3, rate=K3)
    out = poisoned(80, 48, dtype=torch.float16)
    decode(torch.from_numpy(codes), codebook="mul1", rate=K3, out=out)
    np.testing.assert_array_equal(out.numpy(), decode_inner(codes, get_codebook("mul1"), K3))


@pytest.mark.parametrize("table", ["auto", "compact", "full"])
def test_the_form_of_a_table_changes_no_bit(table: str) -> None:
    codes = random_codes(1, 7, rate=Rate.of(2))
    out = poisoned(16, 112, dtype=torch.float16)
    decode(torch.from_numpy(codes), codebook="lut_e4m3", rate=Rate.of(2), table=table, out=out)
    np.testing.assert_array_equal(out.numpy(), decode_inner(codes, get_codebook("lut_e4m3"), Rate.of(2)))


def test_no_tiles_are_no_work() -> None:
    out = poisoned(0, 64)
    assert decode(torch.zeros(0, 4, 48, dtype=torch.int16), codebook="mcg", rate=K3, out=out) is out


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"codes": torch.zeros(1, 2, 48, dtype=torch.int32)}, KernelTypeError, "codes must be torch.int16"),
        ({"out": torch.zeros(16, 32, dtype=torch.float64)}, KernelTypeError, "out must be torch.float16 or"),
        ({"out": torch.zeros(16, 32, device="meta")}, KernelTypeError, "out must be on cpu"),
        ({"rate": Rate.of(4)}, KernelValueError, r"n_tiles, 64\], got \[1, 2, 48\]"),
        ({"codes": torch.zeros(2, 48, dtype=torch.int16)}, KernelValueError, r"got \[2, 48\]"),
        ({"out": torch.zeros(32, 16)}, KernelValueError, r"out must be \[16, 32\].*got \[32, 16\]"),
        ({"out": torch.zeros(32, 16).T}, KernelValueError, "contiguous"),
        ({"codebook": "hyb"}, FormatValueError, "hyb"),
        ({"table": "large"}, KernelValueError, "table 'large' is not one of compact, full"),
        ({"table": "full"}, KernelValueError, "mul1 at K = 3 has no full table; lut_e4m3 has one at K = 2"),
        ({"rate": Rate.of(2.5), "codebook": "mcg"}, FormatValueError, "mul1"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_written(
    change: dict[str, object], error: type[Exception], text: str
) -> None:
    call = {"codes": torch.zeros(1, 2, 48, dtype=torch.int16), "codebook": "mul1", "rate": K3, "out": poisoned(16, 32)}
    call |= change
    before = call["out"].clone() if call["out"].device.type == "cpu" else None
    codes = call.pop("codes")
    with pytest.raises(error, match=text):
        decode(codes, **call)
    if before is not None:
        np.testing.assert_array_equal(as_bits(call["out"]), as_bits(before))
