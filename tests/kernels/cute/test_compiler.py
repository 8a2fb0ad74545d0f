"""Holds the table of compiled kernels to its rules: one compilation a key, and none where it is forbidden."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from trellis_kernels.cute import compiler
from trellis_kernels.cute.archs import ARCHS, Arch, arch_of_device, get_arch
from trellis_kernels.cute.keys import DecodeKey
from trellis_kernels.errors import ColdKernelError, KernelUnsupportedError

KEY = DecodeKey(arch="sm_90a", codebook="mul1", half_bits=5, out_dtype="bfloat16")
OTHER = DecodeKey(arch="sm_90a", codebook="mul1", half_bits=4, out_dtype="bfloat16")


class FakeKernel:
    """What a compilation returns, which counts how often it goes to the devices."""

    def __init__(self, key: DecodeKey) -> None:
        self.key = key
        self.loads = 0

    def to(self, device: None) -> None:
        self.loads += 1


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[DecodeKey]:
    """An empty table of kernels whose compilations are recorded and cost nothing."""
    built: list[DecodeKey] = []

    def build(key: DecodeKey, extra_options: str = "") -> FakeKernel:
        built.append(key)
        return FakeKernel(key)

    monkeypatch.setattr(compiler, "_build", build)
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(compiler, "_ready", {})
    monkeypatch.setattr(compiler, "_frozen", False)
    return built


def test_equal_keys_share_one_compilation(builds: list[DecodeKey]) -> None:
    first = compiler.compile_kernel(KEY)
    again = compiler.compile_kernel(DecodeKey(**vars(KEY)))
    assert again is first
    assert compiler.compile_kernel(OTHER) is not first
    assert builds == [KEY, OTHER]
    assert first.loads == 0


def test_cold_keys_are_those_that_are_not_ready(builds: list[DecodeKey]) -> None:
    assert compiler.cold([KEY, OTHER, KEY]) == (KEY, OTHER)
    assert compiler.kernel_count() == 0
    compiler.precompile([KEY])
    missing = (OTHER,) if not torch.cuda.is_available() or arch_of_device(0).name == KEY.arch else (KEY, OTHER)
    assert compiler.cold([KEY, OTHER]) == missing
    assert compiler.kernel_count() == 1
    assert builds == [KEY]  # asking compiles nothing


def test_launch_compiles_and_loads_once(builds: list[DecodeKey]) -> None:
    kernel = compiler.ready(KEY)
    assert compiler.ready(KEY) is kernel
    assert builds == [KEY]
    assert kernel.loads == 1


def test_frozen_launch_of_a_cold_kernel_names_its_key(builds: list[DecodeKey]) -> None:
    compiler.ready(KEY)
    compiler.freeze()
    assert compiler.is_frozen()
    assert compiler.ready(KEY).key == KEY
    with pytest.raises(ColdKernelError, match="frozen") as caught:
        compiler.ready(OTHER)
    assert repr(OTHER) in str(caught.value)
    assert builds == [KEY]
    compiler.thaw()
    assert compiler.ready(OTHER).key == OTHER


def test_compiled_but_not_loaded_is_cold_under_capture(builds: list[DecodeKey], monkeypatch) -> None:
    compiler.compile_kernel(KEY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ColdKernelError, match="captured"):
        compiler.ready(KEY)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert compiler.ready(KEY).loads == 1


def test_precompile_loads_only_what_this_device_runs(builds: list[DecodeKey], monkeypatch) -> None:
    foreign = DecodeKey(arch="sm_80", codebook="mcg", half_bits=4, out_dtype="float16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compiler, "arch_of_device", lambda index: get_arch("sm_90a"))
    compiler.precompile([KEY, foreign])
    assert builds == [KEY, foreign]
    assert compiler._ready.keys() == {KEY}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compiler.precompile([OTHER])
    assert compiler._ready.keys() == {KEY}
    assert compiler._compiled.keys() == {KEY, foreign, OTHER}


def test_precompile_compiles_each_key_once_and_tells_how_far_it_is(builds: list[DecodeKey]) -> None:
    seen: list[tuple[int, int]] = []
    compiler.precompile([KEY, OTHER, KEY], progress=lambda done, total: seen.append((done, total)))
    assert builds == [KEY, OTHER]
    assert seen == [(1, 2), (2, 2)]


def test_processes_without_a_cache_leave_the_work_here(builds: list[DecodeKey], monkeypatch) -> None:
    monkeypatch.setattr(compiler, "_cache", lambda: None)
    compiler.precompile([KEY, OTHER], jobs=2)
    assert builds == [KEY, OTHER]


def test_missing_dsl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass.cute")

    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(compiler.importlib, "import_module", absent)
    with pytest.raises(KernelUnsupportedError, match=r"mul1 K=2\.5.*nvidia-cutlass-dsl"):
        compiler.compile_kernel(KEY)


def test_keys_and_command_line_import_no_dsl() -> None:
    code = "import sys, trellis_kernels.cli; sys.exit(any(name.split('.')[0] == 'cutlass' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_binary_is_for_its_target(arch: str) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    cubin = compiler.build_cubin(DecodeKey(arch=arch, codebook="mcg", half_bits=4, out_dtype="float16"))
    assert cubin[:4] == b"\x7fELF"
    major_minor = int(arch.removeprefix("sm_").removesuffix("a"))
    # the ELF header's flags hold the target in byte 0 up to ABI 7, and in byte 1 from ABI 8 on
    assert major_minor in cubin[48:50]


def test_device_is_matched_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (9, 0), 1: (8, 9), 2: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "some card")
    arch_of_device.cache_clear()
    found: list[Arch] = [arch_of_device(0), arch_of_device(1)]
    assert [arch.name for arch in found] == ["sm_90a", "sm_80"]
    with pytest.raises(KernelUnsupportedError, match=r"some card.*7\.5.*9\.0"):
        arch_of_device(2)
    arch_of_device.cache_clear()
