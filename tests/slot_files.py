"""Owns the making of slot-major content for tests: manifests, layers in memory, and what loops make of them.

Any bits are a legal tile, so codes are uniform noise.  It lays rows itself and must not use the product to do so.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.activations import Activation
from trellis_format.container.layer import ContainerLayer, ContainerPairLayer
from trellis_format.container.manifest import ManifestHead, parse_manifest
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import ArrayView, MemoryArray
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights
from trellis_format.transform import ExpertTransform

PAIR_BYTES = {"P22": 0x22, "P33": 0x33, "P24": 0x24, "P43": 0x43, "P44": 0x44}

Layer = tuple[TrellisSource, TrellisWeights]


def manifest_json(
    *,
    codebook: str = "mcg",
    bits: int = 3,
    experts: int = 3,
    hidden: int = 512,
    intermediate: int = 3072,
    per_expert: bool = True,
    transform: bool = False,
    kinds: tuple[str, ...] = (),
    row_alignment: int = 4096,
    alignment: int = 4,
    layers: tuple[int, ...] = (3,),
) -> dict[str, Any]:
    """A manifest as JSON; digests are made up."""
    slots = intermediate // 32
    return {
        "kind": "exl3-manifest",
        "schema": "exl3-v1",
        "codebook": codebook,
        **({"codebook_seed": 0xCBAC1FED} if codebook == "mcg" else {}),
        "geometry": {
            "num_experts": experts,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "slot_channels": 32,
            "num_slots": slots,
            "moe_layer_indices": list(layers),
        },
        "rates": (
            {"structure": "per_expert_pair", "pair_kinds": list(kinds)}
            if kinds
            else {"structure": "uniform", "bits": bits}
        ),
        "hadamard": {
            "intermediate_hadamard": transform,
            "per_expert_input_rotations": per_expert,
            **({"pre_block": 512, "post_block": 128} if transform else {}),
        },
        "layout": {
            "row_alignment": row_alignment,
            "extent_alignment_slots": alignment,
            "extent_barriers": [slots // 2] if transform else [],
        },
        "layers": {
            str(layer): {"file": f"exl3-layer-{layer:05d}.safetensors", "sha256": f"{layer:064x}"} for layer in layers
        },
    }


def head_of(**changes: Any) -> ManifestHead:
    """A manifest; arguments as `manifest_json`."""
    return parse_manifest(manifest_json(**changes))


def edited(data: dict[str, Any], path: str, value: Any = ...) -> dict[str, Any]:
    """A copy of JSON with the value at a dotted path replaced, or removed where none is given."""
    result = copy.deepcopy(data)
    *parents, last = path.split(".")
    here: Any = result
    for key in parents:
        here = here[key]
    if value is ...:
        del here[last]
    else:
        here[last] = value
    return result


def halves(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float16]:
    """Finite signed float16 of about unit size, none of them zero."""
    return (rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape)).astype(np.float16)


def random_content(
    extent: tuple[int, int] | None = None, *, layer: int = 3, seed: int = 0, **changes: Any
) -> ContainerLayer:
    """A uniform layer in memory, over (first slot, slots) of its axis or all of it; manifest as `manifest_json`."""
    data = manifest_json(layers=(layer,), **changes)
    head, geometry = parse_manifest(data), data["geometry"]
    rng = np.random.default_rng([seed, layer])
    experts, hidden, slots = geometry["num_experts"], geometry["hidden_size"], geometry["num_slots"]
    payload = experts * 3 * hidden // 16 * 64 * data["rates"]["bits"]
    alignment = data["layout"]["row_alignment"]
    codes = np.zeros((slots, -(-payload // alignment) * alignment), dtype=np.uint8)
    codes[:, :payload] = rng.integers(0, 256, (slots, payload), dtype=np.uint8)
    lead = (experts,) if data["hadamard"]["per_expert_input_rotations"] else ()
    tables = {name: halves(rng, *lead, hidden) for name in ("gate_suh", "up_suh", "down_svh")}
    rotations = halves(rng, slots, experts, 3, 32)
    signs = rng.integers(0, 8, experts, dtype=np.uint8) if data["hadamard"]["intermediate_hadamard"] else None
    first, count = extent or (0, slots)
    rows = slice(first, first + count)
    share = TrellisExtent(global_intermediate_size=geometry["intermediate_size"], first_slot=first, slot_count=count)
    return ContainerLayer(
        head=head,
        layer=layer,
        extent=share,
        codes=MemoryArray(codes[rows]),
        rotations=rotations[rows],
        sign_pattern=signs,
        **tables,
    )


def random_pair_content(*, layer: int = 3, seed: int = 0, experts: int = 2, hidden: int = 128) -> ContainerPairLayer:
    """A layer of 16 slots whose rates vary over pairs and experts, rows of different payloads."""
    kinds = ("P33", "P24", "P43")
    data = manifest_json(experts=experts, hidden=hidden, intermediate=512, kinds=kinds, layers=(layer,), alignment=8)
    data["codebook"] = "lut_e4m3"
    del data["codebook_seed"]
    rng = np.random.default_rng(seed)
    table = np.array([PAIR_BYTES[kind] for kind in kinds], dtype=np.uint8)
    fc1, fc2 = (table[rng.integers(0, 3, (2, experts))] for _ in range(2))
    nibbles = [(part >> 4).astype(int) + (part & 15) for part in (fc1, fc2)]
    payloads = (hidden // 16 * 32 * (2 * nibbles[0] + nibbles[1])).sum(axis=1).repeat(8)
    codes = np.zeros((16, -(-int(payloads.max()) // 4096) * 4096), dtype=np.uint8)
    for row, payload in zip(codes, payloads, strict=True):
        row[:payload] = rng.integers(1, 256, payload)
    return ContainerPairLayer(
        head=parse_manifest(data),
        layer=layer,
        extent=TrellisExtent.whole(512),
        codes=MemoryArray(codes),
        rotations=halves(rng, 16, experts, 3, 32),
        gate_suh=halves(rng, experts, hidden),
        up_suh=halves(rng, experts, hidden),
        down_svh=halves(rng, experts, hidden),
        rates_fc1=fc1,
        rates_fc2=fc2,
    )


def linear_by_loop(
    rows: npt.NDArray[np.uint8], rates: list[list[Rate]], hidden: int, expert: int, projection: int
) -> npt.NDArray[np.int16]:
    """One linear's tiles, picked out of rows tile by tile: `[k_tiles, n_tiles, 16*K]`, the last projection is down."""
    offset = sum(
        hidden // 16 * 2 * rate.tile_bytes
        for index, rate in enumerate(rate for row in rates for rate in row)
        if index < expert * len(rates[0]) + projection
    )
    rate, down = rates[expert][projection], projection == len(rates[0]) - 1
    tiles_hidden, tiles_width = hidden // 16, 2 * len(rows)
    shape = (tiles_width, tiles_hidden) if down else (tiles_hidden, tiles_width)
    out = np.empty((*shape, rate.tile_words16), dtype=np.int16)
    for slot, row in enumerate(rows):
        for plane in (0, 1):
            for tile in range(tiles_hidden):
                begin = offset + (plane * tiles_hidden + tile) * rate.tile_bytes
                words = np.frombuffer(row[begin : begin + rate.tile_bytes].tobytes(), dtype="<i2")
                out[(2 * slot + plane, tile) if down else (tile, 2 * slot + plane)] = words
    return out


