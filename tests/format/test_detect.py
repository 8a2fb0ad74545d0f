"""Holds the detection of containers to manifests alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from trellis_format.detect import CONTAINERS, container_of
from trellis_format.errors import FormatNotFoundError, FormatValueError

MANIFESTS = {"exl3-v1": "exl3-manifest.json", "native": "trellis-manifest.json"}


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_manifest_decides(tmp_path: Path, container: str) -> None:
    if container in MANIFESTS:
        (tmp_path / MANIFESTS[container]).write_text("not even JSON")
    assert container_of(tmp_path) == container
    assert container_of(str(tmp_path)) == container


def test_two_manifests_are_no_container(tmp_path: Path) -> None:
    for name in MANIFESTS.values():
        (tmp_path / name).write_text("{}")
    with pytest.raises(FormatValueError, match=r"two containers: exl3-manifest.json, trellis-manifest.json"):
        container_of(tmp_path)


def test_paths_that_are_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FormatNotFoundError, match="no such checkpoint directory"):
        container_of(tmp_path / "no")
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatValueError, match="is a directory, this is a file"):
        container_of(tmp_path / "file")
