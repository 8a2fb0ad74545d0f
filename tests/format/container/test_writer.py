"""Holds written containers to what loops lay and to the same bits on the way back; what they cannot hold is refused."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from exl3_files import random_layer, write_checkpoint
from slot_files import random_content, random_linears, random_pair_content, rows_by_loop
from trellis_format.checkpoint import open_checkpoint
from trellis_format.container.layer import ContainerLayer, ContainerPairLayer
from trellis_format.container.manifest import MANIFEST_NAME, read_manifest
from trellis_format.container.reader import read_layer
from trellis_format.container.writer import (
    container_refusal,
    layer_entry,
    plan_head,
    write_content,
    write_layer,
    write_manifest,
)
from trellis_format.errors import FormatTypeError, FormatUnsupportedError, FormatValueError
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.extent import TrellisExtent
from trellis_format.slots import read_linear, row_bytes
from trellis_format.source import TrellisSource

VARIANTS: dict[str, dict[str, Any]] = {
    "mcg 3": {"codebook": "mcg", "rates": (3,)},
    "mcg 6, shared": {"codebook": "mcg", "rates": (6,), "shared": True},
    "lut_e4m3 2, joint": {"codebook": "lut_e4m3", "rates": (2,), "joint": True},
    "lut_fp16 5, one expert": {"codebook": "lut_fp16", "rates": (5,), "experts": 1},
}
EACH = pytest.mark.parametrize("variant", VARIANTS)
FILE = "exl3-layer-00003.safetensors"


@EACH
@pytest.mark.parametrize("row_alignment", [1, 4096, 65536])
def test_linears_to_container_and_back_is_bit_identical(tmp_path: Path, variant: str, row_alignment: int) -> None:
    layer = random_linears(**VARIANTS[variant])
    head = plan_head({3: layer[0]}, row_alignment=row_alignment)
    manifest = write_manifest(tmp_path, head, {3: write_layer(tmp_path, head, 3, *layer)})
    assert manifest == read_manifest(tmp_path)
    content = read_layer(tmp_path, manifest, 3)
    assert content.codes.shape[1] % row_alignment == 0
    source, weights = trellis_from_exl3(content)
    for expert in range(layer[0].geometry.num_experts):
        for projection in range(3):
            stored = layer[1].code_view(expert, projection).read()
            assert read_linear(source, weights, expert, projection).tobytes() == stored.tobytes()
    assert source.geometry == layer[0].geometry
    assert source.joint_input_scales == layer[0].joint_input_scales
    for name, array in layer[1].scale_arrays().items():
        assert weights.scale_arrays()[name].tobytes() == array.tobytes()


@EACH
def test_another_reader_sees_the_rows_of_the_loop(tmp_path: Path, variant: str) -> None:
    layer = random_linears(**VARIANTS[variant])
    head = plan_head({3: layer[0]})
    entry = write_layer(tmp_path, head, 3, *layer)
    tensors = load_file(tmp_path / FILE)
    assert set(tensors) == head.tensor_names()
    size = row_bytes(layer[0])
    assert np.array_equal(tensors["codes"][:, :size], rows_by_loop(layer))
    assert tensors["codes"].shape[1] == -(-size // 4096) * 4096
    assert not tensors["codes"][:, size:].any()
    experts = layer[0].geometry.num_experts
    for slot in range(12):
        for expert in range(experts):
            for projection in range(3):
                expected = layer[1].intermediate_scales[expert, projection, 32 * slot : 32 * slot + 32]
                assert np.array_equal(tensors["rotations"][slot, expert, projection], expected)
    with safe_open(tmp_path / FILE, "np") as file:
        assert dict(file.metadata()) == head.layer_metadata(3)
    assert entry.sha256 == hashlib.sha256((tmp_path / FILE).read_bytes()).hexdigest()
    assert layer_entry(tmp_path, 3) == entry


def test_a_checkpoints_layers_survive_the_way_there_and_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        name: tensor
        for index in (1, 4)
        for name, tensor in random_layer(rng, layer=index, hidden=256, experts=3, bits=4).items()
    }
    folder = write_checkpoint(tmp_path / "raw", tensors)
    out = tmp_path / "out"
    out.mkdir()
    with open_checkpoint(folder) as checkpoint:
        layers = {index: trellis_from_exl3(find_layer(checkpoint, index)) for index in (1, 4)}
        head = plan_head({index: layer[0] for index, layer in layers.items()})
        write_manifest(out, head, {index: write_layer(out, head, index, *layer) for index, layer in layers.items()})
    for index in (1, 4):
        source, weights = trellis_from_exl3(read_layer(out, read_manifest(out), index))
        for expert in range(3):
            for place, word in enumerate(("gate_proj", "up_proj", "down_proj")):
                name = f"model.layers.{index}.mlp.experts.{expert}.{word}"
                assert read_linear(source, weights, expert, place).tobytes() == tensors[f"{name}.trellis"].tobytes()
                inner = weights.intermediate_scales[expert, place]
                first = weights.input_scales[expert, min(place, weights.input_scales.shape[1] - 1)]
                suh, svh = (inner, weights.output_scales[expert]) if place == 2 else (first, inner)
                assert suh.tobytes() == tensors[f"{name}.suh"].tobytes()
                assert svh.tobytes() == tensors[f"{name}.svh"].tobytes()


def test_shared_layers_are_given_to_every_expert_where_one_is_not(tmp_path: Path) -> None:
    layers = {
        0: random_linears(codebook="mcg", rates=(4,), shared=True),
        1: random_linears(codebook="mcg", rates=(4,), seed=1),
    }
    head = plan_head({index: layer[0] for index, layer in layers.items()})
    assert head.hadamard.per_expert_input_rotations
    entries = {index: write_layer(tmp_path, head, index, *layer) for index, layer in layers.items()}
    manifest = write_manifest(tmp_path, head, entries)
    for index, layer in layers.items():
        _, weights = trellis_from_exl3(read_layer(tmp_path, manifest, index))
        mine = layer[1].input_scales
        assert np.array_equal(weights.input_scales, np.broadcast_to(mine, (3, 2, 256)))


def test_a_transformed_layer_is_read_back_in_halves(tmp_path: Path) -> None:
    layer = random_linears(hidden=512, intermediate=512, codebook="lut_e4m3", rates=(2,), transform=True)
    head = plan_head({3: layer[0]})
    assert head.layout.extent_barriers == (8,)
    manifest = write_manifest(tmp_path, head, {3: write_layer(tmp_path, head, 3, *layer)})
    with pytest.raises(FormatValueError, match="the barrier at slot 8 lies inside"):
        read_layer(tmp_path, manifest, 3, TrellisExtent.whole(512))
    with pytest.raises(FormatValueError, match="the barrier at slot 8 lies inside"):
        trellis_from_exl3(read_layer(tmp_path, manifest, 3))
    for first in (0, 8):
        share = TrellisExtent(global_intermediate_size=512, first_slot=first, slot_count=8)
        source, weights = trellis_from_exl3(read_layer(tmp_path, manifest, 3, share))
        assert source.expert_transform == layer[0].expert_transform
        assert weights.expert_sign_patterns.tobytes() == layer[1].expert_sign_patterns.tobytes()  # type: ignore[union-attr]
        assert weights.input_scales.tobytes() == layer[1].input_scales.tobytes()
        for index in range(9):
            expected = read_linear(*layer, *divmod(index, 3), share)
            assert read_linear(source, weights, *divmod(index, 3)).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codebook": "mul1", "rates": (4,)}, "codebook mul1 is not one of mcg, lut_e4m3, lut_fp16"),
        ({"codebook": "3inst", "rates": (4,)}, "codebook 3inst is not one of"),
        ({"codebook": "mcg", "rates": (3, 4)}, "rates K = 3, 4 differ within the layer"),
        ({"codebook": "mcg", "rates": (2,)}, "codebook mcg has no K = 2 in it; legal K: 3, 4, 5, 6"),
        ({"codebook": "mcg", "rates": (8,)}, "codebook mcg has no K = 8 in it"),
        ({"codebook": "mcg", "rates": (4,), "gated": False}, "experts have no gate, for which it has no field"),
        ({"codebook": "mcg", "rates": (4,), "biased": True}, "gate, up, down has a bias"),
        ({"codebook": "mcg", "rates": (4,), "true_sizes": (250, 384)}, "padding to 256 x 384 channels"),
    ],
)
def test_what_it_cannot_hold_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    source, _ = random_linears(**changes)
    assert reason in str(container_refusal(source))
    with pytest.raises(FormatUnsupportedError, match=f"layer 9: an exl3-v1 container cannot hold it: {reason}"):
        plan_head({9: source})


def plain_source(**changes: Any) -> TrellisSource:
    return random_linears(**{"codebook": "mcg", "rates": (4,)} | changes)[0]


def test_shares_and_divided_projections_are_refused() -> None:
    assert container_refusal(plain_source()) is None
    divided = dataclasses.replace(plain_source(), up_divisor=128.0)
    assert "up is divided by 128" in str(container_refusal(divided))
    share = TrellisExtent(global_intermediate_size=384, first_slot=4, slot_count=4)
    assert "only 128 of 384 channels" in str(container_refusal(dataclasses.replace(plain_source(), extent=share)))
    signed, _ = random_linears(hidden=512, codebook="mcg", rates=(4,), transform=True)
    assert "half of 384 channels, where an intermediate Hadamard has a barrier" in str(container_refusal(signed))
    with pytest.raises(FormatValueError, match="a container needs at least one layer"):
        plan_head({})
    with pytest.raises(FormatTypeError, match="row_alignment must be an integer, got str"):
        plan_head({0: plain_source()}, row_alignment="4096")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"rates": (5,)}, "rates"), ({"hidden": 128}, "geometry"), ({"codebook": "lut_e4m3"}, "codebook")],
)
def test_layers_that_cannot_share_a_container_are_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(FormatUnsupportedError, match=f"layers 1 and 2: an exl3-v1 container has one {name}"):
        plan_head({1: plain_source(), 2: plain_source(**changes)})


def test_layers_that_do_not_fit_the_head_are_refused(tmp_path: Path) -> None:
    head = plan_head({0: plain_source()})
    for changes, text in (
        ({"codebook": "lut_e4m3"}, "layer 0: codebook lut_e4m3 differs from mcg"),
        ({"rates": (5,)}, "layer 0: rates .* differs from"),
        ({"experts": 2}, "layer 0: geometry .* differs from the head's"),
    ):
        with pytest.raises(FormatValueError, match=text):
            write_layer(tmp_path, head, 0, *random_linears(**{"codebook": "mcg", "rates": (4,)} | changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        random_content(hidden=512, intermediate=256, codebook="lut_e4m3", bits=2, transform=True),
        random_content(hidden=512, intermediate=256, per_expert=False, row_alignment=512),
        random_pair_content(),
    ],
    ids=["transform", "shared", "pairs"],
)
def test_content_is_written_as_it_is(tmp_path: Path, content: ContainerLayer | ContainerPairLayer) -> None:
    entry = write_content(tmp_path, content)
    manifest = write_manifest(tmp_path, content.head, {3: entry})
    parts = [(0, 4), (4, 4)] if content.sign_pattern is not None else [(0, content.extent.slot_count)]
    for first, count in parts:
        share = dataclasses.replace(content.extent, first_slot=first, slot_count=count)
        found = read_layer(tmp_path, manifest, 3, share)
        assert type(found) is type(content)
        assert found.codes.read().tobytes() == content.codes.read()[first : first + count].tobytes()
        assert found.rotations.tobytes() == content.rotations[first : first + count].tobytes()
        for name, table in content.tables().items():
            if name != "rotations":
                assert found.tables()[name].tobytes() == table.tobytes()


def test_content_must_be_whole_sound_and_aligned(tmp_path: Path) -> None:
    with pytest.raises(FormatValueError, match="layer 3: a layer file holds the whole axis"):
        write_content(tmp_path, random_content((0, 4), intermediate=256))
    content = random_content(intermediate=256)
    with pytest.raises(FormatValueError, match="layer 3: down_svh must be finite"):
        write_content(tmp_path, dataclasses.replace(content, down_svh=content.down_svh * np.float16(np.inf)))
    wider = np.pad(content.codes.read(), ((0, 0), (0, 1)))
    with pytest.raises(FormatValueError, match=r"rows of \d+ bytes are not a multiple of row_alignment 4096"):
        write_content(tmp_path, dataclasses.replace(content, codes=wider))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path) -> None:
    layer = random_linears(codebook="mcg", rates=(4,))
    head = plan_head({0: layer[0]})

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_layer(tmp_path, head, 0, *layer, on_bytes=stop)
    assert list(tmp_path.iterdir()) == []
    entry = write_layer(tmp_path, head, 0, *layer)
    with pytest.raises(FormatValueError, match=rf"{MANIFEST_NAME}: cannot be written: No such file"):
        write_manifest(tmp_path / "nowhere", head, {0: entry})
    with pytest.raises(FormatValueError, match="cannot be read: No such file"):
        layer_entry(tmp_path, 1)


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    layer, pieces = random_linears(codebook="mcg", rates=(4,)), []
    entry = write_layer(tmp_path, plan_head({3: layer[0]}), 3, *layer, on_bytes=pieces.append)
    assert sum(pieces) == sum(array.nbytes for array in load_file(tmp_path / entry.file).values())
