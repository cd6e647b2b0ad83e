"""A failure is reported on the smallest batch that shows it."""

from __future__ import annotations

import pytest

from spec_decode.conformance.check import run_and_shrink
from spec_decode.testing.batches import Batch
from spec_decode.testing.outcome import CheckFailure, Measurements

MANY = Batch((1, 1, 1), (40, 3, 17), 5)


def failing(condition: object, seen: list[Batch] | None = None) -> object:
    def run(batch: Batch) -> Measurements:
        if seen is not None:
            seen.append(batch)
        if condition(batch):  # type: ignore[operator]
            raise CheckFailure(contract="c", expected="e", got=str(list(batch.seq_lens)))
        return {"error": 0.5}

    return run


def test_shortest_request_failing_alone_is_reported() -> None:
    with pytest.raises(CheckFailure) as failure:
        run_and_shrink(failing(lambda batch: max(batch.seq_lens) > 16), MANY)  # type: ignore[arg-type]

    assert str(failure.value).endswith("got: [17]; smallest case: one request of 17 tokens, query length 1")


def test_failure_of_whole_batch_is_reported_on_it() -> None:
    with pytest.raises(CheckFailure) as failure:
        run_and_shrink(failing(lambda batch: batch.rows > 1), MANY)  # type: ignore[arg-type]

    assert "got: [40, 3, 17]; smallest case: requests of [40, 3, 17] tokens in 5 rows" in str(failure.value)


def test_error_while_shrinking_does_not_hide_failure() -> None:
    def run(batch: Batch) -> Measurements:
        if batch.rows == 1:
            raise RuntimeError("one row is too few")
        raise CheckFailure(contract="c", expected="e", got="g")

    with pytest.raises(CheckFailure, match="no request fails alone"):
        run_and_shrink(run, MANY)


def test_passing_case_runs_once_and_keeps_evidence() -> None:
    seen: list[Batch] = []

    assert run_and_shrink(failing(lambda batch: False, seen), MANY) == {"error": 0.5}  # type: ignore[arg-type]
    assert seen == [MANY]
