"""Holds conversion to identical tensors there and back, to refusing what would be lost, and to being resumed."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from exl3_files import MARKERS, random_layer, write_checkpoint, write_json
from slot_files import edited, manifest_json, random_content
from trellis_format.checkpoint import open_checkpoint
from trellis_format.container.manifest import parse_manifest
from trellis_format.container.writer import write_content, write_manifest
from trellis_format.convert import ASSUMED_BYTES_PER_SECOND, ConvertPlan, convert, parse_layers, plan_conversion
from trellis_format.convert_source import open_source
from trellis_format.detect import CONTAINERS
from trellis_format.errors import FormatError, FormatUnsupportedError, FormatValueError
from trellis_format.inspect import inspect_checkpoint
from trellis_format.rates import Rate
from trellis_format.report import Severity
from trellis_format.synth import SynthSpec, synth_checkpoint
from trellis_format.synth_names import NAMINGS
from trellis_format.synth_source import synth_container
from trellis_format.validate import validate_checkpoint

CONFIG = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2, "hidden_act": "silu"}


def run(source: Path, out: Path, target: str, **options: Any) -> ConvertPlan:
    with closing(open_source(source)) as opened:
        return convert(opened, out, target, **options)


def content(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with open_checkpoint(path) as checkpoint:
        return {
            name: (tensor.entry.dtype, tensor.shape, b"".join(chunk.tobytes() for chunk in tensor.read_chunks(1 << 20)))
            for name, tensor in checkpoint.tensors.items()
        }


def plain_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != ".safetensors"}


def there_and_back(source: Path, folder: Path, target: str) -> None:
    run(source, folder / "there", target)
    run(folder / "there", folder / "back", "exl3", shards=2)
    assert content(folder / "back") == content(source)
    kept = plain_files(folder / "back")
    kept.pop("model.safetensors.index.json")
    wanted = plain_files(source)
    wanted.pop("model.safetensors.index.json", None)
    assert kept == wanted


def is_refused_by_exl3_v1(path: Path) -> bool:
    report = inspect_checkpoint(path)
    codebooks = {name for layer in report.layers for part in layer.projections for name in part.codebooks}
    padded = any(layer.padded_hidden_size != layer.hidden_size for layer in report.layers)
    return codebooks != {"mcg"} or padded


@pytest.mark.parametrize("target", CONTAINERS)
def test_the_data_set_goes_there_and_back(tmp_path: Path, checkpoint_path: Path, target: str) -> None:
    if target == "exl3-v1" and is_refused_by_exl3_v1(checkpoint_path):
        with pytest.raises(FormatUnsupportedError, match=r"layer \d: an exl3-v1 container cannot hold it"):
            run(checkpoint_path, tmp_path / "there", target)
        assert list(tmp_path.iterdir()) == []
    else:
        there_and_back(checkpoint_path, tmp_path, target)


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_goes_through_native(tmp_path: Path, naming: str) -> None:
    rates = tuple(Rate.of(bits) for bits in (1, 2.5, 4, 8))
    sizes = {"hidden": 100, "intermediate": 200, "experts": 3, "layers": 2}
    spec = SynthSpec(**sizes, rates=rates, naming=naming, dense=True, shards=3)
    synth_checkpoint(tmp_path / "source", spec)
    there_and_back(tmp_path / "source", tmp_path, "native")


def test_a_container_goes_through_native_and_back(tmp_path: Path, data_set: Any) -> None:
    source = data_set.checkpoints["dsv3_3_mcg"]
    run(source, tmp_path / "container", "exl3-v1")
    run(tmp_path / "container", tmp_path / "native", "native")
    run(tmp_path / "native", tmp_path / "again", "exl3-v1")
    first, again = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("container", "again")
    )
    assert again == first


def sound(**options: Any) -> dict[str, Any]:
    return dict(random_layer(np.random.default_rng(0), **options))


def test_what_other_containers_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a", sound(bias=np.float32), config=CONFIG)
    with pytest.raises(FormatUnsupportedError, match=r"gate_proj\.bias: layer 0: bias is F32, other containers hold"):
        run(source, tmp_path / "out", "native")
    mixed = sound(bits=lambda expert, word: 3 + expert)
    source = write_checkpoint(tmp_path / "b", mixed, config=CONFIG)
    with pytest.raises(FormatUnsupportedError, match="rates K = 3, 4 differ within the layer"):
        run(source, tmp_path / "out", "exl3-v1")
    two = sound() | sound(layer=1, hidden=256)
    source = write_checkpoint(tmp_path / "c", two, config=None)
    with pytest.raises(FormatUnsupportedError, match="layers 0 and 1: a native checkpoint has one geometry"):
        run(source, tmp_path / "out", "native")
    assert not (tmp_path / "out").exists()


def test_codebooks_that_exl3_lacks_are_refused(tmp_path: Path) -> None:
    spec = SynthSpec(hidden=128, intermediate=128, experts=2, layers=1, codebook="lut_e4m3")
    synth_container(tmp_path / "native", spec, "native")
    with pytest.raises(FormatUnsupportedError, match="layer 0: EXL3 linears cannot hold it: codebook lut_e4m3"):
        run(tmp_path / "native", tmp_path / "out", "exl3")
    run(tmp_path / "native", tmp_path / "v1", "exl3-v1")
    run(tmp_path / "v1", tmp_path / "again", "native")
    first, again = ((tmp_path / name / "trellis-layer-00000.safetensors").read_bytes() for name in ("native", "again"))
    assert first == again


@pytest.mark.parametrize("equal", [True, False])
def test_layers_under_an_intermediate_hadamard_go_between_containers(tmp_path: Path, equal: bool) -> None:
    made = random_content(experts=2, hidden=512, intermediate=256, transform=True, row_alignment=4096)
    kept = made if not equal else replace(made, up_suh=made.gate_suh)
    (tmp_path / "v1").mkdir()
    write_manifest(tmp_path / "v1", kept.head, {3: write_content(tmp_path / "v1", kept)})
    run(tmp_path / "v1", tmp_path / "native", "native")
    run(tmp_path / "native", tmp_path / "again", "exl3-v1")
    run(tmp_path / "again", tmp_path / "back", "native")
    for first, second, name in (("v1", "again", "exl3-layer-00003"), ("native", "back", "trellis-layer-00003")):
        files = [load_file(tmp_path / folder / f"{name}.safetensors") for folder in (first, second)]
        assert sorted(files[0]) == sorted(files[1])
        assert all(files[0][key].tobytes() == files[1][key].tobytes() for key in files[0])
    native = load_file(tmp_path / "native" / "trellis-layer-00003.safetensors")["input_scales.vectors"]
    wanted = kept.gate_suh if equal else np.stack([kept.gate_suh, kept.up_suh], axis=1)
    assert native.tobytes() == wanted.tobytes()
    for folder in ("v1", "native", "again"):
        assert validate_checkpoint(tmp_path / folder, data=True).findings == ()
    with pytest.raises(FormatUnsupportedError, match=r"layer 3: EXL3 linears cannot hold it: .* Hadamard"):
        run(tmp_path / "v1", tmp_path / "no", "exl3")


def test_barriers_do_not_matter_to_a_layer_that_is_carried(tmp_path: Path) -> None:
    data = edited(manifest_json(experts=2, hidden=128, intermediate=256), "layout.extent_barriers", [4])
    made = replace(random_content(experts=2, hidden=128, intermediate=256), head=parse_manifest(data))
    (tmp_path / "v1").mkdir()
    write_manifest(tmp_path / "v1", made.head, {3: write_content(tmp_path / "v1", made)})
    assert validate_checkpoint(tmp_path / "v1", data=True).findings == ()
    run(tmp_path / "v1", tmp_path / "native", "native")
    codes = load_file(tmp_path / "native" / "trellis-layer-00003.safetensors")["codes"]
    assert codes.tobytes() == np.ascontiguousarray(made.codes.read()[:, : codes.shape[1]]).tobytes()


def test_files_that_cannot_be_copied_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    source = write_checkpoint(tmp_path / "source", sound(), config=CONFIG)
    (source / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("shutil.copyfile", refuse)
    with pytest.raises(FormatValueError, match=r"\.json: cannot be copied: Permission denied"):
        run(source, tmp_path / "out", "native")


def test_a_stated_quantisation_without_modules_is_kept(tmp_path: Path) -> None:
    stated = {"quant_method": "exl3"}
    source = write_checkpoint(tmp_path / "source", sound() | sound(layer=1), config=CONFIG, quantization=stated)
    run(source, tmp_path / "out", "native", layers=[1])
    assert not (tmp_path / "out" / "quantization_config.json").exists()
    run(tmp_path / "out", tmp_path / "back", "exl3")
    assert json.loads((tmp_path / "back" / "quantization_config.json").read_text()) == stated


def test_exl3_is_dealt_to_other_shards_whatever_it_holds(tmp_path: Path) -> None:
    tensors = sound(bias=np.float32) | sound(layer=1, packed=True, codebook="mul1", bits=2.5)
    source = write_checkpoint(tmp_path / "a", tensors, config=CONFIG)
    run(source, tmp_path / "out", "exl3", shards=5)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 5
    found, wanted = content(tmp_path / "out"), content(source)
    for name in [name for name in wanted if name.endswith((".su", ".sv"))]:
        words = tensors[name].view(np.uint16)
        signs = [-1.0 if words[place // 16] >> (place % 16) & 1 else 1.0 for place in range(16 * words.size)]
        data = np.array(signs, np.float16).tobytes()
        wanted[f"{name}h"] = ("F16", (16 * words.size,), data)
        del wanted[name]
    assert found == wanted


def test_layers_may_be_chosen(tmp_path: Path) -> None:
    spec = SynthSpec(hidden=128, intermediate=128, experts=2, layers=4, codebook="mcg", dense=True)
    synth_checkpoint(tmp_path / "source", spec)
    plan = run(tmp_path / "source", tmp_path / "out", "exl3-v1", layers=[3, 1])
    assert (plan.layers, plan.left_out) == ((1, 3), (0, 2))
    run(tmp_path / "out", tmp_path / "back", "exl3")
    left_out = ("model.layers.0.mlp.experts.", "model.layers.2.mlp.experts.")
    everything = content(tmp_path / "source")
    assert content(tmp_path / "back") == {name: it for name, it in everything.items() if not name.startswith(left_out)}
    report = inspect_checkpoint(tmp_path / "back")
    assert [finding for finding in report.findings if finding.severity is not Severity.NOTE] == []
    with pytest.raises(FormatValueError, match="layer 9 has no experts; layers with experts: 0, 1, 2, 3"):
        run(tmp_path / "source", tmp_path / "no", "exl3", layers=[0, 9])


@pytest.mark.parametrize("target", CONTAINERS)
@pytest.mark.parametrize("dense", [False, True])
def test_an_interrupted_conversion_continues(tmp_path: Path, target: str, dense: bool) -> None:
    spec = SynthSpec(hidden=128, intermediate=128, experts=2, layers=3, codebook="mcg", dense=dense)
    synth_checkpoint(tmp_path / "source", spec)
    wanted = run(tmp_path / "source", tmp_path / "whole", target, shards=3)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "source", tmp_path / "out", target, shards=3, on_progress=stop)
    assert not (tmp_path / "out").exists()
    kept = {file: file.stat().st_ino for file in (tmp_path / ".out.partial").glob("*.safetensors")}
    assert kept
    progress: list[int] = []
    plan = run(
        tmp_path / "source", tmp_path / "out", target, shards=3, on_progress=lambda done, _: progress.append(done)
    )
    assert plan == wanted
    assert progress == sorted(progress)
    for file, inode in kept.items():
        assert (tmp_path / "out" / file.name).stat().st_ino == inode
    whole, resumed = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("whole", "out")
    )
    assert resumed == whole


def test_what_is_left_of_another_conversion_is_not_taken(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", sound(), config=CONFIG)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", "native", on_progress=stop)
    write_json(source / "config.json", CONFIG | {"hidden_act": "gelu_pytorch_tanh"})
    with pytest.raises(FormatValueError, match="is left from another conversion"):
        run(source, tmp_path / "out", "native")


def test_an_existing_destination_is_kept(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", sound(), config=CONFIG)
    with pytest.raises(FormatValueError, match="already exists"):
        run(source, source, "exl3")


def test_a_plan_writes_nothing_and_counts_every_byte(tmp_path: Path) -> None:
    spec = SynthSpec(hidden=128, intermediate=256, experts=2, layers=2, codebook="mcg", dense=True)
    synth_checkpoint(tmp_path / "source", spec)
    totals: set[int] = set()
    for target in CONTAINERS:
        with closing(open_source(tmp_path / "source")) as source:
            plan = plan_conversion(source, target)
            assert plan.seconds == plan.nbytes / ASSUMED_BYTES_PER_SECOND
            assert not (tmp_path / target).exists()
            convert(source, tmp_path / target, target, on_progress=lambda _, total: totals.add(total))
        written = sum(entry.stat().st_size for entry in (tmp_path / target).iterdir() if entry.suffix == ".safetensors")
        tensors = plan.code_bytes + plan.scale_bytes + plan.outside_bytes
        assert 0 <= written - tensors < 60_000  # headers, and vectors that a plan counts once where experts share them
        assert plan.nbytes in totals
    assert len(totals) <= len(CONTAINERS)
    with (
        closing(open_source(tmp_path / "source")) as source,
        pytest.raises(FormatValueError, match="known: exl3"),
    ):
        plan_conversion(source, "gguf")


def test_a_checkpoint_without_experts_can_only_be_dealt_anew(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {"a": np.ones(3, np.float16)}, config={})
    run(source, tmp_path / "out", "exl3")
    assert content(tmp_path / "out") == content(source)
    for target in ("native", "exl3-v1"):
        with pytest.raises(FormatError, match="at least one layer"):
            run(source, tmp_path / target, target)


def test_a_damaged_container_is_not_converted(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", sound(), config=CONFIG)
    for target in ("native", "exl3-v1"):
        out = tmp_path / target
        run(source, out, target)
        (file,) = (path for path in out.glob("*layer*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-8192] ^= 1  # a code: any bits of it are legal, so that nothing but the digest can tell
        file.write_bytes(data)
        with pytest.raises(FormatValueError, match="sha256"):
            run(out, tmp_path / f"{target}.back", "exl3")
        assert not (tmp_path / f"{target}.back").exists()
        shutil.rmtree(tmp_path / f".{target}.back.partial")


def test_a_foreign_multiplier_is_not_written_as_our_own(tmp_path: Path) -> None:
    tensors = sound(codebook="mul1")
    name = next(name for name in tensors if name.endswith(".mul1"))
    tensors[name] = np.array(MARKERS["mul1"] + 2, np.uint32).view(np.int32)
    source = write_checkpoint(tmp_path / "source", tensors, config=CONFIG)
    with pytest.raises(FormatValueError, match="expected 0x83DCD12D"):
        run(source, tmp_path / "out", "native")


@pytest.mark.parametrize(("text", "layers"), [("0", (0,)), ("3,1,3", (1, 3)), ("0-2, 7", (0, 1, 2, 7)), ("5-5", (5,))])
def test_layers_as_text(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "0-200000", "1" * 12, "²"])
def test_layers_that_are_none(text: str) -> None:
    with pytest.raises(FormatValueError, match="layers"):
        parse_layers(text)


@pytest.mark.parametrize("text", ["0-99999999999", "9" * 5000, "0-100001"])
def test_a_range_that_is_too_long_is_told_so(text: str) -> None:
    with pytest.raises(FormatValueError, match="at most 100,000 layers"):
        parse_layers(text)


def test_the_index_is_made_anew(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", sound(), config=CONFIG, shards=3, index=True)
    run(source, tmp_path / "out", "exl3", shards=2)
    mapping = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(mapping.values()) == {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(set(mapping.values())) == 2
