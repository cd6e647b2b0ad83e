"""FlashInfer's builders over a stand-in for its kernels: what is planned when, and the effect of a stale plan."""

import gc
from dataclasses import replace
from importlib import import_module
from itertools import permutations
from weakref import ref

import pytest
import torch

from builders import AdvanceLevel, BatchError
from spec_decode.conformance import check_backend
from spec_decode.graphs import runtime_for
from spec_decode.testing.batches import RAGGED, VERIFY, Batch
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.outcome import CheckFailure, Outcome
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject
from tests.factories import CPU
from tests.flashinfer_stand_in import NAMES, backend, installed
from tests.flashinfer_stand_in.wrappers import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from tests.mutants.mutant import broken_once_built

PLANNED = ("flashinfer_tensor_cores", "flashinfer_cuda_cores")
LONG, SHORT, ALONE = Batch((1, 1), (150, 140), 3), Batch((1, 1), (20, 30), 3), Batch((1,), (143,), 3)


@pytest.fixture(autouse=True, scope="module")
def stand_in():
    with installed():
        yield


@pytest.fixture
def plans(monkeypatch):
    """One entry for every plan() from here on."""
    calls = []

    def counted(plan):
        return lambda *args, **kwargs: calls.append(plan) or plan(*args, **kwargs)

    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        monkeypatch.setattr(wrapper, "plan", counted(wrapper.plan))
    return calls


def fixture_of(instance, rows, **changes):
    subject = Subject(instance, CPU)
    return PagedFixture(subject, replace(subject.base_spec(), scale=None, **changes), rows)


def build(fixture, batch, builder=None):
    return (builder or fixture.builder()).build(fixture.view(fixture.load(batch), batch))


def built(instance, batch, **changes):
    """A fixture of the backend, its builder, and the view that it has built, with what it built."""
    fixture = fixture_of(instance, batch.rows, **changes)
    builder, view = fixture.builder(), fixture.view(fixture.load(batch), batch)
    return fixture, builder, view, builder.build(view)


def advanced(instance, before, after):
    """A fixture, and the metadata of one batch that was advanced over another in its place."""
    fixture = fixture_of(instance, before.rows)
    buffers, builder = fixture.load(before), fixture.builder()
    metadata = builder.build(fixture.view(buffers, before))
    fixture.poison()
    fixture.load_tables(len(after.seq_lens))
    fixture.reload(buffers, after)
    builder.advance(metadata)
    return fixture, metadata


def assert_attends_right(fixture, batch, metadata):
    """Attends to a batch that the metadata means by now."""
    queries = fixture.queries(batch)
    out = fixture.attend(metadata, batch, batch.seq_lens, queries)
    fixture.assert_within_budget(out, batch.seq_lens, queries, contract="attention")


def with_advance(name, advance):
    """The backend with another advance, which runs once the metadata has been built right."""
    instance = backend(name)
    type(instance).builder = broken_once_built(instance.builder, advance)
    return instance


def nothing(builder, metadata):
    pass


def lengths_alone(builder, metadata):
    pages_before = (metadata.block_table.shape[1] - 1) * builder.spec.page_size
    torch.sub(metadata.seq_lens, pages_before, out=metadata.last_page_len)


def plan_alone(builder, metadata):
    kept = metadata.last_page_len.clone()
    type(builder).__base__.advance(builder, metadata)
    metadata.last_page_len.copy_(kept)


