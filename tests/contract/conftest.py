"""Gives every test of this folder a fleet of relays."""

from relays import fleet

__all__ = ["fleet"]
