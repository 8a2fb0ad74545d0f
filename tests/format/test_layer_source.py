"""Holds the opening of one layer to the same weights from every container, and to what lies beside a container."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trellis_format
from exl3_files import random_layer, write_checkpoint, write_json
from slot_files import random_content, random_pair_content
from trellis_format.activations import Activation
from trellis_format.container.writer import write_content, write_manifest
from trellis_format.convert import convert
from trellis_format.convert_source import open_source
from trellis_format.detect import CONTAINERS
from trellis_format.errors import FormatError, FormatTypeError, FormatUnsupportedError, FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.layer_source import open_layer_source, stated_activation
from trellis_format.slots import read_linear

CONFIG: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2, "hidden_act": "silu"}


def made(folder: Path, container: str, config: Any = CONFIG) -> Path:
    source = write_checkpoint(folder / "exl3", random_layer(np.random.default_rng(0), layer=5), config=config)
    if container != "exl3":
        with closing(open_source(source)) as opened:
            convert(opened, folder / container, container)
    return folder / container


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_gives_the_same_layer(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    source, weights = open_layer_source(path, 5)
    expected, raw = open_layer_source(tmp_path / "exl3", 5)
    assert source.activation == expected.activation == Activation("silu")
    assert (source.geometry, source.codebook, source.rates) == (expected.geometry, "mcg", expected.rates)
    for expert in range(2):
        for projection in range(3):
            assert np.array_equal(
                read_linear(source, weights, expert, projection), read_linear(expected, raw, expert, projection)
            )
    for name, table in raw.scale_arrays().items():
        assert np.array_equal(np.broadcast_to(weights.scale_arrays()[name], table.shape), table)


@pytest.mark.parametrize("container", CONTAINERS)
def test_layers_and_paths_must_exist(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    with pytest.raises(FormatValueError, match="5"):
        open_layer_source(path, 4)
    with pytest.raises(FormatError, match="no such"):
        open_layer_source(tmp_path / "no", 5)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_named_activation_takes_what_is_stated_where_that_is_its_law_and_legal(
    tmp_path: Path, container: str
) -> None:
    for number, (stated, name, law) in enumerate(
        (
            ({"swiglu_limit": 5.0}, "silu", Activation("silu", limit=5.0)),
            ({"swiglu_limit": 5.0}, "situ", Activation("situ")),
            ({"swiglu_limit": -1.0}, "silu", Activation("silu")),
            ({"swiglu_limit": -1.0}, "swigluoai", Activation.named("swigluoai")),
            ({"hidden_act": "mish"}, "silu", Activation("silu")),
        )
    ):
        path = made(tmp_path / str(number), container)  # sound while it is converted
        write_json(path / "config.json", CONFIG | stated)
        if container == "exl3" or law.limit != 5.0:  # a manifest states silu without its limit
            assert open_layer_source(path, 5, activation=name)[0].activation == law
    write_json(path / "config.json", CONFIG | {"swiglu_limit": -1.0})
    if container == "exl3":
        with pytest.raises(FormatValueError, match=r"limit -1.0 must be above 0"):
            open_layer_source(path, 5)
    with pytest.raises(FormatValueError, match="unknown activation 'swish'"):
        open_layer_source(path, 5, activation="swish")


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_activation_can_be_given_and_is_not_made_up(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container, config=CONFIG | {"hidden_act": "mish"})
    assert open_layer_source(path, 5)[0].activation is None
    assert stated_activation(path) == "hidden_act is 'mish'"
    assert open_layer_source(path, 5, activation=Activation("situ"))[0].activation == Activation("situ")


def test_a_manifest_goes_before_the_configuration(tmp_path: Path) -> None:
    path = made(tmp_path, "native")
    write_json(path / "config.json", CONFIG | {"hidden_act": "gelu_pytorch_tanh"})
    assert open_layer_source(path, 5)[0].activation == Activation("silu")
    (path / "config.json").unlink()
    assert open_layer_source(path, 5)[0].activation == Activation("silu")
    assert stated_activation(path) == "hidden_act is None"


def test_true_widths_come_from_the_configuration(tmp_path: Path) -> None:
    path = made(tmp_path, "exl3-v1")
    write_json(path / "config.json", CONFIG | {"hidden_size": 100, "moe_intermediate_size": 201})
    geometry = open_layer_source(path, 5)[0].geometry
    assert (geometry.hidden_size, geometry.intermediate_size) == (100, 201)
    assert (geometry.padded_hidden_size, geometry.padded_intermediate_size) == (128, 256)
    (path / "config.json").unlink()
    source = open_layer_source(path, 5)[0]
    assert (source.geometry.hidden_size, source.geometry.intermediate_size) == (128, 256)
    assert source.activation is None


def test_true_widths_of_a_native_manifest_stay(tmp_path: Path) -> None:
    tensors = random_layer(np.random.default_rng(0), layer=5)
    for name, tensor in tensors.items():
        if name.endswith("svh") and "down_proj" not in name:
            tensor[200:] = 0  # type: ignore[index]
    source = write_checkpoint(tmp_path / "exl3", tensors, config=CONFIG | {"moe_intermediate_size": 200})
    with closing(open_source(source)) as opened:
        convert(opened, tmp_path / "native", "native")
    write_json(tmp_path / "native" / "config.json", CONFIG | {"moe_intermediate_size": 210})
    assert open_layer_source(tmp_path / "native", 5)[0].geometry.intermediate_size == 200


@pytest.mark.parametrize("container", CONTAINERS[1:])
def test_digests_are_compared_unless_told_not_to(tmp_path: Path, container: str) -> None:
    path = made(tmp_path, container)
    (file,) = path.glob("*layer*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1  # inside the codes, whichever order the tensors have
    file.write_bytes(data)
    with pytest.raises(FormatValueError, match="sha256"):
        open_layer_source(path, 5)
    open_layer_source(path, 5, verify=False)


def test_a_stated_method_can_be_ignored(tmp_path: Path) -> None:
    path = made(tmp_path, "exl3", config=CONFIG | {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(FormatValueError, match="gptq"):
        open_layer_source(path, 5)
    assert open_layer_source(path, 5, ignore_method=True)[0].geometry.num_experts == 2


def test_an_extent_of_a_container(tmp_path: Path) -> None:
    extent = TrellisExtent(global_intermediate_size=256, first_slot=4, slot_count=4)
    source, weights = open_layer_source(made(tmp_path, "native"), 5, extent=extent)
    whole, raw = open_layer_source(tmp_path / "exl3", 5)
    assert source.extent == extent
    assert np.array_equal(read_linear(source, weights, 1, 2), read_linear(whole, raw, 1, 2)[8:])
    with pytest.raises(FormatValueError, match="described whole"):
        open_layer_source(tmp_path / "exl3", 5, extent=extent)


def test_a_transform_is_described_by_halves(tmp_path: Path) -> None:
    content = random_content(experts=2, intermediate=512, transform=True)
    write_manifest(tmp_path, content.head, {3: write_content(tmp_path, content)})
    with pytest.raises(FormatUnsupportedError, match=r"input vectors of their own.*cut at slot 8"):
        open_layer_source(tmp_path, 3)
    half = TrellisExtent(global_intermediate_size=512, first_slot=8, slot_count=8)
    source, weights = open_layer_source(tmp_path, 3, extent=half)
    assert source.expert_transform is not None
    assert np.array_equal(weights.input_scales[:, 0], content.up_suh)


def test_pairs_are_refused(tmp_path: Path) -> None:
    content = random_pair_content()
    write_manifest(tmp_path, content.head, {3: write_content(tmp_path, content)})
    with pytest.raises(FormatUnsupportedError, match="pair rates of kinds"):
        open_layer_source(tmp_path, 3)


@pytest.mark.parametrize(("layer", "activation"), [(True, None), ("5", None), (5, 3)])
def test_arguments_of_other_types(tmp_path: Path, layer: Any, activation: Any) -> None:
    with pytest.raises(FormatTypeError, match="must be an"):
        open_layer_source(made(tmp_path, "exl3"), layer, activation=activation)


def test_configurations_must_be_objects(tmp_path: Path) -> None:
    path = made(tmp_path, "exl3-v1")
    (path / "config.json").write_text("[]")
    with pytest.raises(FormatValueError, match="JSON object"):
        open_layer_source(path, 5)


def test_the_package_names_it() -> None:
    assert trellis_format.open_layer_source is open_layer_source
