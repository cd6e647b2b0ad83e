import pytest
import torch

import attn_backends.kernels.paged_attention
import attn_backends.kernels.tree_attention  # noqa: F401
import spec_decode.drafter.kernels.gather_last_hidden
import spec_decode.drafter.kernels.shift_tokens
import spec_decode.models.kernels.add_rms_norm
import spec_decode.models.kernels.combine_experts
import spec_decode.models.kernels.embed_concat
import spec_decode.models.kernels.mla_query_key
import spec_decode.models.kernels.order_by_expert
import spec_decode.models.kernels.route_tokens
import spec_decode.models.kernels.swiglu
import spec_decode.sampling.draft_sampler  # noqa: F401
from builders import BatchBuffers
from tests.factories import make_cache, make_spec, make_tables
from tests.op_checks import check_op


def shared(query_len=1):
    batch = BatchBuffers(make_tables([20, 20], page_sizes=(4, 8)), max_tokens=2 * query_len)
    batch.load([query_len] * 2, [6, 8])
    return batch


def advance_args():
    batch, tables = shared(), shared().tables
    return (
        batch.seq_lens, batch.positions, batch.slot_mappings, batch.step, tables.overflow, tables.block_tables,
        tables.page_sizes, tables.token_limits,
    )  # fmt: skip


def begin_extend_args():
    batch, tables = shared(3), shared(3).tables
    return (
        batch.seq_lens, batch.positions, batch.slot_mappings, tables.overflow, torch.tensor([4, 5], dtype=torch.int32),
        tables.block_tables, tables.page_sizes, tables.token_limits, 3,
    )  # fmt: skip


def begin_decode_args():
    batch = shared()
    lens = torch.tensor([6, 0], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    return (batch.seq_lens, batch.positions, batch.slot_mappings, batch.step, *lens, 3)


def write_kv_args():
    spec = make_spec()
    cache = make_cache(spec, 5)
    key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    return (key, value, cache.key, cache.value, torch.tensor([2, -1, 19]))


def paged_attention_args():
    spec = make_spec()
    cache = make_cache(spec, 5)
    table = torch.tensor([[0, 1], [2, -1], [-1, -1]], dtype=torch.int32)
    seq_lens, starts = (torch.tensor(v, dtype=torch.int32) for v in ([6, 3, 0], [0, 2, 4, 6]))
    return (
        torch.randn(6, 4, 16), cache.key, cache.value, table, seq_lens, starts, torch.randn(4), None, 2, 6, 2, 0.25, 3,
        20.0, True, False,
    )  # fmt: skip


def count_prefix_args():
    lens, starts = torch.tensor([6, 8, 0], dtype=torch.int32), torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    return torch.zeros(3, dtype=torch.int32), lens, starts


def tree_attention_args():
    query, key, value, table, seq_lens, starts, sinks, *_ = paged_attention_args()
    masks, out, lse = torch.tensor([1, 3, 1, 3, 0, 0]), torch.randn(6, 4, 16), torch.randn(4, 6).t()
    return (query, key, value, table, seq_lens, starts, sinks, masks, out, lse, False, 2, 0.25, 20.0)


def sample_draft_args():
    rows, steps, vocab = 3, 2, 11
    return (
        torch.randn(rows, vocab), torch.tensor([0.0, 1.0, 0.5]), torch.arange(rows), torch.arange(rows),
        torch.tensor([3, 4, 0], dtype=torch.int32), torch.tensor([1]), torch.zeros(rows, steps, dtype=torch.int64),
        torch.zeros(rows, steps, vocab), torch.zeros(rows, dtype=torch.int64),
        torch.tensor([2, 1, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), torch.tensor([0.1]),
        torch.zeros(1, dtype=torch.int32), torch.arange(vocab), torch.randn(rows, 4), torch.zeros(rows, 4),
    )  # fmt: skip


def rope_args():
    return (torch.randn(3, 5, 16), torch.tensor([0, 7, 2]), torch.randn(8, 16))


def rope_and_write_kv_args():
    key, value, *cache, slots = write_kv_args()
    return (torch.randn(3, 4, 16), key, value, torch.tensor([0, 7, 2]), torch.randn(8, 16), *cache, slots)


def rms_norm_args():
    return (torch.randn(3, 20), None, torch.randn(20), 1e-6)


def add_rms_norm_args():
    return (torch.randn(3, 20), torch.randn(3, 20), torch.randn(20), 1e-6)


def swiglu_args():
    return (torch.randn(3, 20), 0.5)


def route_tokens_args():
    return (torch.randn(3, 12), torch.randn(12), 4, "sigmoid", 4, 2, True, 1.5)


def order_by_expert_args():
    return (torch.tensor([[3, 0], [0, 5], [3, 3]]), 7)


def combine_experts_args():
    return torch.randn(6, 8), torch.randn(3, 2), torch.tensor([[3, 0], [1, 5], [4, 2]]), torch.randn(3, 8)


def embed_concat_args():
    return torch.tensor([3, 0, 3]), torch.randn(5, 8), torch.randn(3, 8), [torch.randn(8), torch.randn(8)], 1e-6


def mla_query_key_args():
    parts = torch.randn(3, 4, 8), torch.randn(3, 4, 2), torch.randn(3, 10), torch.randn(8)
    return *parts, torch.tensor([5, 0, 2]), torch.randn(6, 2), 1e-6


def shift_tokens_args():
    return torch.randint(9, (3, 5)), torch.tensor([7, 8, 9]), torch.tensor([0, 4, 2], dtype=torch.int32)


def gather_last_hidden_args():
    return torch.randn(10, 6), torch.tensor([4, 0], dtype=torch.int32), torch.zeros(2, 6), 5


OPS = {
    "builders::advance_decode": advance_args,
    "builders::begin_extend": begin_extend_args,
    "builders::begin_decode": begin_decode_args,
    "attn_backends::write_kv": write_kv_args,
    "attn_backends::paged_attention": paged_attention_args,
    "attn_backends::tree_attention": tree_attention_args,
    "builders::count_prefix": count_prefix_args,
    "spec_decode::sample_draft": sample_draft_args,
    "attn_backends::rope": rope_args,
    "attn_backends::rope_and_write_kv": rope_and_write_kv_args,
    "spec_decode::add_rms_norm": add_rms_norm_args,
    "spec_decode::swiglu": swiglu_args,
    "spec_decode::route_tokens": route_tokens_args,
    "spec_decode::order_by_expert": order_by_expert_args,
    "spec_decode::combine_experts": combine_experts_args,
    "spec_decode::embed_concat": embed_concat_args,
    "spec_decode::mla_query_key": mla_query_key_args,
    "spec_decode::shift_tokens": shift_tokens_args,
    "spec_decode::gather_last_hidden": gather_last_hidden_args,
}


@pytest.mark.parametrize(("name", "args"), [*OPS.items(), ("spec_decode::add_rms_norm", rms_norm_args)])
def test_an_op_writes_what_its_schema_says_and_its_fake_matches(name, args):
    namespace, op = name.split("::")
    op = getattr(getattr(torch.ops, namespace), op).default
    check_op(op, args())
