"""Holds generation to transformers' own on the same model, to its report, and every refusal to one clear line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_set import DataSet
from trellis_moe.commands import generation
from trellis_moe.commands.generation import GENERATE_SCHEMA, GenerateRequest, TokenWatch, generate
from trellis_moe.errors import MoeValueError

pytest.importorskip("transformers", reason="transformers is an extra of trellis-moe")

NAME = "tiny_3_mul1"


class Letters:
    """A tokenizer of one letter an id; id 0 is special and id 9 is half of a character."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(96 + number) for number in ids if number not in (0, 9)) + (
            "\N{REPLACEMENT CHARACTER}" if ids and ids[-1] == 9 else ""
        )


@pytest.fixture
def model(data_set: DataSet) -> Path:
    return data_set.root / "checkpoints" / NAME


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """A copy without tokenizer, its configuration changed."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", target)
    return target


def test_tokens_are_those_that_transformers_generates(model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shown: list[str] = []
    report = generate(GenerateRequest(model=model, prompt="Hello", device="cpu", max_new_tokens=5), show=shown.append)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("Hello", return_tensors="pt")
    whole = AutoModelForCausalLM.from_pretrained(model).generate(
        **ids, max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    prompt = ids["input_ids"][0].tolist()
    assert report["prompt_ids"] == prompt
    assert report["new_ids"] == whole[0, len(prompt) :].tolist()
    assert report["text"] == "".join(shown) == tokenizer.decode(report["new_ids"], skip_special_tokens=True)
    assert (report["schema"], report["schema_version"]) == (GENERATE_SCHEMA, 1)
    assert (report["expert_layers"], report["linears"], report["dtype"]) == (2, 9, "float16")
    assert report["tokens_per_second"] == pytest.approx(4 / report["seconds"]["other_tokens"])
    assert json.loads(json.dumps(report)) == report


def test_ids_need_no_tokenizer(model: Path, tmp_path: Path) -> None:
    bare = edited(model, tmp_path / "bare")
    shown: list[str] = []
    request = GenerateRequest(model=bare, ids=(3, 4, 5), device="cpu", dtype="float32", max_new_tokens=3)
    report = generate(request, show=shown.append)
    assert (len(report["new_ids"]), report["dtype"], report["prompt_ids"]) == (3, "float32", [3, 4, 5])
    assert "".join(shown) == report["text"] == " ".join(map(str, report["new_ids"]))
    with pytest.raises(MoeValueError, match=r"has no tokenizer \(tokenizer\.json, .*\); give token ids with --ids"):
        generate(GenerateRequest(model=bare, prompt="Hello", device="cpu"))


def test_draws_repeat_by_seed_and_a_static_cache_changes_nothing(model: Path) -> None:
    def new(**changes: Any) -> list[int]:
        given = {"temperature": 2.0, "seed": 5} | changes
        found: list[int] = generate(
            GenerateRequest(model=model, ids=(7,), device="cpu", max_new_tokens=6, dtype="float32", **given)
        )["new_ids"]
        return found

    first = new()
    assert new() == first
    assert new(seed=6) != first
    assert new(is_static=True) == first


def test_text_waits_for_whole_characters() -> None:
    shown: list[str] = []
    watch = TokenWatch(shown.append, Letters())
    watch.put(torch.tensor([[20, 21]]))  # the prompt
    for number in (1, 9, 2, 0, 9):
        watch.put(torch.tensor([number]))
    assert shown == ["a", "b"]
    watch.end()
    assert "".join(shown) == watch.text
    assert watch.ids == [1, 9, 2, 0, 9]
    assert len(watch.times) == 5
    assert watch.times == sorted(watch.times)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "neither of --prompt and --ids; give one"),
        ({"prompt": "a", "ids": (1,)}, "both of --prompt and --ids; give one"),
        ({"ids": ()}, "--ids has no token; give at least 1"),
        ({"prompt": "a", "max_new_tokens": 0}, "--max-new-tokens must be positive, got 0"),
        ({"prompt": "a", "temperature": -1.0}, "--temperature must be 0 or more and finite, got -1.0"),
        ({"prompt": "a", "temperature": float("nan")}, "--temperature must be 0 or more and finite, got nan"),
        ({"prompt": "a", "seed": -1}, "--seed must be 0 or more and below 18446744073709551616, got -1"),
        ({"prompt": "a", "seed": 1 << 64}, "--seed must be 0 or more and below 1844.*, got 18446744073709551616"),
    ],
)
def test_requests_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(MoeValueError, match=message):
        GenerateRequest(model=Path(), **given)


def test_what_cannot_be_generated_is_refused_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, ids: tuple[int, ...] = (1,)) -> None:
        generate(GenerateRequest(model=path, ids=ids, device="cpu"))

    with pytest.raises(MoeValueError, match=r"has no config\.json, which says what model it is"):
        refused(tmp_path)
    with pytest.raises(MoeValueError, match="token id 512 is outside the vocabulary of 512; ids are from 0"):
        refused(model, (3, 512))
    monkeypatch.setattr(generation, "load_whole", None)  # ids and counts are checked before the model is loaded
    with pytest.raises(MoeValueError, match="token id -1 is outside the vocabulary of 512; ids are from 0"):
        refused(model, (3, -1))
    with pytest.raises(MoeValueError, match="the prompt has 512 tokens; with one more, the model has 512 positions"):
        refused(model, (1,) * 512)
    with pytest.raises(
        MoeValueError, match="--max-new-tokens 64 after a prompt of 449: the model has 512 positions, so at most 63"
    ):
        refused(model, (1,) * 449)
    if not torch.cuda.is_available():
        with pytest.raises(MoeValueError, match="no CUDA device is visible"):
            generate(GenerateRequest(model=model, ids=(1,), device="cuda"))


def test_a_model_s_own_choices_do_not_stop_the_text(model: Path, tmp_path: Path) -> None:
    asks = edited(model, tmp_path / "asks")
    shutil.copy(model / "generation_config.json", asks)
    request = GenerateRequest(model=asks, ids=(3, 4), device="cpu", max_new_tokens=2, dtype="float32")
    plain = generate(request)["new_ids"]
    (asks / "generation_config.json").write_text(json.dumps({"num_beams": 4, "num_return_sequences": 2}))
    assert generate(request)["new_ids"] == plain


def test_warnings_come_before_the_first_token_and_are_kept(model: Path, tmp_path: Path) -> None:
    shallow = edited(model, tmp_path / "shallow", num_hidden_layers=1)
    order: list[str] = []
    report = generate(
        GenerateRequest(model=shallow, ids=(3, 4), device="cpu", max_new_tokens=1),
        warn=lambda _: order.append("warning"),
        begin_with=lambda: order.append("begin"),
        show=lambda _: order.append("text"),
    )
    assert order == ["warning", "begin", "text"]
    (warning,) = report["warnings"]
    assert "has no place for: 5, first model.layers.1.input_layernorm.weight" in warning
