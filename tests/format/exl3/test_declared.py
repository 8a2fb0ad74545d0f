"""Holds the comparison of configurations with tensors to both being named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import MARKERS, random_linear, write_checkpoint
from trellis_format.checkpoint import Checkpoint, open_checkpoint
from trellis_format.errors import FormatValueError
from trellis_format.exl3.declared import EXL3_METHOD, DeclaredQuantization, Statement, read_declared
from trellis_format.exl3.linear import Exl3Linear, describe_linear


def opened(
    folder: Path, config: Any = None, quantization: Any = None, **options: Any
) -> tuple[Checkpoint, DeclaredQuantization, Exl3Linear]:
    tensors = random_linear(np.random.default_rng(0), "p", 128, 128, **options)
    checkpoint = open_checkpoint(write_checkpoint(folder / "c", tensors, config=config, quantization=quantization))
    parts = {name.removeprefix("p."): tensor for name, tensor in checkpoint.tensors.items()}
    return checkpoint, read_declared(checkpoint), describe_linear("p", parts)


def test_statements_carry_file_and_field(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "exl3", "bits": 3.5, "head_bits": 6, "codebook": "mcg"}}
    checkpoint, declared, _ = opened(tmp_path, config, {"quant_method": "exl3", "calibration": {"rows": 1}})
    first, second = (str(checkpoint.path / name) for name in ("config.json", "quantization_config.json"))
    assert declared.statements == (
        Statement("exl3", first, "quantization_config.quant_method"),
        Statement("3.5", first, "quantization_config.bits"),
        Statement("6", first, "quantization_config.head_bits"),
        Statement("mcg", first, "quantization_config.codebook"),
        Statement("exl3", second, "quant_method"),
    )
    assert [stated.value for stated in declared.of("quant_method")] == [EXL3_METHOD] * 2
    assert str(declared.of("codebook")[0]) == f"{first} says quantization_config.codebook = 'mcg'"
    assert declared.storage_file is None


def test_text_config_may_hold_the_object(tmp_path: Path) -> None:
    _, declared, _ = opened(tmp_path, {"text_config": {"quantization_config": {"codebook": "mcg"}}})
    assert declared.of("codebook")[0].field == "text_config.quantization_config.codebook"


def test_no_configuration_states_nothing(tmp_path: Path) -> None:
    checkpoint, declared, linear = opened(tmp_path)
    assert declared.statements == ()
    declared.check_method(checkpoint.tensors["p.trellis"])
    declared.check_method(None)
    declared.check_linear(linear)


@pytest.mark.parametrize("name", ["config.json", "quantization_config.json"])
def test_a_foreign_method_names_both_files_and_a_tensor(tmp_path: Path, name: str) -> None:
    foreign: dict[str, Any] = {"quant_method": "fp8"}
    pair = ({"quantization_config": foreign}, None) if name == "config.json" else (None, foreign)
    checkpoint, declared, _ = opened(tmp_path, *pair)
    with pytest.raises(FormatValueError) as caught:
        declared.check_method(checkpoint.tensors["p.trellis"])
    text = str(caught.value)
    assert text.count(str(checkpoint.path / name)) == 1
    for part in (str(checkpoint.path / name), "quant_method = 'fp8'", "model.safetensors", "p.trellis", "'exl3'"):
        assert part in text
    declared.check_method(None)


def test_a_method_without_tensors_is_refused(tmp_path: Path) -> None:
    checkpoint, declared, _ = opened(tmp_path, {"quantization_config": {"quant_method": "exl3"}})
    declared.check_method(checkpoint.tensors["p.trellis"])
    with pytest.raises(FormatValueError, match=r"quant_method = 'exl3', but no shard holds an EXL3 trellis"):
        declared.check_method(None)


@pytest.mark.parametrize("stated", ["3inst", "mcg", "mul1", "lut_e4m3"])
@pytest.mark.parametrize("found", ["3inst", "mcg", "mul1"])
def test_a_stated_codebook_agrees_with_the_marker(tmp_path: Path, stated: str, found: str) -> None:
    _, declared, linear = opened(tmp_path, {"quantization_config": {"codebook": stated}}, codebook=found)
    if stated == found:
        declared.check_linear(linear)
        return
    with pytest.raises(FormatValueError, match=re.escape(f"codebook = '{stated}'")) as caught:
        declared.check_linear(linear)
    text = str(caught.value)
    if found == "3inst":
        assert "expected one of mcg, mul1; found none, so 3inst" in text
    else:
        assert f"the marker tensor {found} says {found}" in text
    assert "config.json" in text
    assert caught.value.tensor == "p.trellis"


def storage(**entry: Any) -> dict[str, Any]:
    return {"quant_method": "exl3", "tensor_storage": {"p": {"quant_format": "exl3", **entry}}}


@pytest.mark.parametrize("bits", [3, 3.0, 2.5, 8, 1.5])
def test_a_noted_rate_agrees_with_the_width(tmp_path: Path, bits: float) -> None:
    for stated in (1, 1.5, 2.5, 3, 3.0, 8, "3", True, None, [], 3.25, 1e300):
        folder = tmp_path / str(stated)[:8]
        folder.mkdir(exist_ok=True)
        _, declared, linear = opened(folder, None, storage(bits_per_weight=stated), bits=bits, codebook="mul1")
        if stated is None or (not isinstance(stated, bool) and stated == bits):
            declared.check_linear(linear)
            continue
        with pytest.raises(FormatValueError, match=rf"bits_per_weight = '{re.escape(str(stated))}'") as caught:
            declared.check_linear(linear)
        assert f"{round(16 * bits)} words wide, which is K = {bits:g}" in str(caught.value)
        assert "quantization_config.json" in str(caught.value)


@pytest.mark.parametrize("codebook", MARKERS)
def test_a_noted_multiplier_is_that_of_the_codebook(tmp_path: Path, codebook: str) -> None:
    key = f"{codebook}_multiplier"
    for number, (value, sound) in enumerate(
        [(MARKERS[codebook], True), (MARKERS[codebook] - 2**32, True), (7, False), ("mcg", False), (None, True)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, declared, linear = opened(folder, None, storage(**{key: value}), codebook=codebook)
        if sound:
            declared.check_linear(linear)
            continue
        with pytest.raises(FormatValueError, match="another multiplier are refused") as caught:
            declared.check_linear(linear)
        assert f"0x{MARKERS[codebook]:08X}" in str(caught.value)
        assert f"tensor_storage['p'].{key}" in str(caught.value)


@pytest.mark.parametrize(("noted", "found"), [("mcg", "mul1"), ("mul1", "3inst")])
def test_a_noted_multiplier_of_another_codebook(tmp_path: Path, noted: str, found: str) -> None:
    entry = storage(**{f"{noted}_multiplier": MARKERS[noted]})
    _, declared, linear = opened(tmp_path, None, entry, codebook=found)
    with pytest.raises(FormatValueError, match=rf"{noted}_multiplier = '0x{MARKERS[noted]:08X}'"):
        declared.check_linear(linear)


@pytest.mark.parametrize("codebook", MARKERS)
def test_an_option_states_the_multiplier_of_the_codebook(tmp_path: Path, codebook: str) -> None:
    key, multiplier = f"{codebook}_multiplier", MARKERS[codebook]
    for number, (value, sound) in enumerate(
        [(multiplier, True), (multiplier - 2**32, True), (hex(multiplier), True), (None, True), (7, False),
         (0, False), ("x", False), (True, False), (multiplier + 2**32, False), ([], False)]
    ):  # fmt: skip
        for name in ("config", "quantization"):
            folder = tmp_path / f"{number}{name}"
            folder.mkdir()
            stated = {"experimental_options": {key: value}}
            pair = ({"quantization_config": stated}, None) if name == "config" else (None, stated)
            if sound:
                opened(folder, *pair, codebook=codebook)
                continue
            with pytest.raises(FormatValueError, match="another multiplier are refused") as caught:
                opened(folder, *pair, codebook=codebook)
            assert f"experimental_options.{key} = " in str(caught.value)
            assert f"0x{multiplier:08X}" in str(caught.value)
            assert str(caught.value.file).endswith("config.json")


def test_options_are_an_object(tmp_path: Path) -> None:
    with pytest.raises(FormatValueError, match="experimental_options must be an object, got list"):
        opened(tmp_path, None, {"experimental_options": []})


def test_a_module_that_is_not_noted_passes(tmp_path: Path) -> None:
    _, declared, linear = opened(tmp_path, None, {"tensor_storage": {"q": {"bits_per_weight": 8}}})
    declared.check_linear(linear)
    assert declared.storage_file is not None


@pytest.mark.parametrize(
    ("config", "quantization", "text"),
    [
        ({"quantization_config": []}, None, r"config\.json: quantization_config must be an object, got list"),
        (
            {"quantization_config": {"quant_method": 3}},
            None,
            "quantization_config.quant_method must be a string, got int",
        ),
        (
            {"quantization_config": {"codebook": ["mcg"]}},
            None,
            "quantization_config.codebook must be a string, got list",
        ),
        (None, {"codebook": True}, r"quantization_config\.json: codebook must be a string, got bool"),
        (None, {"tensor_storage": []}, "tensor_storage must be an object, got list"),
    ],
)
def test_keys_have_their_types(tmp_path: Path, config: Any, quantization: Any, text: str) -> None:
    with pytest.raises(FormatValueError, match=text):
        opened(tmp_path, config, quantization)


def test_an_entry_is_an_object(tmp_path: Path) -> None:
    _, declared, linear = opened(tmp_path, None, {"tensor_storage": {"p": 3}})
    with pytest.raises(FormatValueError, match=r"tensor_storage\['p'\] must be an object"):
        declared.check_linear(linear)


def test_real_checkpoints_agree_with_their_configurations(checkpoint_path: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_path)
    declared = read_declared(checkpoint)
    assert [stated.value for stated in declared.of("quant_method")] == ["exl3", "exl3"]
    modules = [name.removesuffix(".trellis") for name in checkpoint.tensors if name.endswith(".trellis")]
    for module in modules:
        parts = {n.removeprefix(f"{module}."): t for n, t in checkpoint.tensors.items() if n.startswith(f"{module}.")}
        declared.check_linear(describe_linear(module, parts))
    assert modules
