"""Holds synthetic layers in containers to the same synthetic model in EXL3, and to codebooks that EXL3 lacks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trellis_format.codebooks import CODEBOOKS
from trellis_format.convert import convert
from trellis_format.convert_source import open_source
from trellis_format.errors import FormatUnsupportedError, FormatValueError
from trellis_format.rates import Rate
from trellis_format.reference import moe_forward
from trellis_format.synth import SynthSpec, plan_synthetic, synth_checkpoint
from trellis_format.synth_names import NAMINGS
from trellis_format.synth_source import PlannedArray, SynthSource, synth_container
from trellis_format.validate import validate_checkpoint
from trellis_format.writer import PlannedTensor

SPEC = SynthSpec(hidden=128, intermediate=256, experts=3, layers=2, codebook="mcg", dense=True)


def tree(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if "config" not in file.name}


@pytest.mark.parametrize(
    ("container", "spec"),
    [
        ("exl3-v1", SPEC),
        ("native", SPEC),
        ("native", replace(SPEC, naming="gpt_oss", hidden=100, intermediate=200, codebook="mul1",
                           rates=(Rate.of(1), Rate.of(2.5)))),
    ],
)  # fmt: skip
def test_a_container_is_what_conversion_makes_of_exl3(tmp_path: Path, container: str, spec: SynthSpec) -> None:
    written = synth_container(tmp_path / "direct", spec, container)
    synth_checkpoint(tmp_path / "exl3", spec)
    with closing(open_source(tmp_path / "exl3")) as source:
        convert(source, tmp_path / "converted", container, shards=spec.shards)
    assert tree(tmp_path / "direct") == tree(tmp_path / "converted")
    assert written > 0


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_is_sound_in_native(tmp_path: Path, naming: str) -> None:
    synth_container(tmp_path / "out", replace(SPEC, naming=naming, intermediate=200), "native")
    assert validate_checkpoint(tmp_path / "out", data=True).findings == ()


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_every_codebook_gives_activations_near_1(tmp_path: Path, codebook: str) -> None:
    spec = replace(SPEC, codebook=codebook, rates=CODEBOOKS[codebook].legal_rates, dense=False)
    synth_container(tmp_path / "out", spec, "native")
    with closing(open_source(tmp_path / "out")) as source:
        described, weights = source.read_layer(1)
        assert described.codebook == codebook
        rng = np.random.default_rng(0)
        y = moe_forward(described, weights, rng.normal(size=(4, 128)), np.array([[0, 2]] * 4), np.full((4, 2), 0.5))
    assert 0.02 < y.std() < 10


def test_layers_are_described_without_their_codes() -> None:
    source = SynthSource(SPEC)
    assert source.layers == (0, 1)
    assert source.files() == []
    assert source.identity() == SynthSource(SPEC).identity() != SynthSource(replace(SPEC, seed=1)).identity()
    described, weights = source.read_layer(0)
    assert described == source.describe(0)
    assert weights.intermediate_scales.shape == (3, 3, 256)
    names = {tensor.name for tensor in source.outside}
    assert names == {tensor.name for tensor in plan_synthetic(SPEC) if ".experts." not in tensor.name}


def test_what_a_container_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FormatUnsupportedError, match="codebook mul1"):
        synth_container(tmp_path / "out", replace(SPEC, codebook="mul1"), "exl3-v1")
    assert list(tmp_path.iterdir()) == []


def test_a_planned_array_reads_as_its_chunks() -> None:
    data = np.arange(12, dtype=np.uint8)
    plan = PlannedTensor("t", "I16", (4, 3), lambda: iter([data[:5], 12, data[5:]]))
    wanted = np.concatenate([data[:5], np.zeros(12, np.uint8), data[5:]]).view("<i2").reshape(4, 3)
    array = PlannedArray(plan, "<i2")
    assert np.array_equal(array.read(), wanted)
    out = np.full(8, 99, dtype=np.uint8)
    array.read_box((slice(1, 3), slice(1, 3)), out)
    assert np.array_equal(out.view("<i2").reshape(2, 2), wanted[1:3, 1:3])
    array.read_box((slice(0, 0), slice(0, 3)), out[:0])
    with pytest.raises(FormatValueError, match="buffer must be"):
        array.read_box((slice(0, 1), slice(0, 3)), out)
