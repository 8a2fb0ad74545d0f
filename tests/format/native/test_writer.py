"""Holds written native checkpoints to what loops lay, to the same bits on the way back, and to being whole."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from format.native.test_layer import GEOMETRY, glm_layer, k3_layer
from slot_files import Layer, random_linears, rows_by_loop
from trellis_format.activations import Activation
from trellis_format.errors import FormatUnsupportedError, FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.native.layer import trellis_from_native
from trellis_format.native.manifest import MANIFEST_NAME, NativeGeometry, NativeHead, read_manifest
from trellis_format.native.reader import read_layer
from trellis_format.native.scales import ScaleFactors
from trellis_format.native.writer import layer_entry, plan_head, write_layer, write_manifest, write_native_layer
from trellis_format.schema import parse_model
from trellis_format.slots import read_linear
from trellis_format.source import CodeLayout, TrellisSource

VARIANTS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "uniform": {"rates": (3,), "codebook": "3inst"},
    "no gate": {"gated": False},
    "biased and padded": {"biased": True, "true_sizes": (200, 300)},
    "shared": {"shared": True},
    "joint": {"joint": True},
    "shared and joint": {"shared": True, "joint": True, "codebook": "mcg", "rates": (4,)},
    "transform": {"hidden": 512, "transform": True, "codebook": "lut_e4m3", "rates": (2,)},
    "one expert": {"experts": 1, "rates": (1.5, 2.5, 3.5)},
    "lut_fp16": {"codebook": "lut_fp16", "rates": (5, 6)},
}
EACH = pytest.mark.parametrize("variant", VARIANTS)


def same_linears(left: Layer, right: Layer) -> None:
    geometry = left[0].geometry
    for expert in range(geometry.num_experts):
        for projection in range(len(geometry.projections)):
            one, other = read_linear(*left, expert, projection), read_linear(*right, expert, projection)
            assert one.tobytes() == other.tobytes()


def write_one(folder: Path, layer: Layer, index: int = 0) -> None:
    head = plan_head({index: layer[0]})
    write_manifest(folder, head, {index: write_layer(folder, head, index, *layer)})


@EACH
def test_linears_to_rows_and_back_is_bit_identical(tmp_path: Path, variant: str) -> None:
    layer = random_linears(**VARIANTS[variant])
    write_one(tmp_path, layer, 7)
    source, weights = trellis_from_native(read_layer(tmp_path, read_manifest(tmp_path), 7))
    assert source == dataclasses.replace(layer[0], layout=CodeLayout.SLOT_MAJOR)
    same_linears(layer, (source, weights))
    before, after = layer[1].scale_arrays(), weights.scale_arrays()
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.dtype == after[name].dtype == np.float16
        assert array.shape == after[name].shape
        assert array.tobytes() == after[name].tobytes()
    patterns = layer[1].expert_sign_patterns
    assert (patterns is None) == (weights.expert_sign_patterns is None)
    if patterns is not None:
        assert patterns.tobytes() == weights.expert_sign_patterns.tobytes()  # type: ignore[union-attr]


@EACH
def test_rows_are_written_again_as_the_same_file(tmp_path: Path, variant: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    write_one(first, random_linears(**VARIANTS[variant]))
    for hold_codes in (True, False):
        layer = trellis_from_native(read_layer(first, read_manifest(first), 0, hold_codes=hold_codes))
        write_one(second, layer)
        for path in first.iterdir():
            assert path.read_bytes() == (second / path.name).read_bytes()


@EACH
def test_another_reader_sees_the_rows_of_the_loop(tmp_path: Path, variant: str) -> None:
    layer = random_linears(**VARIANTS[variant])
    write_one(tmp_path, layer)
    tensors = load_file(tmp_path / "trellis-layer-00000.safetensors")
    assert np.array_equal(tensors["codes"], rows_by_loop(layer))
    manifest = json.loads((tmp_path / MANIFEST_NAME).read_text())
    data = (tmp_path / "trellis-layer-00000.safetensors").read_bytes()
    assert manifest["layers"]["0"]["sha256"] == hashlib.sha256(data).hexdigest()
    assert sorted(tensors) == sorted(read_manifest(tmp_path).tensor_names(tuple(layer[0].biased)))


def test_layers_of_different_granularity_share_one_configuration(tmp_path: Path) -> None:
    layers = {
        0: random_linears(rates=(3,), shared=True, joint=True, seed=1),
        1: random_linears(rates=(1, 2, 3, 4, 5, 6, 7, 8, 1.5), seed=2),
        2: random_linears(rates=(2.5,), shared=True, seed=3),
        5: random_linears(rates=(2, 2, 2, 8, 8, 8, 4, 4, 4), joint=True, biased=True, seed=4),
    }
    layers[5] = (dataclasses.replace(layers[5][0], up_divisor=128.0), layers[5][1])
    head = plan_head({index: layer[0] for index, layer in layers.items()})
    assert head.config.rate.granularity == "per_expert_projection"
    assert head.config.scale.input_scales.vectors == "per_expert"
    entries = {index: write_layer(tmp_path, head, index, *layer) for index, layer in layers.items()}
    manifest = write_manifest(tmp_path, head, entries)
    assert manifest == read_manifest(tmp_path)
    for index, layer in layers.items():
        found = trellis_from_native(read_layer(tmp_path, manifest, index))
        same_linears(layer, found)
        assert found[0].rates == layer[0].rates
        assert (found[0].up_divisor, found[0].biased) == (layer[0].up_divisor, layer[0].biased)
        mine = layer[1].input_scales
        lead = (3, *mine.shape) if layer[0].shared_input_scales else mine.shape
        assert np.array_equal(found[1].input_scales, np.broadcast_to(mine, lead))


@pytest.mark.parametrize(
    ("rates", "granularity"),
    [
        ([(3,), (3,)], "uniform"),
        ([(3,), (4,)], "per_layer"),
        ([(3, 3, 3, 4, 4, 4, 5, 5, 5), (4,)], "per_expert"),
        ([(3, 3, 4), (4,)], "per_expert_projection"),
    ],
)
def test_the_coarsest_granularity_is_chosen(rates: list[tuple[float, ...]], granularity: str) -> None:
    sources = {index: random_linears(rates=given, hidden=128)[0] for index, given in enumerate(rates)}
    assert plan_head(sources).config.rate.granularity == granularity


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"codebook": "3inst", "rates": (3,)}, "one codebook, not mul1 and 3inst"),
        ({"hidden": 128}, "one geometry"),
        ({"experts": 2}, "one geometry"),
        ({"gated": False}, "one geometry"),
    ],
)
def test_layers_that_cannot_share_a_checkpoint_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(FormatUnsupportedError, match=f"layers 1 and 2: a native checkpoint has {text}"):
        plan_head({2: random_linears(**changes)[0], 1: random_linears()[0]})


def test_shares_and_nothing_cannot_be_written() -> None:
    with pytest.raises(FormatValueError, match="needs at least one layer"):
        plan_head({})
    source = random_linears()[0]
    share = TrellisExtent(global_intermediate_size=384, first_slot=4, slot_count=4)
    with pytest.raises(FormatUnsupportedError, match=r"layer 4: only TrellisExtent.* is at hand"):
        plan_head({4: dataclasses.replace(source, extent=share)})
    other = dataclasses.replace(source, activation=Activation("situ"))
    with pytest.raises(FormatUnsupportedError, match="one activation"):
        plan_head({0: source, 1: other})


def test_layers_that_do_not_fit_the_head_are_refused(tmp_path: Path) -> None:
    head = plan_head({0: random_linears(rates=(3,), shared=True)[0]})
    for changes, text in (
        ({"rates": (3, 3, 4), "shared": True}, "do not fit the head's granularity uniform"),
        ({"rates": (3,)}, "experts have scales of their own, the head declares per_layer ones"),
        ({"rates": (3,), "shared": True, "codebook": "mcg"}, "layer 0: mcg of .* differs from the head's"),
        ({"rates": (3,), "shared": True, "experts": 2}, "differs from the head's"),
    ):
        with pytest.raises(FormatValueError, match=text):
            write_layer(tmp_path, head, 0, *random_linears(**changes))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path) -> None:
    layer = random_linears()
    head = plan_head({0: layer[0]})

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_layer(tmp_path, head, 0, *layer, on_bytes=stop)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FormatValueError, match="cannot be written: No such file"):
        write_layer(tmp_path / "nowhere", head, 0, *layer)
    entry = write_layer(tmp_path, head, 0, *layer)
    with pytest.raises(FormatValueError, match="cannot be written: No such file"):
        write_manifest(tmp_path / "nowhere", head, {0: entry})


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    layer, pieces = random_linears(), []
    head = plan_head({0: layer[0]})
    entry = write_layer(tmp_path, head, 0, *layer, on_bytes=pieces.append)
    assert sum(pieces) == sum(array.nbytes for array in load_file(tmp_path / entry.file).values())
    assert layer_entry(tmp_path, 0, layer[0]) == entry


def head_of(config: Any) -> NativeHead:
    return parse_model(
        NativeHead,
        {
            "kind": "trellis-manifest",
            "schema": "trellis-native-v1",
            "quantization_config": config.quantization_config(),
            "geometry": NativeGeometry.of(GEOMETRY).model_dump(),
        },
    )


def test_gains_are_written_as_they_are(tmp_path: Path) -> None:
    one = ScaleFactors(np.full(512, 1.5, np.float16), np.array(0.5, np.float16))
    for content in (glm_layer(), k3_layer(input_scales=one)):
        head = head_of(content.config)
        entry = write_native_layer(tmp_path, head, 1, content)
        found = read_layer(tmp_path, write_manifest(tmp_path, head, {1: entry}), 1)
        assert found.codes.read().tobytes() == content.codes.read().tobytes()
        assert found.rate.tobytes() == content.rate.tobytes()
        for name in ("input_scales", "intermediate_scales", "output_scales"):
            mine, theirs = getattr(content, name), getattr(found, name)
            assert mine.vectors.tobytes() == theirs.vectors.tobytes()
            assert (mine.gains is None) == (theirs.gains is None)
            if mine.gains is not None:
                assert mine.gains.tobytes() == theirs.gains.tobytes()
        left, right = trellis_from_native(content), trellis_from_native(found)
        assert left[0] == right[0]
        for name, array in left[1].scale_arrays().items():
            assert array.tobytes() == right[1].scale_arrays()[name].tobytes()


def test_content_of_another_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatValueError, match="layer 1: configuration, sizes or extent differ from the head's"):
        write_native_layer(tmp_path, head_of(k3_layer().config), 1, glm_layer())
    assert list(tmp_path.iterdir()) == []


def test_the_source_stays_as_it_was(tmp_path: Path) -> None:
    source, weights = random_linears()
    before = [weights.code_view(*divmod(index, 3)).read().tobytes() for index in range(9)]
    write_one(tmp_path, (source, weights))
    assert [weights.code_view(*divmod(index, 3)).read().tobytes() for index in range(9)] == before
    assert isinstance(source, TrellisSource)
