"""An engine's FlashInfer wrapper planned on the device, compared with FlashInfer's host planner."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attn_backends.engines.vllm.device_plan import DevicePlan
from builders import BatchError
from tests.builders.flashinfer.host_planner import Case, ceil_div, read_plan
from tests.factories import make_spec

BATCHES = 300


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """The SMs that the host planner plans for."""
    monkeypatch.setattr("attn_backends.engines.vllm.device_plan.num_sms", lambda device: 132)


def random_case(draw):
    rows, page = draw.choice([1, 2, 3, 5, 8, 32, 64]), draw.choice([16, 32, 64])
    query, window = draw.choice([1, 1, 1, 2, 4, 5, 8]), draw.choice([-1, -1, -1, 127, 1023])
    longest = draw.choice([300, 4000, 60000])
    lens = [draw.randint(query, longest) for _ in range(rows)]
    heads = {"num_kv_heads": draw.choice([1, 2, 8]), "group": draw.choice([1, 3, 4, 8])}
    return Case(lens, page_size=page, query_len=query, window_left=window, tensor_cores=True, **heads)


def wrapper_of(case):
    """What an engine's wrapper holds after it was planned for other lengths."""
    return SimpleNamespace(_plan_info=case.first_plan().info, _int_workspace_buffer=case.workspace())


def spec_of(case, **changes):
    sizes = {
        "num_q_heads": case.num_kv_heads * case.group,
        "num_kv_heads": case.num_kv_heads,
        "page_size": case.page_size,
        "sliding_window": case.window_left + 1 if case.window_left >= 0 else None,
    }
    return make_spec(**{**sizes, **changes})


def table_of(case, gap=0):
    width = max(ceil_div(length, case.page_size) for length in case.seq_lens) + 2
    wide = torch.arange(case.num_reqs * (width + gap), dtype=torch.int32).view(case.num_reqs, -1)
    return wide[:, :width]


def plan_of(case, seq_lens, table, wrapper=None, **changes):
    wrapper = wrapper or wrapper_of(case)
    return DevicePlan(wrapper, spec_of(case, **changes), seq_lens, table, query_len=case.query_len)


def test_random_batches_match_host_plan():
    draw = random.Random(0)
    for _ in range(BATCHES):
        case = random_case(draw)
        plan = plan_of(case, torch.tensor(case.seq_lens, dtype=torch.int32), table_of(case))
        plan.refresh()
        assert read_plan(plan.workspace, plan.layout) == case.host_plan().arrays, case


@pytest.mark.parametrize("gap", [0, 7])
def test_plan_covers_every_page_and_length_of_table(gap):
    case = Case([40, 17, 300], tensor_cores=True)
    table, wrapper = table_of(case, gap), wrapper_of(case)
    plan_of(case, torch.tensor(case.seq_lens, dtype=torch.int32), table, wrapper).refresh()
    starts, pages = wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf
    for row, length in enumerate(case.seq_lens):
        owned = ceil_div(length, case.page_size)
        assert torch.equal(pages[starts[row] : starts[row] + owned], table[row, :owned])
        others = int(starts[row + 1] - starts[row]) - 1
        assert others * case.page_size + int(wrapper._paged_kv_last_page_len_buf[row]) == length


def test_refresh_follows_lengths_moved_by_engine():
    case, later = Case([40, 17, 300], tensor_cores=True), Case([900, 4, 301], tensor_cores=True)
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    plan = plan_of(case, lens, table_of(later))
    plan.refresh()
    lens.copy_(torch.tensor(later.seq_lens))
    plan.refresh()
    assert read_plan(plan.workspace, plan.layout) == later.host_plan().arrays


def test_head_count_of_all_ranks_is_rejected():
    case = Case([40] * 8, num_kv_heads=8, tensor_cores=True)
    with pytest.raises(BatchError, match="need a plan of at least 264 tiles, got 33"):
        plan_of(case, torch.tensor(case.seq_lens, dtype=torch.int32), table_of(case), num_kv_heads=1, num_q_heads=4)


def test_block_beyond_planned_window_is_rejected():
    """FlashInfer plans the window and one query tile, here of 64 tokens; the first token of the block sees them all."""
    case = Case([400, 300], head_dim=256, group=1, query_len=80, window_left=99, page_size=16, tensor_cores=True)
    lens, table = torch.tensor(case.seq_lens, dtype=torch.int32), table_of(case)
    with pytest.raises(
        BatchError, match="a block of 80 tokens and its window take 179 KV tokens, FlashInfer plans 11 pages"
    ):
        plan_of(case, lens, table, causal=False, head_dim=256)
    plan_of(case, lens, table, head_dim=256).refresh()
    shorter = replace(case, query_len=77)
    plan_of(shorter, lens, table, causal=False, head_dim=256).refresh()


def test_a_plan_of_another_batch_is_refused():
    case, larger = Case([40] * 3, tensor_cores=True), Case([40] * 4, tensor_cores=True)
    lens = torch.tensor(larger.seq_lens, dtype=torch.int32)
    with pytest.raises(BatchError, match="must be for 4 requests of 1 query tokens, got one for 3 tokens"):
        plan_of(larger, lens, table_of(larger), wrapper_of(case))
