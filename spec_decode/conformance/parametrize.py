"""The pytest face: one decorator makes a test of every check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attn_backends import AttentionBackend
from spec_decode.conformance.check import Check
from spec_decode.conformance.runner import iter_checks


def parametrize_with_checks(
    *backends: str | AttentionBackend, device: torch.device | None = None
) -> Callable[..., Any]:
    """``@parametrize_with_checks("mykernel")`` over ``def test_conformance(check): check()``; needs pytest.

    An unclaimed case counts as a skip with the backend's own reasons.
    """
    import pytest

    params = [
        pytest.param(_for_pytest(check), id=f"{name}-{check.id}")
        for backend in backends
        for name in [backend if isinstance(backend, str) else backend.name]
        for check in iter_checks(backend, device=device)
    ]
    mark: Callable[..., Any] = pytest.mark.parametrize("check", params)
    return mark


def _for_pytest(check: Check) -> Callable[[], None]:
    import pytest

    from spec_decode.conformance.check import Unavailable, Unsupported

    def run() -> None:
        try:
            with torch.no_grad():
                check()
        except (Unsupported, Unavailable) as reason:
            pytest.skip(str(reason))

    return run
