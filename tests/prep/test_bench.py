"""Holds the measurement of preparation to its counts, and to finding codes that are not the source's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prep.samples import extent_of, random_layer
from trellis_format.rates import Rate
from trellis_prep import PreparedExperts, PrepTypeError, PrepValueError, TrellisStaging, bench, plan_layout
from trellis_prep.bench import make_layer, measure_preparation
from trellis_prep.pinned import registered_bytes


def test_counts_are_those_of_the_plan() -> None:
    source, weights = random_layer(experts=5)
    extent, staging = extent_of(384, 1, 2), TrellisStaging(max_bytes=200_000, readers=2)
    found = measure_preparation(source, weights, staging=staging, extent=extent, repeats=3, layers=2)
    assert found.nbytes == plan_layout(source, extent).total_bytes
    assert found.final_bytes == 2 * found.nbytes
    assert (found.device, found.layers, found.bound_bytes, found.readers) == ("cpu", 2, 200_000, 2)
    assert found.slots * found.slot_bytes <= 200_000
    assert [len(found.samples_ns), len(found.alone_samples_ns), len(found.copy_samples_ns)] == [3, 3, 3]
    assert all(sample > 0 for sample in found.samples_ns + found.alone_samples_ns + found.copy_samples_ns)
    assert found.is_exact
    assert found.peak_device_bytes is None
    assert found.share_of_copy == pytest.approx(found.gb_per_second / found.copy_gb_per_second)
    assert registered_bytes() == 0


def test_codes_that_are_not_the_sources_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, layer = bench.prepare, random_layer()

    def flip(*arguments: object, **options: object) -> PreparedExperts:
        prepared = honest(*arguments, **options)  # type: ignore[arg-type]
        prepared.codes[-1] ^= 1
        return prepared

    monkeypatch.setattr(bench, "prepare", flip)
    assert not measure_preparation(*layer, repeats=1).is_exact


def test_made_layers_are_of_the_asked_size(tmp_path: Path) -> None:
    source, weights = make_layer(tmp_path / "layer", hidden=256, intermediate=128, experts=2, rate=Rate.of(2))
    assert source.code_bytes() == 2 * 3 * 256 * 128 * 2 // 8
    assert measure_preparation(source, weights, repeats=1).is_exact
    holes, weights = make_layer(
        tmp_path / "holes", hidden=256, intermediate=128, experts=2, rate=Rate.of(2), sparse=True
    )
    assert not bench.prepare(holes, weights).codes.any()


@pytest.mark.parametrize("name", ["repeats", "layers"])
def test_counts_are_positive_ints(name: str) -> None:
    with pytest.raises(PrepValueError, match=f"{name} must be at least 1, got 0"):
        measure_preparation(*random_layer(), **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(PrepTypeError, match=f"{name} must be an int, got float"):
        measure_preparation(*random_layer(), **{name: 1.5})  # type: ignore[arg-type]


@pytest.mark.gpu
def test_gpu_takes_nothing_beyond_the_weights_but_rounding() -> None:
    found = measure_preparation(*random_layer(experts=8), device="cuda", repeats=2, layers=3)
    assert found.is_exact
    assert found.peak_device_bytes is not None
    assert found.peak_device_bytes <= 1 << 20
    assert found.final_bytes >= 3 * found.nbytes
    assert torch.device(found.device).type == "cuda"
