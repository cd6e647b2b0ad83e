"""Every op is in the table, its schema is true, and its fake is like it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ops import attention, drafting, models, sampling  # noqa: F401
from tests.ops.questions import check_schema
from tests.ops.sample import TABLE

ROOT = Path(__file__).parents[1]


def test_every_op_that_the_library_defines_has_samples() -> None:
    rooms = ("attn_backends", "builders", "engines", "spec_decode")
    text = "".join(path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py"))
    defined = set(re.findall(r'= define_op\(\s*"(\w+::\w+)"', text))
    assert len(defined) == text.count("= define_op(") and defined == set(TABLE)
    assert all(op.samples for op in TABLE.values())


@pytest.mark.parametrize("op", TABLE)
def test_the_schema_is_true_and_the_fake_is_like_the_op(op: str) -> None:
    for sample in TABLE[op].samples:
        check_schema(TABLE[op].call, sample)
