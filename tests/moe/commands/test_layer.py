"""Holds a layer's way from a checkpoint to an output: refusals, launches of bounded scratch, shares that add up."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import exl3_files
from data_set import DataSet
from moe.samples import Layer as SampleLayer
from moe.samples import Routes, bits, distance, truth
from moe.samples import run as run_layer_of
from slot_files import random_content
from trellis_format.activations import ACTIVATIONS, Activation
from trellis_format.container.writer import write_content, write_manifest
from trellis_format.convert import convert
from trellis_format.convert_source import open_source
from trellis_format.errors import FormatUnsupportedError, FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.layer_source import open_layer_source
from trellis_format.rates import Rate
from trellis_format.synth import SynthSpec, synth_checkpoint
from trellis_moe import MoeValueError
from trellis_moe.commands import layer as module
from trellis_moe.commands.layer import Layer, choose_device, open_layer, run_layer
from trellis_prep import PrepValueError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layer(data_set: DataSet) -> Layer:
    return open_layer(data_set.checkpoints["tiny_3_mul1"], 0)


@pytest.fixture(scope="module")
def routes(layer: Layer) -> Routes:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(21, layer.source.geometry.hidden_size, generator=generator).half()
    return Routes(x, torch.randint(-1, 8, (21, 2), generator=generator), torch.rand(21, 2, generator=generator))


def outcome(layer: Layer, routes: Routes, **options: Any) -> torch.Tensor:
    return run_layer(layer, routes.x, routes.ids, routes.weights, **{"device": CPU} | options).y


def test_a_layer_is_near_the_reference(layer: Layer, routes: Routes) -> None:
    assert distance(outcome(layer, routes), truth(SampleLayer(layer.source, layer.weights), routes)) <= 1e-3


@pytest.mark.parametrize("container", ["exl3-v1", "native"])
def test_every_container_gives_the_same_bits(tmp_path: Path, container: str) -> None:
    raw = tmp_path / "raw"
    synth_checkpoint(
        raw, SynthSpec(hidden=256, intermediate=384, experts=3, layers=1, rates=(Rate.of(4),), codebook="mcg")
    )
    with closing(open_source(raw)) as opened:
        convert(opened, tmp_path / container, container)
    expected, found = open_layer(raw, 0), open_layer(tmp_path / container, 0)
    assert found.source.activation == expected.source.activation
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, expected.source.geometry.hidden_size, generator=generator).half()
    ids = torch.randint(0, expected.source.geometry.num_experts, (5, 2), generator=generator)
    routes = Routes(x, ids, torch.rand(5, 2, generator=generator))
    y = outcome(expected, routes)
    assert distance(y, truth(SampleLayer(expected.source, expected.weights), routes)) <= 1e-3
    assert bits(outcome(found, routes)) == bits(y)
    parts = [outcome(found, routes, rank=rank, world_size=2) for rank in range(2)]
    assert bits(parts[1]) == bits(outcome(expected, routes, rank=1, world_size=2))


@pytest.mark.parametrize(("codebook", "k"), [("lut_e4m3", 3), ("lut_fp16", 5)])
def test_codebooks_of_containers_run_on_the_cpu(tmp_path: Path, codebook: str, k: int) -> None:
    content = random_content(experts=3, hidden=256, intermediate=384, codebook=codebook, bits=k)
    for name in ("gate_suh", "up_suh", "down_svh"):
        getattr(content, name)[...] *= np.float16(0.06)  # sums stay in the range of float16
    write_manifest(tmp_path, content.head, {3: write_content(tmp_path, content)})
    layer = open_layer(tmp_path, 3, activation=Activation("silu"))
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(4, 256, generator=generator).half()
    routes = Routes(x, torch.randint(0, 3, (4, 2), generator=generator), torch.rand(4, 2, generator=generator))
    y = outcome(layer, routes)
    assert torch.isfinite(y).all()
    assert distance(y, truth(SampleLayer(layer.source, layer.weights), routes)) <= 1e-3


def test_halves_of_an_intermediate_hadamard_run_and_the_whole_is_refused(tmp_path: Path) -> None:
    content = random_content(experts=3, hidden=512, intermediate=512, transform=True)
    write_manifest(tmp_path, content.head, {3: write_content(tmp_path, content)})
    with pytest.raises(FormatUnsupportedError, match=r"intermediate_hadamard.*input vectors of their own"):
        open_layer(tmp_path, 3, activation=Activation("silu"))
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 512, generator=generator) / 64
    routes = Routes(x, torch.randint(0, 3, (6, 2), generator=generator), torch.rand(6, 2, generator=generator))
    for first_slot in (0, 8):
        half = TrellisExtent(global_intermediate_size=512, first_slot=first_slot, slot_count=8)
        source, weights = open_layer_source(tmp_path, 3, extent=half, activation=Activation("silu"))
        found = run_layer_of(SampleLayer(source, weights), routes, extent=half)
        assert distance(found, truth(SampleLayer(source, weights), routes, extent=half)) <= 1e-3


@pytest.mark.parametrize("size", [1.0, 0.1, 0.01, 1e-6, 100.0])
def test_inputs_of_any_size_keep_their_precision(layer: Layer, routes: Routes, size: float) -> None:
    sized = Routes(routes.x.float() * size, routes.ids, routes.weights)
    assert distance(outcome(layer, sized), truth(SampleLayer(layer.source, layer.weights), sized)) <= 1e-3


@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_scratch_is_bounded_and_launches_change_no_bit(
    layer: Layer, routes: Routes, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    whole = run_layer(layer, routes.x, routes.ids, routes.weights, device=CPU)
    bound = whole.plan.required_nbytes() * tokens // 21 + 16 * len(whole.plan.scratch_specs())  # boundaries of 16 bytes
    monkeypatch.setattr(module, "MAX_SCRATCH_BYTES", bound)
    seen: list[tuple[str, int, int]] = []
    cut = run_layer(layer, routes.x, routes.ids, routes.weights, device=CPU, progress=lambda *step: seen.append(step))
    assert cut.plan.required_nbytes() <= bound
    assert tokens - 1 <= cut.plan.direct_token_capacity <= tokens + 1
    assert bits(cut.y) == bits(whole.y)
    steps = [step[1:] for step in seen if step[0] == "run"]
    assert steps == sorted(steps)
    assert steps[-1] == (21 * 4, 21 * 4)
    assert seen[0][0] == "prepare"


def test_one_token_is_launched_however_small_the_bound(
    layer: Layer, routes: Routes, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = outcome(layer, routes)
    monkeypatch.setattr(module, "MAX_SCRATCH_BYTES", 1)
    assert bits(outcome(layer, routes)) == bits(whole)


def test_no_tokens_give_no_rows(layer: Layer, routes: Routes) -> None:
    assert outcome(layer, routes.part(slice(0, 0))).shape == (0, 256)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_add_up(layer: Layer, routes: Routes, world_size: int) -> None:
    parts = [
        run_layer(layer, routes.x, routes.ids, routes.weights, device=CPU, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    whole = run_layer(layer, routes.x, routes.ids, routes.weights, device=CPU)
    assert distance(sum(part.y.double() for part in parts), whole.y) <= 1e-6
    for expert in range(8):
        for projection, axis in enumerate((1, 1, 0)):
            tiles = [part.experts.tiles(expert, projection)[0] for part in parts]
            assert torch.equal(torch.cat(tiles, dim=axis), whole.experts.tiles(expert, projection)[0])


@pytest.mark.parametrize(
    ("rank", "world_size", "words"),
    [(2, 2, "rank 2 is outside 0..1"), (-1, 2, "rank -1"), (0, 4, "1 to 3"), (0, 0, "1 to 3")],
)
def test_ranks_that_cannot_be_are_refused(layer: Layer, routes: Routes, rank: int, world_size: int, words: str) -> None:
    with pytest.raises(PrepValueError, match=words):
        outcome(layer, routes, rank=rank, world_size=world_size)


def small(tmp_path: Path, config: object, words: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Path:
    tensors = exl3_files.random_layer(np.random.default_rng(0), words=words)
    return exl3_files.write_checkpoint(tmp_path / "model", tensors, config=config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, ": there is no config.json to state the activation; "),
        ({}, "/config.json: hidden_act is None"),
        ({"hidden_act": "tanhexp"}, "/config.json: hidden_act is 'tanhexp'"),
        ({"mlp_hidden_act": "mish", "hidden_act": "silu"}, "/config.json: mlp_hidden_act is 'mish'"),
    ],
)
def test_an_unknown_activation_is_refused_and_can_be_given(tmp_path: Path, config: object, words: str) -> None:
    path = small(tmp_path, config)
    with pytest.raises(MoeValueError) as caught:
        open_layer(path, 0)
    assert str(caught.value).startswith(f"{path}{words}")
    assert "--activation, one of " + ", ".join(ACTIVATIONS) in str(caught.value)
    for given in ("situ", Activation("situ")):
        assert open_layer(path, 0, activation=given).source.activation == Activation("situ")


GPT_OSS = {"model_type": "gpt_oss", "swiglu_limit": 3.0}


@pytest.mark.parametrize(
    ("config", "given", "law"),
    [
        (GPT_OSS, None, Activation("swigluoai", limit=3.0, alpha=1.702, beta=1.0)),
        (GPT_OSS, "swigluoai", Activation("swigluoai", limit=3.0, alpha=1.702, beta=1.0)),
        (GPT_OSS, "silu", Activation("silu")),
        ({"hidden_act": "silu"}, "swigluoai", Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0)),
        ({"hidden_act": "silu", "swiglu_limit": 2.5}, "silu", Activation("silu", limit=2.5)),
        ({"hidden_act": "silu", "swiglu_limit": 2.5}, "situ", Activation("situ")),
        (GPT_OSS, Activation("swigluoai", limit=5.0), Activation("swigluoai", limit=5.0)),
        (None, "swigluoai", Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0)),
    ],
)
def test_a_name_keeps_the_constants_that_the_checkpoint_states(
    tmp_path: Path, config: object, given: Activation | str | None, law: Activation
) -> None:
    assert open_layer(small(tmp_path, config), 0, activation=given).source.activation == law


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatValueError, match="unknown activation 'mish'"):
        open_layer(small(tmp_path, GPT_OSS), 0, activation="mish")


@pytest.mark.parametrize("config", [{"mlp_hidden_act": "relu2"}, {}, None])
def test_a_gate_that_does_not_fit_names_the_layer_and_what_would_fit(tmp_path: Path, config: object) -> None:
    path = small(tmp_path, config, ("up_proj", "down_proj"))
    with pytest.raises(MoeValueError) as caught:
        open_layer(path, 0, activation="silu")
    assert str(caught.value) == (
        f"{path}: layer 0: activation silu takes a gate, the experts have no gate; --activation must be relu2"
    )
    with pytest.raises(MoeValueError, match=r"must be silu or gelu_tanh or situ or swigluoai$"):
        open_layer(small(tmp_path / "gated", {"mlp_hidden_act": "relu2"}), 0)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"hidden_size": 512}, ("hidden_size = 512", "128 hidden channels")),
        ({"moe_intermediate_size": 640}, ("moe_intermediate_size = 640", "256 intermediate channels")),
        ({"num_experts": 1}, ("says 1 experts", "have 2")),
        ({"text_config": {"num_local_experts": 1}}, ("says 1 experts", "have 2")),
    ],
)
def test_a_configuration_that_disagrees_is_a_warning(
    tmp_path: Path, config: dict[str, object], parts: tuple[str, ...]
) -> None:
    path = small(tmp_path, {"hidden_act": "silu"} | config)
    (warning,) = open_layer(path, 0).warnings
    assert warning.startswith(f"{path / 'config.json'}: layer 0: config.json says ")
    assert all(part in warning for part in parts), warning


@pytest.mark.parametrize("config", [{"hidden_size": 128, "moe_intermediate_size": 200, "num_experts": 2}, {}, None])
def test_a_configuration_that_agrees_is_none(tmp_path: Path, config: dict[str, object] | None) -> None:
    assert open_layer(small(tmp_path, config), 0, activation="silu").warnings == ()


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(MoeValueError, match="cannot hold a NUL, this one has it at index 1"):
        open_layer("a\0b", 0)


def test_names_are_matched_by_a_pattern(tmp_path: Path) -> None:
    tensors = exl3_files.random_layer(
        np.random.default_rng(0), layer=3, words=("a", "gate", "b"), name="net.{}.x{}.{}".format
    )
    tensors = {name.replace(".a.", ".w1.").replace(".gate.", ".up.").replace(".b.", ".w2."): tensor
               for name, tensor in tensors.items()}  # fmt: skip
    path = exl3_files.write_checkpoint(tmp_path / "model", tensors, config={"hidden_act": "silu"})
    with pytest.raises(FormatValueError, match="layer 3 has no experts"):
        open_layer(path, 3)
    pattern = r"net\.(?P<layer>\d+)\.x(?P<expert>\d+)\.(?P<projection>\w+)"
    assert open_layer(path, 3, pattern=pattern).source.geometry.num_experts == 2


def test_devices_have_names() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(MoeValueError, match="--device cuda: no CUDA device is visible"):
        choose_device("cuda")


@pytest.mark.gpu
def test_a_gpu_gives_the_same_within_rounding(layer: Layer, routes: Routes) -> None:
    found = outcome(layer, routes, device=torch.device("cuda"))
    assert found.device == CPU
    assert distance(found, outcome(layer, routes)) <= 1e-3
