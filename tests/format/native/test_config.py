"""Holds `TrellisConfig` to its schema: exact round trips, each wrong key by its path, and what is handled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from slot_files import edited
from trellis_format.codebooks import CODEBOOKS
from trellis_format.errors import FormatTypeError, FormatUnsupportedError, FormatValueError
from trellis_format.native.config import (  # noqa: F401  # repr uses them
    BoundaryConfig,
    ExpertConfig,
    ProjectionConfig,
    QuantizationConfig,
    RateConfig,
    ScaleConfig,
    TransformConfig,
    TrellisConfig,
    parse_config,
    parse_quantization_config,
)
from trellis_format.transform import ExpertTransform


def boundary(vectors: str, gains: str) -> dict[str, str]:
    return {"vectors": vectors, "gains": gains}


K3 = {
    "version": 2,
    "codebook": "lut_e4m3",
    "rate": {"granularity": "uniform"},
    "scale": {
        "input_scales": boundary("per_layer", "per_layer"),
        "intermediate_scales": boundary("per_layer", "per_expert"),
        "output_scales": boundary("per_layer", "per_layer"),
    },
    "transform": {
        "projection": {"kind": "scaled_hadamard", "block_size": 128},
        "expert": {
            "kind": "intermediate_hadamard",
            "pre_block_size": 512,
            "post_block_size": 128,
            "sign_pattern_granularity": "per_expert",
        },
    },
}
GLM = {
    "version": 2,
    "codebook": "mcg",
    "rate": {"granularity": "per_expert_projection"},
    "scale": {
        "input_scales": boundary("per_layer", "none"),
        "intermediate_scales": boundary("per_expert", "none"),
        "output_scales": boundary("per_layer", "none"),
    },
    "transform": {"projection": {"kind": "scaled_hadamard", "block_size": 128}, "expert": {"kind": "none"}},
}
GROUPED = edited(GLM, "rate", {"granularity": "per_expert", "group_size": 256})
PLAIN = edited(GLM, "transform", {"projection": {"kind": "none"}, "expert": {"kind": "none"}})
EACH = pytest.mark.parametrize("data", [K3, GLM, GROUPED, PLAIN], ids=["K3", "GLM", "grouped", "plain"])


def paths(data: Any, prefix: str = "") -> list[str]:
    """Every dotted path of nested objects."""
    if not isinstance(data, dict):
        return []
    here = [f"{prefix}{key}" for key in data]
    return here + [path for key, value in data.items() for path in paths(value, f"{prefix}{key}.")]


@EACH
def test_parse_then_emit_is_the_same_json(data: dict[str, Any]) -> None:
    config = parse_config(json.loads(json.dumps(data)))
    assert config.to_json() == data
    assert json.dumps(config.to_json()) == json.dumps(data)
    assert eval(repr(config)) == config
    assert len({config, parse_config(data)}) == 1


@EACH
def test_model_configuration_holds_exactly_two_keys(data: dict[str, Any]) -> None:
    config = parse_config(data)
    assert config.quantization_config() == {"quant_method": "b12x_trellis", "b12x_trellis": data}
    assert parse_quantization_config(config.quantization_config()) == config
    for wrong, text in (
        ({"quant_method": "b12x_trellis"}, "b12x_trellis: missing key"),
        ({"b12x_trellis": data}, "quant_method: missing key"),
        ({**config.quantization_config(), "bits": 3}, "bits: unknown key"),
        ({"quant_method": "exl3", "b12x_trellis": data}, "quant_method: Input should be 'b12x_trellis'"),
        ({"quant_method": "b12x_trellis", "b12x_trellis": edited(data, "codebook", "x")}, r"b12x_trellis\.codebook"),
    ):
        with pytest.raises(FormatValueError, match=rf"^config\.json: {text}"):
            parse_quantization_config(wrong, file="config.json")


@EACH
def test_every_key_is_required_and_no_other_is_known(data: dict[str, Any]) -> None:
    for path in paths(data):
        if path != "rate.group_size":
            with pytest.raises(FormatValueError, match=f"{path}: missing key".replace(".", r"\.")):
                parse_config(edited(data, path))
        parent = path.rpartition(".")[0]
        stray = f"{parent}.stray" if parent else "stray"
        with pytest.raises(FormatValueError, match=f"{stray}: unknown key".replace(".", r"\.")):
            parse_config(edited(data, stray, 1))


@EACH
@pytest.mark.parametrize("wrong", [None, True, 1.5, [], ["x"]])
def test_no_key_takes_another_json_type(data: dict[str, Any], wrong: Any) -> None:
    for path in paths(data):
        with pytest.raises(FormatTypeError, match=f"{path} must be".replace(".", r"\.")) as caught:
            parse_config(edited(data, path, wrong))
        assert type(wrong).__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("version", 1, "version: Input should be 2, got '1'"),
        ("version", 3, "version: Input should be 2, got '3'"),
        ("codebook", "hyb", "codebook: unknown codebook; known: 3inst, mcg, mul1, lut_e4m3, lut_fp16, got 'hyb'"),
        ("rate.granularity", "none", r"rate\.granularity: Input should be 'uniform', 'per_layer', 'per_expert' or"),
        ("rate.group_size", 0, r"rate\.group_size: .*greater than 0"),
        ("rate.group_size", 48, r"rate\.group_size: .*multiple of 32, got '48'"),
        ("scale.input_scales.vectors", "none", r"scale\.input_scales\.vectors: Input should be 'uniform'"),
        ("scale.output_scales.gains", "some", r"scale\.output_scales\.gains: Input should be 'none', 'uniform'"),
        ("transform.projection.kind", "hadamard", r"transform\.projection\.kind: Input should be 'none' or"),
        ("transform.projection.kind", "none", r"transform\.projection\.block_size: unknown key for kind 'none'"),
        ("transform.projection.block_size", 96, r"transform\.projection\.block_size: must be a power of two, got 96"),
        ("transform.projection.block_size", 0, r"block_size: must be a power of two, got 0"),
        ("transform.expert.kind", "none", r"transform\.expert\.pre_block_size: unknown key for kind 'none'"),
        ("transform.expert.post_block_size", -128, r"transform\.expert\.post_block_size: must be a power of two"),
        ("transform.expert.sign_pattern_granularity", "uniform", r"sign_pattern_granularity: Input should be"),
    ],
)
def test_wrong_values_are_named_by_path(path: str, value: Any, text: str) -> None:
    with pytest.raises(FormatValueError, match=text):
        parse_config(edited(K3, path, value))


@pytest.mark.parametrize("key", ["pre_block_size", "post_block_size", "sign_pattern_granularity"])
def test_the_intermediate_hadamard_needs_its_three_keys(key: str) -> None:
    text = rf"transform\.expert\.{key}: missing key; kind 'intermediate_hadamard' needs it"
    with pytest.raises(FormatValueError, match=text):
        parse_config(edited(K3, f"transform.expert.{key}"))


@pytest.mark.parametrize("name", CODEBOOKS)
def test_every_codebook_may_be_named(name: str) -> None:
    assert parse_config(edited(K3, "codebook", name)).codebook == name


def test_objects_may_be_put_together_in_python() -> None:
    side = BoundaryConfig(vectors="per_layer", gains="none")
    config = TrellisConfig(
        version=2,
        codebook="mcg",
        rate=RateConfig(granularity="per_expert_projection"),
        scale=ScaleConfig(
            input_scales=side,
            intermediate_scales=BoundaryConfig(vectors="per_expert", gains="none"),
            output_scales=side,
        ),
        transform=TransformConfig(
            projection=ProjectionConfig(kind="scaled_hadamard", block_size=128), expert=ExpertConfig(kind="none")
        ),
    )
    assert config == parse_config(GLM)
    assert config.to_json() == GLM
    with pytest.raises(FormatTypeError, match="version must be an integer, got bool"):
        TrellisConfig(**{**GLM, "version": True})
    with pytest.raises(ValidationError, match="version"):
        TrellisConfig(**{**GLM, "version": 3})
    with pytest.raises(ValidationError, match="frozen"):
        config.codebook = "mul1"


@pytest.mark.parametrize(
    ("granularity", "group", "model", "layer"),
    [
        ("uniform", None, (1,), (1,)),
        ("per_layer", None, (75,), (1,)),
        ("per_expert", None, (75, 256), (256,)),
        ("per_expert_projection", None, (75, 256, 3), (256, 3)),
        ("uniform", 256, (8,), (8,)),
        ("per_layer", 256, (75, 8), (8,)),
        ("per_expert", 256, (75, 256, 8), (256, 8)),
        ("per_expert_projection", 32, (75, 256, 3, 64), (256, 3, 64)),
    ],
)
def test_shapes_of_the_rate_tensor(
    granularity: str, group: int | None, model: tuple[int, ...], layer: tuple[int, ...]
) -> None:
    rate = RateConfig(granularity=granularity, group_size=group)  # type: ignore[arg-type]
    assert rate.model_shape(75, 256, 2048) == model
    assert rate.layer_shape(256, 2048) == layer
    assert rate.projection_mixed is (granularity == "per_expert_projection")


def test_shapes_follow_the_projections_and_groups_must_divide() -> None:
    assert RateConfig(granularity="per_expert_projection").layer_shape(4, 256, 2) == (4, 2)
    with pytest.raises(FormatValueError, match=r"rate\.group_size 96 does not divide the intermediate size 256"):
        RateConfig(granularity="per_expert", group_size=96).layer_shape(4, 256)


def test_what_is_handled() -> None:
    assert parse_config(K3).expert_transform() == ExpertTransform(pre_block=512, post_block=128)
    assert parse_config(GLM).expert_transform() is None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (GROUPED, "rates in groups of 256 channels are not handled"),
        (PLAIN, "projection transform none is not handled; supported: scaled_hadamard of 128"),
        (edited(K3, "transform.projection.block_size", 256), "scaled_hadamard of 256 is not handled"),
        (edited(K3, "transform.expert.pre_block_size", 256), "blocks 256 and 128 is not handled"),
    ],
)
def test_what_is_well_formed_but_not_handled(data: dict[str, Any], text: str) -> None:
    config = parse_config(data)
    with pytest.raises(FormatUnsupportedError, match=text):
        config.expert_transform()
