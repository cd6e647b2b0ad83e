"""Family numerics: if a spec requests it, no bit of a token's output depends on the rest of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from builders import AttentionSpec
from spec_decode.conformance.cases import spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import with_case
from spec_decode.testing.batches import Batch, Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.outcome import expect
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.poison import bits
from spec_decode.testing.subject import Subject

_LENGTHS = (5, 33, 290)
"""Shorter than a block, shorter than a split, and longer than one."""
_BOUND = 304
_QUERY_LEN = 4
_ROWS = 5
_CROWD = 32
"""Row count at which a kernel can use fewer splits than for a few rows."""

check = Family("numerics", covers=with_case())


def _batch_invariant_cases(subject: Subject) -> Iterable[tuple[str, Case]]:
    """Yield specs that request batch invariance, for a few telling variants."""
    variants = ("base", "bf16", "window", "window_sinks_cap", "sinks", "deepseek_v3", "deepseek_v4_packed")
    batch = Batch((_QUERY_LEN,) * 3, _LENGTHS, _ROWS)
    for name, case in spec_cases({"texts": batch}, variants)(subject):
        yield name, Case(replace(case.spec, batch_invariant=True), batch)


@check(
    "with batch_invariant, no bit of a token's output depends on the other rows, its query's length, padding or the "
    "bound on lengths",
    _batch_invariant_cases,
)
def bits_do_not_depend_on_the_batch(subject: Subject, case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (_QUERY_LEN, case.spec.num_q_heads, case.spec.head_dim)
    queries = [torch.randn(shape, generator=generator).to(case.spec.dtype) for _ in _LENGTHS]
    together = _attended(subject, case.spec, range(len(_LENGTHS)), queries, case.batch.rows, _BOUND)
    for request, length in enumerate(_LENGTHS):
        (block,) = _attended(subject, case.spec, [request], queries, 1, length)
        ends = [query[-1:] for query in queries]
        (last,) = _attended(subject, case.spec, [request], ends, 1, _BOUND)
        (crowded,) = _attended(subject, case.spec, [request], ends, _CROWD, _BOUND)
        for what, found, expected in (
            (f"a block of {_QUERY_LEN} tokens alone", block, together[request]),
            ("its last token alone", last, together[request][-1:]),
            (f"its last token in {_CROWD} rows", crowded, together[request][-1:]),
        ):
            differing = int((bits(found) != bits(expected)).sum())
            expect(
                differing == 0,
                contract="a token's output is the same bits in every batch",
                expected=f"{what}, of a request of {length} tokens, as in a batch of {len(_LENGTHS)}",
                got=f"{differing} of {found.numel()} elements differ, by up to {(found - expected).abs().max():.2e}",
            )


def _attended(
    subject: Subject,
    spec: AttentionSpec,
    requests: Sequence[int],
    queries: Sequence[torch.Tensor],
    rows: int,
    max_seq_len: int,
) -> list[torch.Tensor]:
    """Return the outputs of these requests, on the CPU, run as one batch of `rows` rows including padding."""
    chosen = [queries[request] for request in requests]
    lens = tuple(len(query) for query in chosen)
    # The same size for every batch, so every fixture has the same keys and values.
    fixture = PagedFixture(subject, spec, _CROWD, max_seq_len=_BOUND)
    fixture.reorder(requests)
    batch = Batch(lens, tuple(_LENGTHS[request] for request in requests), rows)
    out = BuiltBatch(fixture, batch, max_seq_len=max_seq_len).attend(chosen).cpu()
    return list(out[: sum(lens)].split(list(lens)))
