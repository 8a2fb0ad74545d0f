"""Holds the self-check to passing where nothing is wrong, and to showing each op that is broken on purpose."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch

from trellis_format.codebooks import CODEBOOKS
from trellis_format.rates import Rate
from trellis_format.ring import unpack_states
from trellis_kernels import OPS, KernelUnsupportedError, PackedRoutes, selfcheck
from trellis_kernels.selfcheck import Check, environment_lines, pattern_codes, run_checks

CPU = torch.device("cpu")


def test_the_pattern_is_the_published_one() -> None:
    states = unpack_states(pattern_codes(1, Rate.of(3)), Rate.of(3)).reshape(-1)
    assert [f"{state:04x}" for state in states[:4]] == ["44c4", "2627", "313c", "89e3"]
    digest = hashlib.sha256(states.astype("<u2").tobytes()).hexdigest()
    assert digest == "aff9af7846e149dd86c186e4b9a096b38e87c6303ae59eb3ad380ca95b287daa"


def test_a_sound_machine_passes_every_op_and_codebook() -> None:
    checks = list(run_checks(CPU))
    assert [check for check in checks if check.outcome != "ok"] == []
    assert {check.op for check in checks} == set(OPS)
    pairs = {f"{name} K={rate}" for name, codebook in CODEBOOKS.items() for rate in codebook.legal_rates}
    assert {check.case for check in checks if check.op == "decode"} == pairs


def spoil(result: object) -> object:
    """Change one number of an op's result."""
    tensor = result.route_indices if isinstance(result, PackedRoutes) else result
    assert isinstance(tensor, torch.Tensor)
    tensor.view(-1)[0] += 1
    return result


@pytest.mark.parametrize("op", OPS)
def test_one_wrong_number_shows(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    sound = selfcheck.implementation

    def broken(name: str, backend: str) -> Callable[..., object]:
        function = sound(name, backend)
        return (lambda *given, **keywords: spoil(function(*given, **keywords))) if name == op else function

    monkeypatch.setattr(selfcheck, "implementation", broken)
    outcomes = {check.outcome for check in run_checks(CPU) if check.op == op}
    assert "ok" not in outcomes
    assert all(word.startswith(("off by", "1 of", "expert", "failed")) for word in outcomes)


def test_an_exception_is_one_row_and_a_missing_backend_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = selfcheck.implementation

    def broken(name: str, backend: str) -> Callable[..., object]:
        if name == "activate":
            raise RuntimeError("no launch today")
        if name == "grouped_gemm":
            raise KernelUnsupportedError("op grouped_gemm has no such backend")
        return sound(name, backend)

    monkeypatch.setattr(selfcheck, "implementation", broken)
    found = {check.op: check for check in run_checks(CPU)}
    assert found["activate"].outcome == "failed: RuntimeError: no launch today"
    assert found["grouped_gemm"].outcome == "skipped: op grouped_gemm has no such backend"
    assert [op for op, check in found.items() if not check.is_good] == ["activate"]
    assert Check("a", "b", "cpu", "off by 1").is_good is False


def test_nan_is_a_fault() -> None:
    found = torch.full((2, 2), float("nan"))
    assert selfcheck._distance(found, np.ones((2, 2))) is not None


def test_versions_and_device_are_named() -> None:
    lines = environment_lines(CPU)
    assert f"torch {torch.__version__}" in lines[0]
    assert lines[1] == "cpu"


def test_the_environment_is_told_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", find_nothing)
    monkeypatch.setattr(selfcheck, "version", find_nothing)
    line = environment_lines(CPU)[0]
    assert line.startswith("trellis-kernels ")
    assert line.endswith("nvidia-cutlass-dsl not installed")


@pytest.mark.gpu
def test_gpu_every_kernel_passes() -> None:
    checks = list(run_checks(torch.device("cuda", 0)))
    assert [check for check in checks if not check.is_good] == []
    assert {check.backend for check in checks} == {"cpu", "cute"}


def test_the_compiler_is_there_or_not_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(selfcheck, "version", missing)
    assert selfcheck.compiler_state() == (None, None)
    monkeypatch.setattr(selfcheck, "version", lambda name: "4.8.1")
    monkeypatch.setitem(sys.modules, "cutlass", None)
    assert selfcheck.compiler_state() == ("4.8.1", "ModuleNotFoundError")
    monkeypatch.setitem(sys.modules, "cutlass", sys)
    assert selfcheck.compiler_state() == ("4.8.1", None)
