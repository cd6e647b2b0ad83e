"""FlashInfer's builders over a stand-in for its kernels: what is planned and when, and what a stale plan comes to."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from builders import AdvanceLevel, BatchError
from spec_decode.conformance import check_backend
from spec_decode.graphs import runtime_for
from spec_decode.testing.batches import RAGGED, VERIFY, Batch
from spec_decode.testing.outcome import CheckFailure, Outcome
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject
from tests.factories import CPU
from tests.flashinfer_stand_in import NAMES, backend, installed
from tests.flashinfer_stand_in.wrappers import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

PLANNED = ("flashinfer_tensor_cores", "flashinfer_cuda_cores")
LONG, SHORT, ALONE = Batch((1, 1), (150, 140), 3), Batch((1, 1), (20, 30), 3), Batch((1,), (143,), 3)


@pytest.fixture(autouse=True, scope="module")
def stand_in():
    with installed():
        yield


@pytest.fixture
def plans(monkeypatch):
    """One entry for every plan() from here on."""
    made = []

    def counted(plan):
        return lambda *args, **kwargs: made.append(plan) or plan(*args, **kwargs)

    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        monkeypatch.setattr(wrapper, "plan", counted(wrapper.plan))
    return made


def fixture_of(made, rows, **changes):
    subject = Subject(made, CPU)
    return PagedFixture(subject, replace(subject.base_spec(), scale=None, **changes), rows)


def build(fixture, batch, builder=None):
    return (builder or fixture.builder()).build(fixture.view(fixture.load(batch), batch))


def assert_attends_right(fixture, batch, metadata):
    """Attends to a batch that the metadata means by now."""
    queries = fixture.queries(batch)
    out = fixture.attend(metadata, batch, batch.seq_lens, queries)
    fixture.assert_within_budget(out, batch.seq_lens, queries, contract="attention")


def with_advance(name, advance):
    """The backend with another advance, which runs once the metadata has been built right."""
    made = backend(name)
    right = made.builder

    def build(self, batch, *, horizon=0):
        self.advance = partial(right.advance, self)
        try:
            return right.build(self, batch, horizon=horizon)
        finally:
            del self.advance

    claim = classmethod(lambda cls, spec, device: right.advance_support(spec, device))
    methods = {"build": build, "advance_support": claim}
    methods["advance"] = lambda self, metadata: advance(right, self, metadata)
    type(made).builder = type("Stale", (right,), methods)
    return made


def nothing(right, builder, metadata):
    pass


def lengths_alone(right, builder, metadata):
    pages_before = (metadata.block_table.shape[1] - 1) * builder.spec.page_size
    torch.sub(metadata.seq_lens, pages_before, out=metadata.last_page_len)


def plan_alone(right, builder, metadata):
    kept = metadata.last_page_len.clone()
    right.advance(builder, metadata)
    metadata.last_page_len.copy_(kept)


WHOLE = (
    "builder.advance_means_a_rebuild[[]base-*",
    "builder.advance_attends_right[[]base-*",
    "builder.advance_refreshes_another_batch[[]base-*",
    "graph.loop_replays_over_other_batches[[]base-*",
    "graph.replay_equals_eager[[]base-*",
    "graph.two_sizes_interleave[[]base-*",
    "drafter.strategies_agree[[]k2-n2[]]",
    "drafter.steps_attend_to_the_logical_prefix[[]k4-n3[]]",
)
REPLAYS = tuple(check for check in WHOLE if "another_batch" in check or check.startswith("graph"))
"""Where the plan changes too: the others stay within the 128 tokens that one chunk takes at least."""


@pytest.mark.parametrize(
    ("stale", "killers"),
    [(nothing, WHOLE), (plan_alone, WHOLE), (lengths_alone, REPLAYS)],
    ids=["nothing", "plan_alone", "lengths_alone"],
)
@pytest.mark.parametrize("name", PLANNED)
def test_a_stale_advance_fails_the_checks_that_are_about_it(name, stale, killers):
    report = check_backend(with_advance(name, stale), device=CPU, checks=killers, report=True)

    assert len({result.check for result in report.results}) == len(killers)
    assert {result.outcome for result in report.results} <= {Outcome.FAIL, Outcome.ERROR}


@pytest.mark.parametrize("name", NAMES)
def test_an_advance_into_another_chunk_means_a_rebuild_and_attends_right(name):
    batch = Batch((1, 1, 1), (126, 127, 14), 4)
    fixture = fixture_of(backend(name), batch.rows)
    built = fixture.build(batch, horizon=4)
    metadata = built.metadata
    assert_attends_right(fixture, batch, metadata)
    for step in range(1, 5):
        built.advance()
        fresh = built.fresh()
        assert torch.equal(metadata.plan, fresh.plan) and torch.equal(metadata.last_page_len, fresh.last_page_len)
        now = replace(batch, seq_lens=tuple(n + step for n in batch.seq_lens))
        assert_attends_right(fixture, now, metadata)


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_left_behind_at_the_end_of_a_chunk_drops_tokens(name):
    batch = Batch((1,), (128,), 1)
    fixture = fixture_of(with_advance(name, lengths_alone), batch.rows)
    built = fixture.build(batch, horizon=1)
    assert_attends_right(fixture, batch, built.metadata)
    built.advance()
    with pytest.raises(CheckFailure, match="attention"):
        assert_attends_right(fixture, replace(batch, seq_lens=(129,)), built.metadata)


def test_on_the_cuda_cores_a_plan_of_longer_requests_would_not_end():
    fixture = fixture_of(with_advance("flashinfer_cuda_cores", lengths_alone), LONG.rows)
    buffers, builder = fixture.load(LONG), fixture.builder()
    metadata = builder.build(fixture.view(buffers, LONG))
    fixture.reload(buffers, SHORT)
    builder.advance(metadata)
    with pytest.raises(RuntimeError, match="would not end: a chunk of request 0 starts at 128 of 20 tokens"):
        assert_attends_right(fixture, SHORT, metadata)


def test_a_plan_of_shorter_queries_puts_partial_outputs_elsewhere_on_the_tensor_cores():
    """The kernel counts the chunks of a token by the length on the device, the merge goes by the plan."""
    long, short = Batch((5, 5), (150, 140), 3), Batch((5, 5), (20, 30), 3)
    fixture = fixture_of(with_advance("flashinfer_tensor_cores", lengths_alone), long.rows)
    buffers, builder = fixture.load(long), fixture.builder()
    metadata = builder.build(fixture.view(buffers, long))
    fixture.reload(buffers, short)
    builder.advance(metadata)
    with pytest.raises(CheckFailure, match="attention"):
        assert_attends_right(fixture, short, metadata)


@pytest.mark.parametrize("after", [LONG, SHORT, ALONE], ids=["long", "short", "alone"])
@pytest.mark.parametrize("before", [LONG, SHORT, ALONE], ids=["long", "short", "alone"])
@pytest.mark.parametrize("name", NAMES)
def test_an_advance_follows_any_lengths_to_any_others(name, before, after):
    fixture = fixture_of(backend(name), before.rows)
    buffers, builder = fixture.load(before), fixture.builder()
    metadata = builder.build(fixture.view(buffers, before))
    fixture.poison()
    fixture.load_tables(len(after.seq_lens))
    fixture.reload(buffers, after)
    builder.advance(metadata)
    assert_attends_right(fixture, after, metadata)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_shape_is_planned_once(name, plans):
    fixture = fixture_of(backend(name), LONG.rows)
    builder = fixture.builder()
    buffers = fixture.load(LONG)
    for batch in (LONG, SHORT, ALONE):
        fixture.reload(buffers, batch)
        builder.advance(builder.build(fixture.view(buffers, batch)))
    of_decodes = 0 if name == "flashinfer_xqa" else 1
    assert len(plans) == of_decodes

    extend = Batch((4, 4), (40, 150), LONG.rows)
    for _ in range(2):
        fixture.reload(buffers, extend)
        builder.build(fixture.view(buffers, extend))
    assert len(plans) == of_decodes + 1


@pytest.mark.parametrize("name", NAMES)
def test_a_build_of_a_known_shape_reads_nothing_back(name):
    fixture = fixture_of(backend(name), LONG.rows)
    buffers, builder = fixture.load(LONG), fixture.builder()
    builder.build(fixture.view(buffers, LONG))
    runtime_for(CPU).capture(lambda: builder.build(fixture.view(buffers, LONG)))


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_plans_nothing(name, plans):
    fixture = fixture_of(backend(name), LONG.rows)
    buffers, builder = fixture.load(LONG), fixture.builder()
    metadata = builder.build(fixture.view(buffers, LONG))
    query, _, _ = fixture.inputs(LONG, LONG.seq_lens, fixture.queries(LONG))
    planned = len(plans)

    def step():
        builder.advance(metadata)
        fixture.subject.backend.forward(query, fixture.cache, metadata, spec=fixture.spec)

    graph = runtime_for(CPU).capture(step)
    graph.replay()
    assert len(plans) == planned


def test_shapes_of_one_builder_do_not_disturb_each_other():
    batches = [LONG, Batch((1,), (130,), 1), VERIFY]
    fixture = fixture_of(backend("flashinfer"), 4)
    builder, kept = fixture.builder(), []
    for batch in batches:
        kept.append((batch, fixture.load(batch)))
    metadata = [builder.build(fixture.view(buffers, batch)) for batch, buffers in kept]
    for (batch, _), its in zip(kept, metadata, strict=True):
        assert_attends_right(fixture, batch, its)


@pytest.mark.parametrize("name", NAMES)
def test_another_table_is_followed_where_it_lies(name):
    fixture = fixture_of(backend(name), LONG.rows)
    builder, view = fixture.builder(), fixture.view(fixture.load(LONG), LONG)
    table = view.block_table.clone()
    builder.build(view)
    moved = builder.build(replace(view, block_table=table))
    view.block_table.fill_(-1)
    assert_attends_right(fixture, LONG, moved)


def test_a_builder_of_xqa_serves_an_extend_and_then_decodes():
    fixture = fixture_of(backend("flashinfer_xqa"), 4)
    builder = fixture.builder()
    assert_attends_right(fixture, VERIFY, build(fixture, VERIFY, builder))
    decode = replace(LONG, rows=4)
    assert_attends_right(fixture, decode, build(fixture, decode, builder))


def test_a_ragged_batch_is_planned_for_its_own_lengths_every_time(plans):
    fixture = fixture_of(backend("flashinfer"), RAGGED.rows)
    builder = fixture.builder()
    for batch in (RAGGED, replace(RAGGED, seq_lens=(150, 9, 30, 7))):
        assert_attends_right(fixture, batch, build(fixture, batch, builder))
    assert len(plans) == 2


def test_a_ragged_batch_refuses_to_advance():
    fixture = fixture_of(backend("flashinfer"), RAGGED.rows)
    builder = fixture.builder()
    metadata = build(fixture, RAGGED, builder)
    with pytest.raises(BatchError, match=r"up to 20 tokens a row in 31 of 4 rows; .* Build it anew"):
        builder.advance(metadata)


def in_wider_rows(table, *, before, after, rows=0):
    """The same table as columns of rows that are wider by other entries, and in memory for more rows."""
    wide = torch.full((len(table) + rows, before + table.shape[1] + after), -7, dtype=table.dtype)
    view = wide[: len(table), before : before + table.shape[1]]
    return view.copy_(table)


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize("batch", [LONG, VERIFY], ids=["decode", "extend"])
def test_rows_may_lie_any_stride_apart(name, batch):
    fixture = fixture_of(backend(name), batch.rows)
    view = fixture.view(fixture.load(batch), batch)
    spread = replace(view, block_table=in_wider_rows(view.block_table, before=3, after=2, rows=1))
    builder = fixture.builder()
    builder.build(view)
    metadata = builder.build(spread)
    view.block_table.fill_(-1)
    assert_attends_right(fixture, batch, metadata)


@pytest.mark.parametrize(
    ("change", "strides"),
    [
        pytest.param(lambda table: table.t().contiguous().t(), r"\(1, 3\)", id="rows strided themselves"),
        pytest.param(lambda table: table[:1].expand(3, -1), r"\(0, 1\)", id="rows that overlap"),
        pytest.param(lambda table: in_wider_rows(table, before=3, after=0), r"\(13, 1\)", id="memory that ends"),
    ],
)
def test_rows_that_are_not_one_list_of_pages_are_refused(change, strides):
    fixture = fixture_of(backend("flashinfer"), LONG.rows)
    view = fixture.view(fixture.load(LONG), LONG)
    with pytest.raises(BatchError, match=f"one list of pages, got rows of 10 with strides {strides}"):
        fixture.builder().build(replace(view, block_table=change(view.block_table)))


def test_xqa_refuses_rows_that_lie_apart():
    fixture = fixture_of(backend("flashinfer_xqa"), LONG.rows)
    view = fixture.view(fixture.load(LONG), LONG)
    with pytest.raises(BatchError, match=r"without gaps, got strides \(15, 1\)"):
        spread = in_wider_rows(view.block_table, before=3, after=2, rows=1)
        fixture.builder().build(replace(view, block_table=spread))


@pytest.mark.parametrize("name", PLANNED)
def test_one_row_of_another_width_is_another_shape(name):
    batch = Batch((1,), (40,), 1)
    fixture = fixture_of(backend(name), batch.rows)
    builder, view = fixture.builder(), fixture.view(fixture.load(batch), batch)
    builder.build(view)
    assert_attends_right(fixture, batch, builder.build(replace(view, block_table=view.block_table[:, :4])))


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(Batch((1,) * 7, (150,) * 7, 7), id="decode"),
        pytest.param(Batch((20, 20), (40, 150), 2), id="two_query_tiles"),
        pytest.param(Batch((1,) * 20, (150,) * 20, 20), id="many_decodes"),
        pytest.param(Batch((2,) * 9, (150,) * 9, 9), id="short_extends"),
        pytest.param(Batch((5,) * 20, (150,) * 20, 20), id="many_extends"),
        pytest.param(Batch((40, 1), (160, 150), 2), id="ragged"),
    ],
)
def test_the_workspace_holds_the_partial_outputs(batch):
    with installed(partials=0):
        build(fixture_of(backend("flashinfer"), batch.rows, num_q_heads=8, num_kv_heads=1), batch)


@pytest.mark.parametrize(
    ("changes", "kernel", "why"),
    [
        ({"num_kv_heads": 2}, "tensor_cores", "query heads share keys"),
        ({"num_kv_heads": 8}, "cuda_cores", "no two query heads share keys"),
        ({"num_kv_heads": 8, "sliding_window": 40}, "tensor_cores", "reads all tokens, not the window alone"),
    ],
)
def test_the_kernel_is_chosen_by_the_spec_and_says_why(changes, kernel, why):
    fixture = fixture_of(backend("flashinfer"), 3, num_q_heads=8, **changes)
    support = fixture.subject.backend.builder.advance_support(fixture.spec, CPU)

    assert build(fixture, LONG).launch.kernel == kernel
    assert support.level is AdvanceLevel.IN_GRAPH
    assert support.reason.startswith(kernel) and why in support.reason


@pytest.mark.parametrize(
    ("name", "kernel", "how"),
    [
        ("flashinfer_tensor_cores", "tensor_cores", "its split plan is recomputed on the device"),
        ("flashinfer_cuda_cores", "cuda_cores", "its split plan is recomputed on the device"),
        ("flashinfer_xqa", "xqa", "reads lengths and pages itself"),
    ],
)
@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_a_kernel_that_is_asked_for_is_taken_whatever_the_spec(name, kernel, how, num_kv_heads):
    fixture = fixture_of(backend(name), 3, num_q_heads=8, num_kv_heads=num_kv_heads)

    assert build(fixture, LONG).launch.kernel == kernel
    assert fixture.subject.backend.builder.advance_support(fixture.spec, CPU).reason == f"{kernel} (asked for): {how}"


@pytest.mark.parametrize("name", NAMES)
def test_extends_and_ragged_batches_take_the_prefill_wrapper(name):
    fixture = fixture_of(backend(name), 4)

    assert build(fixture, VERIFY).launch.kernel == "extend"
    assert build(fixture, RAGGED).launch.kernel == "ragged"


def test_a_graph_may_not_go_past_the_table():
    fixture = fixture_of(backend("flashinfer"), 3)
    builder = fixture.builder()
    constants = builder.capture_constants(build(fixture, LONG, builder))

    assert (constants.max_reqs, constants.max_query_len, constants.max_seq_len) == (3, 1, 160)
