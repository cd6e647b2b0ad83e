import math
from dataclasses import replace

import pytest
import torch

from attn_backends import KVCache, get
from attn_backends.base import check_forward_inputs
from attn_backends.kernels.paged_attention import PagedAttentionArguments, tile_config
from builders import BatchBuffers, BatchError
from tests.factories import CPU, make_cache, make_spec, make_tables

PLAIN = make_spec(head_dim=64)
CASES = {
    "decode": (PLAIN, [1, 1, 1], [1, 4, 17]),
    "ragged": (PLAIN, [1, 5, 3], [9, 5, 21]),
    "uniform extend": (PLAIN, [3, 3], [7, 20]),
    "no grouping": (replace(PLAIN, num_kv_heads=4), [2, 2], [7, 20]),
    "one kv head": (replace(PLAIN, num_kv_heads=1), [2, 2], [7, 20]),
    "window": (replace(PLAIN, sliding_window=5), [1, 4, 8], [4, 20, 8]),
    "window of one": (replace(PLAIN, sliding_window=1), [1, 3], [4, 20]),
    "sinks": (replace(PLAIN, sinks=True), [1, 4], [1, 20]),
    "soft cap": (replace(PLAIN, soft_cap=1.5), [1, 4], [3, 20]),
    "scale": (replace(PLAIN, scale=0.7), [1, 4], [3, 20]),
    "another value dim": (replace(PLAIN, value_dim=72), [1, 4], [3, 20]),
    "everything": (
        replace(PLAIN, sliding_window=6, sinks=True, soft_cap=2.0, scale=0.3, value_dim=72), [3, 1, 2], [3, 9, 21],
    ),
    "one-token pages": (replace(PLAIN, page_size=1), [2, 1], [7, 20]),
}  # fmt: skip


