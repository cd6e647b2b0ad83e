"""Select names by shell-style patterns."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase


def chosen(parser: argparse.ArgumentParser, patterns: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    """Return the names that match an --only pattern, in the order of the patterns, or all. Exit with a usage error if a
    pattern matches none."""
    for pattern in patterns or []:
        if not any(fnmatchcase(name, pattern) for name in names):
            parser.error(f"--only must match one of {', '.join(names)}, got {pattern}.")
    return [*dict.fromkeys(name for pattern in patterns or ["*"] for name in names if fnmatchcase(name, pattern))]
