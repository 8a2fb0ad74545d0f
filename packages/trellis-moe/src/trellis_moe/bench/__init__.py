"""Owns the measurement of layers, ops and preparation into receipts.  It must not know tables or plots."""
