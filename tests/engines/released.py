"""Engines whose released Python tests run inside of, if it is there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def needs(package: str, release: str) -> pytest.MarkDecorator:
    """Skips a test without a release of the package whose version begins so."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    reason = f"{package} {release} is not installed: found {found}"
    return pytest.mark.skipif(not f"{found}.".startswith(f"{release}."), reason=reason)
