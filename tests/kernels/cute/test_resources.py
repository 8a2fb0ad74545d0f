"""Holds the reading of a binary's resources to CUDA's own tool, and to damaged images."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from trellis_kernels.cute import compiler
from trellis_kernels.cute.keys import DecodeKey
from trellis_kernels.cute.resources import read_resources
from trellis_kernels.errors import KernelValueError


@pytest.fixture(scope="module")
def cubin() -> bytes:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    return compiler.build_cubin(DecodeKey(arch="sm_90a", codebook="3inst", half_bits=14, out_dtype="float32"))


def cuobjdump() -> str:
    """Path of the tool, from the search path or from triton's wheel."""
    triton = find_spec("triton")
    inside = Path(*triton.submodule_search_locations[:1], "backends/nvidia/bin/cuobjdump") if triton else Path()
    found = shutil.which("cuobjdump") or (str(inside) if inside.is_file() else None)
    if found is None:
        pytest.skip("cuobjdump is neither on the path nor in a triton wheel")
    return found


def test_counts_are_those_of_cuobjdump(cubin: bytes, tmp_path: Path) -> None:
    (found,) = read_resources(cubin)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    listing = subprocess.run([cuobjdump(), "-res-usage", file], capture_output=True, text=True, check=True)
    wanted = re.search(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", listing.stdout + listing.stderr)
    assert wanted
    assert wanted.groups() == (
        found.kernel,
        str(found.registers),
        str(found.stack_bytes),
        str(found.shared_bytes),
    )
    assert 2048 < found.code_bytes < len(cubin)


def test_frame_counts_as_stack(cubin: bytes) -> None:
    (found,) = read_resources(cubin)
    frame = bytes([4, 0x11, 8, 0])  # sized record, frame size, eight bytes of payload: symbol and value
    at = cubin.index(frame)
    spilling = cubin[: at + 8] + (48).to_bytes(4, "little") + cubin[at + 12 :]
    (changed,) = read_resources(spilling)
    assert (found.stack_bytes, changed.stack_bytes) == (0, 48)
    assert changed.registers == found.registers


@pytest.mark.parametrize("image", [b"", b"MZ" + bytes(100), b"\x7fELF\x01" + bytes(100), b"\x7fELF\x02"])
def test_other_images_are_refused(image: bytes) -> None:
    with pytest.raises(KernelValueError, match="64-bit ELF"):
        read_resources(image)


def test_kernel_without_register_count_is_refused(cubin: bytes) -> None:
    count = bytes([4, 0x2F, 8, 0])
    with pytest.raises(KernelValueError, match="register count"):
        read_resources(cubin.replace(count, bytes([4, 0x7E, 8, 0])))
