from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import BatchError
from builders.flashinfer.layout import PlanLayout
from builders.flashinfer.plan import replan
from spec_decode.graphs import runtime_for
from tests.builders.flashinfer.host_planner import NUM_SMS, UNTOUCHED, Case, ceil_div, read_plan
from tests.factories import CPU, make_spec


@st.composite
def batches(draw: st.DrawFn, longest: int = 9000) -> list[int]:
    """Up to 1024 lengths, padding rows among them; the large batches repeat a few lengths."""
    length = st.one_of(st.just(0), st.integers(1, 300), st.integers(1, longest))
    lengths = draw(st.lists(length, min_size=1, max_size=12))
    num_reqs = draw(st.one_of(st.just(len(lengths)), st.integers(1, 40), st.integers(1, 1024)))
    return (lengths * num_reqs)[:num_reqs]


def cases(**fields: st.SearchStrategy) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        seq_lens=batches(),
        page_size=st.sampled_from([1, 16, 64]),
        num_kv_heads=st.sampled_from([1, 2, 8]),
        group=st.sampled_from([1, 3, 4, 8]),
        head_dim=st.sampled_from([64, 128, 256]),
        **fields,
    )


CUDA_CORES = cases(grid=st.integers(NUM_SMS, 16 * NUM_SMS))
TENSOR_CORES = cases(
    tensor_cores=st.just(True),
    query_len=st.one_of(st.just(1), st.integers(2, 24)),
    window_left=st.one_of(st.just(-1), st.integers(0, 4096)),
)


@settings(max_examples=80)
@given(CUDA_CORES)
def test_cuda_core_plan_matches_host_planner(case):
    assert case.plan() == case.host_plan([max(count, 1) for count in case.pages]).arrays


@settings(max_examples=80)
@given(TENSOR_CORES)
def test_tensor_core_plan_matches_host_planner(case):
    assert case.plan() == case.host_plan().arrays


@given(st.one_of(CUDA_CORES, TENSOR_CORES))
def test_offsets_and_grid_do_not_depend_on_lengths(case):
    host, layout = case.host_plan(), case.layout()
    assert host.info == case.host_plan([1] * case.num_reqs).info
    assert host.num_bytes == layout.num_bytes or not layout.split


@given(CUDA_CORES.filter(lambda case: case.layout().split))
def test_cuda_core_tiles_start_within_their_tokens(case):
    """Past them, its unsigned count of tokens would wrap, and the kernel would not end."""
    plan = case.plan()
    covered = [0] * case.num_reqs
    for request, tile in zip(plan["request_indices"], plan["kv_tile_indices"], strict=True):
        start, length = tile * plan["kv_chunk_size"][0], case.seq_lens[request]
        assert start < length or tile == length == 0
        assert start == covered[request]
        covered[request] = min(start + plan["kv_chunk_size"][0], length)
    assert covered == case.seq_lens


