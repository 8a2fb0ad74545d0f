"""Holds layers to float64 where offsets need more than 32 bits and where experts are very many.

A bank of random codes is made on the device itself, so that a GPU holds gigabytes that no file or host has; a few
experts, those at the far end among them, are read back as a small layer for the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from moe.samples import Layer, Routes, bits, distance, launch, make_layer, make_plan, make_routes, truth
from trellis_format.files.arrays import MemoryArray
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.source import Projection, TrellisSource, TrellisWeights
from trellis_moe import bind, plan_weights, prepare_weights
from trellis_prep import PreparedExperts, plan_layout

TOP_K = 3
RATES = ("8", "7", "8")  # of the largest banks
WORDS = 1 << 31  # words that an int32 counts no more, which is 8 GiB
BYTES = 1 << 30  # words whose bytes a uint32 counts no more


@dataclass(frozen=True)
class Bank:
    """A layer that only its device holds."""

    source: TrellisSource
    experts: PreparedExperts

    def part(self, chosen: list[int]) -> Layer:
        """Some experts, in that order, as a layer in memory."""
        held = self.experts
        codes = []
        for expert in chosen:
            row = []
            for index, projection in enumerate(Projection):
                first, half_bits = (int(value) for value in held.descriptors[expert, index])
                k, n = self.source.geometry.matrix(projection)
                words = Rate(half_bits).tile_words16 // 2 * (k // 16) * (n // 16)
                tiles = held.codes[first : first + words].cpu().numpy().view(np.int16)
                row.append(MemoryArray(tiles.reshape(k // 16, n // 16, -1)))
            codes.append(tuple(row))
        rates = RateTable.of([[self.source.rates.rate(e, index) for index in range(3)] for e in chosen])
        source = replace(self.source, geometry=replace(self.source.geometry, num_experts=len(chosen)), rates=rates)
        picked = torch.tensor(chosen)
        weights = TrellisWeights(
            codes=tuple(codes),
            rate=rates.rate_bytes(),
            input_scales=held.input_scales.cpu()[picked].numpy(),
            intermediate_scales=held.intermediate_scales.cpu()[picked].numpy(),
            output_scales=held.output_scales.cpu()[picked].numpy(),
            biases={},
        )
        return Layer(source, weights)


def make_bank(experts: int, hidden: int, intermediate: int, rates: tuple[str, ...], device: str) -> Bank:
    """Random codes and scales; the codes of an expert follow from its place, as those of its neighbours do."""
    small = make_layer(experts=1, hidden=hidden, intermediate=intermediate, rates=rates)
    table = RateTable.of([[Rate.of(rates[(e + index) % len(rates)]) for index in range(3)] for e in range(experts)])
    source = replace(small.source, geometry=replace(small.source.geometry, num_experts=experts), rates=table)
    layout = plan_layout(source, source.extent)
    generator = torch.Generator(device).manual_seed(experts)
    tensors = {}
    for spec in layout.tensors:
        if spec.name == "codes":
            tensor = torch.empty(spec.shape, dtype=torch.int32, device=device)
            tensor.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
        elif spec.name == "descriptors":
            tensor = torch.from_numpy(np.stack((layout.offsets, layout.half_bits), axis=-1)).to(device)
        else:
            sign = torch.randint(0, 2, spec.shape, generator=generator, device=device) * 2.0 - 1.0
            tensor = sign * (torch.rand(spec.shape, generator=generator, device=device) + 0.5)
            if spec.name == "intermediate_scales":
                tensor[:, :2] *= hidden**-0.5
                tensor[:, 2] *= intermediate**-0.5
            tensor = tensor.half()
        tensors[spec.name] = tensor
    return Bank(source, PreparedExperts.of(layout, tensors))


def check(bank: Bank, chosen: list[int], tokens: tuple[int, ...], device: str) -> set[str]:
    """Runs over a few experts are near float64; gives the paths that were taken."""
    part = bank.part(chosen)
    paths = set()
    for count in tokens:
        routes = make_routes(part, count, TOP_K)
        named = torch.where(routes.ids < 0, -1, torch.tensor(chosen)[routes.ids.clamp(min=0)])
        plan = make_plan(Layer(bank.source, part.weights), tokens=count, top_k=TOP_K, device=device)
        paths.add(plan.variants[-1].path)
        found = launch(bind(plan, bank.experts), Routes(routes.x, named, routes.weights))
        assert distance(found, truth(part, routes)) <= 1e-3, count
    return paths


def around(bank: Bank, words: int) -> list[int]:
    """The experts of the linear that holds a word, and of the next one in memory."""
    firsts = bank.experts.layout.offsets
    order = np.argsort(firsts, axis=None)
    at = int(np.searchsorted(firsts.ravel()[order], words, side="right")) - 1
    return [int(index) // firsts.shape[1] for index in order[at : at + 2]]


@pytest.mark.parametrize("rates", [("2", "3.5"), RATES])
def test_a_bank_on_its_device_is_what_preparation_makes(rates: tuple[str, ...]) -> None:
    bank = make_bank(7, 128, 256, rates, "cpu")
    whole = bank.part(list(range(7)))
    assert whole.source == bank.source
    prepared = prepare_weights(plan_weights(whole.source), whole.weights)
    for name, tensor in prepared.tensors.items():
        assert bits(tensor) == bits(bank.experts.tensors[name]), name
    assert check(bank, [6, 0, 3], (1, 9), "cpu") == {"op_by_op"}


def test_the_experts_around_a_word_are_those_whose_linears_meet_there() -> None:
    bank = make_bank(7, 128, 256, RATES, "cpu")
    firsts = bank.experts.layout.offsets
    for expert, index in ((0, 0), (3, 1), (5, 2)):
        word = int(firsts[expert, index])
        assert around(bank, word) == around(bank, word + 1) == [expert, expert + 1]
    assert around(bank, int(firsts[1, 2]) - 1) == [0, 1]
    assert around(bank, int(firsts[0, 1]) - 1) == [6, 0]  # the last gate, then the first up


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "sizes", "tokens", "path"),
    [(1000, (2048, 1536), (1, 9, 600), "moe_small"), (3000, (1024, 1024), (600,), "prefill")],
    ids=["few", "many"],
)
def test_gpu_offsets_beyond_32_bits(experts: int, sizes: tuple[int, int], tokens: tuple[int, ...], path: str) -> None:
    bank = make_bank(experts, *sizes, RATES, "cuda")
    assert bank.experts.codes.numel() > WORDS + (1 << 20)
    chosen = sorted({0, *around(bank, BYTES), *around(bank, WORDS), experts - 1})
    assert check(bank, chosen, tokens, "cuda") == {path}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ten_thousand_experts(device: str) -> None:
    bank = make_bank(10_000, 128, 128, ("1", "2.5"), device)
    assert check(bank, [0, 4095, 4096, 9_999], (1, 40), device) == {"op_by_op"}
