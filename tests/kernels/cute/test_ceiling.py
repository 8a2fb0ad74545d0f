"""Holds the ceiling kernels to decoding every weight, in registers alone."""

from __future__ import annotations

import pytest
import torch

from trellis_format.errors import FormatValueError
from trellis_format.rates import Rate
from trellis_kernels.cute.keys import DecodeKey

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import compiler
from trellis_kernels.cute.ceiling import CeilingKey, launch_ceiling
from trellis_kernels.cute.resources import read_resources

KEYS = [CeilingKey("sm_90a", name, 6, streams) for name in ("3inst", "mcg", "mul1") for streams in (True, False)]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_binary_decodes_all_that_a_decode_kernel_does(key: CeilingKey) -> None:
    (found,) = read_resources(compiler.build_cubin(key))
    (decode,) = read_resources(compiler.build_cubin(DecodeKey("sm_90a", key.codebook, 6, "float16")))
    assert found.stack_bytes == 0
    assert found.code_bytes > decode.code_bytes // 2  # nothing was optimised away


def test_names_tell_keys_apart() -> None:
    assert len({str(key) for key in KEYS}) == len(KEYS)
    assert all(eval(repr(key)) == key for key in KEYS)


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [True, False])
def test_gpu_every_whole_step_counts(streams: bool) -> None:
    codes = torch.randint(-(2**15), 2**15, (1040 + 3, 48), dtype=torch.int16, device="cuda")
    scratch = torch.zeros(4, dtype=torch.int32, device="cuda")
    weights = launch_ceiling(codes, codebook="mcg", rate=Rate.of(3), streams=streams, scratch=scratch)
    torch.cuda.synchronize()
    assert weights == 1040 * 256


@pytest.mark.gpu
def test_gpu_unknown_codebooks_are_refused() -> None:
    codes = torch.zeros(4, 48, dtype=torch.int16, device="cuda")
    with pytest.raises(FormatValueError, match="hyb"):
        launch_ceiling(codes, codebook="hyb", rate=Rate.of(3), streams=True, scratch=codes)
