"""Window lists, compared with a loop over tokens and positions."""

from __future__ import annotations

import fnmatch

import pytest
import torch

from builders import AttentionKind, BatchBuffers, BatchError, advance_state
from builders.sparse_window import SparseWindowBuilder
from spec_decode.conformance import check_backend
from tests.factories import CPU, make_spec, make_tables

MAX_SEQ_LEN = 192
BATCHES = {
    "decode": ([1] * 5, [1, 16, 17, 129, 188], 7),
    "single": ([1], [33], 1),
    "verify": ([5, 5, 5], [5, 37, 150], 4),
    "ragged": ([3, 1, 20, 7], [3, 64, 20, 130], 6),
}


class WindowCase:
    """A batch in its buffers, with builders over it."""

    def __init__(self, batch="decode", *, window=17, page_size=16, limits=None, more_tokens=0):
        self.window, self.page_size = window, page_size
        self.query_lens, self.seq_lens, rows = BATCHES[batch]
        self.tables = make_tables(
            limits or [MAX_SEQ_LEN] * len(self.seq_lens),
            page_sizes=(page_size,), max_reqs=rows, max_seq_len=MAX_SEQ_LEN,
        )  # fmt: skip
        self.buffers = BatchBuffers(self.tables, max_tokens=64)
        self.load(self.query_lens, self.seq_lens, rows, more_tokens)

    def load(self, query_lens, seq_lens, rows, more_tokens=0):
        num_reqs, num_tokens = self.buffers.load(query_lens, seq_lens, pad_reqs=rows)
        self.view = self.buffers.view(
            0, num_reqs=num_reqs, num_tokens=num_tokens + more_tokens, max_query_len=max(query_lens),
            uniform=len(set(query_lens)) == 1,
        )  # fmt: skip

    def builder(self):
        spec = make_spec(num_kv_heads=1, page_size=self.page_size, sliding_window=self.window, kind=AttentionKind.MLA)
        return SparseWindowBuilder(spec, CPU, max_reqs=8, max_tokens=64, max_seq_len=MAX_SEQ_LEN)

    def lists_by_hand(self):
        """Per token the slots it sees; None for a token of no live request."""
        view, lists = self.view, []
        starts, table = view.query_start_loc.tolist(), view.block_table.tolist()
        for token, position in enumerate(view.positions.tolist()):
            owners = [r for r in range(view.num_reqs) if starts[r] <= token < starts[r + 1] and view.seq_lens[r] > 0]
            if owners:
                past = range(max(0, position - self.window + 1), position + 1)
                pages = [table[owners[0]][p // self.page_size] for p in past]
                lists.append([page * self.page_size + p % self.page_size for page, p in zip(pages, past, strict=True)])
            else:
                lists.append(None)
        return lists


def assert_lists(metadata, lists):
    width = metadata.window_indices.shape[1]
    assert metadata.window_indices.tolist() == [(seen or []) + [-1] * (width - len(seen or [])) for seen in lists]
    assert metadata.window_lens.tolist() == [len(seen or []) for seen in lists]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [1, 17, 128])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_token_lists_slots_of_its_window(batch, window, page_size):
    fixture = WindowCase(batch, window=window, page_size=page_size)
    assert_lists(fixture.builder().build(fixture.view), fixture.lists_by_hand())


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens_after_last_request_see_nothing(batch):
    fixture = WindowCase(batch, more_tokens=3)
    fixture.buffers.positions.fill_(9)
    metadata = fixture.builder().build(fixture.view)
    assert_lists(metadata, fixture.lists_by_hand())
    assert metadata.window_lens[-3:].eq(0).all() and metadata.window_lens[:-3].ne(0).any()


@pytest.mark.parametrize("batch", ["decode", "verify"])
@pytest.mark.parametrize(("window", "page_size"), [(1, 64), (17, 16), (128, 1)])
def test_advance_lists_windows_of_next_batch_and_steps(batch, window, page_size):
    query_lens, seq_lens, rows = BATCHES[batch]
    fixture = WindowCase(batch, window=window, page_size=page_size)
    fixture.load(query_lens[:1], query_lens[:1], rows)
    builder = fixture.builder()
    metadata = builder.build(fixture.view)
    fixture.load(query_lens, seq_lens, rows)
    for _ in range(6 if batch == "decode" else 1):
        builder.advance(metadata)
        assert_lists(metadata, fixture.lists_by_hand())
        advance_state(fixture.buffers, fixture.view.num_reqs)


def test_request_at_its_limit_sees_nothing_more():
    fixture = WindowCase(limits=[192, 16, 192, 129, 192])
    builder = fixture.builder()
    metadata = builder.build(fixture.view)
    advance_state(fixture.buffers, fixture.view.num_reqs)
    builder.advance(metadata)
    assert metadata.window_lens.tolist() == [2, 0, 17, 0, 17, 0, 0]
    assert_lists(metadata, fixture.lists_by_hand())


def test_pages_outside_window_are_not_read():
    fixture = WindowCase("ragged", page_size=1)
    clean = fixture.lists_by_hand()
    used = torch.zeros_like(fixture.view.block_table, dtype=torch.bool)
    for request, (query, seq) in enumerate(zip(fixture.query_lens, fixture.seq_lens, strict=True)):
        used[request, max(0, seq - query - 16) : seq] = True
    fixture.view.block_table[~used] = 2**31 - 1
    assert_lists(fixture.builder().build(fixture.view), clean)


def test_sparse_window_builder_passes_builder_checks():
    rules = ("build_*", "constants*", "advance_means*", "advance_is*", "advance_keeps*")
    checks = ["contract.builder*", "builder.step_fields*", *(f"builder.{rule}[[]window-decode]" for rule in rules)]
    report = check_backend("sparse_swa_mla", device=CPU, checks=checks)
    ids = [f"{result.check}[{result.case}]" for result in report.results]
    assert all(fnmatch.filter(ids, check) for check in checks) and report.counts["pass"] == len(ids)
    capture, advance = (report.claims[f"graph:{name}"] for name in ("capture", "advance"))
    assert (capture.level, advance.level) == ("always", "in graph") and "one kernel" in advance.reason


@pytest.mark.parametrize(("window", "width"), [(1, 128), (128, 128), (129, 256)])
def test_list_width_is_rounded_for_sparse_kernels(window, width):
    fixture = WindowCase(window=window)
    assert fixture.builder().build(fixture.view).window_indices.shape == (7, width)


def test_a_spec_without_a_window_is_refused():
    with pytest.raises(BatchError, match="a list of slots needs a sliding window, got sliding_window=None"):
        SparseWindowBuilder(make_spec(), CPU, max_reqs=8, max_tokens=64, max_seq_len=MAX_SEQ_LEN)
