"""A mark for tests that read the committed reports, which are of older schemas until they are made again."""

import pytest

from spec_decode.conformance.report import ReportError

NEEDS_NEW_REPORTS = pytest.mark.xfail(
    raises=ReportError,
    strict=True,
    reason="the committed reports are of older schemas: make them again, drop this mark",
)
