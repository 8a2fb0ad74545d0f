"""Holds the files of receipts to one form, and the documentation to receipts of GPUs at a commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from receipt_samples import CPU, layer_row, make_receipt
from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.schema import Receipt, Skipped
from trellis_moe.receipts.store import dump, gpu_folder, load, load_published, publish, write

RECEIPT = make_receipt(
    [layer_row(8, 155_000), layer_row(32, 350_000)], skipped=(Skipped(what="a case", why="no time"),)
)  # fmt: skip


def test_a_file_gives_its_receipt_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "all.json"
    write(RECEIPT, path)
    assert load(path) == RECEIPT
    assert path.read_text() == dump(load(path))


def test_a_file_of_many_layers_has_them_in_groups(tmp_path: Path) -> None:
    layers = [("GLM-4.5-Air", "3"), ("Qwen3-30B-A3B", "3"), ("Qwen3-30B-A3B", "4")]
    rows = [layer_row(tokens, 9_000 * tokens, geometry=name, k=k) for name, k in layers for tokens in (1, 8, 64, 512)]
    receipt, path = make_receipt(rows), tmp_path / "all.json"
    write(receipt, path)
    assert load(path) == receipt
    assert path.read_text() == dump(load(path))
    assert path.read_text().count("GLM-4.5-Air") == 1


def test_plain_json_of_the_schema_is_a_receipt_too(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(RECEIPT.model_dump_json(by_alias=True))
    assert load(path) == RECEIPT


def test_each_row_has_a_line() -> None:
    lines = dump(RECEIPT).splitlines()
    assert sum(line.rstrip(",").endswith("]") and "155000" in line for line in lines) == 1
    assert sum(line.startswith('["device copy"') for line in lines) == 1
    assert len(dump(RECEIPT)) < len(RECEIPT.model_dump_json(by_alias=True))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "is no receipt: JSONDecodeError"),
        ("[]", "is no receipt"),
        ("{}", "is no receipt: KeyError"),
        (dump(RECEIPT).replace('"dirty": false,\n', ""), "dirty: Field required"),
        (dump(RECEIPT).replace('"check.error": 0.0001', '"check.error": 1.0'), "above its bound"),
    ],
)
def test_what_is_no_receipt_is_refused_by_name(tmp_path: Path, content: str, match: str) -> None:
    path = tmp_path / "all.json"
    path.write_text(content)
    with pytest.raises(MoeValueError, match=match) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoeValueError, match="cannot be read"):
        load(tmp_path / "all.json")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoeValueError, match="cannot be written"):
        write(RECEIPT, tmp_path / "file" / "all.json")


def test_receipts_lie_in_the_folder_of_their_gpu(tmp_path: Path) -> None:
    (path,) = publish([("all", RECEIPT)], tmp_path)
    assert path == tmp_path / "nvidia-h200" / "all.json"
    (published,) = load_published(tmp_path)
    assert (published.gpu, published.name, published.receipt) == ("nvidia-h200", "all", RECEIPT)
    assert gpu_folder("NVIDIA GH200 480GB (x2)") == "nvidia-gh200-480gb-x2"
    path.rename(path.parent.parent / "all.json")
    assert load_published(tmp_path) == ()


@pytest.mark.parametrize(
    ("change", "match"),
    [({"machine": CPU}, "rehearsal on a CPU"), ({"dirty": True}, "differed from commit")],
    ids=["cpu", "dirty"],
)
def test_the_documentation_takes_no_other_receipt(tmp_path: Path, change: dict[str, object], match: str) -> None:
    receipt: Receipt = RECEIPT.model_copy(update=change)
    with pytest.raises(MoeValueError, match=match):
        publish([("all", receipt)], tmp_path)
    assert list(tmp_path.iterdir()) == []
    write(receipt, tmp_path / "nvidia-h200" / "all.json")
    with pytest.raises(MoeValueError, match=match):
        load_published(tmp_path)


def test_a_receipt_in_the_folder_of_another_gpu_is_refused(tmp_path: Path) -> None:
    write(RECEIPT, tmp_path / "nvidia-h100" / "all.json")
    with pytest.raises(MoeValueError, match="whose folder is nvidia-h200"):
        load_published(tmp_path)
