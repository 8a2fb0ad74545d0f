"""Owns the ways a launch is carried out.  It must not know how a plan was made."""
