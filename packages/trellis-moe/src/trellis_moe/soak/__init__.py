"""Owns a long run of many layers under changing loads, and the report of what held.

It must not know how layers run.
"""
