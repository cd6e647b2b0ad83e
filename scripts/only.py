"""Choosing by patterns, as shells match names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase


def chosen(parser: argparse.ArgumentParser, patterns: Sequence[str] | None, names: Sequence[str]) -> set[str]:
    """The names that fit one of the patterns of --only, or all. Ends the script for a pattern that fits none."""
    for pattern in patterns or []:
        if not any(fnmatchcase(name, pattern) for name in names):
            parser.error(f"--only must fit some of {', '.join(names)}, got {pattern}.")
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns or ["*"])}
