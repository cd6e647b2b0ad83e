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
def test_the_plan_of_the_cuda_core_kernel_is_the_hosts(case):
    assert case.plan() == case.host_plan([max(count, 1) for count in case.pages]).arrays


@settings(max_examples=80)
@given(TENSOR_CORES)
def test_the_plan_of_the_tensor_core_kernel_is_the_hosts(case):
    assert case.plan() == case.host_plan().arrays


@given(st.one_of(CUDA_CORES, TENSOR_CORES))
def test_offsets_and_grid_do_not_depend_on_the_lengths(case):
    host, layout = case.host_plan(), case.layout()
    assert host.info == case.host_plan([1] * case.num_reqs).info
    assert host.num_bytes == layout.num_bytes or not layout.split


@given(CUDA_CORES.filter(lambda case: case.layout().split))
def test_no_tile_of_the_cuda_core_kernel_starts_past_its_tokens(case):
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
def test_tiles_of_the_tensor_core_kernel_reach_every_token_they_must(case):
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
def test_partial_outputs_lie_where_the_tensor_core_kernel_writes_them(case):
    """It takes o_indptr[request] + token * chunks + chunk, and counts the chunks itself from the device's length."""
    plan = case.plan()
    query_tile, size = case.host_plan().info[3], plan["kv_chunk_size"][0]
    for request, length in enumerate(case.seq_lens):
        tokens = max(length, 1) if case.window_left < 0 else min(max(length, 1), case.window_left + query_tile)
        first = plan["o_indptr"][request]
        rows = [first + token * ceil_div(tokens, size) for token in range(case.query_len + 1)]
        assert plan["merge_indptr"][request * case.query_len : (request + 1) * case.query_len + 1] == rows


def test_empty_rows_take_a_tile_each_so_that_the_grid_is_never_outgrown():
    """FlashInfer's own planner counts them as nothing when it looks for the chunk, and writes past its arrays."""
    case = Case([8192] + [0] * 40)
    assert case.host_plan().num_tiles > case.layout().padded_tiles
    assert sum(case.plan()["block_valid_mask"]) <= case.layout().padded_tiles


@given(st.one_of(CUDA_CORES, TENSOR_CORES))
def test_last_page_len_gives_back_the_length_in_uint32(case):
    pages_before = (case.row_stride - 1) * case.page_size
    _, last_page_len = case.replanned()
    assert [(pages_before + last) % 2**32 for last in last_page_len.tolist()] == case.seq_lens


@given(st.one_of(CUDA_CORES, TENSOR_CORES))
def test_nothing_outside_the_plan_is_written(case):
    workspace, layout = case.replanned()[0], case.layout()
    outside = torch.ones(len(workspace), dtype=torch.bool)
    for offset, length in layout.arrays.values():
        outside[4 * offset : 4 * (offset + length)] = False
    outside[layout.block_valid_mask :][: layout.padded_tiles if layout.split else 0] = False
    assert workspace[outside].eq(UNTOUCHED).all()


def test_without_splits_the_plan_that_fixed_the_layout_is_kept():
    case = Case([5, 0, 4000] * 50)
    workspace, last_page_len = case.replanned()
    assert not case.layout().split and torch.equal(workspace, case.workspace())
    assert last_page_len[0] == 5 - (case.row_stride - 1) * 16


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("num_reqs", [3, 150])
def test_a_replay_plans_for_the_lengths_of_the_replay(tensor_cores, num_reqs):
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


@pytest.mark.parametrize("case", [Case([3, 700]), Case([3, 700], tensor_cores=True, query_len=3)], ids=["cuda", "fa2"])
def test_the_op_writes_what_its_schema_says(case):
    layout = case.layout()
    workspace, last_page_len = case.replanned()
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    values = [int(getattr(layout, name)) for name in PlanLayout.__dataclass_fields__]
    torch.library.opcheck(
        torch.ops.builders.flashinfer_replan.default,
        (seq_lens, last_page_len, workspace, case.row_stride, values),
        test_utils=("test_schema", "test_faketensor"),
    )


def tensor_core_refusal(info, query_len=1, num_kv_heads=8):
    spec = make_spec(page_size=16, num_q_heads=32, num_kv_heads=num_kv_heads)
    with pytest.raises(BatchError) as refused:
        PlanLayout.of_tensor_cores(info, spec, num_reqs=2, num_sms=NUM_SMS, query_len=query_len)
    return str(refused.value)


def changed(info, index, value):
    return [*info[:index], value, *info[index + 1 :]]


FA2_INFO = Case([1, 1], tensor_cores=True).host_plan().info
CUDA_INFO = Case([1, 1]).host_plan().info


def test_plan_info_of_the_other_kernel_is_refused():
    assert "holds 15 values in FlashInfer 0.6.12 to 0.7.2, got 10" in tensor_core_refusal(CUDA_INFO)
    with pytest.raises(BatchError, match="holds 10 values"):
        PlanLayout.of_cuda_cores(FA2_INFO, num_reqs=2, page_size=16)


def test_a_plan_without_cuda_graph_mode_is_refused():
    assert "CUDA-graph mode" in tensor_core_refusal(changed(FA2_INFO, 13, 0))
    with pytest.raises(BatchError, match="CUDA-graph mode"):
        PlanLayout.of_cuda_cores(changed(CUDA_INFO, 8, 0), num_reqs=2, page_size=16)


def test_a_tensor_core_plan_without_splits_is_refused():
    assert "split_kv off" in tensor_core_refusal(changed(FA2_INFO, 14, 0))


def test_a_tensor_core_plan_for_other_queries_is_refused():
    assert "2 requests of 3 query tokens, got one for 2 tokens" in tensor_core_refusal(FA2_INFO, query_len=3)


def test_a_tensor_core_plan_with_too_few_tiles_is_refused():
    assert "66 tiles or more, got 33" in tensor_core_refusal(FA2_INFO, num_kv_heads=4)


def test_a_cuda_core_plan_for_another_batch_size_is_refused():
    unsplit = Case([1] * 150).host_plan().info
    with pytest.raises(BatchError, match="exactly 149 tiles, got 150"):
        PlanLayout.of_cuda_cores(unsplit, num_reqs=149, page_size=16)


def test_offsets_that_are_no_int32_offsets_are_refused():
    message = tensor_core_refusal(changed(FA2_INFO, 5, 30))
    assert "multiples of 4 bytes" in message and "'qo_tile_indices': 30" in message


@pytest.fixture
def buffers():
    layout = Case([5, 9]).layout()
    seq_lens, last_page_len = (torch.zeros(2, dtype=torch.int32) for _ in range(2))
    return [seq_lens, last_page_len, torch.zeros(4000, dtype=torch.uint8), layout]


def test_lengths_of_another_batch_are_refused(buffers):
    buffers[0] = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(BatchError, match=r"seq_lens must be torch.int32 \[2\]"):
        replan(*buffers, row_stride=4)


@pytest.mark.parametrize("num_bytes", [1000, 4001])
def test_a_workspace_that_does_not_hold_the_plan_is_refused(buffers, num_bytes):
    buffers[2] = torch.zeros(num_bytes, dtype=torch.uint8)
    with pytest.raises(BatchError, match=f"whole int32 elements, got {num_bytes} bytes"):
        replan(*buffers, row_stride=4)


def test_a_layout_of_another_batch_is_refused_by_its_buffers(buffers):
    buffers[3] = replace(buffers[3], num_reqs=3)
    with pytest.raises(BatchError, match="seq_lens must be"):
        replan(*buffers, row_stride=4)
