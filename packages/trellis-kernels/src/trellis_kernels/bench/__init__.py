"""Owns measurements of the kernels on random layers.  It must not be imported by any kernel."""
