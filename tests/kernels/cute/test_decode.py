"""Holds the decode kernel to the numpy law: in numpy lane by lane, as a binary, and on a GPU where there is one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trellis_format.codebooks import CODEBOOKS, STATES, get_codebook
from trellis_format.errors import FormatValueError
from trellis_format.rates import Rate
from trellis_format.ring import unpack_states
from trellis_format.tiles import decode_inner
from trellis_kernels.arguments import FULL_TABLE_CODEBOOK, FULL_TABLE_RATE
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.registry import decode_keys
from trellis_kernels.errors import ColdKernelError, KernelTypeError, KernelValueError

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import compiler
from trellis_kernels.cute.decode import decode
from trellis_kernels.cute.resources import read_resources
from trellis_kernels.cute.table_codebooks import TABLE_CODEBOOKS, table_codebook

PAIRS = [
    pytest.param(name, rate, id=f"{name}-{rate}")
    for name, codebook in CODEBOOKS.items()
    for rate in codebook.legal_rates
]
TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def random_codes(*shape: int, rate: Rate, seed: int = 0) -> np.ndarray:
    """Tiles of random bits, which are all legal: `[*shape, 16*K] int16`."""
    rng = np.random.default_rng([seed, rate.half_bits, *shape])
    return rng.integers(-(2**15), 2**15, (*shape, rate.tile_words16), dtype=np.int16)


def expected(codes: np.ndarray, codebook: str, rate: Rate, dtype: str) -> torch.Tensor:
    """The numpy law in an output dtype; fp16 to bf16 rounds to nearest even."""
    return torch.from_numpy(decode_inner(codes, get_codebook(codebook), rate)).to(TORCH_DTYPES[dtype])


def as_bits(values: torch.Tensor) -> np.ndarray:
    """Bytes of a tensor, so that comparison is of bits."""
    return values.cpu().contiguous().view(torch.uint8).numpy().reshape(-1)


# ------------------------------------------------------------------------------------------------ without a GPU
@pytest.mark.parametrize(("codebook", "rate"), PAIRS)
@pytest.mark.parametrize("has_stmatrix", [True, False])
def test_lanes_in_numpy_give_the_law(run_decode, codebook: str, rate: Rate, has_stmatrix: bool) -> None:
    codes = random_codes(2, 7, rate=rate)
    found = run_decode(codes, rate, codebook, "float16", has_stmatrix)
    np.testing.assert_array_equal(found, as_bits(expected(codes, codebook, rate, "float16")))


@pytest.mark.parametrize("dtype", VALUE_BYTES)
def test_lanes_in_numpy_give_the_law_with_a_full_table(run_decode, dtype: str) -> None:
    codes = random_codes(2, 7, rate=FULL_TABLE_RATE)
    found = run_decode(codes, FULL_TABLE_RATE, FULL_TABLE_CODEBOOK, dtype, True, "full")
    np.testing.assert_array_equal(found, as_bits(expected(codes, FULL_TABLE_CODEBOOK, FULL_TABLE_RATE, dtype)))


@pytest.mark.parametrize("dtype", VALUE_BYTES)
@pytest.mark.parametrize("n_tiles", [1, 2, 3, 4, 5, 17])
def test_lanes_in_numpy_write_every_dtype_and_ragged_row(run_decode, dtype: str, n_tiles: int) -> None:
    rate = Rate.of(2.5)
    codes = random_codes(3, n_tiles, rate=rate)
    found = run_decode(codes, rate, "mul1", dtype, True)
    np.testing.assert_array_equal(found, as_bits(expected(codes, "mul1", rate, dtype)))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_binary_stays_in_registers(arch: str, codebook: str) -> None:
    has_table = codebook in TABLE_CODEBOOKS
    rates = (4, 10) if has_table else (6, 7, 14)
    keys = [key for key in decode_keys(arch) if key.codebook == codebook and key.half_bits in rates]
    assert keys
    for key in keys:
        (cost,) = read_resources(compiler.build_cubin(key))
        table_bytes = 0 if key.table == "full" or not has_table else table_codebook(codebook, key.table).words.nbytes
        assert cost.stack_bytes == 0
        # 128 threads of at most 42 registers leave room for 12 blocks, three quarters of an SM's warps; with a table 96
        # leave room for five
        assert 16 < cost.registers <= (96 if has_table else 42)
        assert 8192 <= cost.shared_bytes - table_bytes <= 9216


def test_tensors_off_the_device_are_refused() -> None:
    with pytest.raises(KernelTypeError, match="CUDA device, got cpu and cpu"):
        decode(torch.zeros(1, 1, 48, dtype=torch.int16), codebook="mul1", rate=Rate.of(3), out=torch.zeros(16, 16))


# --------------------------------------------------------------------------------------------------- on a GPU
def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix on the device in which an element that is never written shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", VALUE_BYTES)
@pytest.mark.parametrize(("codebook", "rate"), PAIRS)
def test_gpu_gives_the_law_for_all_states(codebook: str, rate: Rate, dtype: str) -> None:
    codes = random_codes(61, 137, rate=rate)
    assert np.unique(unpack_states(codes, rate)).size == STATES
    out = poisoned(61 * 16, 137 * 16, dtype=TORCH_DTYPES[dtype])
    assert decode(torch.from_numpy(codes).cuda(), codebook=codebook, rate=rate, out=out) is out
    np.testing.assert_array_equal(as_bits(out), as_bits(expected(codes, codebook, rate, dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", VALUE_BYTES)
@pytest.mark.parametrize("shape", [(61, 137), (1, 1), (3000, 3), (2, 9000)])
def test_gpu_full_table_gives_the_compact_ones_bits(shape: tuple[int, int], dtype: str) -> None:
    codes = torch.from_numpy(random_codes(*shape, rate=FULL_TABLE_RATE)).cuda()
    found = {}
    for table in ("auto", "compact", "full"):
        out = poisoned(shape[0] * 16, shape[1] * 16, dtype=TORCH_DTYPES[dtype])
        found[table] = decode(codes, codebook=FULL_TABLE_CODEBOOK, rate=FULL_TABLE_RATE, table=table, out=out)
    wanted = expected(codes.cpu().numpy(), FULL_TABLE_CODEBOOK, FULL_TABLE_RATE, dtype)
    np.testing.assert_array_equal(as_bits(found["full"]), as_bits(wanted))
    assert all(torch.equal(found["full"], found[table]) for table in ("auto", "compact"))


@pytest.mark.gpu
def test_gpu_full_table_replays_after_its_caller_forgot_it() -> None:
    codes = torch.from_numpy(random_codes(3, 5, rate=FULL_TABLE_RATE)).cuda()
    out = poisoned(48, 80, dtype=torch.float16)
    call = {"codebook": FULL_TABLE_CODEBOOK, "rate": FULL_TABLE_RATE, "table": "full", "out": out}
    decode(codes, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(codes, **call)
    del call
    torch.cuda.empty_cache()
    hoard = [torch.full((1 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    out.fill_(float("nan"))
    graph.replay()
    wanted = expected(codes.cpu().numpy(), FULL_TABLE_CODEBOOK, FULL_TABLE_RATE, "float16")
    np.testing.assert_array_equal(as_bits(out), as_bits(wanted))
    assert len(hoard) == 64


@pytest.mark.gpu
def test_gpu_full_table_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SimpleNamespace(shared_memory_per_block_optin=65536, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    codes = torch.zeros(1, 1, 32, dtype=torch.int16, device="cuda")
    with pytest.raises(KernelValueError, match=r"takes 74752 bytes .* has 65536; take compact"):
        decode(
            codes,
            codebook=FULL_TABLE_CODEBOOK,
            rate=FULL_TABLE_RATE,
            table="full",
            out=poisoned(16, 16, dtype=torch.float16),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (5, 3), (3, 4), (2, 5), (7, 15), (1, 16), (2, 17), (129, 6)])
@pytest.mark.parametrize("bits", [1, 2.5, 3, 4, 7, 8])
def test_gpu_writes_ragged_shapes_and_nothing_else(shape: tuple[int, int], bits: float) -> None:
    rate = Rate.of(bits)
    codes = random_codes(*shape, rate=rate, seed=1)
    elements = shape[0] * shape[1] * 256
    guarded = poisoned(elements + 512, dtype=torch.float16)
    out = guarded[256 : 256 + elements].view(shape[0] * 16, shape[1] * 16)
    decode(torch.from_numpy(codes).cuda(), codebook="mul1", rate=rate, out=out)
    np.testing.assert_array_equal(as_bits(out), as_bits(expected(codes, "mul1", rate, "float16")))
    assert guarded[:256].isnan().all()
    assert guarded[256 + elements :].isnan().all()


@pytest.mark.gpu
def test_gpu_takes_leading_axes_and_4_byte_alignment() -> None:
    rate = Rate.of(3)
    codes = random_codes(2, 3, 5, 7, rate=rate, seed=2)
    storage = torch.zeros(codes.size + 2, dtype=torch.int16, device="cuda")
    shifted = storage[2:].view(codes.shape)
    shifted.copy_(torch.from_numpy(codes))
    out = poisoned(2, 3, 80, 112, dtype=torch.float16)
    decode(shifted, codebook="mcg", rate=rate, out=out)
    for i in range(2):
        for j in range(3):
            wanted = expected(codes[i, j], "mcg", rate, "float16")
            np.testing.assert_array_equal(as_bits(out[i, j]), as_bits(wanted))


@pytest.mark.gpu
def test_gpu_offsets_pass_32_bits() -> None:
    rate = Rate.of(1)
    tile_rows, n_tiles = 8229, 1024  # 2.2e9 weights: output bytes and elements both pass 2^31
    codes = torch.randint(-(2**15), 2**15, (tile_rows, n_tiles, 16), dtype=torch.int16, device="cuda")
    out = poisoned(tile_rows * 16, n_tiles * 16, dtype=torch.float16)
    decode(codes, codebook="3inst", rate=rate, out=out)
    for rows in (slice(0, 2), slice(4095, 4098), slice(tile_rows - 2, tile_rows)):
        wanted = expected(codes[rows].cpu().numpy(), "3inst", rate, "float16")
        np.testing.assert_array_equal(as_bits(out[rows.start * 16 : rows.stop * 16]), as_bits(wanted))
    assert not out.isnan().any()


@pytest.mark.gpu
def test_gpu_runs_on_the_current_stream_and_in_a_graph() -> None:
    rate = Rate.of(4)
    host = random_codes(3, 9, rate=rate, seed=3)
    codes = torch.from_numpy(host).cuda()
    out = poisoned(48, 144, dtype=torch.float32)
    decode(codes, codebook="3inst", rate=rate, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(codes, codebook="3inst", rate=rate, out=out)
    host = random_codes(3, 9, rate=rate, seed=4)
    codes.copy_(torch.from_numpy(host))
    out.fill_(float("nan"))
    graph.replay()
    np.testing.assert_array_equal(as_bits(out), as_bits(expected(host, "3inst", rate, "float32")))


@pytest.mark.gpu
def test_gpu_refuses_a_cold_kernel_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_ready", {})
    codes = torch.zeros(1, 1, 16, dtype=torch.int16, device="cuda")
    out = poisoned(16, 16, dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ColdKernelError, match=r"captured.*half_bits=2"):
        decode(codes, codebook="mcg", rate=Rate.of(1), out=out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"codes": lambda c: c.to(torch.int32)}, KernelTypeError, r"int16, got torch\.int32"),
        ({"out": lambda o: o.to(torch.float64)}, KernelTypeError, r"got torch\.float64"),
        ({"out": lambda o: o.cpu()}, KernelTypeError, "cuda:0 and cpu"),
        ({"codes": lambda c: c[..., :40]}, KernelValueError, r"48\], got \[4, 6, 40\]"),
        ({"codes": lambda c: c[0]}, KernelValueError, r"got \[6, 48\]"),
        ({"out": lambda o: o[:48]}, KernelValueError, r"\[64, 96\].*got \[48, 96\]"),
        ({"out": lambda o: o.t().contiguous().t()}, KernelValueError, "out must be contiguous"),
        ({"codes": lambda c: c.transpose(0, 1).contiguous().transpose(0, 1)}, KernelValueError, "codes must be contig"),
        ({"out": lambda o: torch.zeros(6145, device="cuda")[1:].view(64, 96)}, KernelValueError, "16 bytes, got 4"),
        ({"codebook": lambda _: "mcgg"}, FormatValueError, "mcgg"),
    ],
)
def test_gpu_refuses(change, error, match: str) -> None:
    rate = Rate.of(3)
    arguments = {
        "codes": torch.from_numpy(random_codes(4, 6, rate=rate)).cuda(),
        "out": poisoned(64, 96, dtype=torch.float32),
        "codebook": "mcg",
    }
    arguments = {name: change.get(name, lambda same: same)(value) for name, value in arguments.items()}
    with pytest.raises(error, match=match):
        decode(arguments["codes"], codebook=arguments["codebook"], rate=rate, out=arguments["out"])


@pytest.mark.gpu
def test_gpu_accepts_no_tiles() -> None:
    codes = torch.zeros(0, 4, 48, dtype=torch.int16, device="cuda")
    out = torch.zeros(0, 64, dtype=torch.float16, device="cuda")
    assert decode(codes, codebook="mcg", rate=Rate.of(3), out=out) is out
