"""Owns measurements on record: their schema, files, verdicts, tables and plots.  It must not measure."""
