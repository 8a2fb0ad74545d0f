"""Holds synthetic checkpoints to being sound, to their specification, and to depending on nothing but it."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trellis_format.checkpoint import open_checkpoint
from trellis_format.codebooks import EXL3_CODEBOOKS
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import find_layer, find_layers
from trellis_format.inspect import inspect_checkpoint
from trellis_format.rates import Rate
from trellis_format.reference import moe_forward
from trellis_format.report import Severity
from trellis_format.synth import SynthSpec, plan_synthetic, synth_checkpoint
from trellis_format.synth_names import NAMINGS

SPEC = SynthSpec(hidden=128, intermediate=256, experts=3, layers=2, rates=(Rate.of(2),))


def digests(spec: SynthSpec) -> dict[str, str]:
    """SHA-256 of every tensor's bytes, without a file; a hole hashes as its zeros."""
    result = {}
    for tensor in plan_synthetic(spec):
        digest = hashlib.sha256()
        for chunk in tensor.chunks():
            digest.update(bytes(chunk) if isinstance(chunk, int) else chunk.tobytes())
        result[tensor.name] = digest.hexdigest()
    return result


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_gives_a_checkpoint_without_a_finding(tmp_path: Path, naming: str, dense: bool) -> None:
    spec = replace(SPEC, hidden=192, intermediate=100, naming=naming, dense=dense, layers=1, experts=2)
    synth_checkpoint(tmp_path / "out", spec)
    report = inspect_checkpoint(tmp_path / "out")
    assert [(finding.code, finding.message) for finding in report.findings] == []
    (layer,) = report.layers
    assert layer.readable
    assert (layer.hidden_size, layer.padded_hidden_size) == (192, 256)
    assert (layer.intermediate_size, layer.padded_intermediate_size) == (100, 128)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        (key,) = find_layers(checkpoint)
        source, weights = trellis_from_exl3(find_layer(checkpoint, key))
    rng = np.random.default_rng(0)
    y = moe_forward(source, weights, rng.normal(size=(4, 192)), np.array([[0, 1]] * 4), np.full((4, 2), 0.5))
    assert 0.02 < y[:, :192].std() < 10  # scales keep activations near 1
    if y.shape[1] > 192 and not source.biased:
        assert not y[:, 192:].any()


@pytest.mark.parametrize("codebook", EXL3_CODEBOOKS)
def test_rates_are_drawn_from_those_given(tmp_path: Path, codebook: str) -> None:
    rates = EXL3_CODEBOOKS[codebook].legal_rates
    spec = replace(SPEC, codebook=codebook, rates=rates, experts=24, layers=1, intermediate=128, top_k=4)
    synth_checkpoint(tmp_path / "out", spec)
    (layer,) = inspect_checkpoint(tmp_path / "out").layers
    assert layer.readable
    found = Counter[str]()
    for projection in layer.projections:
        found.update(projection.rates)
        assert set(projection.codebooks) == {codebook}
    assert set(found) <= {str(rate) for rate in rates}
    assert len(found) > len(rates) // 2


@pytest.mark.parametrize(("mix", "in_expert", "in_layer"), [("layer", 1, 1), ("expert", 1, 2), ("projection", 2, 2)])
def test_what_takes_a_draw_of_its_own(mix: Any, in_expert: int, in_layer: int) -> None:
    spec = replace(SPEC, rates=(Rate.of(1), Rate.of(4)), mix=mix, experts=8, layers=6, top_k=1)
    tables: dict[str, dict[str, set[int]]] = {}
    for tensor in plan_synthetic(spec):
        parts = tensor.name.split(".")
        if parts[-1] == "trellis":
            tables.setdefault(parts[2], {}).setdefault(parts[5], set()).add(tensor.shape[2])
    assert max(len(rates) for experts in tables.values() for rates in experts.values()) == in_expert
    assert max(len(set().union(*experts.values())) for experts in tables.values()) == in_layer
    assert len(set().union(*(rates for experts in tables.values() for rates in experts.values()))) == 2


