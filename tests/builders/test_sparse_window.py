"""Window lists, held against a loop over tokens and positions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from builders import AdvanceLevel, AttentionKind, BatchBuffers, BatchError, GraphSupport, advance_state
from builders.sparse_window import SparseWindowBuilder
from spec_decode.graphs import runtime_for
from tests.factories import CPU, make_spec, make_tables

MAX_SEQ_LEN = 192
BATCHES = {
    "decode": ([1] * 5, [1, 16, 17, 129, 188], 7),
    "single": ([1], [33], 1),
    "verify": ([5, 5, 5], [5, 37, 150], 4),
    "ragged": ([3, 1, 20, 7], [3, 64, 20, 130], 6),
}
FIELDS = ("window_indices", "window_lens")


class Asked:
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

    def advance(self):
        advance_state(self.buffers, self.view.num_reqs)

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


def fields_of(metadata):
    return {f.name: getattr(metadata, f.name) for f in dataclasses.fields(metadata)}


def assert_same(found, fresh):
    for name, value in fields_of(fresh).items():
        other = getattr(found, name)
        assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, name


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [1, 17, 128])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_token_lists_the_slots_of_its_window(batch, window, page_size):
    asked = Asked(batch, window=window, page_size=page_size)
    assert_lists(asked.builder().build(asked.view), asked.lists_by_hand())


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens_behind_the_last_request_see_nothing(batch):
    asked = Asked(batch, more_tokens=3)
    asked.buffers.positions.fill_(9)
    metadata = asked.builder().build(asked.view)
    assert_lists(metadata, asked.lists_by_hand())
    assert metadata.window_lens[-3:].eq(0).all() and metadata.window_lens[:-3].ne(0).any()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [1, 17, 128])
def test_an_advance_means_a_fresh_build(window, page_size):
    asked = Asked(window=window, page_size=page_size)
    builder = asked.builder()
    metadata = builder.build(asked.view)
    for _ in range(6):
        asked.advance()
        builder.advance(metadata)
        assert_same(metadata, asked.builder().build(asked.view))
        assert_lists(metadata, asked.lists_by_hand())


@pytest.mark.parametrize("batch", ["decode", "verify"])
def test_an_advance_over_another_batch_means_a_fresh_build_of_that(batch):
    query_lens, seq_lens, rows = BATCHES[batch]
    asked = Asked(batch)
    asked.load(query_lens[:1], query_lens[:1], rows)
    builder = asked.builder()
    metadata = builder.build(asked.view)
    asked.load(query_lens, seq_lens, rows)
    builder.advance(metadata)
    assert_same(metadata, asked.builder().build(asked.view))
    assert_lists(metadata, asked.lists_by_hand())


def test_a_captured_advance_replays_over_another_batch():
    query_lens, seq_lens, rows = BATCHES["decode"]
    asked = Asked()
    asked.load([1], [1], rows)
    builder = asked.builder()
    metadata = builder.build(asked.view)
    graph = runtime_for(CPU).capture(lambda: builder.advance(metadata))
    asked.load(query_lens, seq_lens, rows)
    graph.replay()
    assert_lists(metadata, asked.lists_by_hand())


def test_a_request_at_its_limit_sees_nothing_more():
    asked = Asked(limits=[192, 16, 192, 129, 192])
    builder = asked.builder()
    metadata = builder.build(asked.view)
    asked.advance()
    builder.advance(metadata)
    assert metadata.window_lens.tolist() == [2, 0, 17, 0, 17, 0, 0]
    assert_lists(metadata, asked.lists_by_hand())


def test_pages_outside_the_window_are_not_followed():
    asked = Asked("ragged", page_size=1)
    clean = asked.builder().build(asked.view)
    used = torch.zeros_like(asked.view.block_table, dtype=torch.bool)
    for request, (query, seq) in enumerate(zip(asked.query_lens, asked.seq_lens, strict=True)):
        used[request, max(0, seq - query - 16) : seq] = True
    asked.view.block_table[~used] = 2**31 - 1
    assert_same(asked.builder().build(asked.view), dataclasses.replace(clean, block_table=asked.view.block_table))


@pytest.mark.parametrize("batch", BATCHES)
def test_building_and_advancing_leave_the_batch_alone(batch):
    asked = Asked(batch)
    before = {name: value.clone() for name, value in fields_of(asked.view).items() if isinstance(value, torch.Tensor)}
    builder = asked.builder()
    builder.advance(builder.build(asked.view))
    assert all(torch.equal(getattr(asked.view, name), value) for name, value in before.items())


def test_the_same_shape_is_built_at_the_same_addresses():
    asked = Asked()
    builder = asked.builder()
    first = builder.build(asked.view)
    asked.advance()
    second = builder.build(asked.view)
    for name, value in fields_of(first).items():
        if isinstance(value, torch.Tensor):
            assert value.data_ptr() == getattr(second, name).data_ptr(), name


def test_two_builders_share_no_buffer():
    asked = Asked()
    first, second = (asked.builder().build(asked.view) for _ in range(2))
    assert all(getattr(first, name).data_ptr() != getattr(second, name).data_ptr() for name in FIELDS)


def test_exactly_the_step_fields_follow_the_position():
    asked = Asked()
    built = fields_of(asked.builder().build(asked.view))
    before = {name: value.clone() for name, value in built.items() if isinstance(value, torch.Tensor)}
    asked.advance()
    after = asked.builder().build(asked.view)
    changed = {name for name, value in before.items() if not torch.equal(value, getattr(after, name))}
    assert changed == set(SparseWindowBuilder.step_fields)


@pytest.mark.parametrize(("window", "width"), [(1, 128), (128, 128), (129, 256)])
def test_lists_are_as_wide_as_sparse_kernels_want_them(window, width):
    asked = Asked(window=window)
    assert asked.builder().build(asked.view).window_indices.shape == (7, width)


def test_the_capture_constants_are_the_batch_s_bounds():
    asked = Asked("verify")
    constants = asked.builder().capture_constants(asked.builder().build(asked.view))
    assert (constants.max_reqs, constants.max_query_len, constants.max_seq_len) == (4, 5, MAX_SEQ_LEN)


def test_the_claims_are_those_of_a_backend_that_drafts_in_one_graph():
    support = SparseWindowBuilder.advance_support(make_spec(sliding_window=17), CPU)
    assert SparseWindowBuilder.graph_support is GraphSupport.ALWAYS
    assert support.level is AdvanceLevel.IN_GRAPH and "one kernel" in support.reason


def test_a_spec_without_a_window_is_refused():
    with pytest.raises(BatchError, match="a list of slots needs a sliding window, got sliding_window=None"):
        SparseWindowBuilder(make_spec(), CPU, max_reqs=8, max_tokens=64, max_seq_len=MAX_SEQ_LEN)