class Asked:
    """A batch on a cache that is noise, with what attention over the logical tokens gives, in plain fp64."""

    def __init__(self, spec, query_lens, seq_lens, pad_reqs=None):
        generator = torch.Generator().manual_seed(1)
        tables = make_tables(seq_lens, page_sizes=(spec.page_size,), max_reqs=4, max_seq_len=32)
        self.spec, self.query_lens, self.seq_lens = spec, query_lens, seq_lens
        self.batch = BatchBuffers(tables, max_tokens=64)
        num_reqs, num_tokens = self.batch.load(query_lens, seq_lens, pad_reqs=pad_reqs)
        self.view = self.batch.view(
            0, num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=max(query_lens),
            uniform=len(set(query_lens)) == 1,
        )  # fmt: skip
        self.cache = make_cache(spec, tables.num_pages[0])
        self.query = torch.randn(num_tokens, spec.num_q_heads, spec.head_dim, generator=generator)
        self.sinks = torch.randn(spec.num_q_heads, generator=generator) if spec.sinks else None

    def run(self, name):
        backend = get(name)
        builder = backend.builder(self.spec, CPU, max_reqs=4, max_tokens=64, max_seq_len=32)
        return backend.forward(self.query, self.cache, builder.build(self.view), spec=self.spec, sinks=self.sinks)

    def truth(self):
        rows, token = [], 0
        for request, (query, seq) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            for position in range(seq - query, seq):
                heads = range(self.spec.num_q_heads)
                rows.append(torch.stack([self._one(request, position, token, head) for head in heads]))
                token += 1
        return torch.stack(rows)

    def _one(self, request, position, token, head):
        spec = self.spec
        first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
        kv_head = head * spec.num_kv_heads // spec.num_q_heads
        weights, total = [], 0.0 if self.sinks is None else math.exp(float(self.sinks[head]))
        values = []
        for past in range(first, position + 1):
            page = int(self.batch.tables.block_tables[0, request, past // spec.page_size])
            key = self.cache.key[page, past % spec.page_size, kv_head].double()
            score = spec.softmax_scale * float(self.query[token, head].double() @ key)
            score = score if spec.soft_cap is None else spec.soft_cap * math.tanh(score / spec.soft_cap)
            weights.append(math.exp(score))
            values.append(self.cache.value[page, past % spec.page_size, kv_head].double())
        total += sum(weights)
        return sum((w / total * v for w, v in zip(weights, values, strict=True)), torch.zeros(spec.out_dim))


@pytest.mark.parametrize("name", ["torch_reference", "triton_paged"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_over_pages_is_attention_over_the_logical_tokens(name, case):
    asked = Asked(*case)
    torch.testing.assert_close(asked.run(name).double(), asked.truth(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["torch_reference", "triton_paged"])
@pytest.mark.parametrize("spec", [PLAIN, replace(PLAIN, sinks=True)], ids=["plain", "sinks"])
def test_padding_rows_come_out_as_zero(name, spec):
    out = Asked(spec, [2, 2], [7, 20], pad_reqs=4).run(name)
    assert out[4:].eq(0).all() and out[:4].ne(0).any()


@pytest.mark.parametrize("name", ["torch_reference", "triton_paged"])
def test_nothing_outside_a_requests_tokens_is_read(name):
    asked = Asked(PLAIN, [1, 3], [6, 17])
    owned = torch.zeros(asked.cache.num_pages, 4, dtype=torch.bool)
    for request, length in enumerate(asked.seq_lens):
        for position in range(length):
            owned[asked.batch.tables.block_tables[0, request, position // 4], position % 4] = True
    clean = asked.run(name)
    asked.cache.key[~owned] = asked.cache.value[~owned] = float("nan")
    assert torch.equal(asked.run(name), clean)


@pytest.mark.parametrize("name", ["torch_reference", "triton_paged"])
def test_a_window_keeps_tokens_before_it_from_being_read(name):
    asked = Asked(replace(PLAIN, sliding_window=4), [1], [18])
    clean = asked.run(name)
    pages = asked.batch.tables.block_tables[0, 0, :3].long()
    asked.cache.value[pages] = 1e4
    assert torch.equal(asked.run(name), clean)


@pytest.mark.parametrize("name", ["torch_reference", "triton_paged"])
def test_keys_and_values_may_be_packed_any_way(name):
    asked = Asked(PLAIN, [1, 3], [6, 17])
    plain = asked.run(name)
    packed = torch.stack([asked.cache.key, asked.cache.value], 3).flatten(3)
    asked.cache = KVCache(packed[..., :64], packed[..., 64:])
    assert torch.equal(asked.run(name), plain)


def refusal(change):
    asked = Asked(PLAIN, [1, 3], [6, 17])
    builder = get("torch_reference").builder(PLAIN, CPU, max_reqs=4, max_tokens=64, max_seq_len=32)
    args = {
        "query": asked.query,
        "cache": asked.cache,
        "metadata": builder.build(asked.view),
        "spec": PLAIN,
        "sinks": None,
    }
    with pytest.raises(BatchError) as refused:
        check_forward_inputs(**{**args, **change(asked)})
    return str(refused.value)


def test_too_few_query_tokens_are_refused():
    assert "query must be torch.float32 [4, 4, 64]" in refusal(lambda asked: {"query": asked.query[:-1]})


def test_a_query_of_another_dtype_is_refused():
    assert "got torch.bfloat16" in refusal(lambda asked: {"query": asked.query.bfloat16()})


def test_a_cache_of_another_dtype_is_refused():
    assert "key cache must be" in refusal(lambda a: {"cache": KVCache(a.cache.key.bfloat16(), a.cache.value)})


def test_a_cache_of_another_page_size_is_refused():
    assert "value cache must be" in refusal(lambda a: {"cache": KVCache(a.cache.key, a.cache.value[:, :2])})


def test_a_cache_whose_last_dim_is_strided_is_refused():
    def strided(asked):
        return {"cache": KVCache(asked.cache.key.transpose(1, 3).contiguous().transpose(1, 3), asked.cache.value)}

    assert "the last dim of the key cache must be contiguous" in refusal(strided)


def test_sinks_that_the_spec_does_not_have_are_refused():
    assert "spec.sinks=False and a tensor" in refusal(lambda asked: {"sinks": torch.zeros(4)})


def test_missing_sinks_are_refused():
    assert "spec.sinks=True and None" in refusal(lambda asked: {"spec": replace(PLAIN, sinks=True)})


def test_sinks_of_another_dtype_are_refused():
    change = {"spec": replace(PLAIN, sinks=True), "sinks": torch.zeros(4, dtype=torch.bfloat16)}
    assert "sinks must be torch.float32 [4]" in refusal(lambda asked: change)


@pytest.mark.parametrize(
    ("row_bytes", "tokens", "alone", "block_m", "tile"),
    [
        pytest.param(512, 32, True, 16, (32, 8, 1), id="one request of few KV heads"),
        pytest.param(512, 256, True, 16, (64, 8, 1), id="one request, a longer context"),
        pytest.param(512, 64, True, 32, (64, 4, 1), id="an extend alone"),
        pytest.param(512, 64, False, 16, (64, 4, 1), id="one block a program"),
        pytest.param(512, 512, False, 16, (64, 4, 2), id="many blocks a program"),
        pytest.param(1024, 512, False, 16, (32, 4, 2), id="wide heads"),
        pytest.param(2048, 8, False, 16, (16, 4, 1), id="no block below a matrix product's least"),
    ],
)
def test_a_tile_follows_what_bounds_a_program(row_bytes, tokens, alone, block_m, tile):
    config = tile_config(row_bytes=row_bytes, tokens=tokens, alone=alone, block_m=block_m)
    assert (config["BLOCK_N"], config["num_warps"], config["num_stages"]) == tile


def attend(**changes):
    """Two queries at the end of six tokens; changes: of the op's arguments."""
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(2, 4, 1, 16, generator=generator)
    return PagedAttentionArguments(**{
        "query": torch.randn(2, 1, 16, generator=generator), "key_cache": cache, "value_cache": cache.flip(3),
        "block_table": torch.tensor([[0, 1]], dtype=torch.int32), "seq_lens": torch.tensor([6], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2], dtype=torch.int32), "sinks": None, "tree_masks": None,
        "max_query_len": 2, "max_seq_len": 8, "num_splits": 1, "scale": 0.2, "sliding_window": None,
        "soft_cap": None, "causal": True, "batch_invariant": True, **changes,
    })  # fmt: skip


@pytest.mark.parametrize("how", ["reference", "launch"])
def test_a_window_in_splits_whose_bits_must_not_depend_on_the_batch_is_refused(how):
    with pytest.raises(BatchError, match=r"got num_splits=2, sliding_window=3\. Pass num_splits=1"):
        getattr(attend(num_splits=2, sliding_window=3), how)()


@pytest.mark.parametrize(
    "changes",
    [{"num_splits": 2}, {"sliding_window": 3}, {"num_splits": 2, "sliding_window": 3, "batch_invariant": False}],
)
def test_either_alone_and_both_where_bits_may_depend_on_the_batch_are_allowed(changes):
    assert attend(**changes).reference().isfinite().all()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [None, 1])
def test_queries_before_the_first_token_see_nothing(invariant, window):
    arguments = attend(seq_lens=torch.tensor([1], dtype=torch.int32), sliding_window=window, batch_invariant=invariant)
    out = arguments.reference()
    assert out[0].eq(0).all() and torch.equal(out[1, 0], arguments.value_cache[0, 0, 0])
