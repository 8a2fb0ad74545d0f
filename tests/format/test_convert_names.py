"""Holds the file of names to going round, and to refusing names that it cannot give back."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl3_files import write_json
from trellis_format.convert_names import NAMES_FILE, LayerNames, default_names, dump_names, names_of, read_names
from trellis_format.errors import FormatValueError
from trellis_format.exl3.names import DEFAULT_PATTERN, ExpertName, compile_pattern, match_expert
from trellis_format.source import Projection
from trellis_format.synth_names import NAMINGS


@pytest.mark.parametrize("name", NAMINGS)
def test_names_of_every_architecture_go_round(tmp_path: Path, name: str) -> None:
    naming, pattern = NAMINGS[name], compile_pattern(DEFAULT_PATTERN)
    modules = {}
    for expert in (0, 1, 12):
        for projection in naming.words:
            module = naming.expert_path(3, expert, projection)
            says = match_expert(module, pattern)
            assert says is not None
            modules[module] = says
    names = names_of(modules)
    write_json(tmp_path / NAMES_FILE, dump_names({3: names}))
    (kept,) = read_names(tmp_path).values()
    assert {kept.module(says.expert, says.projection) for says in modules.values()} == set(modules)
    assert list(kept.words) == list(naming.words)


def test_a_directory_without_the_file_has_no_names(tmp_path: Path) -> None:
    assert read_names(tmp_path) == {}
    assert default_names(4).module(2, Projection.DOWN) == "model.layers.4.mlp.experts.2.down_proj"


def test_names_that_follow_no_pattern_are_refused() -> None:
    modules = {
        "a.0.x": ExpertName("a", 0, 0, Projection.UP),
        "a.1.y": ExpertName("a", 0, 1, Projection.UP),
    }
    with pytest.raises(FormatValueError, match=r"a\.0\.x: named other than 'a\.0\.y'"):
        names_of(modules)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"schema": "other", "layers": {}}, "schema"),
        ({"schema": "trellis-format/names", "schema_version": 2, "layers": {}}, "schema_version"),
        ({"schema": "trellis-format/names", "layers": {"x": {}}}, "layers.x"),
        ({"schema": "trellis-format/names", "layers": {"0": {"prefix": 1, "words": {}}}}, "layers.0.prefix"),
        ({"schema": "trellis-format/names", "layers": {"0": {"prefix": "p", "words": {"side": "w"}}}}, "side"),
        ({"schema": "trellis-format/names", "layers": {}, "more": 1}, "more"),
        ([], "the file: Input should be an object"),
    ],
)
def test_files_that_break_a_rule_name_the_key(tmp_path: Path, value: object, text: str) -> None:
    write_json(tmp_path / NAMES_FILE, value)
    with pytest.raises(FormatValueError, match=text):
        read_names(tmp_path)


def test_a_projection_without_a_name_is_refused() -> None:
    with pytest.raises(FormatValueError, match="experts under 'p' have no name for down"):
        LayerNames(prefix="p", words={Projection.UP: "u"}).module(0, Projection.DOWN)


def test_the_object_has_a_schema() -> None:
    names = LayerNames(prefix="p", words={Projection.UP: "u"})
    assert dump_names({7: names}) == {
        "schema": "trellis-format/names",
        "schema_version": 1,
        "layers": {"7": {"prefix": "p", "words": {"up": "u"}}},
    }
