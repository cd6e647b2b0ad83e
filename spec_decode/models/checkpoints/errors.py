"""The error of every checkpoint that cannot be loaded."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message says what is wrong with which file."""