WHOLE = (
    "builder.advance_means_a_rebuild[[]base-single[]]",
    "builder.advance_attends_right[[]base-single[]]",
    "builder.advance_refreshes_another_batch[[]base-decode[]]",
    "graph.loop_replays_over_other_batches[[]base-few[]]",
    "graph.replay_equals_eager[[]base-few[]]",
    "graph.two_sizes_interleave[[]base-few[]]",
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
def test_stale_advance_fails_related_checks(name, stale, killers):
    report = check_backend(with_advance(name, stale), device=CPU, checks=killers, report=True)

    assert len({result.check for result in report.results}) == len(killers)
    assert {result.outcome for result in report.results} <= {Outcome.FAIL, Outcome.ERROR}


@pytest.mark.parametrize("name", NAMES)
def test_advance_across_chunks_rebuilds_and_attends_right(name):
    batch = Batch((1, 1, 1), (126, 127, 14), 4)
    fixture = fixture_of(backend(name), batch.rows)
    running = BuiltBatch(fixture, batch, horizon=4)
    metadata = running.metadata
    assert_attends_right(fixture, batch, metadata)
    for step in range(1, 5):
        running.advance()
        fresh = running.fresh()
        assert torch.equal(metadata.plan, fresh.plan) and torch.equal(metadata.last_page_len, fresh.last_page_len)
        now = replace(batch, seq_lens=tuple(n + step for n in batch.seq_lens))
        assert_attends_right(fixture, now, metadata)


ENDLESS = "would not end: a chunk of request 0 starts at 128 of 20 tokens"


@pytest.mark.parametrize(
    ("name", "before", "after", "error", "words"),
    [
        pytest.param("flashinfer_cuda_cores", LONG, SHORT, RuntimeError, ENDLESS, id="on CUDA cores it would not end"),
        # The kernel counts the chunks of a token by the length on the device, the merge goes by the plan.
        pytest.param(
            "flashinfer_tensor_cores",
            Batch((5, 5), (150, 140), 3),
            Batch((5, 5), (20, 30), 3),
            CheckFailure,
            "attention",
            id="on tensor cores partial outputs lie elsewhere",
        ),
        *(
            pytest.param(name, Batch((1,), (128,), 1), Batch((1,), (129,), 1), CheckFailure, "attention")
            for name in PLANNED
        ),
    ],
)
def test_kernel_detects_stale_plan(name, before, after, error, words):
    fixture, metadata = advanced(with_advance(name, lengths_alone), before, after)
    with pytest.raises(error, match=words):
        assert_attends_right(fixture, after, metadata)


@pytest.mark.parametrize(("before", "after"), [*permutations([LONG, SHORT, ALONE], 2)])
@pytest.mark.parametrize("name", NAMES)
def test_advance_follows_any_change_of_lengths(name, before, after):
    fixture, metadata = advanced(backend(name), before, after)
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


def test_prompt_plans_are_freed_and_draft_plans_kept(plans, monkeypatch):
    monkeypatch.setattr(import_module("builders.flashinfer.builder"), "KEPT_TOKENS", 8)
    for query_len, stays in ((8, True), (9, False)):
        _, builder, view, metadata = built(backend("flashinfer"), Batch((query_len,), (150,), 1))
        assert builder.build(view).launch is metadata.launch
        launch = ref(metadata.launch)
        del metadata
        gc.collect()
        assert (launch() is not None) is stays
        del plans[:]
        builder.build(view)
        assert len(plans) == (not stays)


@pytest.mark.parametrize("name", NAMES)
def test_known_shape_builds_without_sync_or_new_plan(name, plans):
    fixture, builder, view, metadata = built(backend(name), LONG)
    query, _, _ = fixture.inputs(LONG, LONG.seq_lens, fixture.queries(LONG))
    planned = len(plans)
    runtime_for(CPU).capture(lambda: builder.build(view))

    def step():
        builder.advance(metadata)
        fixture.subject.backend.forward(query, fixture.cache, metadata, spec=fixture.spec)

    runtime_for(CPU).capture(step).replay()
    assert len(plans) == planned


def test_shapes_of_one_builder_are_independent():
    batches = [LONG, Batch((1,), (130,), 1), VERIFY]
    fixture = fixture_of(backend("flashinfer"), 4)
    builder, kept = fixture.builder(), []
    for batch in batches:
        kept.append((batch, fixture.load(batch)))
    metadata = [builder.build(fixture.view(buffers, batch)) for batch, buffers in kept]
    for (batch, _), its in zip(kept, metadata, strict=True):
        assert_attends_right(fixture, batch, its)


@pytest.mark.parametrize("name", NAMES)
def test_other_block_table_is_read_in_place(name):
    fixture, builder, view, _ = built(backend(name), LONG)
    moved = builder.build(replace(view, block_table=view.block_table.clone()))
    view.block_table.fill_(-1)
    assert_attends_right(fixture, LONG, moved)


def test_xqa_builder_serves_extend_then_decode():
    fixture = fixture_of(backend("flashinfer_xqa"), 4)
    builder = fixture.builder()
    assert_attends_right(fixture, VERIFY, build(fixture, VERIFY, builder))
    decode = replace(LONG, rows=4)
    assert_attends_right(fixture, decode, build(fixture, decode, builder))


def test_ragged_batch_is_replanned_and_never_advances(plans):
    fixture = fixture_of(backend("flashinfer"), RAGGED.rows)
    builder = fixture.builder()
    for batch in (RAGGED, replace(RAGGED, seq_lens=(150, 9, 30, 7))):
        metadata = build(fixture, batch, builder)
        assert_attends_right(fixture, batch, metadata)
    assert len(plans) == 2
    with pytest.raises(BatchError, match=r"up to 20 tokens per row in 31 of 4 rows; .* Rebuild it"):
        builder.advance(metadata)


def in_wider_rows(table, *, before, after, rows=0):
    """The same table as columns of rows that are wider by other entries, and in memory for more rows."""
    wide = torch.full((len(table) + rows, before + table.shape[1] + after), -7, dtype=table.dtype)
    view = wide[: len(table), before : before + table.shape[1]]
    return view.copy_(table)


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize("batch", [LONG, VERIFY], ids=["decode", "extend"])
def test_block_table_rows_may_have_any_stride(name, batch):
    fixture, builder, view, _ = built(backend(name), batch)
    metadata = builder.build(replace(view, block_table=in_wider_rows(view.block_table, before=3, after=2, rows=1)))
    view.block_table.fill_(-1)
    assert_attends_right(fixture, batch, metadata)


ONE_LIST = "one list of pages, got rows of 10 with strides "


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        pytest.param("flashinfer", lambda table: table.t().contiguous().t(), rf"{ONE_LIST}\(1, 3\)", id="transposed"),
        pytest.param("flashinfer", lambda table: table[:1].expand(3, -1), rf"{ONE_LIST}\(0, 1\)", id="overlapping"),
        pytest.param(
            "flashinfer",
            lambda table: in_wider_rows(table, before=3, after=0),
            rf"{ONE_LIST}\(13, 1\)",
            id="memory that ends",
        ),
        pytest.param(
            "flashinfer_xqa",
            lambda table: in_wider_rows(table, before=3, after=2, rows=1),
            r"without gaps, got strides \(15, 1\)",
            id="gaps in XQA's",
        ),
    ],
)
def test_misread_block_table_is_rejected(name, change, words):
    _, builder, view, _ = built(backend(name), LONG)
    with pytest.raises(BatchError, match=words):
        builder.build(replace(view, block_table=change(view.block_table)))


