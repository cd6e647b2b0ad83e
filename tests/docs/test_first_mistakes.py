"""Each mistake that docs/adding-a-backend.md lists gets the answer the page shows, from the check it names."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attn_backends import AttentionBackend
from spec_decode.conformance import check_backend
from spec_decode.conformance.report import FAILURES, Report
from spec_decode.testing.outcome import Outcome
from tests.docs.pages import DOCS, ROOT
from tests.factories import CPU

sys.path.insert(0, str(ROOT / "examples" / "window_pages"))

from window_pages.backend import WindowPages
from window_pages.builder import WindowPagesBuilder

PAGE = (DOCS / "adding-a-backend.md").read_text()


@dataclass(frozen=True)
class Mistake:
    """A broken copy of the page's backend; the check that finds it, and words of its answer that the page quotes."""

    name: str
    check: str
    says: str
    backend: AttentionBackend

    def report(self) -> Report:
        return check_backend(self.backend, device=CPU, checks=[self.check], report=True)


def _mistake(name: str, check: str, says: str, backend: dict[str, Any] | None = None, **builder: Any) -> Mistake:
    support = classmethod(lambda cls, spec, device: WindowPagesBuilder.advance_support(spec, device))
    mistaken = type("Mistaken", (WindowPagesBuilder,), {"advance_support": support, **builder})
    kind = type("Mistake", (WindowPages,), {"name": name, "builder": mistaken, **(backend or {})})
    return Mistake(name, check, says, kind())


def _before(trouble: Any) -> Any:
    def advance(self: Any, metadata: Any) -> None:
        trouble(metadata)
        WindowPagesBuilder.advance(self, metadata)

    return advance


def _allocates(self: Any, metadata: Any) -> None:
    object.__setattr__(metadata, "seen", metadata.seen.clone())
    WindowPagesBuilder.advance(self, metadata)


def _assigns(self: Any, metadata: Any) -> None:
    metadata.seen = metadata.seen + 1


def _counts_on(self: Any, metadata: Any) -> None:
    before = metadata.seen.clone()
    WindowPagesBuilder.advance(self, metadata)
    longest = self.spec.sliding_window or self.max_seq_len
    metadata.seen.copy_(torch.where(before > 0, before + 1, before).clamp(max=longest))