@given(TENSOR_CORES)
def test_tensor_core_tiles_cover_required_tokens(case):
    """kv_start and the causal end of a query tile as the kernel computes them from the device's lengths."""
    plan, layout = case.plan(), case.layout()
    query_tile = case.host_plan().info[3]
    reach = {}
    for request, q_tile, kv_tile in zip(
        *(plan[f"{name}_indices"] for name in ("request", "qo_tile", "kv_tile")), strict=True
    ):
        reach[request, q_tile] = max(reach.get((request, q_tile), 0), (kv_tile + 1) * plan["kv_chunk_size"][0])
    assert len(reach) == case.num_reqs * layout.query_tiles
    for (request, q_tile), tokens in reach.items():
        length = case.seq_lens[request]
        window = length if case.window_left < 0 else case.window_left
        start = max(length + q_tile * query_tile // case.group - case.query_len - window, 0)
        end = min(length, length - case.query_len + ceil_div((q_tile + 1) * query_tile, case.group))
        assert start + tokens >= end


@given(TENSOR_CORES)
def test_partial_outputs_lie_at_tensor_core_offsets(case):
    """It takes o_indptr[request] + token * chunks + chunk, and counts the chunks itself from the device's length."""
    plan = case.plan()
    query_tile, size = case.host_plan().info[3], plan["kv_chunk_size"][0]
    for request, length in enumerate(case.seq_lens):
        tokens = max(length, 1) if case.window_left < 0 else min(max(length, 1), case.window_left + query_tile)
        first = plan["o_indptr"][request]
        rows = [first + token * ceil_div(tokens, size) for token in range(case.query_len + 1)]
        assert plan["merge_indptr"][request * case.query_len : (request + 1) * case.query_len + 1] == rows


def test_empty_rows_take_one_tile_each():
    """FlashInfer's own planner counts them as nothing when it looks for the chunk, and writes past its arrays."""
    case = Case([8192] + [0] * 40)
    assert case.host_plan().num_tiles > case.layout().padded_tiles
    assert sum(case.plan()["block_valid_mask"]) <= case.layout().padded_tiles


@given(st.one_of(CUDA_CORES, TENSOR_CORES))
def test_replan_writes_length_and_only_plan_arrays(case):
    (workspace, last_page_len), layout = case.replanned(), case.layout()
    pages_before = (case.row_stride - 1) * case.page_size
    assert [(pages_before + last) % 2**32 for last in last_page_len.tolist()] == case.seq_lens
    outside = torch.ones(len(workspace), dtype=torch.bool)
    for offset, length in layout.arrays.values():
        outside[4 * offset : 4 * (offset + length)] = False
    outside[layout.block_valid_mask :][: layout.padded_tiles if layout.split else 0] = False
    assert workspace[outside].eq(UNTOUCHED).all()


def test_plan_without_splits_stays_unchanged():
    case = Case([5, 0, 4000] * 50)
    workspace, last_page_len = case.replanned()
    assert not case.layout().split and torch.equal(workspace, case.workspace())
    assert last_page_len[0] == 5 - (case.row_stride - 1) * 16


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("num_reqs", [3, 150])
def test_replay_plans_for_current_lengths(tensor_cores, num_reqs):
    before, after = (Case((lens * num_reqs)[:num_reqs], tensor_cores=tensor_cores) for lens in ([1], [900, 0, 77]))
    layout, workspace = before.layout(), before.workspace()
    seq_lens, last_page_len = (torch.tensor(before.seq_lens, dtype=torch.int32) for _ in range(2))
    graph = runtime_for(CPU).capture(
        lambda: replan(seq_lens, last_page_len, workspace, layout, row_stride=after.row_stride)
    )
    seq_lens.copy_(torch.tensor(after.seq_lens))
    graph.replay()
    assert torch.equal(last_page_len, after.replanned()[1])
    assert read_plan(workspace, layout) == after.plan()


FA2_INFO = Case([1, 1], tensor_cores=True).host_plan().info
CUDA_INFO = Case([1, 1]).host_plan().info
UNSPLIT = Case([1] * 150).host_plan().info


def of_tensor_cores(info, *, query_len=1, num_kv_heads=8):
    spec = make_spec(page_size=16, num_q_heads=32, num_kv_heads=num_kv_heads)
    return PlanLayout.of_tensor_cores(info, spec, num_reqs=2, num_sms=NUM_SMS, query_len=query_len)


def of_cuda_cores(info, num_reqs=2):
    return PlanLayout.of_cuda_cores(info, num_reqs=num_reqs, page_size=16)


def changed(info, index, value):
    return [*info[:index], value, *info[index + 1 :]]


INT32 = "multiples of 4 bytes.*'qo_tile_indices': 30"
REFUSED = {
    "the other kernel's": (lambda: of_tensor_cores(CUDA_INFO), "has 15 values in FlashInfer 0.6.12 to 0.7.2, got 10"),
    "the other's": (lambda: of_cuda_cores(FA2_INFO), "has 10 values"),
    "no graph mode": (lambda: of_tensor_cores(changed(FA2_INFO, 13, 0)), "CUDA-graph mode"),
    "no graph mode either": (lambda: of_cuda_cores(changed(CUDA_INFO, 8, 0)), "CUDA-graph mode"),
    "no splits": (lambda: of_tensor_cores(changed(FA2_INFO, 14, 0)), "split_kv off"),
    "other queries": (
        lambda: of_tensor_cores(FA2_INFO, query_len=3),
        "2 requests of 3 query tokens, got one for 2 tokens",
    ),
    "too few tiles": (lambda: of_tensor_cores(FA2_INFO, num_kv_heads=4), "at least 66 tiles, got 33"),
    "another batch size": (lambda: of_cuda_cores(UNSPLIT, num_reqs=149), "exactly 149 tiles, got 150"),
    "no int32 offsets": (lambda: of_tensor_cores(changed(FA2_INFO, 5, 30)), INT32),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_foreign_plan_info_is_rejected(make, message):
    with pytest.raises(BatchError, match=f"(?s){message}"):
        make()


@pytest.mark.parametrize(
    ("rows", "num_bytes", "num_reqs", "message"),
    [
        (3, 4000, 2, r"seq_lens must be torch.int32 \[2\]"),
        (2, 1000, 2, "whole int32 elements, got 1000 bytes"),
        (2, 4001, 2, "whole int32 elements, got 4001 bytes"),
        (2, 4000, 3, "seq_lens must be"),
    ],
)
def test_buffers_of_another_plan_are_refused(rows, num_bytes, num_reqs, message):
    layout = replace(Case([5, 9]).layout(), num_reqs=num_reqs)
    seq_lens, last_page_len = torch.zeros(rows, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(BatchError, match=message):
        replan(seq_lens, last_page_len, torch.zeros(num_bytes, dtype=torch.uint8), layout, row_stride=4)


@pytest.mark.parametrize("split", [True, False])
def test_rows_beyond_32_bit_tokens_are_rejected(split):
    case = Case([5, 9] if split else [5] * 150, page_size=16)
    lens, workspace = torch.tensor(case.seq_lens, dtype=torch.int32), case.workspace()
    last_page_len, most = torch.zeros_like(lens), (2**28 - 1) // case.num_reqs
    replan(lens, last_page_len, workspace, case.layout(), row_stride=most)
    assert ((most - 1) * 16 + last_page_len.long()).tolist() == case.seq_lens
    before = last_page_len.clone()
    with pytest.raises(BatchError, match=f"in 32 bits, got {case.num_reqs} rows of {most + 1} pages of 16"):
        replan(lens, last_page_len, workspace, case.layout(), row_stride=most + 1)
    assert torch.equal(last_page_len, before)
