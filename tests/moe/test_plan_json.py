"""Holds plans in files to giving back the very plan, and to naming where another would be planned."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe.samples import LAWS, make_layer
from trellis_format.activations import Activation
from trellis_format.errors import FormatError
from trellis_kernels.layers import DeviceLimits
from trellis_moe import (
    ActivationSpec,
    ExecutionCapacity,
    ExecutionPlan,
    MoeError,
    MoeValueError,
    RoutingSpec,
    plan_execution,
    plan_weights,
)
from trellis_moe.plan_json import PLAN_SCHEMA, PLAN_SCHEMA_VERSION, PlanDocument, plan_document, plan_schema
from trellis_prep import even_extents

HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)


def make(law: Activation = LAWS[0], limits: DeviceLimits | None = HOPPER, **options: Any) -> ExecutionPlan:
    layer = make_layer(activation=law, rates=("2", "3.5"), biased=law.gated, up_divisor=128.0)
    return plan_execution(
        plan_weights(layer.source, even_extents(384, 3)[1]),
        activation=ActivationSpec(nonlinearity=law, io_dtype="bfloat16", arithmetic="bytes"),
        capacity=ExecutionCapacity(max_tokens=700, top_k=3, token_counts=(1, 8), scratch_bound=1 << 28),
        routing=RoutingSpec(id_dtype="int32", weight_dtype="bfloat16"),
        device="cuda" if limits else "cpu",
        limits=limits,
        **options,
    )


@pytest.mark.parametrize("limits", [HOPPER, None], ids=["hopper", "cpu"])
@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_a_plan_comes_back_from_its_document(law: Activation, limits: DeviceLimits | None) -> None:
    plan = make(law, limits)
    again = ExecutionPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()


def test_a_plan_of_the_reference_comes_back_as_one() -> None:
    plan = make(reference=True)
    assert ExecutionPlan.from_json(plan.to_json()) == plan != make()


def test_the_document_states_what_the_plan_does() -> None:
    plan = make()
    document = json.loads(plan.to_json())
    assert (document["schema"], document["schema_version"]) == (PLAN_SCHEMA, PLAN_SCHEMA_VERSION)
    stated = document["stated"]
    assert stated["scratch_nbytes"] == plan.required_nbytes()
    assert stated["prepared_nbytes"] == plan.weights.required_nbytes()
    assert stated["compile_keys"] == [repr(key) for key in plan.compile_keys()]
    assert [variant["tokens"] for variant in stated["variants"]] == [1, 8, 700]
    places = [(spec.buffer.name, spec.first, spec.buffer.nbytes) for spec in plan.scratch_specs()]
    assert places == [
        (part["name"], part["first"], part["nbytes"]) for variant in stated["variants"] for part in variant["scratch"]
    ]
    assert stated["variants"][2]["rejected"][0]["path"] == "moe_small"


def test_operands_and_io_have_dtypes_of_their_own() -> None:
    activation = json.loads(make().to_json())["declared"]["activation"]
    assert (activation["rotation_dtype"], activation["io_dtype"]) == ("float16", "bfloat16")


def changed(change: str, value: Any) -> str:
    """The document of a plan with one value put at a path of keys."""
    document = json.loads(make().to_json())
    *path, last = change.split(".")
    place = document
    for key in path:
        place = place[int(key)] if key.isdecimal() else place[key]
    place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "value", "words"),
    [
        ("schema_version", 2, "not a plan of schema version 1: schema_version"),
        ("schema", "another", "not a plan of schema version 1: schema"),
        ("surplus", 1, "surplus"),
        ("declared.capacity.surplus", 1, "declared.capacity.surplus"),
        ("stated.scratch_nbytes", 5, r"stated.scratch_nbytes is 5 in the document and \d+ here"),
        (
            "stated.variants.1.path",
            "prefill",
            r"stated.variants\[1\].path is 'prefill' in the document and 'moe_small'",
        ),
        ("stated.variants.0.backends", {}, r"stated.variants\[0\].backends is {} in the document"),
        ("stated.compile_keys", [], r"stated.compile_keys is \[\] in the document"),
    ],
)
def test_another_document_is_refused_with_the_place(change: str, value: Any, words: str) -> None:
    with pytest.raises(MoeValueError, match=words):
        ExecutionPlan.from_json(changed(change, value))


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("declared.capacity.max_tokens", "700"),
        ("declared.capacity.max_tokens", True),
        ("declared.capacity.max_tokens", 0),
        ("declared.source.half_bits", [[3.5]]),
        ("declared.source.codebook", "unknown"),
        ("declared.device_type", "tpu"),
        ("declared", None),
    ],
)
def test_declarations_that_break_a_rule_are_refused(change: str, value: Any) -> None:
    with pytest.raises((MoeError, FormatError)):
        ExecutionPlan.from_json(changed(change, value))


def test_other_words_of_a_reason_make_no_other_plan() -> None:
    text = changed("stated.variants.2.rejected", [{"path": "moe_small", "reason": "otherwise"}])
    assert ExecutionPlan.from_json(text) == make()


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises((MoeValueError, FormatError)):
        ExecutionPlan.from_json(text)


def test_the_schema_is_exported_and_forbids_other_keys() -> None:
    schema = plan_schema()
    assert schema["properties"]["schema_version"]["const"] == PLAN_SCHEMA_VERSION
    assert schema["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for name, part in schema["$defs"].items() if "properties" in part)
    document = plan_document(make())
    assert isinstance(document, PlanDocument)
    assert set(schema["required"]) == {"schema", "schema_version", "declared", "stated"}
