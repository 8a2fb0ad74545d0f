"""Holds a layer's way from a checkpoint to an output: refusals, launches of bounded scratch, shares that add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import exl3_files
from data_set import DataSet
from moe.samples import Layer as SampleLayer
from moe.samples import Routes, bits, distance, truth
from trellis_format.activations import ACTIVATIONS, Activation
from trellis_format.errors import FormatValueError
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


@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_scratch_is_bounded_and_launches_change_no_bit(
    layer: Layer, routes: Routes, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    whole = run_layer(layer, routes.x, routes.ids, routes.weights, device=CPU)
    bound = whole.plan.required_nbytes() * tokens // 21 + 16 * len(whole.plan.scratch)  # boundaries of 16 bytes
    monkeypatch.setattr(module, "MAX_SCRATCH_BYTES", bound)
    seen: list[tuple[str, int, int]] = []
    cut = run_layer(layer, routes.x, routes.ids, routes.weights, device=CPU, progress=lambda *step: seen.append(step))
    assert cut.plan.required_nbytes() <= bound
    assert tokens - 1 <= cut.plan.capacity.max_tokens <= tokens + 1
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
        (None, "hidden_act is None"),
        ({}, "hidden_act is None"),
        ({"hidden_act": "tanhexp"}, "hidden_act is 'tanhexp'"),
        ({"mlp_hidden_act": "mish", "hidden_act": "silu"}, "mlp_hidden_act is 'mish'"),
    ],
)
def test_an_unknown_activation_is_refused_and_can_be_given(tmp_path: Path, config: object, words: str) -> None:
    path = small(tmp_path, config)
    with pytest.raises(MoeValueError) as caught:
        open_layer(path, 0)
    assert str(caught.value).startswith(f"{path / 'config.json'}: {words}")
    assert "--activation, one of " + ", ".join(ACTIVATIONS) in str(caught.value)
    assert open_layer(path, 0, activation=Activation("situ")).source.activation == Activation("situ")


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
