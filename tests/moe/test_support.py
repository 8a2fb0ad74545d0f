"""Holds the README's support table to the registries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe.samples import LAWS, Layer, make_layer
from slot_files import random_linears
from trellis_format.codebooks import CODEBOOKS
from trellis_format.rates import Rate
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.layers import DeviceLimits
from trellis_moe import (
    ActivationSpec,
    ExecutionCapacity,
    MoeUnsupportedError,
    RoutingSpec,
    plan_execution,
    plan_weights,
)
from trellis_moe.support import (
    LAUNCHES,
    TESTED_ON,
    check_support,
    launch_path,
    rates_text,
    support_row,
    support_table,
)
from trellis_prep import even_extents

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_shows_the_table() -> None:
    _, _, rest = README.read_text().partition("<!-- support-table: begin -->\n")
    shown, mark, _ = rest.partition("<!-- support-table: end -->")
    assert mark
    assert shown.strip() == support_table()


def test_every_codebook_launch_and_target_has_its_place() -> None:
    files, runs, _, legend = support_table().split("\n\n")
    assert all(files.count(f"| `{name}` |") == 1 for name in CODEBOOKS)
    assert all(f"| `{name}` | {launch} |" in runs for name in CODEBOOKS for launch in LAUNCHES)
    assert all(f"`{arch}`" in runs.splitlines()[0] for arch in ARCHS)
    assert set(TESTED_ON) <= set(ARCHS)
    assert all(gpu in legend for gpu in TESTED_ON.values())
    tested = [column for column, arch in enumerate(ARCHS) if arch in TESTED_ON]
    for line in runs.splitlines()[2:]:
        cells = line.strip("| ").split(" | ")[3:]
        assert [column for column, cell in enumerate(cells) if cell.startswith("●")] == tested


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_table_says_what_a_plan_takes(codebook: str, arch: str) -> None:
    for rate in CODEBOOKS[codebook].legal_rates:
        layer = make_layer(codebook=codebook, rates=(str(rate),), experts=2, intermediate=256)
        for tokens in LAUNCHES.values():
            plan = plan_execution(
                plan_weights(layer.source),
                activation=ActivationSpec(nonlinearity=LAWS[0], io_dtype="bfloat16"),
                capacity=ExecutionCapacity(max_tokens=tokens, top_k=2),
                device="cuda",
                limits=DeviceLimits(arch, 132),
            )
            assert plan.variants[-1].path == launch_path(codebook, rate.half_bits, arch, tokens)


@pytest.mark.parametrize("arch", ARCHS)
def test_table_says_what_a_plan_takes_of_layers_that_are_not_plain(arch: str) -> None:
    sizes = {"hidden": 512, "intermediate": 512, "codebook": "mul1", "rates": (3,)}
    transformed = Layer(*random_linears(experts=8, transform=True, **sizes))
    plain = Layer(*random_linears(experts=8, **sizes))
    _, _, others, _ = support_table().split("\n\n")
    header, _, *rows = (line.strip("| ").split(" | ") for line in others.splitlines())
    cases = [
        (transformed, RoutingSpec(), {"transformed": True}),
        (plain, RoutingSpec(apply_router_weight_on_input=True), {"weighs_input": True}),
    ]
    assert len(rows) == len(cases) * len(LAUNCHES)
    for index, (layer, routing, kind) in enumerate(cases):
        for tokens, row in zip(LAUNCHES.values(), rows[index * len(LAUNCHES) :], strict=False):
            plan = plan_execution(
                plan_weights(layer.source, even_extents(512, 2)[0]),
                activation=ActivationSpec(nonlinearity=LAWS[0], io_dtype="bfloat16"),
                capacity=ExecutionCapacity(max_tokens=tokens, top_k=2),
                routing=routing,
                device="cuda",
                limits=DeviceLimits(arch, 132),
            )
            assert plan.variants[-1].path == launch_path("mul1", 6, arch, tokens, **kind) == "op_by_op"
            assert row[header.index(f"`{arch}`")].endswith(" op by op")


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        (("1", "2", "3"), "1 to 3"),
        (("2", "4"), "2, 4"),
        (("1", "1.5", "2", "2.5"), "1 to 2, 1.5, 2.5"),
        (("1.5", "2.5"), "1.5, 2.5"),
    ],
)
def test_rates_read_as_ranges(rates: tuple[str, ...], text: str) -> None:
    assert rates_text([Rate.of(rate) for rate in rates]) == text


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_a_refusal_shows_the_row_of_the_table(codebook: str) -> None:
    row = support_row(codebook)
    lines = [line for line in support_table().splitlines() if line.startswith(f"| `{codebook}` |")]
    assert len(lines) == 1 + len(LAUNCHES)
    assert all(cell.strip() in row for line in lines for cell in line.strip("|").split("|"))
    spec = ActivationSpec(nonlinearity=LAWS[0], io_dtype="float16", arithmetic="exact")
    source = make_layer(codebook=codebook, rates=("5" if codebook == "lut_fp16" else "3",)).source
    check_support(source, spec)
    for arithmetic, legal in (("bytes", ("mul1",)), ("unrounded", ("3inst", "mcg", "mul1"))):
        if codebook in legal:
            check_support(source, replace(spec, arithmetic=arithmetic))
            continue
        with pytest.raises(MoeUnsupportedError, match=f"arithmetic {arithmetic} needs codebook .*mul1") as caught:
            check_support(source, replace(spec, arithmetic=arithmetic))
        assert row in str(caught.value)
