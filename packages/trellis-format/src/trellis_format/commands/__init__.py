"""Owns the subcommands of `trellis-format`, one module each.  It must not know how arguments are dispatched."""

from __future__ import annotations
