"""Shrink a failure to the smallest batch that shows it, so that its author has little to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spec_decode.testing.batches import Batch
from spec_decode.testing.expectations import CheckFailure, Measurements


def run_and_shrink(run: Callable[[Batch], Measurements | None], batch: Batch) -> Measurements:
    """run(batch). If that raises CheckFailure, raise the failure of the smallest batch that still fails.

    Each request is tried alone and without padding, the shortest first: most failures need no second request.
    """
    try:
        return run(batch) or {}
    except CheckFailure as failure:
        small, shown = next(_failing(run, batch), (batch, failure))
        raise CheckFailure(
            contract=shown.contract, expected=shown.expected, got=shown.got, shrunk=_describe(small)
        ) from None


def _failing(run: Callable[[Batch], Measurements | None], batch: Batch) -> Iterator[tuple[Batch, CheckFailure]]:
    for length, query in sorted(zip(batch.seq_lens, batch.query_lens, strict=True)):
        alone = Batch((query,), (length,), 1)
        try:
            run(alone)
        except CheckFailure as failure:
            yield alone, failure
        except Exception:  # another error on a request alone must not hide the failure that is being explained
            continue


def _describe(batch: Batch) -> str:
    if batch.rows == 1:
        return f"one request of {batch.seq_lens[0]} tokens, query length {batch.query_lens[0]}"
    return f"requests of {list(batch.seq_lens)} tokens in {batch.rows} rows, none of them alone"