def _casts(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    built = WindowPagesBuilder.build(self, batch, horizon=horizon)
    return replace(built, slot_mapping=batch.slot_mapping.int().long())


def _writes(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    batch.seq_lens.clamp_(min=1)
    return WindowPagesBuilder.build(self, batch, horizon=horizon)


def _sized_by_this_batch(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    pages = -(-max(batch.host_seq_lens) // self.spec.page_size)
    built = WindowPagesBuilder.build(self, batch, horizon=horizon)
    return replace(built, pages=built.pages[:, :pages])


def _as_if_pages_had_16_tokens(self: Any, metadata: Any) -> None:
    spec, self.spec = self.spec, replace(self.spec, page_size=16)
    WindowPagesBuilder.advance(self, metadata)
    self.spec = spec


def _leaves_the_rest(self: Any, metadata: Any) -> None:
    before = metadata.pages.clone()
    WindowPagesBuilder.advance(self, metadata)
    metadata.pages.copy_(torch.where(metadata.pages > 0, metadata.pages, before))


def _unwritten(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    out = WindowPages.forward(self, *args, **kwargs)
    return out + 0 * torch.empty_like(out)


def _times_zero(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    out = WindowPages.forward(self, query, cache, metadata, **options)
    return out + 0 * cache.key[metadata.pages.long()].sum()


def _follows_the_table(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    _ = cache.key[metadata.block_table.clamp(min=0).long()]
    return WindowPages.forward(self, query, cache, metadata, **options)


HOST_WORK = {
    "branches_on_the_device": ("reads device data on the host", lambda m: int(m.seq_lens.max())),
    "copies_to_the_host": ("reads device data on the host", lambda m: m.seq_lens.tolist()),
    "makes_a_tensor_of_host_data": ("copies fresh host data to the device", lambda m: torch.tensor([1, 2])),
    "has_a_shape_of_device_data": ("makes a shape that depends on device data", lambda m: m.seq_lens.nonzero()),
    "repeats_by_device_data": (
        "makes a shape that depends on device data",
        lambda m: torch.repeat_interleave(m.seq_lens, m.seq_lens),
    ),
    "indexes_by_a_mask": ("whose count only the device knows", lambda m: m.positions[m.seq_lens > 0]),
}
"""What advance() does first, and the answer."""
MISTAKES = [
    *(
        _mistake(name, "builder.advance_is_device_work", says, advance=_before(trouble))
        for name, (says, trouble) in HOST_WORK.items()
    ),
    _mistake("replaces_a_tensor", "builder.advance_keeps_addresses", "replaced", advance=_allocates),
    _mistake("assigns_a_field", "builder.advance_means_a_rebuild", "FrozenInstanceError", advance=_assigns),
    _mistake("casts_a_view", "builder.build_reuses_its_addresses", "moved", build=_casts),
    _mistake("counts_on", "builder.advance_refreshes_another_batch", "P2", advance=_counts_on),
    _mistake(
        "leaves_the_rest_of_a_buffer",
        "builder.advance_refreshes_another_batch",
        "built for requests of [156",
        advance=_leaves_the_rest,
    ),
    _mistake(
        "takes_one_page_size_for_all",
        "builder.advance_means_a_rebuild",
        "matches the current batch",
        advance=_as_if_pages_had_16_tokens,
    ),
    _mistake(
        "forgets_a_step_field",
        "builder.step_fields_are_complete",
        "pages changed and is not declared",
        step_fields=("seq_lens", "positions", "slot_mapping", "skip", "seen"),
    ),
    _mistake("sized_by_this_batch", "graph.loop_replays_over_other_batches", "step", build=_sized_by_this_batch),
    _mistake("writes_to_the_batch", "builder.build_leaves_the_batch_alone", "change", build=_writes),
    _mistake("reads_unwritten_memory", "poison.uninitialised_memory_is_not_read", "inf", {"forward": _unwritten}),
    _mistake("multiplies_nan_by_0", "poison.page_order_does_not_matter", "nan", {"forward": _times_zero}),
    _mistake("follows_the_table", "poison.stale_table_entries_are_not_read", "index", {"forward": _follows_the_table}),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_first_mistake_gives_answer_on_page(mistake: Mistake) -> None:
    report = mistake.report()

    family, check = mistake.check.split(".")
    assert f"`{check}`" in PAGE or f"`{mistake.check}`" in PAGE or f"`{family}.*`" in PAGE
    assert [r.reason for r in report.results if r.outcome in FAILURES and mistake.says in r.reason], [
        (r.outcome.value, r.reason) for r in report.results
    ]


def test_single_page_size_fails_only_other_page_cases() -> None:
    (mistake,) = (mistake for mistake in MISTAKES if mistake.name == "takes_one_page_size_for_all")

    assert {result.case for result in mistake.report().results if result.outcome in FAILURES} == {
        "page_4-decode",
        "page_128-decode",
    }


def test_lost_claim_is_noted_in_page_words() -> None:
    def build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
        return WindowPagesBuilder.build(self, batch, horizon=horizon)

    silent = type("Silent", (WindowPages,), {"builder": type("Loses", (WindowPagesBuilder,), {"build": build})})()
    notes: list[str] = []
    report = check_backend(
        silent, device=CPU, checks=["builder.advance_is_device_work"], on_note=notes.append, report=True
    )

    assert {result.outcome for result in report.results} == {Outcome.UNSUPPORTED}
    for words in ("advance is REBUILD", "it must define advance_support() again"):
        assert words in notes[0] and words in PAGE


def test_counting_on_is_right_until_next_batch() -> None:
    (mistake,) = (mistake for mistake in MISTAKES if mistake.name == "counts_on")
    check_backend(mistake.backend, device=CPU, checks=["builder.advance_means_a_rebuild"])
