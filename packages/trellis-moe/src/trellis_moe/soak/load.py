"""Owns the load of a soak: which layer runs how many tokens when, eagerly or from a graph, and what is counted.

It must not know how layers were made.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trellis_moe.soak.layers import INPUT_SETS, Inputs, SoakLayer, same_bits

__all__ = ["Graphs", "Outcome", "run_load"]

_GRAPH_SHARE = 0.8  # of the runs that come from a graph, where there are graphs
_POISON_EVERY = 16  # runs; in between, scratch holds what the run before it left


@dataclass
class Outcome:
    """What a load counted.

    Attributes:
        runs: runs by kind, `eager` or `graph`.
        tokens: runs by their tokens, in powers of two.
        mismatches: (layer, tokens, kind) of each run whose bits were others, the first hundred.
        mismatch_count: of all.
        seconds: that the load took.
    """

    runs: Counter[str] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    mismatches: list[tuple[int, int, str]] = field(default_factory=list)
    mismatch_count: int = 0
    seconds: float = 0.0

    def note(self, layer: int, tokens: int, kind: str, *, same: bool) -> None:
        """Count a run."""
        self.runs[kind] += 1
        self.tokens[1 << (tokens - 1).bit_length()] += 1
        if not same:
            self.mismatch_count += 1
            if len(self.mismatches) < 100:
                self.mismatches.append((layer, tokens, kind))


class Graphs:
    """CUDA graphs of every layer at some token counts, in one pool.

    Args:
        layers: the layers.
        counts: token counts; each is captured in the launch that covers it.
    """

    def __init__(self, layers: list[SoakLayer], counts: tuple[int, ...]) -> None:
        self.counts = counts
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = {}
        pool = torch.cuda.graph_pool_handle()
        for index, layer in enumerate(layers):
            for tokens in counts:
                first = _covering(layer, tokens, 0)
                held = [part[:tokens].clone() for part in (first.x, first.ids, first.weights, first.expected)]
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    layer.binding.run(*held[:3], out=held[3])
                self._graphs[index, tokens] = graph, held

    def replay(self, layer: int, tokens: int, inputs: Inputs) -> torch.Tensor:
        """The output of a graph whose inputs were changed in place, over a poisoned one."""
        graph, held = self._graphs[layer, tokens]
        for mine, given in zip(held, (inputs.x, inputs.ids, inputs.weights), strict=False):
            mine.copy_(given[:tokens])
        held[3].fill_(float("nan"))
        graph.replay()
        return held[3]


def run_load(
    layers: list[SoakLayer],
    arena: torch.Tensor,
    graphs: Graphs | None,
    *,
    seconds: float,
    least_runs: int = 0,
    seed: int = 0,
    ends: Callable[[Outcome], bool] | None = None,
) -> Outcome:
    """Run random layers over random token counts until the time is over, and compare every output bit for bit.

    A run of n tokens takes the first n of the inputs of the launch that covers it, so that what it must give is known:
    a token's bits do not depend on the tokens beside it.

    Args:
        layers: the layers, with what they must give.
        arena: their scratch, poisoned now and then.
        graphs: graphs to replay, or None.
        seconds: how long.
        least_runs: runs that are made in any case.
        seed: of the choices.
        ends: asked after each run, whose outcome it is given; the load ends early where it says so.
    """
    chance, outcome, begin = random.Random(seed), Outcome(), time.monotonic()
    largest = max(layers, key=lambda layer: layer.binding.plan.direct_token_capacity)
    out = torch.empty_like(_covering(largest, largest.binding.plan.direct_token_capacity, 0).expected)
    step = 0
    while time.monotonic() - begin < seconds or sum(outcome.runs.values()) < least_runs:
        is_first = step == 0  # the largest run, so that later ones find the memory that their comparisons take
        index = layers.index(largest) if is_first else chance.randrange(len(layers))
        layer, which = layers[index], chance.randrange(INPUT_SETS)
        if step % _POISON_EVERY == 0:
            arena.fill_(chance.choice((0xFF, 0x7E, 0x00)))
        if graphs is not None and not is_first and chance.random() < _GRAPH_SHARE:
            kind, tokens = "graph", chance.choice(graphs.counts)
            inputs = _covering(layer, tokens, which)
            found = graphs.replay(index, tokens, inputs)
        else:
            most = layer.binding.plan.direct_token_capacity
            kind, tokens = "eager", most if is_first else _some_tokens(chance, most)
            inputs = _covering(layer, tokens, which)
            found = out[:tokens].fill_(float("nan"))
            layer.binding.run(inputs.x[:tokens], inputs.ids[:tokens], inputs.weights[:tokens], out=found)
        outcome.note(index, tokens, kind, same=same_bits(found, inputs.expected[:tokens]))
        step += 1
        outcome.seconds = time.monotonic() - begin
        if ends is not None and ends(outcome):
            break
    outcome.seconds = time.monotonic() - begin
    return outcome


def _covering(layer: SoakLayer, tokens: int, which: int) -> Inputs:
    return layer.inputs[layer.binding.plan.variant_for(tokens).tokens][which]


def _some_tokens(chance: random.Random, most: int) -> int:
    """Tokens of a run, as often from each power of two, up to `most`."""
    high = 1 << chance.randrange(most.bit_length() + 1)
    return chance.randint(max(high // 2, 1), min(high, most)) if high // 2 < most else most
