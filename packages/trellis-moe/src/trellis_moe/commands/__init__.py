"""Owns what the commands do: run and demo.  It must not parse arguments."""
