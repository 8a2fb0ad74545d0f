"""Holds the shared argument rules to one thing that no backend's test can: both backends use them, and only them.

What each rule refuses, and with which words, is tested through the torch backend in `cpu/`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trellis_kernels
from trellis_kernels import arguments

SOURCE = Path(trellis_kernels.__file__).parent
RULES = {
    "check_table": ("cpu/decode.py", "cute/keys.py"),
    "check_rotate_input": ("cpu/rotate.py", "cute/rotate.py"),
    "check_rotate_output": ("cpu/rotate.py", "cute/rotate.py"),
    "check_activate": ("cpu/activate.py", "cute/activate.py"),
    "check_topk_ids": ("cpu/routes.py", "cute/route_pack.py"),
    "check_reduce_routes": ("cpu/reduce.py", "cute/reduce.py"),
}


def called(path: Path) -> set[str]:
    """Names of the functions that a module calls by their bare names."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def test_every_rule_is_listed() -> None:
    assert set(RULES) == {name for name in arguments.__all__ if name.startswith("check_")}


@pytest.mark.parametrize("rule", RULES)
def test_both_backends_use_the_rule(rule: str) -> None:
    for file in RULES[rule]:
        assert rule in called(SOURCE / file), file


def test_rotation_blocks_are_that_of_a_linear_and_four_of_them() -> None:
    assert arguments.ROTATION_BLOCKS == (128, 512)