def test_bytes_follow_from_seed_and_name_alone() -> None:
    base = digests(SPEC)
    assert digests(SPEC) == base
    assert digests(replace(SPEC, shards=5)) == base
    wider = digests(replace(SPEC, experts=4, layers=3, dense=True))
    routers = {name for name in base if name.endswith("gate.weight")}
    assert all(wider[name] == digest for name, digest in base.items() if name not in routers)
    other = digests(replace(SPEC, seed=1))
    assert all((other[name] == digest) == name.endswith(".mul1") for name, digest in base.items())
    assert len({digest for name, digest in base.items() if not name.endswith(".mul1")}) == len(base) - 18


def test_bytes_of_a_seed_never_change() -> None:
    """Reports of bugs name a seed, so its bytes are part of the contract."""
    found = digests(SynthSpec(hidden=128, intermediate=128, experts=1, layers=1, top_k=1, naming="gpt_oss"))
    together = hashlib.sha256("".join(f"{name} {found[name]}\n" for name in sorted(found)).encode()).hexdigest()
    assert together == "e06ccac1d1ea4abeeca72b0369b877a48ecd81d817f9c8bc3df7279a5844d155"


def test_shards_and_sizes(tmp_path: Path) -> None:
    told: list[int] = []
    total = synth_checkpoint(tmp_path / "out", replace(SPEC, shards=3, dense=True), on_bytes=told.append)
    assert sum(told) == total
    report = inspect_checkpoint(tmp_path / "out")
    assert len(report.shards) == 3
    assert report.bytes.total == total
    assert report.bytes.head > 0
    assert (report.model.num_experts, report.model.top_k) == (3, 2)


def test_a_sparse_checkpoint_takes_little_room(tmp_path: Path) -> None:
    spec = replace(SPEC, hidden=2048, intermediate=2048, experts=8, rates=(Rate.of(8),), sparse=True)
    total = synth_checkpoint(tmp_path / "out", spec)
    assert total > 190 << 20
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "out").iterdir()) < 4 << 20
    report = inspect_checkpoint(tmp_path / "out")
    assert all(finding.severity is not Severity.ERROR for finding in report.findings)
    assert all(layer.readable for layer in report.layers)


@pytest.mark.parametrize("name", ["hidden", "intermediate", "experts", "layers", "top_k", "shards"])
def test_sizes_are_positive_ints(name: str) -> None:
    with pytest.raises(FormatValueError, match=f"{name} 0 is below 1"):
        replace(SPEC, **{name: 0})
    with pytest.raises(FormatTypeError, match=f"{name} must be an int, got bool"):
        replace(SPEC, **{name: True})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": -1}, "seed -1 is below 0"),
        ({"top_k": 4}, "top_k 4 exceeds the 3 experts"),
        ({"mix": "tile"}, "unknown mix 'tile'"),
        ({"codebook": "lut_fp16"}, "codebook lut_fp16 has no K = 2"),
        ({"codebook": "lut_e4m3", "dense": True}, "EXL3, which has no codebook lut_e4m3; known: 3inst, mcg, mul1"),
        ({"codebook": "fp4"}, "unknown codebook 'fp4'"),
        ({"rates": ()}, "at least one rate"),
        ({"codebook": "mcg", "rates": (Rate.of(3), Rate.of(2.5))}, "no half rate"),
        ({"naming": "gpt2"}, "unknown naming"),
    ],
)
def test_specifications_are_checked(change: dict[str, Any], text: str) -> None:
    with pytest.raises(FormatValueError, match=text):
        replace(SPEC, **change)


def test_exl3_has_no_table_codebooks(tmp_path: Path) -> None:
    with pytest.raises(FormatValueError, match="unknown codebook 'lut_e4m3' of EXL3; known: 3inst, mcg, mul1"):
        synth_checkpoint(tmp_path / "out", replace(SPEC, codebook="lut_e4m3"))


def test_the_destination_is_not_overwritten(tmp_path: Path) -> None:
    synth_checkpoint(tmp_path / "out", SPEC)
    with pytest.raises(FormatValueError, match="already exists"):
        synth_checkpoint(tmp_path / "out", SPEC)
