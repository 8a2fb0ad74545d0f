"""Holds compile targets to their names, their devices, and to generators that ask which one they compile for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trellis_kernels.cute import archs, compiler
from trellis_kernels.cute.archs import ARCHS, arch_of_device, compiling_for, current_target, get_arch
from trellis_kernels.cute.keys import DecodeKey
from trellis_kernels.errors import KernelUnsupportedError, KernelValueError


def test_names_are_keys_and_unknown_ones_are_refused() -> None:
    assert all(get_arch(name).name == name for name in ARCHS)
    with pytest.raises(KernelValueError, match=r"'sm_70'; known: sm_80, sm_90a"):
        get_arch("sm_70")


def test_no_capability_has_two_targets() -> None:
    capabilities = [capability for arch in ARCHS.values() for capability in arch.capabilities]
    assert len(capabilities) == len(set(capabilities))


def test_a_device_has_the_target_of_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [(9, 0), (8, 9), (7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", devices.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(archs, "arch_of_device", arch_of_device.__wrapped__)
    assert [archs.arch_of_device(index).name for index in range(2)] == ["sm_90a", "sm_80"]
    with pytest.raises(KernelUnsupportedError, match=r"device 2 \(GPU 2\) has compute capability 7\.5"):
        archs.arch_of_device(2)


def test_a_target_is_current_inside_its_compilation_alone() -> None:
    assert current_target() is None
    with compiling_for("sm_80"):
        with compiling_for("sm_90a"):
            assert current_target() is ARCHS["sm_90a"]
        assert current_target() is ARCHS["sm_80"]
        with pytest.raises(KernelValueError), compiling_for("sm_90a"):
            get_arch("")
        assert current_target() is ARCHS["sm_80"]
    assert current_target() is None
    with pytest.raises(KernelValueError, match="sm_70"), compiling_for("sm_70"):
        pass


def test_generators_see_the_target_of_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(build=lambda key, options: (current_target().name, options))
    monkeypatch.setattr(compiler, "importlib", SimpleNamespace(import_module=lambda name: module))
    for arch in ARCHS:
        assert compiler._build(DecodeKey(arch, "mcg", 6, "float16")) == (arch, f"--gpu-arch {arch}")
