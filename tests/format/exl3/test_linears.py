"""Holds the way back to linears to the tensors that a layer was described from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import expert_name, random_layer, write_checkpoint
from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.exl3.linears import exl3_refusal, plan_linears
from trellis_format.extent import TrellisExtent
from trellis_format.source import Projection
from trellis_format.transform import ExpertTransform
from trellis_format.writer import PlannedTensor

WORDS = {Projection.GATE: "gate_proj", Projection.UP: "up_proj", Projection.DOWN: "down_proj"}


def content(tensor: PlannedTensor) -> bytes:
    return b"".join(chunk.tobytes() for chunk in tensor.chunks() if not isinstance(chunk, int))


@pytest.mark.parametrize(
    "options",
    [
        {"codebook": "mcg", "bits": 3},
        {"codebook": "3inst", "bits": 1, "bias": np.float16},
        {"codebook": "mul1", "bits": lambda expert, word: (1.5, 2, 8)[(expert + len(word)) % 3]},
        {"words": ("up_proj", "down_proj"), "codebook": "mul1", "bits": 2.5},
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_gives_back_its_tensors(tmp_path: Path, options: dict[str, Any], shared: bool) -> None:
    tensors = random_layer(np.random.default_rng(0), experts=3, **options)
    if shared:  # vectors that experts and gate and up share are kept once by the description
        first = {"suh": "gate_proj" if "words" not in options else "up_proj", "svh": "down_proj"}
        for name in tensors:
            word, _, suffix = name.rpartition(".")[0].rpartition(".")[2], None, name.rpartition(".")[2]
            if (suffix == "suh" and word != "down_proj") or (suffix == "svh" and word == "down_proj"):
                tensors[name] = tensors[f"{expert_name(0, 0, first[suffix])}.{suffix}"]
    path = write_checkpoint(tmp_path, tensors, config={"hidden_act": "relu2" if "words" in options else "silu"})
    with open_checkpoint(path) as checkpoint:
        source, weights = trellis_from_exl3(find_layer(checkpoint, 0))
        assert (source.shared_input_scales, source.shared_output_scales) == (shared, shared)
        assert exl3_refusal(source) is None
        planned = list(plan_linears(source, lambda: weights, lambda e, p: expert_name(0, e, WORDS[p])))
        found = {tensor.name: (tensor.shape, content(tensor)) for tensor in planned}
    assert len(found) == len(planned)
    assert found == {name: (tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()}  # type: ignore[union-attr]


def test_what_linears_cannot_hold_is_named(tmp_path: Path) -> None:
    tensors = random_layer(np.random.default_rng(0), hidden=512)
    for name in tensors:
        if name.endswith("up_proj.suh"):
            tensors[name] = tensors[name.replace("up_proj", "gate_proj")]
    with open_checkpoint(write_checkpoint(tmp_path, tensors)) as checkpoint:
        source, _ = trellis_from_exl3(find_layer(checkpoint, 0))
    part = TrellisExtent(global_intermediate_size=256, first_slot=0, slot_count=4)
    assert "only 128 of 256 channels" in str(exl3_refusal(replace(source, extent=part)))
    assert "codebook lut_e4m3 is not one of 3inst, mcg, mul1" in str(exl3_refusal(replace(source, codebook="lut_e4m3")))
    turned = replace(source, expert_transform=ExpertTransform(pre_block=512, post_block=128))
    assert "intermediate Hadamard" in str(exl3_refusal(turned))


def test_nothing_is_read_before_it_is_written(tmp_path: Path) -> None:
    tensors = random_layer(np.random.default_rng(0))
    with open_checkpoint(write_checkpoint(tmp_path, tensors)) as checkpoint:
        source, _ = trellis_from_exl3(find_layer(checkpoint, 0))

    def read() -> Any:
        raise AssertionError("read while planning")

    assert len(list(plan_linears(source, read, lambda e, p: expert_name(0, e, WORDS[p])))) == len(tensors)
