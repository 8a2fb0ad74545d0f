"""Owns the check of layers on many ranks: their results against one rank's, what a lost rank does, and their times.

It must not know how ranks exchange.  It runs under torchrun, or starts its ranks itself:

    torchrun --nproc-per-node=2 -m trellis_moe.dist_check
    python -m trellis_moe.dist_check --launch 2 --times --json times.json
    python -m trellis_moe.dist_check --launch 2 --kill-rank 1
"""
