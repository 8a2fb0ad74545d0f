"""Owns `trellis-moe demo`: a layer of a real checkpoint, its own router, and the distance from two references.

It must not parse arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3.layers import find_layer
from trellis_format.reference import moe_forward
from trellis_moe.commands.layer import choose_device, open_layer, run_layer
from trellis_moe.commands.progress import progress_bar
from trellis_moe.commands.router import route
from trellis_moe.commands.run import SCHEMA_VERSION, describe_run
from trellis_moe.errors import MoeValueError

__all__ = ["DEMO_CHECKPOINT", "demo"]

DEMO_SCHEMA = "trellis-moe/demo"
DEMO_CHECKPOINT = "tiny_3_mul1"
_TOKENS = 40  # of the stored case that the demo shows
_SEED = 20251
_BOUND_REFERENCE = 1e-3  # relative L2 to the float64 reference, float16 activations
_BOUND_PEER = 2e-3  # relative L2 to exllamav3's output, whose own float16 rounding is most of it


def demo(
    *,
    checkpoint: Path | None,
    layer: int,
    device: str | None,
    tokens: int,
    activation: str | None = None,
    show_progress: bool = True,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run the demo.

    Args:
        checkpoint: a directory; None is the checkpoint in the repository, whose stored inputs and outputs are used.
        layer: index of the layer.
        device: `cpu`, `cuda`, or None for a GPU where there is one.
        tokens: tokens of random input, where there is no stored one.
        activation: a name of the law, in place of what the checkpoint states.
        show_progress: whether a bar may be shown.
        warn: called, before the work begins, with each warning that the report will have.

    Returns:
        The report, with `error_float64` and, where an output of exllamav3 is stored, `error_exllamav3` (relative L2),
        and whether each is within its bound.

    Raises:
        FormatError, PrepError, MoeError: if something is refused.
    """
    target = choose_device(device)
    path = checkpoint if checkpoint is not None else _repository_data() / "checkpoints" / DEMO_CHECKPOINT
    opened = open_layer(path, layer, activation=activation)
    stored = _stored_case(path, layer) if checkpoint is None and activation is None else None
    x = stored["x"] if stored else _random_input(tokens, opened.source.geometry.hidden_size)
    with open_checkpoint(path) as files:
        ids, weights = route(files, find_layer(files, layer), x)
    if warn is not None:
        for warning in opened.warnings:
            warn(warning)
    with progress_bar(show_progress) as tell:
        result = run_layer(opened, x, ids, weights, device=target, progress=tell)
    truth = moe_forward(opened.source, opened.weights, x.numpy(), ids.numpy(), weights.numpy())
    error = _distance(result.y, torch.from_numpy(truth))
    report = {
        "schema": DEMO_SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "checkpoint": str(path),
        "layer": layer,
        **describe_run(opened, result),
        "explain": result.plan.explain(),
        "error_float64": error,
        "bound_float64": _BOUND_REFERENCE,
        "ok": error <= _BOUND_REFERENCE,
    }
    if stored:
        peer = _distance(result.y, stored["y"].double())
        routes_agree = bool((ids.sort().values == stored["topk_ids"].sort().values).all())
        report |= {"error_exllamav3": peer, "bound_exllamav3": _BOUND_PEER, "routes_agree": routes_agree}
        report["ok"] = report["ok"] and peer <= _BOUND_PEER and routes_agree
    return report


def _repository_data() -> Path:
    """The test data of the clone that this package, or else this process, runs in."""
    for parent in (*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents):
        data = parent / "tests" / "data"
        if (data / "checkpoints" / DEMO_CHECKPOINT / "config.json").is_file():
            return data
    raise MoeValueError(
        "the demo's checkpoint is in the repository (tests/data), and neither this package nor this process runs in a "
        "clone of it; give --checkpoint DIR"
    )


def _stored_case(path: Path, layer: int) -> dict[str, torch.Tensor] | None:
    """Input, routes and exllamav3's output of a layer, where the repository has them."""
    golden = path.parent.parent / "golden" / "exl3_moe.safetensors"
    prefix = f"{path.name}.layer{layer}.m{_TOKENS}."
    if not golden.is_file():
        return None
    case = {name.removeprefix(prefix): t for name, t in load_file(golden).items() if name.startswith(prefix)}
    return case or None


def _random_input(tokens: int, hidden: int) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(_SEED)).to(torch.float16)


def _distance(y: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2: ||y - reference|| / ||reference||."""
    return float((y.double() - reference).norm() / reference.norm())
