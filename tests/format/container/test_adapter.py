"""Holds the adapters, container and raw, to loops over what is stored: bit for bit, as views, at every extent."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import random_layer, write_checkpoint
from slot_files import head_of, linear_by_loop, random_content, random_pair_content, rates_of
from trellis_format.activations import Activation
from trellis_format.checkpoint import open_checkpoint
from trellis_format.codebooks import EXL3_CODEBOOKS
from trellis_format.container.adapter import config_of, trellis_from_container
from trellis_format.container.layer import ContainerLayer
from trellis_format.errors import FormatTypeError, FormatUnsupportedError, FormatValueError
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import MemoryArray
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.slots import linear_to_rows, read_linear, read_rows, rows_to_linear
from trellis_format.source import CodeLayout
from trellis_format.transform import ExpertTransform

EXTENTS = [(0, 8), (8, 4), (48, 12), (60, 8)]
LAYERS = {
    bits: random_content(codebook="mcg" if bits > 2 else "lut_e4m3", bits=bits, row_alignment=65536, seed=bits)
    for bits in (2, 3, 4)
}


def cut(content: ContainerLayer, first: int, count: int) -> ContainerLayer:
    """An extent of a layer in memory, arrays by plain slicing."""
    rows = slice(first - content.extent.first_slot, first - content.extent.first_slot + count)
    return dataclasses.replace(
        content,
        extent=dataclasses.replace(content.extent, first_slot=first, slot_count=count),
        codes=MemoryArray(content.codes.read()[rows]),
        rotations=content.rotations[rows],
    )


@pytest.mark.parametrize("bits", LAYERS)
@pytest.mark.parametrize(("first", "count"), EXTENTS)
def test_assembly_is_that_of_the_loop(first: int, count: int, bits: int) -> None:
    content = cut(LAYERS[bits], first, count)
    source, weights = trellis_from_exl3(content)
    codes = content.codes.read()
    for expert in range(3):
        for projection in range(3):
            expected = linear_by_loop(codes, rates_of(source), 512, expert, projection)
            assert read_linear(source, weights, expert, projection).tobytes() == expected.tobytes()
    for expert in range(3):
        for projection in range(3):
            for slot in range(count):
                found = weights.intermediate_scales[expert, projection, 32 * slot : 32 * slot + 32]
                assert found.tobytes() == content.rotations[slot, expert, projection].tobytes()
    for expert in range(3):
        assert weights.input_scales[expert, 0].tobytes() == content.gate_suh[expert].tobytes()
        assert weights.input_scales[expert, 1].tobytes() == content.up_suh[expert].tobytes()
        assert weights.output_scales[expert].tobytes() == content.down_svh[expert].tobytes()


@pytest.mark.parametrize("bits", LAYERS)
def test_codes_are_a_view_without_the_padding(bits: int) -> None:
    content = cut(LAYERS[bits], 48, 12)
    source, weights = trellis_from_exl3(content)
    codes, whole = weights.codes.read(), content.codes.read()  # type: ignore[union-attr]
    payload = 3 * 3 * 32 * 64 * bits
    assert codes.shape == (12, payload)
    assert whole.shape[1] % 65536 == 0
    assert codes.ctypes.data == whole.ctypes.data
    assert codes.strides == whole.strides
    assert source.layout is CodeLayout.SLOT_MAJOR
    assert weights.rate.tolist() == [bits * 17]
    assert weights.rate.shape == (1,)
    assert source.rates == RateTable.uniform(Rate.of(bits))
    assert source.extent == TrellisExtent(global_intermediate_size=3072, first_slot=48, slot_count=12)
    assert source.code_bytes() == codes.size


def test_the_layer_is_not_changed() -> None:
    content = cut(LAYERS[3], 8, 4)
    arrays = [content.codes.read(), *content.tables().values()]
    before = [array.tobytes() for array in arrays]
    for array in arrays:
        array.setflags(write=False)
    trellis_from_exl3(content)
    assert [array.tobytes() for array in arrays] == before


def test_one_object_or_equal_bits_are_one_input_vector() -> None:
    content = cut(LAYERS[3], 0, 8)
    for up in (content.gate_suh, content.gate_suh.copy()):
        source, weights = trellis_from_exl3(dataclasses.replace(content, up_suh=up))
        assert source.joint_input_scales
        assert weights.input_scales.shape == (3, 1, 512)
    zeros = np.zeros_like(content.gate_suh)
    source, weights = trellis_from_exl3(dataclasses.replace(content, gate_suh=zeros, up_suh=-zeros))
    assert not source.joint_input_scales  # equal numbers, other bits
    assert weights.input_scales.shape == (3, 2, 512)


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_shared_vectors_stay_shared(experts: int) -> None:
    content = random_content(experts=experts, hidden=256, intermediate=128, per_expert=False)
    source, weights = trellis_from_exl3(content)
    assert (source.shared_input_scales, source.shared_output_scales) == (True, True)
    assert np.array_equal(weights.input_scales, np.stack([content.gate_suh, content.up_suh]))
    assert weights.output_scales.ctypes.data == content.down_svh.ctypes.data
    own = random_content(experts=experts, hidden=256, intermediate=128)
    assert not trellis_from_exl3(own)[0].shared_input_scales


@pytest.mark.parametrize("per_expert", [True, False])
@pytest.mark.parametrize(("first", "count", "half"), [(0, 48, 0), (44, 4, 0), (48, 48, 1), (60, 8, 1)])
def test_each_half_of_a_transformed_layer_has_its_input_vector(
    first: int, count: int, half: int, per_expert: bool
) -> None:
    content = random_content((first, count), codebook="lut_e4m3", bits=2, transform=True, per_expert=per_expert)
    source, weights = trellis_from_exl3(content)
    table = (content.gate_suh, content.up_suh)[half]
    assert np.array_equal(weights.input_scales[..., 0, :], table)
    assert weights.input_scales.shape == (*table.shape[:-1], 1, 512)
    assert source.joint_input_scales
    assert source.expert_transform == ExpertTransform()
    assert weights.expert_sign_patterns is content.sign_pattern


def test_a_transformed_layer_is_never_taken_whole() -> None:
    content = random_content(codebook="lut_e4m3", bits=2, transform=True)
    with pytest.raises(FormatValueError, match="extent of first slot 0, count 96: the barrier at slot 48"):
        trellis_from_exl3(content)
    layout = content.head.layout.model_copy(update={"extent_barriers": ()})
    open_head = content.head.model_copy(update={"layout": layout})
    with pytest.raises(FormatValueError, match=r"slots 0\.\.96 crosses the half boundary at slot 48"):
        trellis_from_exl3(dataclasses.replace(content, head=open_head))


@pytest.mark.parametrize(("key", "block"), [("pre_block", 256), ("post_block", 64)])
def test_other_blocks_are_refused(key: str, block: int) -> None:
    content = random_content((0, 8), codebook="lut_e4m3", bits=2, transform=True)
    hadamard = content.head.hadamard.model_copy(update={key: block})
    head = content.head.model_copy(update={"hadamard": hadamard})
    with pytest.raises(FormatUnsupportedError, match=r"blocks \d+ and \d+ is not handled; supported: 512 and 128"):
        trellis_from_exl3(dataclasses.replace(content, head=head))


def test_pairs_are_their_own_type_and_refused_with_the_kinds() -> None:
    for adapter in (trellis_from_exl3, trellis_from_container):
        with pytest.raises(FormatUnsupportedError, match="layer 3 has pair rates of kinds P33, P24, P43"):
            adapter(random_pair_content())
    uniform = cut(LAYERS[3], 0, 8)
    with pytest.raises(FormatUnsupportedError, match="pair"):
        trellis_from_exl3(dataclasses.replace(uniform, head=head_of(kinds=("P33",))))


def test_content_is_checked() -> None:
    content = cut(LAYERS[3], 0, 8)
    with pytest.raises(FormatValueError, match=r"layer 3: gate_suh must be finite, got nan at \[0, 0\]"):
        trellis_from_exl3(dataclasses.replace(content, gate_suh=np.full_like(content.gate_suh, np.nan)))


@pytest.mark.parametrize("value", [{}, None, np.zeros(3), "layer"])
def test_other_types_are_refused_with_the_accepted_ones(value: Any) -> None:
    text = f"expected an Exl3Layer or a ContainerLayer, got {type(value).__name__}"
    with pytest.raises(FormatTypeError, match=text):
        trellis_from_exl3(value)


def test_axes_that_are_not_in_blocks_are_refused() -> None:
    with pytest.raises(FormatValueError, match="intermediate_size 192 is stored in 256 channels, not in 192"):
        trellis_from_exl3(random_content(hidden=128, intermediate=192, alignment=2))
    with pytest.raises(FormatValueError, match="hidden_size 144 is stored in 256 channels, not in 144"):
        trellis_from_exl3(random_content(hidden=144, intermediate=128))
    with pytest.raises(FormatValueError, match=r"channels 64\.\.192 cuts a Hadamard block of 128; nearest legal"):
        trellis_from_exl3(random_content((2, 4), hidden=128, intermediate=256, alignment=2))


def test_what_the_container_does_not_state_may_be_given() -> None:
    law = Activation("situ")
    source, _ = trellis_from_exl3(cut(LAYERS[3], 0, 8), activation=law, up_divisor=128.0)
    assert (source.activation, source.up_divisor) == (law, 128.0)
    plain, _ = trellis_from_exl3(cut(LAYERS[3], 0, 8))
    assert (plain.activation, plain.up_divisor) == (None, 1.0)


@pytest.mark.parametrize("per_expert", [True, False])
def test_a_manifest_amounts_to_a_configuration(per_expert: bool) -> None:
    side = {"vectors": "per_expert" if per_expert else "per_layer", "gains": "none"}
    plain = config_of(head_of(per_expert=per_expert)).to_json()
    assert plain["scale"] == {
        "input_scales": side,
        "intermediate_scales": {"vectors": "per_expert", "gains": "none"},
        "output_scales": side,
    }
    assert (plain["codebook"], plain["rate"]) == ("mcg", {"granularity": "uniform"})
    assert plain["transform"]["expert"] == {"kind": "none"}
    signed = config_of(head_of(codebook="lut_e4m3", bits=2, transform=True))
    assert signed.expert_transform() == ExpertTransform()
    with pytest.raises(FormatUnsupportedError, match="pair rates of kinds P33"):
        config_of(head_of(kinds=("P33",)))


# ---------------------------------------------------------------------------------------------------- raw linears
PAIRS = [
    pytest.param(name, rate, id=f"{name}-{rate}")
    for name, codebook in EXL3_CODEBOOKS.items()
    for rate in codebook.legal_rates
]


def test_there_are_27_pairs() -> None:
    assert len(PAIRS) == 27


def check_raw(folder: Path, tensors: dict[str, Any], experts: int) -> None:
    """Raw linears are taken as they are, and survive the way to slots and back."""
    with open_checkpoint(write_checkpoint(folder, tensors)) as checkpoint:
        source, weights = trellis_from_exl3(find_layer(checkpoint, 0))
        for expert in range(experts):
            for index, word in enumerate(("gate_proj", "up_proj", "down_proj")):
                stored = tensors[f"model.layers.0.mlp.experts.{expert}.{word}.trellis"]
                rate = source.rates.rate(expert, index)
                assert rate == Rate.from_width(stored.shape[2])
                assert read_linear(source, weights, expert, index).tobytes() == stored.tobytes()
                rows = linear_to_rows(stored, down=index == 2)
                assert rows.tobytes() == read_rows(source, weights, expert, index).tobytes()
                assert rows_to_linear(rows, rate, down=index == 2).tobytes() == stored.tobytes()
                for slot, row in enumerate(rows):
                    low, high = (
                        stored[plane] if index == 2 else stored[:, plane] for plane in (2 * slot, 2 * slot + 1)
                    )
                    assert row.tobytes() == low.tobytes() + high.tobytes()


@pytest.mark.parametrize(("codebook", "rate"), PAIRS)
def test_raw_layers_of_every_pair(tmp_path: Path, codebook: str, rate: Rate) -> None:
    tensors = random_layer(np.random.default_rng(rate.half_bits), codebook=codebook, bits=rate.bits)
    check_raw(tmp_path, tensors, 2)


def test_raw_layer_of_mixed_rates(tmp_path: Path) -> None:
    rates = {"gate_proj": (1, 2.5, 4, 8), "up_proj": (2.5, 4, 8, 1), "down_proj": (8, 1, 2.5, 4)}
    tensors = random_layer(
        np.random.default_rng(0), codebook="mul1", experts=4, bits=lambda expert, word: rates[word][expert]
    )
    check_raw(tmp_path, tensors, 4)


@pytest.mark.parametrize("value", [5, None, "layer", {}])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(FormatTypeError, match=f"a layer of a container is needed, got {type(value).__name__}"):
        trellis_from_container(value)
