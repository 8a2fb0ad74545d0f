"""Owns the doors to other engines, each a module that is imported where its engine is.  It must not import them."""