def random_linears(
    *,
    experts: int = 3,
    hidden: int = 256,
    intermediate: int = 384,
    codebook: str = "mul1",
    rates: tuple[float, ...] = (1, 2.5, 4, 8),
    gated: bool = True,
    biased: bool = False,
    shared: bool = False,
    joint: bool = False,
    true_sizes: tuple[int, int] | None = None,
    transform: bool = False,
    seed: int = 0,
) -> Layer:
    """A layer of linears in memory; `rates` are taken in turn over experts and projections."""
    rng = np.random.default_rng([seed, experts, hidden])
    projections = tuple(Projection) if gated else (Projection.UP, Projection.DOWN)
    true_hidden, true_intermediate = true_sizes or (hidden, intermediate)
    geometry = ExpertGeometry(
        num_experts=experts,
        hidden_size=true_hidden,
        intermediate_size=true_intermediate,
        padded_hidden_size=hidden,
        padded_intermediate_size=intermediate,
        projections=projections,
    )
    count = len(projections)
    table = [[Rate.of(rates[(expert * count + p) % len(rates)]) for p in range(count)] for expert in range(experts)]
    joint = joint or transform or not gated
    lead = () if shared else (experts,)
    source = TrellisSource(
        codebook=codebook,
        geometry=geometry,
        rates=RateTable.of(table),
        layout=CodeLayout.EXL3_LINEAR,
        extent=TrellisExtent.whole(intermediate),
        shared_input_scales=shared,
        joint_input_scales=joint,
        shared_output_scales=shared,
        biased=projections if biased else (),
        activation=Activation("silu" if gated else "relu2"),
        expert_transform=ExpertTransform() if transform else None,
    )

    def tiles(projection: Projection, rate: Rate) -> ArrayView:
        k, n = geometry.matrix(projection)
        return MemoryArray(rng.integers(-(2**15), 2**15, (k // 16, n // 16, rate.tile_words16), dtype=np.int16))

    weights = TrellisWeights(
        codes=tuple(tuple(tiles(p, row[i]) for i, p in enumerate(projections)) for row in table),
        rate=source.rates.rate_bytes(),
        input_scales=halves(rng, *lead, 1 if joint else 2, hidden),
        intermediate_scales=halves(rng, experts, count, intermediate),
        output_scales=halves(rng, *lead, hidden),
        biases={p: halves(rng, experts, geometry.matrix(p)[1]) for p in source.biased},
        expert_sign_patterns=rng.integers(0, 8, experts, dtype=np.uint8) if transform else None,
    )
    return source, weights


def rates_of(source: TrellisSource) -> list[list[Rate]]:
    """K of every expert and projection, as rows."""
    geometry = source.geometry
    return [
        [source.rates.rate(expert, index) for index in range(len(geometry.projections))]
        for expert in range(geometry.num_experts)
    ]


def rows_by_loop(layer: Layer) -> npt.NDArray[np.uint8]:
    """A layer's linears as rows, appended by loops over slots, experts, projections and planes."""
    source, weights = layer
    rows = []
    for slot in range(source.extent.slot_count):
        row = b""
        for expert in range(source.geometry.num_experts):
            for index, projection in enumerate(source.geometry.projections):
                tiles = weights.code_view(expert, index).read()
                for plane in (2 * slot, 2 * slot + 1):
                    row += (tiles[plane] if projection is Projection.DOWN else tiles[:, plane]).tobytes()
        rows.append(np.frombuffer(row, dtype=np.uint8))
    return np.stack(rows)
