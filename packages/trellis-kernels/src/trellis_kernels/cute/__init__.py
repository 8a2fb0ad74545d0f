"""Owns the GPU backend: kernels written in CuTe DSL, their compile keys and their ahead-of-time compilation.

Nothing here imports `cutlass` until a kernel is compiled or launched, so that keys and plans work where it is missing.
"""
