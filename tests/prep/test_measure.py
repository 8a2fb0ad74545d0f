"""Holds measurements to what was really taken."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from trellis_prep import measure
from trellis_prep.measure import Measured, Meter, sample_rate

CPU = torch.device("cpu")
MIB = 1 << 20


def test_peak_is_of_what_was_freed_meanwhile() -> None:
    with Meter(CPU) as meter:
        big = np.ones(96 * MIB, dtype=np.uint8)
        del big
        kept = np.ones(16 * MIB, dtype=np.uint8)
    measured = meter.measured
    assert measured is not None
    if measured.host_peak_bytes is None:
        pytest.skip("this system does not tell a process's peak memory")
    assert 80 * MIB < measured.host_peak_bytes < 160 * MIB
    assert measured.device_peak_bytes is None
    assert kept.size == 16 * MIB


def test_time_is_wall_time() -> None:
    with Meter(CPU) as meter:
        time.sleep(0.05)
    assert meter.measured is not None
    assert 0.05 <= meter.measured.seconds < 5


def test_failure_is_not_measured() -> None:
    with pytest.raises(KeyError), Meter(CPU) as meter:
        raise KeyError
    assert meter.measured is None


def test_peaks_above_the_weights() -> None:
    assert Measured(1.0, 500, None).above(300) == (200, None)
    assert Measured(1.0, 200, None).above(300) == (0, None)
    assert Measured(1.0, None, None).above(300) == (None, None)
    assert Measured(1.0, 500, 310).above(300) == (500, 10)


def test_system_that_does_not_tell_gives_none(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(measure, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(measure, "_CLEAR_REFS", tmp_path / "no" / "clear_refs")
    with Meter(CPU) as meter:
        pass
    assert meter.measured is not None
    assert meter.measured.host_peak_bytes is None


def test_rate_is_in_gigabytes() -> None:
    assert sample_rate(3_000_000_000, 2.0) == 1.5
    assert sample_rate(0, 0.0) == 0.0


@pytest.mark.gpu
def test_device_peak_is_torchs() -> None:
    device = torch.device("cuda", 0)
    with Meter(device) as meter:
        big = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        del big
    assert meter.measured is not None
    assert 64 * MIB <= (meter.measured.device_peak_bytes or 0) < 80 * MIB
