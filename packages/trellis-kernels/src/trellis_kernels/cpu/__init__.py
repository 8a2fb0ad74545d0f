"""Owns the `cpu` backend: every op in torch, written to be read, on any device.  It must not know kernels."""