@pytest.mark.parametrize("name", PLANNED)
def test_single_row_of_other_width_is_replanned(name):
    batch = Batch((1,), (40,), 1)
    fixture, builder, view, _ = built(backend(name), batch)
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
def test_workspaces_fit_partial_outputs_and_plan(batch):
    with installed(partials=0, plan=0):
        build(fixture_of(backend("flashinfer"), batch.rows, num_q_heads=8, num_kv_heads=1), batch)


def test_block_beyond_planned_window_is_rejected():
    """It plans the window and one query tile, here of 16 tokens; the first token of the block sees it all."""
    block, subject = Batch((64, 1, 1, 1, 1), (600,) * 5, 5), Subject(backend("flashinfer"), CPU)
    changes = {"num_q_heads": 1, "num_kv_heads": 1, "sliding_window": 200, "page_size": 16, "causal": False}
    fixture = PagedFixture(subject, replace(subject.base_spec(), scale=None, **changes), block.rows, max_seq_len=600)
    with pytest.raises(
        BatchError, match="a block of 64 tokens and its window take 263 KV tokens, FlashInfer plans 14 pages"
    ):
        build(fixture, block)
    for seen in (replace(block, query_lens=(24, 1, 1, 1, 1)), replace(block, seq_lens=(220,) * 5)):
        assert_attends_right(fixture, seen, build(fixture, seen))


PLAN, READS = "its split plan is recomputed on the device", "reads lengths and pages itself"


@pytest.mark.parametrize(
    ("name", "changes", "kernel", "why"),
    [
        ("flashinfer", {"num_kv_heads": 2}, "tensor_cores", "query heads share keys"),
        ("flashinfer", {"num_kv_heads": 8}, "cuda_cores", "query heads share no keys"),
        (
            "flashinfer",
            {"num_kv_heads": 8, "sliding_window": 40},
            "tensor_cores",
            "reads all tokens, not only the window",
        ),
        *(
            (f"flashinfer_{kernel}", {"num_kv_heads": heads}, kernel, f" (requested): {how}")
            for kernel, how in (("tensor_cores", PLAN), ("cuda_cores", PLAN), ("xqa", READS))
            for heads in (2, 8)
        ),
    ],
)
def test_kernel_is_named_or_chosen_with_reason(name, changes, kernel, why):
    fixture, builder, _, metadata = built(backend(name), LONG, num_q_heads=8, **changes)
    support = builder.advance_support(fixture.spec, CPU)

    assert metadata.launch.kernel == kernel and support.level is AdvanceLevel.IN_GRAPH
    assert support.reason.startswith(kernel) and why in support.reason


@pytest.mark.parametrize("name", NAMES)
def test_extend_and_ragged_batches_use_prefill_wrapper(name):
    fixture = fixture_of(backend(name), 4)

    assert build(fixture, VERIFY).launch.kernel == "extend"
    assert build(fixture, RAGGED).launch.kernel == "ragged"


def test_capture_constants_stop_at_table_width():
    _, builder, _, metadata = built(backend("flashinfer"), LONG)
    constants = builder.capture_constants(metadata)

    assert (constants.max_reqs, constants.max_query_len, constants.max_seq_len) == (3, 1, 160)
