"""Every kernel compared with the torch reference of its op, surrounded by poison."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops import attention, drafting, models, sampling, state  # noqa: F401
from tests.ops.questions import Garbage, check_op
from tests.ops.sample import TABLE

SAMPLES = [(op, at) for op in TABLE for at in range(len(TABLE[op].samples))]
STRIDED = [(op, at) for op, at in SAMPLES if TABLE[op].strided and at < 2]


@pytest.fixture(autouse=True)
def new_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    memory = Garbage()
    monkeypatch.setattr(torch, "empty", memory.given_by(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", memory.given_by(torch.Tensor.new_empty))
    yield
    for placed in memory.placed:
        placed.assert_alone()


@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=str)
def test_kernel_matches_reference_and_touches_nothing_else(op: str, sample: int) -> None:
    check_op(TABLE[op], TABLE[op].samples[sample], torch.device("cpu"))


@pytest.mark.parametrize(("op", "sample"), STRIDED, ids=str)
def test_operands_with_row_gaps_are_read_in_place(op: str, sample: int) -> None:
    check_op(TABLE[op], TABLE[op].samples[sample], torch.device("cpu"), gaps=True)
