"""Holds the grouping of linears into layers, and the checks across the experts of a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import random_layer, random_linear, write_checkpoint
from trellis_format.activations import Activation
from trellis_format.checkpoint import Checkpoint, open_checkpoint
from trellis_format.errors import FormatError, FormatTypeError, FormatUnsupportedError, FormatValueError
from trellis_format.exl3.layers import LayerKey, example_trellis, find_layer, find_layers, group_modules
from trellis_format.rates import Rate
from trellis_format.source import Projection

RNG = np.random.default_rng(0)
WORDS = ("w1", "w3", "w2")


def opened(folder: Path, tensors: dict[str, Any], **files: Any) -> Checkpoint:
    return open_checkpoint(write_checkpoint(folder / "c", tensors, **files))


def test_tensors_are_grouped_by_module(tmp_path: Path) -> None:
    tensors = {
        **random_linear(RNG, "a.q", 128, 128, bias=np.float16),
        **random_linear(RNG, "a.q.inner", 128, 128, codebook="3inst"),
        "a.q.weight": np.zeros(2, np.float16),
        "a.norm.weight": np.zeros(2, np.float16),
        "b.suh": np.zeros(2, np.float16),
        "bias": np.zeros(2, np.float16),
    }
    modules = group_modules(opened(tmp_path, tensors).tensors)
    assert {name: sorted(parts) for name, parts in modules.linears.items()} == {
        "a.q": ["bias", "mcg", "suh", "svh", "trellis"],
        "a.q.inner": ["suh", "svh", "trellis"],
    }
    assert sorted(modules.others) == ["a.norm.weight", "a.q.weight", "b.suh", "bias"]
    assert all(
        part.entry.name == f"{name}.{suffix}"
        for name, parts in modules.linears.items()
        for suffix, part in parts.items()
    )


def test_what_makes_a_checkpoint_exl3(tmp_path: Path) -> None:
    whole = random_linear(RNG, "b", 128, 128) | random_linear(RNG, "a", 128, 128, packed=True)
    found = example_trellis(opened(tmp_path / "1", whole).tensors)
    assert found is not None
    assert found.entry.name == "a.trellis"
    for number, change in enumerate(
        (
            {"a.trellis": np.zeros((8, 48), np.int16)},
            {"a.trellis": np.zeros((8, 8, 48), np.float16)},
            {"a.su": None},
            {"a.sv": None},
        )
    ):
        tensors = random_linear(RNG, "a", 128, 128, packed=True) | change
        kept = {name: value for name, value in tensors.items() if value is not None}
        assert example_trellis(opened(tmp_path / f"x{number}", kept).tensors) is None


def test_layers_are_found_in_order_with_their_experts(tmp_path: Path) -> None:
    tensors = random_layer(RNG, layer=10) | random_layer(RNG, layer=2) | random_linear(RNG, "lm_head", 128, 256)
    layers = find_layers(opened(tmp_path, tensors))
    assert list(layers) == [LayerKey(2, "model.layers.2.mlp.experts"), LayerKey(10, "model.layers.10.mlp.experts")]
    for names in layers.values():
        assert sorted((name.expert, name.projection) for name in names.values()) == [
            (expert, projection) for expert in range(2) for projection in sorted(Projection)
        ]


@pytest.mark.parametrize("words", [("gate_proj", "up_proj", "down_proj"), WORDS])
def test_a_layer_is_described_whatever_its_words(tmp_path: Path, words: tuple[str, ...]) -> None:
    bits = {"w1": 1, "gate_proj": 1, "w3": 2, "up_proj": 2, "w2": 4, "down_proj": 4}
    tensors = random_layer(RNG, experts=3, words=words, bits=lambda expert, word: bits[word] + expert)
    layer = find_layer(opened(tmp_path, tensors), 0)
    assert layer.projections == tuple(Projection)
    assert layer.file.endswith("model.safetensors")
    for expert, row in enumerate(layer.experts):
        assert [row[projection].rate for projection in Projection] == [Rate.of(b + expert) for b in (1, 2, 4)]
        assert (row[Projection.GATE].k, row[Projection.GATE].n) == (128, 256)
        assert (row[Projection.DOWN].k, row[Projection.DOWN].n) == (256, 128)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    layer = find_layer(opened(tmp_path, random_layer(RNG, words=("up_proj", "down_proj"))), 0)
    assert layer.projections == (Projection.UP, Projection.DOWN)


def test_a_law_that_the_caller_gives_decides_about_the_gate(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, random_layer(RNG, words=("up_proj", "down_proj")), config={"hidden_act": "silu"})
    layer = find_layer(checkpoint, 0, activation=Activation("relu2"))
    assert layer.projections == (Projection.UP, Projection.DOWN)


def test_a_law_with_a_gate_needs_one(tmp_path: Path) -> None:
    for number, config in enumerate(({"hidden_act": "silu"}, {"model_type": "gpt_oss"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        tensors = random_layer(RNG, words=("up_proj", "down_proj"))
        with pytest.raises(FormatValueError, match=r"layer 0: expert 0 has no gate linear; 0 of 2 .* takes a gate"):
            find_layer(opened(folder, tensors, config=config), 0)
    config = {"hidden_act": "silu", "mlp_hidden_act": "relu2"}
    (tmp_path / "plain").mkdir()
    checkpoint = opened(tmp_path / "plain", random_layer(RNG, words=("up_proj", "down_proj")), config=config)
    assert find_layer(checkpoint, 0).projections == (Projection.UP, Projection.DOWN)


def test_one_expert_may_lie_over_several_shards(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, random_layer(RNG), shards=5, index=True)
    layer = find_layer(checkpoint, 0)
    assert (
        len({tensor.file for row in layer.experts for linear in row.values() for tensor in linear.tensors.values()}) > 2
    )
    assert checkpoint.bytes_read == 0


def mtp(layer: int, expert: int, word: str) -> str:
    return f"mtp.layers.{layer}.mlp.experts.{expert}.{word}"


def other(layer: int, expert: int, word: str) -> str:
    return f"model.visual.layers.{layer}.mlp.experts.{expert}.{word}"


def test_an_index_means_the_main_stack(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, random_layer(RNG, bits=3) | random_layer(RNG, bits=4, name=mtp))
    assert find_layer(checkpoint, 0).key == LayerKey(0, "model.layers.0.mlp.experts")
    key = LayerKey(0, "mtp.layers.0.mlp.experts")
    assert (key.auxiliary, find_layer(checkpoint, 0).key.auxiliary) == (True, False)
    assert find_layer(checkpoint, key).experts[0][Projection.UP].rate == Rate.of(4)
    with pytest.raises(FormatValueError, match="no experts under 'nowhere'"):
        find_layer(checkpoint, LayerKey(0, "nowhere"))


def test_an_mtp_layer_alone_is_found_by_its_index(tmp_path: Path) -> None:
    assert find_layer(opened(tmp_path, random_layer(RNG, name=mtp)), 0).key.prefix == "mtp.layers.0.mlp.experts"


def test_an_index_with_two_paths_asks_for_one(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, random_layer(RNG) | random_layer(RNG, name=other))
    with pytest.raises(
        FormatValueError, match=r"under 2 paths: model\.layers\.0.*, model\.visual\.layers\.0.*; name one: --pattern"
    ):
        find_layer(checkpoint, 0)


def test_a_layer_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    tensors = {}
    for layer in (1, 2, 3, 7):
        tensors |= random_layer(RNG, layer=layer, experts=1)
    with pytest.raises(FormatValueError, match=r"layer 0 has no experts; layers with experts: 1-3, 7$"):
        find_layer(opened(tmp_path / "1", tensors), 0)
    with pytest.raises(FormatValueError, match="no layer of this checkpoint has EXL3 experts"):
        find_layer(opened(tmp_path / "2", random_linear(RNG, "lm_head", 128, 128)), 0)


def test_a_pattern_of_ones_own(tmp_path: Path) -> None:
    tensors = random_layer(RNG, words=("up", "down"), name=lambda layer, expert, word: f"net{layer}.e{expert}.{word}")
    checkpoint = opened(tmp_path, tensors)
    assert find_layers(checkpoint) == {}
    pattern = r"net(?P<layer>\d+)\.e(?P<expert>\d+)\.(?P<projection>\w+)"
    assert find_layer(checkpoint, 0, pattern=pattern).projections == (Projection.UP, Projection.DOWN)
    with pytest.raises(FormatValueError, match="lacks the groups"):
        find_layer(checkpoint, 0, pattern="net")


def without(tensors: dict[str, Any], *starts: str) -> dict[str, Any]:
    return {name: value for name, value in tensors.items() if not name.startswith(starts)}


E1 = "model.layers.0.mlp.experts.1."
BROKEN: dict[str, tuple[dict[str, Any], type[FormatError], tuple[str, ...]]] = {
    "a projection of one expert is missing": (
        without(random_layer(RNG, experts=3), f"{E1}up_proj"),
        FormatValueError,
        ("layer 0", "expert 1", "no up linear", "2 of 3"),
    ),
    "an expert is missing": (
        without(random_layer(RNG, experts=3), E1),
        FormatValueError,
        ("expert 1", "no gate", "2 of 3", "highest index is 2"),
    ),
    "down is missing everywhere": (
        {k: v for k, v in random_layer(RNG).items() if ".down_proj" not in k},
        FormatValueError,
        ("expert 0", "no down", "0 of 2"),
    ),
    "a gate on one expert alone": (
        random_layer(RNG, words=("up_proj", "down_proj")) | random_linear(RNG, f"{E1}gate_proj", 128, 256),
        FormatValueError,
        ("expert 0", "no gate", "1 of 2"),
    ),
    "a projection under two names": (
        random_layer(RNG) | random_linear(RNG, f"{E1}w1", 128, 256),
        FormatValueError,
        ("expert 1", "two gate linears", "w1"),
    ),
    "an expert under two numbers": (
        random_layer(RNG) | random_linear(RNG, "model.layers.0.mlp.experts.01.up_proj", 128, 256),
        FormatValueError,
        ("expert 1", "two up linears", "01.up_proj"),
    ),
    "gate and up differ": (
        random_layer(RNG) | random_linear(RNG, f"{E1}up_proj", 128, 384),
        FormatValueError,
        ("expert 1", "gate 128 x 256", "up 128 x 384", "down 256 x 128"),
    ),
    "down does not fit": (
        random_layer(RNG) | random_linear(RNG, f"{E1}down_proj", 384, 128),
        FormatValueError,
        ("expert 1", "gate 128 x 256", "up 128 x 256", "down 384 x 128"),
    ),
    "experts differ in size": (
        random_layer(RNG) | {k: v for k, v in random_layer(RNG, intermediate=384).items() if k.startswith(E1)},
        FormatValueError,
        ("experts 0 and 1", "256 x 128 in expert 0", "384 x 128 in expert 1"),
    ),
    "a bias on one expert alone": (
        random_layer(RNG) | {f"{E1}up_proj.bias": np.zeros(256, np.float16)},
        FormatValueError,
        ("expert 1 up", "expert 0", "bias"),
    ),
    "a linear breaks a rule": (
        random_layer(RNG) | {f"{E1}up_proj.suh": np.ones(128, np.float32)},
        FormatTypeError,
        (f"{E1}up_proj.suh", "float16", "F32"),
    ),
    "an expert with a 2-D trellis": (
        random_layer(RNG) | {f"{E1}up_proj.trellis": np.zeros((8, 48), np.int16)},
        FormatValueError,
        ("embedding", "3-D", "[8, 48]"),
    ),
    "a rank-sliced expert": (
        random_layer(RNG) | random_linear(RNG, f"{E1}up_proj.rank0", 128, 128),
        FormatUnsupportedError,
        ("rank-sliced", "rank 0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_each_rule_across_experts(tmp_path: Path, case: str) -> None:
    tensors, kind, words = BROKEN[case]
    checkpoint = opened(tmp_path, tensors)
    with pytest.raises(kind) as caught:
        find_layer(checkpoint, 0)
    assert [word for word in words if word not in str(caught.value)] == []
    assert checkpoint.bytes_read == 0


def test_a_declared_count_that_is_not_there(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, random_layer(RNG), config={"num_experts": 4})
    with pytest.raises(FormatValueError, match=r"expert 2 has no gate linear; 2 of 4 .*config\.json declares 4"):
        find_layer(checkpoint, 0)


def test_more_experts_than_declared_are_taken(tmp_path: Path) -> None:
    assert len(find_layer(opened(tmp_path, random_layer(RNG), config={"num_experts": 1}), 0).experts) == 2


def test_a_huge_expert_number_ends_at_once(tmp_path: Path) -> None:
    tensors = random_layer(RNG) | random_linear(RNG, "model.layers.0.mlp.experts.999999999.up_proj", 128, 256)
    with pytest.raises(FormatValueError, match="expert 2 has no gate linear; 2 of 1000000000"):
        find_layer(opened(tmp_path, tensors), 0)


def test_statements_are_held_against_the_layer(tmp_path: Path) -> None:
    foreign = {"quantization_config": {"quant_method": "fp8"}}
    checkpoint = opened(tmp_path / "1", random_layer(RNG), config=foreign)
    with pytest.raises(FormatValueError, match="quant_method = 'fp8'"):
        find_layer(checkpoint, 0)
    assert len(find_layer(checkpoint, 0, ignore_method=True).experts) == 2
    wrong = {"quantization_config": {"quant_method": "exl3", "codebook": "mul1"}}
    for ignore in (False, True):
        with pytest.raises(FormatValueError, match="codebook = 'mul1', the marker tensor mcg says mcg"):
            find_layer(opened(tmp_path / "2", random_layer(RNG), config=wrong), 0, ignore_method=ignore)
    noted = {"tensor_storage": {f"{E1}up_proj": {"bits_per_weight": 4}}}
    with pytest.raises(FormatValueError, match=r"experts\.1\.up_proj.*bits_per_weight = '4'.* K = 3"):
        find_layer(opened(tmp_path / "3", random_layer(RNG), quantization=noted), 0)


def test_a_marker_under_another_name_leaves_a_contradiction(tmp_path: Path) -> None:
    tensors = random_layer(RNG, words=WORDS)
    tensors["model.layers.0.mlp.experts.0.w2_rank0.mcg"] = tensors.pop("model.layers.0.mlp.experts.0.w2.mcg")
    stated = {"quantization_config": {"codebook": "mcg"}}
    with pytest.raises(FormatValueError, match="expected one of mcg, mul1; found none, so 3inst"):
        find_layer(opened(tmp_path, tensors, config=stated), 0)


def test_every_layer_of_real_checkpoints_is_described(checkpoint_path: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_path)
    layers = find_layers(checkpoint)
    assert layers
    for key in layers:
        layer = find_layer(checkpoint, key)
        assert layer.key == key
        assert len(layer.experts) == layer.config.expert_count()
    assert checkpoint.bytes_read == 0
