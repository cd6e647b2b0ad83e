"""The smallest batch that shows a failure, so that its author has little to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spec_decode.conformance.cases import Batch
from spec_decode.conformance.check import CheckFailure, Evidence


def on_smallest(run: Callable[[Batch], Evidence | None], batch: Batch) -> Evidence:
    """run(batch); if it fails, the failure of the smallest batch that still does.

    Tried are its requests one by one without padding, the shortest first: most failures need no second request.
    """
    try:
        return run(batch) or {}
    except CheckFailure as failure:
        small, shown = next(_failing(run, batch), (batch, failure))
        raise CheckFailure(
            contract=shown.contract, expected=shown.expected, got=shown.got, smallest=_words(small)
        ) from None


def _failing(run: Callable[[Batch], Evidence | None], batch: Batch) -> Iterator[tuple[Batch, CheckFailure]]:
    for length, query in sorted(zip(batch.seq_lens, batch.query_lens, strict=True)):
        alone = Batch((query,), (length,), 1)
        try:
            run(alone)
        except CheckFailure as failure:
            yield alone, failure
        except Exception:  # what else goes wrong alone must not hide the failure that is being explained
            continue


def _words(batch: Batch) -> str:
    if batch.rows == 1:
        return f"one request of {batch.seq_lens[0]} tokens, query length {batch.query_lens[0]}"
    return f"requests of {list(batch.seq_lens)} tokens in {batch.rows} rows, none of them alone"
