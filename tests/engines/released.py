"""Skip markers for tests that run inside an engine's released Python."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def needs(package: str, release: str) -> pytest.MarkDecorator:
    """Skip a test unless the installed version of the package starts with `release`."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    reason = f"{package} {release} is not installed: found {found}"
    return pytest.mark.skipif(not f"{found}.".startswith(f"{release}."), reason=reason)
