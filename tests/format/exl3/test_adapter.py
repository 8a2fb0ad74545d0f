"""Holds the adapter to exactness: codes are views of the file, vectors are the stored bits, equal ones are joined."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import random_layer, random_linear, write_checkpoint
from trellis_format.activations import Activation
from trellis_format.checkpoint import Checkpoint, open_checkpoint
from trellis_format.codebooks import EXL3_CODEBOOKS
from trellis_format.errors import FormatTypeError, FormatUnsupportedError, FormatValueError
from trellis_format.exl3.adapter import layer_geometry, single_codebook, trellis_from_exl3
from trellis_format.exl3.layers import Exl3Layer, find_layer
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import FileArray
from trellis_format.rates import Rate
from trellis_format.reference import moe_forward
from trellis_format.source import CodeLayout, Projection, TrellisSource, TrellisWeights

PAIRS = [(name, rate) for name, codebook in EXL3_CODEBOOKS.items() for rate in codebook.legal_rates]
WORDS = ("gate_proj", "up_proj", "down_proj")


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def described(folder: Path, tensors: dict[str, Any], config: Any = None) -> tuple[Checkpoint, Exl3Layer]:
    checkpoint = open_checkpoint(write_checkpoint(folder / "c", tensors, config=config))
    return checkpoint, find_layer(checkpoint, 0)


def module(expert: int, word: str) -> str:
    return f"model.layers.0.mlp.experts.{expert}.{word}"


def check_arrays(source: TrellisSource, weights: TrellisWeights, tensors: dict[str, Any], experts: int) -> None:
    """Every value where the description says it is, bit for bit."""
    inputs, outputs = weights.input_scales, weights.output_scales
    for expert in range(experts):
        rows = inputs if source.shared_input_scales else inputs[expert]
        for index, word in enumerate(WORDS):
            name = module(expert, word)
            view = weights.code_view(expert, index)
            assert isinstance(view, FileArray)
            assert np.array_equal(view.read(), tensors[f"{name}.trellis"])
            assert source.rates.rate(expert, index).tile_words16 == view.shape[2]
            suh, svh = (tensors[f"{name}.{part}"].view(np.uint16) for part in ("suh", "svh"))
            middle = weights.intermediate_scales[expert, index].view(np.uint16)
            if word == "down_proj":
                assert np.array_equal(middle, suh)
                row = outputs if source.shared_output_scales else outputs[expert]
                assert np.array_equal(row.view(np.uint16), svh)
            else:
                assert np.array_equal(rows[0 if source.joint_input_scales else index].view(np.uint16), suh)
                assert np.array_equal(middle, svh)


@pytest.mark.parametrize(("codebook", "rate"), PAIRS, ids=str)
def test_every_codebook_and_rate_passes_through_unchanged(tmp_path: Path, codebook: str, rate: Rate) -> None:
    tensors = random_layer(rng(), codebook=codebook, bits=rate.bits)
    checkpoint, layer = described(tmp_path, tensors)
    source, weights = trellis_from_exl3(layer)
    assert (source.codebook, source.layout, source.extent) == (
        codebook,
        CodeLayout.EXL3_LINEAR,
        TrellisExtent.whole(256),
    )
    assert source.rates.distinct() == (rate,)
    assert weights.rate.tolist() == [rate.nibble * 17]
    codes = sum(tensors[name].nbytes for name in tensors if name.endswith("trellis"))
    assert source.code_bytes() == codes
    assert checkpoint.bytes_read <= sum(np.asarray(value).nbytes for value in tensors.values()) - codes
    check_arrays(source, weights, tensors, 2)


def test_rates_may_differ_by_expert_and_projection(tmp_path: Path) -> None:
    rows = ((1, 2.5, 4), (8, 1, 2.5))
    table = {(expert, word): bits for expert, row in enumerate(rows) for word, bits in zip(WORDS, row, strict=True)}
    tensors = random_layer(rng(), codebook="mul1", bits=lambda expert, word: table[expert, word])
    source, weights = trellis_from_exl3(described(tmp_path, tensors)[1])
    assert [f"{byte:02X}" for byte in weights.rate.flat] == ["11", "AA", "44", "88", "11", "AA"]
    assert weights.rate.shape == (2, 3)
    check_arrays(source, weights, tensors, 2)


@pytest.mark.parametrize(
    ("bits", "shape"),
    [(lambda e, w: 3, (1,)), (lambda e, w: 3 + e, (2,)), (lambda e, w: 4 if w == WORDS[2] else 3, (1, 3))],
)
def test_the_rate_table_is_as_short_as_it_can_be(tmp_path: Path, bits: Callable[..., float], shape: tuple) -> None:
    _, weights = trellis_from_exl3(described(tmp_path, random_layer(rng(), bits=bits))[1])
    assert weights.rate.shape == shape


def share(tensors: dict[str, Any], part: str, words: tuple[str, ...], experts: int = 2) -> None:
    """Give all experts, and all of `words`, one vector."""
    vector = tensors[f"{module(0, words[0])}.{part}"]
    for expert in range(experts):
        for word in words:
            tensors[f"{module(expert, word)}.{part}"] = vector.copy()


@pytest.mark.parametrize(
    ("inputs", "joint", "outputs", "flags", "shapes"),
    [
        (False, False, False, (False, False, False), ((2, 2, 128), (2, 128))),
        (True, False, False, (True, False, False), ((2, 128), (2, 128))),
        (True, True, False, (True, True, False), ((1, 128), (2, 128))),
        (False, True, True, (False, True, True), ((2, 1, 128), (128,))),
        (False, False, True, (False, False, True), ((2, 2, 128), (128,))),
    ],
)
def test_equal_vectors_are_stored_once(
    tmp_path: Path, inputs: bool, joint: bool, outputs: bool, flags: tuple, shapes: tuple
) -> None:
    tensors = random_layer(rng())
    if inputs and joint:
        share(tensors, "suh", WORDS[:2])
    elif inputs:
        share(tensors, "suh", WORDS[:1])
        share(tensors, "suh", WORDS[1:2])
    elif joint:
        for expert in range(2):
            tensors[f"{module(expert, WORDS[1])}.suh"] = tensors[f"{module(expert, WORDS[0])}.suh"]
    if outputs:
        share(tensors, "svh", WORDS[2:])
    source, weights = trellis_from_exl3(described(tmp_path, tensors)[1])
    assert (source.shared_input_scales, source.joint_input_scales, source.shared_output_scales) == flags
    assert (weights.input_scales.shape, weights.output_scales.shape) == shapes
    assert weights.intermediate_scales.shape == (2, 3, 256)
    check_arrays(source, weights, tensors, 2)


def test_zeros_of_either_sign_are_different_bits(tmp_path: Path) -> None:
    tensors = random_layer(rng())
    share(tensors, "svh", WORDS[2:])
    tensors[f"{module(0, WORDS[2])}.svh"][5] = 0.0
    tensors[f"{module(1, WORDS[2])}.svh"][5] = -0.0
    source, weights = trellis_from_exl3(described(tmp_path, tensors)[1])
    assert not source.shared_output_scales
    check_arrays(source, weights, tensors, 2)


def test_one_expert_shares_with_itself(tmp_path: Path) -> None:
    tensors = random_layer(rng(), experts=1)
    source, weights = trellis_from_exl3(described(tmp_path, tensors)[1])
    assert (source.shared_input_scales, source.shared_output_scales, source.joint_input_scales) == (True, True, False)
    assert weights.input_scales.shape == (2, 128)
    check_arrays(source, weights, tensors, 1)


def test_packed_signs_become_vectors_of_ones(tmp_path: Path) -> None:
    source, weights = trellis_from_exl3(described(tmp_path, random_layer(rng(), packed=True))[1])
    for array in weights.scale_arrays().values():
        assert array.dtype == np.float16
        assert set(np.unique(array)) == {-1.0, 1.0}
    assert source.codebook == "mcg"


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_biases_are_kept_apart(tmp_path: Path, dtype: type) -> None:
    tensors = random_layer(rng(), bias=dtype)
    source, weights = trellis_from_exl3(described(tmp_path, tensors)[1])
    assert source.biased == tuple(Projection)
    for projection, word in zip(Projection, WORDS, strict=True):
        expected = np.stack([tensors[f"{module(expert, word)}.bias"].astype(np.float16) for expert in range(2)])
        assert np.array_equal(weights.biases[projection], expected)
        assert weights.biases[projection].dtype == np.float16


def test_a_bias_of_one_projection(tmp_path: Path) -> None:
    tensors = random_layer(rng())
    for expert in range(2):
        tensors[f"{module(expert, WORDS[1])}.bias"] = np.full(256, expert, np.float16)
    source, weights = trellis_from_exl3(described(tmp_path, tensors)[1])
    assert source.biased == (Projection.UP,)
    assert weights.biases[Projection.UP][:, 0].tolist() == [0.0, 1.0]


def test_experts_without_a_gate(tmp_path: Path) -> None:
    tensors = random_layer(rng(), words=("up_proj", "down_proj"))
    source, weights = trellis_from_exl3(described(tmp_path, tensors, {"mlp_hidden_act": "relu2"})[1])
    assert source.activation == Activation("relu2")
    assert not source.geometry.gated
    assert weights.input_scales.shape == (2, 1, 128)
    assert weights.intermediate_scales.shape == (2, 2, 256)
    assert not source.joint_input_scales


@pytest.mark.parametrize(
    ("config", "hidden", "intermediate"),
    [
        (None, 128, 256),
        ({"hidden_size": 100, "moe_intermediate_size": 200}, 100, 200),
        ({"hidden_size": 128, "intermediate_size": 130, "moe_intermediate_size": 6000}, 128, 130),
        ({"hidden_size": 4096, "intermediate_size": 64}, 128, 256),
        ({"moe_latent_size": 120, "hidden_size": 4096}, 120, 256),
        ({"text_config": {"hidden_size": 127}}, 127, 256),
    ],
)
def test_true_widths_come_from_the_configuration_where_they_fit(
    tmp_path: Path, config: Any, hidden: int, intermediate: int
) -> None:
    geometry = layer_geometry(described(tmp_path, random_layer(rng()), config)[1])
    assert (geometry.hidden_size, geometry.padded_hidden_size) == (hidden, 128)
    assert (geometry.intermediate_size, geometry.padded_intermediate_size) == (intermediate, 256)
    assert geometry.num_experts == 2


def test_the_activation_may_be_given(tmp_path: Path) -> None:
    _, layer = described(tmp_path, random_layer(rng()), {"hidden_act": "silu"})
    assert trellis_from_exl3(layer)[0].activation == Activation("silu")
    assert trellis_from_exl3(layer, activation=Activation("situ"))[0].activation == Activation("situ")


def test_the_divisor_of_up_comes_from_the_architecture(tmp_path: Path) -> None:
    _, layer = described(tmp_path, random_layer(rng()), {"model_type": "laguna", "hidden_act": "silu"})
    assert trellis_from_exl3(layer)[0].up_divisor == 128.0
    source, weights = trellis_from_exl3(layer, up_divisor=1.0)
    assert source.up_divisor == 1.0
    x = np.random.default_rng(0).normal(size=(3, 128))
    ids, shares = np.array([[0], [1], [0]]), np.array([[0.5], [0.25], [1.0]])
    plain = moe_forward(source, weights, x, ids, shares)
    np.testing.assert_allclose(moe_forward(trellis_from_exl3(layer)[0], weights, x, ids, shares), 128 * plain)


def test_mixed_codebooks_are_refused_with_a_table(tmp_path: Path) -> None:
    tensors = random_layer(rng(), codebook="mcg")
    name = module(1, WORDS[1])
    del tensors[f"{name}.mcg"]
    _, layer = described(tmp_path, tensors | random_linear(rng(), name, 128, 256, codebook="mul1"))
    for call in (single_codebook, trellis_from_exl3):
        with pytest.raises(FormatUnsupportedError) as caught:
            call(layer)
        text = str(caught.value)
        assert "layer 0 mixes codebooks" in text
        assert f"mcg: {module(0, WORDS[0])}; mul1: {name}" in text


@pytest.mark.parametrize("value", [None, 3, "layer", {}, object()])
def test_only_a_layer_is_taken(value: object) -> None:
    with pytest.raises(FormatTypeError, match=f"got {type(value).__name__}"):
        trellis_from_exl3(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["suh", "svh", "bias"])
def test_a_value_that_is_not_finite_is_refused(tmp_path: Path, part: str) -> None:
    tensors = random_layer(rng(), bias=np.float16)
    tensors[f"{module(1, WORDS[0])}.{part}"][9] = np.nan
    with pytest.raises(FormatValueError, match=rf"experts\.1\.gate_proj\.{part}: .*finite.* index 9"):
        trellis_from_exl3(described(tmp_path, tensors)[1])


def test_a_foreign_multiplier_is_refused(tmp_path: Path) -> None:
    tensors = random_layer(rng())
    tensors[f"{module(1, WORDS[2])}.mcg"] = np.int32(5)
    with pytest.raises(FormatValueError, match=r"experts\.1\.down_proj\.mcg: .*0x00000005, expected 0xCBAC1FED"):
        trellis_from_exl3(described(tmp_path, tensors)[1])


def test_the_layer_is_left_as_it_was(tmp_path: Path) -> None:
    _, layer = described(tmp_path, random_layer(rng()))
    rows = [dict(row) for row in layer.experts]
    names = copy.copy(layer.key)
    trellis_from_exl3(layer)
    assert [dict(row) for row in layer.experts] == rows
    assert layer.key == names


def test_real_layers_are_adapted_within_their_geometry(checkpoint_path: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_path)
    index = min(int(name.split(".")[2]) for name in checkpoint.tensors if ".experts.0." in name)
    source, weights = trellis_from_exl3(find_layer(checkpoint, index))
    geometry = source.geometry
    assert source.activation is not None
    assert weights.intermediate_scales.shape == (geometry.num_experts, 3, geometry.padded_intermediate_size)
    padded = weights.intermediate_scales[:, :2, geometry.intermediate_size :]
    assert not padded.any(), "padded output channels have a scale of zero"
    assert weights.output_scales.shape[-1] == geometry.padded_hidden_size
    assert not weights.output_scales[..., geometry.hidden_size :].any()
