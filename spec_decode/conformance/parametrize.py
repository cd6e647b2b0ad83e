"""The pytest interface: one decorator turns every check into a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attn_backends.registry import Backend, load
from attn_backends.torch_settings import one_thread
from spec_decode.conformance.check import Check
from spec_decode.conformance.known_failures import KnownFailure, known_failures_of
from spec_decode.conformance.report import repro_command
from spec_decode.conformance.runner import default_device, iter_checks
from spec_decode.testing.error_location import outside_this_package
from spec_decode.testing.outcome import CheckFailure, Unavailable, Unsupported
from spec_decode.testing.process_exit import refuse_process_exit


def parametrize_with_checks(
    *backends: str | Backend,
    device: torch.device | None = None,
    families: Sequence[str] | None = None,
    quick: bool = False,
) -> Callable[..., Any]:
    """``@parametrize_with_checks("mykernel")`` over ``def test_conformance(check): check()``; needs pytest.

    families, quick: as in `iter_checks`, to keep a session short. Raises ValueError for an unknown family.

    A failure is shown without the kit's frames; its last line is the command that repeats the check. An unclaimed case
    is a skip with the backend's own reasons, a known failure is an xfail with its issue, and so is a failure of a check
    newer than the backend's contract. While a backend is loaded or checked, `os._exit` raises RuntimeError, because it
    would end the session without a summary. Native code that ends the process cannot be intercepted: use pytest-xdist
    (`-n 1`), which then fails the test in which it happened.
    """
    import pytest

    with refuse_process_exit():
        params = [
            pytest.param(
                _for_pytest(
                    check, repro_command(own.name, check.name, check.case, device=(device or default_device()).type)
                ),
                id=f"{own.name}-{check.id}",
                marks=_expected(check, known_failures_of(own)),
            )
            for backend in backends
            for own in [load(backend) if isinstance(backend, str) else backend]
            for check in iter_checks(own, device=device, families=families, quick=quick)
        ]
    mark: Callable[..., Any] = pytest.mark.parametrize("check", params)
    return mark


def _expected(check: Check, known_failures: Sequence[KnownFailure]) -> list[Any]:
    import pytest

    known = [entry for entry in known_failures if entry.covers(check)][:1]
    return [
        pytest.mark.xfail(
            reason=f"{entry.issue}: {entry.reason}",
            raises=None if entry.error else pytest.fail.Exception,
            strict=not entry.can_pass,
        )
        for entry in known
    ]


def _for_pytest(check: Check, repro: str) -> Callable[[], None]:
    """Wrap the check as a test. A failure is shown without the kit's frames and with the command that repeats it."""
    import pytest

    def run() -> None:
        __tracebackhide__ = True
        try:
            # As in `attn-backends check`: with more threads the kit took twelve times as long.
            with one_thread(), torch.no_grad():
                check()
        except (Unsupported, Unavailable) as reason:
            pytest.skip(str(reason))
        except Exception as failure:
            if check.preview:
                pytest.xfail(f"{check.preview}: {failure}")
            if not isinstance(failure, CheckFailure):
                getattr(failure, "add_note", print)(repro)  # Python 3.10 has no notes; pytest shows printed text
                raise failure.with_traceback(outside_this_package(failure.__traceback__))  # noqa: B904, the same error
            why = str(failure)
        else:
            return
        pytest.fail(f"{why}\n{repro}", pytrace=False)

    return run
