"""Holds the sorting of tensors to the names and shapes of real files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from exl3_files import Raw, write_checkpoint
from trellis_format.checkpoint import open_checkpoint
from trellis_format.survey import (
    SkipReason,
    TensorClass,
    class_of,
    count_bytes,
    flat_trellis_reason,
    group_skipped,
    skip_reason,
)


@pytest.mark.parametrize(
    ("module", "linear", "expected"),
    [
        ("model.layers.0.mlp.experts.3.gate_proj", True, "experts"),
        ("model.layers.0.block_sparse_moe.experts.3.w2", False, "experts"),
        ("model.layers.0.mlp.experts.down_proj", False, "experts"),
        ("model.layers.0.mlp.experts", False, "others"),
        ("model.layers.0.mlp.shared_expert.gate_proj", True, "shared_experts"),
        ("model.layers.0.mlp.shared_experts.up_proj", False, "shared_experts"),
        ("model.layers.0.mlp.shared_expert_gate", False, "others"),
        ("model.layers.0.self_attn.q_proj", True, "linears"),
        ("model.layers.0.self_attn.kv_b_proj", False, "others"),
        ("lm_head", True, "head"),
        ("lm_head", False, "head"),
        ("model.language_model.lm_head", True, "head"),
        ("output", True, "head"),
        ("model.layers.0.attention.output", True, "linears"),
        ("model.embed_tokens", False, "embeddings"),
        ("model.language_model.embed_tokens", True, "embeddings"),
        ("transformer.wte", False, "embeddings"),
        ("model.norm", False, "others"),
        ("", False, "others"),
    ],
)
def test_classes_follow_names(module: str, linear: bool, expected: str) -> None:
    assert class_of(module, expert=False, linear=linear) == TensorClass(expected)


def test_a_name_that_the_pattern_matches_is_an_experts() -> None:
    assert class_of("net.e4.up", expert=True, linear=True) is TensorClass.EXPERTS
    assert class_of("net.e4.up", expert=False, linear=True) is TensorClass.LINEARS


def test_bytes_add_up_by_class() -> None:
    sizes = [(kind, 10**place) for place, kind in enumerate(TensorClass)] + [(TensorClass.EXPERTS, 5)]
    counted = count_bytes(sizes)
    assert (counted.experts, counted.shared_experts, counted.linears) == (6, 10, 100)
    assert (counted.head, counted.embeddings, counted.others) == (1000, 10**4, 10**5)
    assert counted.total == 111_116
    assert count_bytes([]).total == 0


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("groups", [1, 2, 16])
def test_quantised_embeddings_are_known_by_their_width(bits: int, groups: int) -> None:
    width = groups * (1 + 16 * bits)
    assert flat_trellis_reason((512, width), signs=True) is SkipReason.EMBEDDING
    assert flat_trellis_reason((512, width), signs=False) is not SkipReason.EMBEDDING


@pytest.mark.parametrize("bits", range(1, 9))
def test_ngram_tables_are_known_by_their_width(bits: int) -> None:
    assert flat_trellis_reason((70_000, 1 + 10 * bits), signs=False) is SkipReason.NGRAM


@pytest.mark.parametrize("shape", [(), (8,), (8, 8, 48), (8, 8, 8, 8), (8, 0), (8, 48), (8, 16), (8, 12)])
def test_other_shapes_are_not_known(shape: tuple[int, ...]) -> None:
    assert flat_trellis_reason(shape, signs=True) is None
    assert flat_trellis_reason(shape, signs=False) is None


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("model.norm.weight", "others", "unquantised"),
        ("model.layers.0.self_attn.q_proj.bias", "others", "unquantised"),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", "experts", "unquantised-expert"),
        ("model.layers.0.self_attn.q_proj.suh", "others", "orphan"),
        ("model.layers.0.mlp.experts.0.w2_rank0.mcg", "experts", "orphan"),
        ("model.layers.0.mlp.experts.0.w2.rank0.mcg", "experts", "rank-sliced"),
        ("x.scale", "others", "unquantised"),
        ("suh", "others", "unquantised"),
    ],
)
def test_reasons_follow_names(name: str, kind: str, expected: str) -> None:
    assert skip_reason(name, TensorClass(kind)).value == expected


def test_every_reason_has_words() -> None:
    assert len({reason.explanation for reason in SkipReason}) == len(SkipReason)


def test_groups_differ_in_more_than_an_index(tmp_path: Path) -> None:
    norms = {f"model.layers.{n}.norm2.weight": np.zeros(4, np.float16) for n in (10, 2, 1)}
    tensors = norms | {
        "model.layers.0.norm3.weight": np.zeros(4, np.float32),
        "model.layers.7.norm2.bias": np.zeros(1, np.float32),
        "model.layers.8.norm2.weight": Raw("BF16", (2,), bytes(4)),
        "a.0.b.1.suh": np.zeros(2, np.float16),
    }
    opened = open_checkpoint(write_checkpoint(tmp_path / "c", tensors)).tensors
    reasons = {name: SkipReason.ORPHAN if name.endswith("suh") else SkipReason.UNQUANTISED for name in opened}
    groups = group_skipped({name: (reasons[name], tensor) for name, tensor in opened.items()})
    assert [(g.reason, g.pattern, g.tensors, g.bytes, g.dtypes, g.example) for g in groups] == [
        ("orphan", "a.*.b.*.suh", 1, 4, ("F16",), "a.0.b.1.suh"),
        ("unquantised", "model.layers.*.norm2.bias", 1, 4, ("F32",), "model.layers.7.norm2.bias"),
        ("unquantised", "model.layers.*.norm2.weight", 4, 28, ("BF16", "F16"), "model.layers.1.norm2.weight"),
        ("unquantised", "model.layers.*.norm3.weight", 1, 16, ("F32",), "model.layers.0.norm3.weight"),
    ]
    assert all(group.explanation == SkipReason(group.reason).explanation for group in groups)
