"""Owns the table of what is supported, made from the registries and the planner.  It must not list anything of its own.

python -m trellis_moe.support      prints the table that the README shows between its support-table marks
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from trellis_format.activations import Activation
from trellis_format.codebooks import CODEBOOKS, EXL3_CODEBOOKS
from trellis_format.codebooks.mul1 import Mul1
from trellis_format.container.manifest import CONTAINER_BITS
from trellis_format.extent import TrellisExtent
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.source import CodeLayout, ExpertGeometry, TrellisSource
from trellis_format.transform import ExpertTransform
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.layers import DeviceLimits
from trellis_moe.errors import MoeUnsupportedError
from trellis_moe.fused import FUSED_NAMES, Declarations, choose_fused
from trellis_moe.specs import ActivationSpec, ExecutionCapacity, RoutingSpec
from trellis_prep import even_extents

__all__ = ["LAUNCHES", "TESTED_ON", "check_support", "launch_path", "support_row", "support_table"]

TESTED_ON = {"sm_90a": "NVIDIA H200"}
"""GPU on which the kernels of a compile target were run; the other targets are compiled and no more."""
LAUNCHES = {"few": 1, "many": 4096}
"""Tokens of the launches that the table tells apart."""
_PATHS = dict.fromkeys(FUSED_NAMES.values(), "fused") | {"op_by_op": "op by op"}
_FILES = ("EXL3", "exl3-v1", "native")
_TESTED, _COMPILED, _ABSENT = "●", "○", "-"

_LIKE = "mul1"  # the codebook that the rows of other layers are made with
_OTHERS = {
    "experts under an intermediate Hadamard of blocks 512 and 128": {"transformed": True},
    "route weights on what experts take": {"weighs_input": True},
}
_REFUSED = "two rates within a pair of planes, rates in groups, a Hadamard of other blocks"


def support_table() -> str:
    """The tables as Markdown: which file may hold which K, what plain and other layers take on a target, the marks."""
    files = [("K of", *_FILES), *((f"`{name}`", *_stored(name)) for name in CODEBOOKS)]
    runs = [("codebook", "tokens", "CPU", *(f"`{arch}`" for arch in ARCHS))]
    runs += [(f"`{name}`", launch, *_run(name, launch)) for name in CODEBOOKS for launch in LAUNCHES]
    others = [("layers", *runs[0][1:])]
    others += [(what, launch, *_run(_LIKE, launch, **kind)) for what, kind in _OTHERS.items() for launch in LAUNCHES]
    return "\n\n".join((_markdown(files), _markdown(runs), _markdown(others), _legend()))


def support_row(codebook: str) -> str:
    """What the tables say of one codebook, in one line."""
    stored = zip(_FILES, _stored(codebook), strict=True)
    runs = (f"{launch} tokens {', '.join(_run(codebook, launch))}" for launch in LAUNCHES)
    return ", ".join((f"`{codebook}`", *(f"{name} K {rates}" for name, rates in stored), *runs))


@lru_cache
def launch_path(
    codebook: str, half_bits: int, arch: str, tokens: int, *, transformed: bool = False, weighs_input: bool = False
) -> str:
    """The path of a launch of a layer: `moe_small`, `prefill` or `op_by_op`.

    Args:
        codebook: its name.
        half_bits: 2K.
        arch: a key of `ARCHS`.
        tokens: of the launch.
        transformed: whether its experts are under an intermediate Hadamard, of which a rank holds a half.
        weighs_input: whether route weights multiply what experts take.
    """
    from trellis_moe.plan import WeightPlan  # which reads this module's refusals

    whole = TrellisExtent.whole(512)
    extent = even_extents(512, 2)[0] if transformed else whole
    source = TrellisSource(
        codebook=codebook,
        geometry=ExpertGeometry(
            num_experts=8,
            hidden_size=512,
            intermediate_size=512,
            padded_hidden_size=512,
            padded_intermediate_size=512,
        ),
        rates=RateTable.uniform(Rate(half_bits)),
        layout=CodeLayout.EXL3_LINEAR,
        extent=whole,
        joint_input_scales=transformed,
        expert_transform=ExpertTransform() if transformed else None,
    )
    declared = Declarations(
        weights=WeightPlan(source=source, extent=extent),
        activation=ActivationSpec(nonlinearity=Activation("silu"), io_dtype="bfloat16"),
        routing=RoutingSpec(apply_router_weight_on_input=weighs_input),
        capacity=ExecutionCapacity(max_tokens=tokens, top_k=2),
        limits=DeviceLimits(arch, 132),
    )
    chosen = choose_fused(declared, tokens).fused
    return "op_by_op" if chosen is None else FUSED_NAMES[type(chosen)]


def check_support(source: TrellisSource, activation: ActivationSpec) -> None:
    """Accept a layer that a path takes.

    Raises:
        MoeUnsupportedError: if none does; states the rule, and shows the codebook's row of the table.
    """
    legal = {"unrounded": EXL3_CODEBOOKS, "bytes": (Mul1.name,)}.get(activation.arithmetic)
    if legal is None or source.codebook in legal:
        return
    needed = f"{'one of ' if len(legal) > 1 else ''}{', '.join(legal)}"
    fact = (
        f"arithmetic {activation.arithmetic} needs codebook {needed}, got {source.codebook}; "
        f"exact is legal for every codebook"
    )
    raise MoeUnsupportedError(f"{fact} ({support_row(source.codebook)})")


def rates_text(rates: Sequence[Rate]) -> str:
    """Rates as ranges of whole K, then the half rates."""
    whole = [rate.half_bits // 2 for rate in rates if not rate.is_half]
    if not whole:
        return ", ".join(map(str, rates))
    text = f"{whole[0]} to {whole[-1]}" if whole == list(range(whole[0], whole[-1] + 1)) else ", ".join(map(str, whole))
    return ", ".join([text, *(str(rate) for rate in rates if rate.is_half)])


def _stored(codebook: str) -> tuple[str, ...]:
    """K that each container may hold, in the order of `_FILES`."""
    every = rates_text(CODEBOOKS[codebook].legal_rates)
    return every if codebook in EXL3_CODEBOOKS else _ABSENT, _container_rates(codebook), every


def _container_rates(codebook: str) -> str:
    legal = CODEBOOKS[codebook].legal_rates
    held = [rate for rate in legal if rate.bits in CONTAINER_BITS.get(codebook, ())]
    return rates_text(held) if held else _ABSENT


def _run(codebook: str, launch: str, **kind: bool) -> tuple[str, ...]:
    """What a launch takes on the CPU and on each target."""
    return f"{_TESTED} {_PATHS['op_by_op']}", *(_cell(codebook, launch, arch, **kind) for arch in ARCHS)


def _cell(codebook: str, launch: str, arch: str, **kind: bool) -> str:
    rates = CODEBOOKS[codebook].legal_rates
    paths: dict[str, list[Rate]] = {}
    for rate in rates:
        path = _PATHS[launch_path(codebook, rate.half_bits, arch, LAUNCHES[launch], **kind)]
        paths.setdefault(path, []).append(rate)
    whole = len(paths) == 1
    parts = (path if whole else f"{path} at K {rates_text(taken)}" for path, taken in paths.items())
    return f"{_TESTED if arch in TESTED_ON else _COMPILED} {'; '.join(parts)}"


def _legend() -> str:
    gpus = ", ".join(f"`{arch}` on an {gpu}" for arch, gpu in TESTED_ON.items())
    return (
        f"{_TESTED} tested, {gpus}; {_COMPILED} compiled for that target, and not run on such a GPU. *fused*: few "
        f"launches for a layer; *op by op*: one kernel after another, on a CPU in torch. *few* is {LAUNCHES['few']} "
        f"token, *many* {LAUNCHES['many']}, of a layer of 8 experts; `plan.explain()` says it for any other. Refused "
        f"when a file is described: {_REFUSED}."
    )


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    marked = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in marked)


if __name__ == "__main__":
    print(support_table())
