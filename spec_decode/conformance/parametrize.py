"""The pytest face: one decorator makes a test of every check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attn_backends import AttentionBackend, get
from attn_backends.torch_settings import one_thread
from spec_decode.conformance.check import Check
from spec_decode.conformance.known_failures import KnownFailure, known_failures_of
from spec_decode.conformance.runner import iter_checks
from spec_decode.testing.expectations import Unavailable, Unsupported
from spec_decode.testing.process_exit import refuse_process_exit


def parametrize_with_checks(
    *backends: str | AttentionBackend,
    device: torch.device | None = None,
    families: Sequence[str] | None = None,
    quick: bool = False,
) -> Callable[..., Any]:
    """``@parametrize_with_checks("mykernel")`` over ``def test_conformance(check): check()``; needs pytest.

    families, quick: as `iter_checks` takes them, to keep a session short. Raises ValueError for an unknown family.

    An unclaimed case counts as a skip with the backend's own reasons, a known failure as an xfail with its issue, and a
    failure of a check that is newer than the backend's contract as an xfail that says so. While a backend is loaded or
    checked, `os._exit` raises RuntimeError: the tests would end with no summary. Native code that ends the process is
    out of reach here: run the tests with pytest-xdist (`-n 1`), which fails the test that it happened in.
    """
    import pytest

    with refuse_process_exit():
        params = [
            pytest.param(
                _for_pytest(check), id=f"{own.name}-{check.id}", marks=_expected(check, known_failures_of(own))
            )
            for backend in backends
            for own in [get(backend) if isinstance(backend, str) else backend]
            for check in iter_checks(own, device=device, families=families, quick=quick)
        ]
    mark: Callable[..., Any] = pytest.mark.parametrize("check", params)
    return mark


def _expected(check: Check, known_failures: Sequence[KnownFailure]) -> list[Any]:
    import pytest

    known = [entry for entry in known_failures if entry.covers(check)][:1]
    return [pytest.mark.xfail(reason=f"{entry.issue}: {entry.reason}", strict=True) for entry in known]


def _for_pytest(check: Check) -> Callable[[], None]:
    import pytest

    def run() -> None:
        try:
            # As `attn-backends check` does: with more threads the kit took twelve times as long.
            with one_thread(), torch.no_grad():
                check()
        except (Unsupported, Unavailable) as reason:
            pytest.skip(str(reason))
        except Exception as failure:
            if not check.preview:
                raise
            pytest.xfail(f"{check.preview}: {failure}")

    return run
