"""Our kernels' backends compared with attention over the logical tokens, for keys and values and for latents."""

from dataclasses import replace

import pytest
import torch

from attn_backends import KVCache, get
from attn_backends.base import check_forward_inputs
from attn_backends.kernels import paged_attention
from attn_backends.kernels.paged_attention import PagedAttentionArguments, prompt_tile, tile_config
from builders import AttentionKind, BatchBuffers, BatchError
from builders.devices import Room
from tests.attn_backends.kernels.attention_oracle import attend, tokens_of
from tests.factories import CPU, indexes_fp8, make_cache, make_spec, make_tables
from tests.ops import served

PLAIN = make_spec(head_dim=64)
LATENTS = make_spec(kind=AttentionKind.MLA, num_kv_heads=1, head_dim=48, value_dim=32, scale=0.2)
SPECS = {
    "plain": PLAIN,
    "no grouping": replace(PLAIN, num_kv_heads=4),
    "one kv head": replace(PLAIN, num_kv_heads=1),
    "window": replace(PLAIN, sliding_window=5),
    "window of one": replace(PLAIN, sliding_window=1),
    "sinks": replace(PLAIN, sinks=True),
    "soft cap": replace(PLAIN, soft_cap=1.5),
    "scale": replace(PLAIN, scale=0.7),
    "another value dim": replace(PLAIN, value_dim=72),
    "everything": replace(PLAIN, sliding_window=6, sinks=True, soft_cap=2.0, scale=0.3, value_dim=72),
    "one-token pages": replace(PLAIN, page_size=1),
    "bfloat16": replace(PLAIN, dtype=torch.bfloat16, kv_dtype=torch.bfloat16),
    "e4m3": replace(PLAIN, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
    "e4m3 by head": replace(
        PLAIN, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, head_scales=True, sinks=True, soft_cap=2.0
    ),
    "latents": LATENTS,
    "latents of DeepSeek-V3's dims": replace(LATENTS, head_dim=576, value_dim=512),
    "latents of less value than rotary dims": replace(LATENTS, value_dim=16),
    "latents in pages of six": replace(LATENTS, page_size=6, num_q_heads=6),
    "latents in float16": replace(LATENTS, dtype=torch.float16, kv_dtype=torch.float16),
}
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 2**-10, "atol": 1e-5}}
CLOSE[torch.bfloat16] = {"rtol": 2**-7, "atol": 1e-5}
BATCHES = {"decode": ([1, 1, 1], [1, 4, 17]), "ragged": ([1, 5, 3], [9, 5, 21]), "uniform": ([3, 3], [7, 20])}
BATCHES["prompts"] = [3, 20, 18], [9, 31, 18]


def names_for(spec):
    return ["torch_reference", "triton_mla" if spec.kind is AttentionKind.MLA else "triton_paged"]


class PagedCase:
    """A batch and a row of padding over a cache that is NaN wherever no request's token lies."""

    def __init__(self, spec, query_lens, seq_lens, masks=None):
        generator = torch.Generator().manual_seed(1)
        tables = make_tables(seq_lens, page_sizes=(spec.page_size,), max_reqs=4, max_seq_len=32)
        self.spec, self.query_lens, self.seq_lens = spec, query_lens, seq_lens
        self.batch = BatchBuffers(tables, max_tokens=64)
        num_reqs, num_tokens = self.batch.load(query_lens, seq_lens, pad_reqs=len(seq_lens) + 1)
        sizes = {"max_query_len": max(query_lens), "uniform": len(set(query_lens)) == 1}
        self.view = self.batch.view(0, num_reqs=num_reqs, num_tokens=num_tokens, **sizes)
        self.masks = masks
        if masks is not None:
            self.batch.tree_masks[: len(masks)] = torch.tensor(masks)
            self.view = self.batch.tree_view(self.view)
        self.table, self.cache = tables.block_tables[0], make_cache(spec, tables.num_pages[0])
        if spec.kind is AttentionKind.MLA:
            self.cache = KVCache(self.cache.key, self.cache.key[..., : spec.out_dim])
        no_token = torch.ones(self.cache.key.shape[:2], dtype=torch.bool)
        for pages, length in zip(self.table, seq_lens, strict=False):
            at = torch.arange(length)
            no_token[pages[at // spec.page_size].long(), at % spec.page_size] = False
        for part in (self.cache.key, self.cache.value):
            part.copy_(part.float().masked_fill(no_token[..., None, None], torch.nan).to(part.dtype))
        self.query = torch.randn(num_tokens, spec.num_q_heads, spec.head_dim, generator=generator).to(spec.dtype)
        self.sinks = torch.randn(spec.num_q_heads, generator=generator) if spec.sinks else None

    def run(self, name):
        """The output; that of the row of padding, which has tokens if all rows have as many, is 0."""
        backend, tokens = get(name), sum(self.query_lens)
        builder = backend.builder(self.spec, CPU, max_reqs=4, max_tokens=64, max_seq_len=32)
        out = backend.forward(self.query, self.cache, builder.build(self.view), spec=self.spec, sinks=self.sinks)
        assert (len(out) > tokens) == self.view.uniform and out[tokens:].eq(0).all()
        return out[:tokens]

    def truth(self):
        rows, window = [], self.spec.sliding_window or 99
        for pages, count, length in zip(self.table, self.query_lens, self.seq_lens, strict=False):
            tokens = tokens_of(self.cache, pages, length, self.spec)
            for position in range(length - count, length):
                seen = range(max(0, position + 1 - window), position + 1)
                if self.masks is not None:
                    own = (length - count + at for at in range(count) if self.masks[len(rows)] >> at & 1)
                    seen = [*range(length - count), *own]
                rows.append(attend(self.query[len(rows)], *tokens, seen, self.spec, self.sinks))
        return torch.stack(rows)


def check(spec, *batch):
    case = PagedCase(spec, *batch)
    for name in names_for(spec):
        out = case.run(name)
        assert out.dtype == spec.dtype
        torch.testing.assert_close(out.double(), case.truth(), **CLOSE[spec.dtype], msg=lambda text, at=name: at + text)


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, id=name, marks=[indexes_fp8] * ("e4m3" in name)) for name, spec in SPECS.items()]
)
def test_paged_attention_matches_logical_attention(spec):
    check(spec, [3, 1, 8], [3, 9, 21])


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("spec", [PLAIN, LATENTS], ids=["plain", "latents"])
def test_paged_attention_is_right_for_every_batch_shape(spec, batch):
    check(spec, *batch)


@pytest.mark.parametrize("spec", [PLAIN, LATENTS], ids=["plain", "latents"])
def test_tree_token_sees_ancestors_and_prefix(spec):
    check(replace(spec, tree=True), [5, 1, 3], [5, 9, 21], [1, 3, 5, 11, 21, 1, 1, 3, 5])


@pytest.mark.parametrize("name", ["torch_reference", "triton_paged"])
def test_sliding_window_hides_earlier_tokens(name):
    case = PagedCase(replace(PLAIN, sliding_window=4), [1], [18])
    clean = case.run(name)
    case.cache.value[case.table[0, :3].long()] = 1e4
    assert torch.equal(case.run(name), clean)


@pytest.mark.parametrize("spec", [PLAIN, LATENTS], ids=["plain", "latents"])
def test_cache_view_of_wider_storage_is_read(spec):
    for name in names_for(spec):
        case = PagedCase(spec, [1, 3], [6, 17])
        plain, cache = case.run(name), case.cache
        wide = torch.cat([cache.key, cache.value if spec is PLAIN else cache.key.flip(0)], 3)
        value = wide[..., 64:] if spec is PLAIN else wide[..., : spec.out_dim]
        case.cache = KVCache(wide[..., : spec.head_dim], value)
        assert torch.equal(case.run(name), plain)


SINKS = {"spec": replace(PLAIN, sinks=True)}
REFUSED = {
    "too few query tokens": (lambda case: {"query": case.query[:-1]}, "query must be torch.float32 [4, 4, 64]"),
    "a query of another dtype": (lambda case: {"query": case.query.bfloat16()}, "got torch.bfloat16"),
    "a cache of another dtype": (
        lambda case: {"cache": KVCache(case.cache.key.bfloat16(), case.cache.value)}, "key cache must be",
    ),
    "a cache of another page size": (
        lambda case: {"cache": KVCache(case.cache.key, case.cache.value[:, :2])}, "value cache must be",
    ),
    "a strided last dim": (
        lambda case: {"cache": KVCache(case.cache.key.mT.contiguous().mT, case.cache.value)},
        "the last dim of the key cache must be contiguous",
    ),
    "sinks that the spec does not have": (lambda _: {"sinks": torch.zeros(4)}, "spec.sinks=False and a tensor"),
    "missing sinks": (lambda _: SINKS, "spec.sinks=True and None"),
    "sinks of another dtype": (
        lambda _: {**SINKS, "sinks": torch.zeros(4, dtype=torch.bfloat16)}, "sinks must be torch.float32 [4]",
    ),
    "sinks apart": (lambda _: {**SINKS, "sinks": torch.zeros(8)[::2]}, "sinks must be contiguous"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_misread_forward_inputs_raise_batch_error(change, message):
    case = PagedCase(PLAIN, [1, 3], [6, 17])
    metadata = get("torch_reference").builder(PLAIN, CPU, max_reqs=4, max_tokens=64, max_seq_len=32).build(case.view)
    right = {"query": case.query, "cache": case.cache, "metadata": metadata, "spec": PLAIN, "sinks": None}
    with pytest.raises(BatchError) as refused:
        check_forward_inputs(**{**right, **change(case)})
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("block_n", "tokens", "alone", "block_m", "wgmma", "tile"),
    [
        pytest.param(128, 32, True, 16, True, (32, 8, 1), id="one request of few KV heads"),
        pytest.param(128, 256, True, 16, True, (128, 8, 1), id="one request, a longer context"),
        pytest.param(128, 257, True, 16, True, (128, 4, 2), id="one with many blocks"),
        pytest.param(128, 64, True, 32, True, (64, 4, 1), id="an extend alone"),
        pytest.param(128, 65, False, 16, True, (128, 4, 1), id="one block a program"),
        pytest.param(128, 257, False, 32, True, (128, 4, 2), id="many blocks a program"),
        pytest.param(32, 8, False, 16, True, (16, 4, 1), id="no block below a matrix product's least"),
        pytest.param(64, 4096, False, 64, True, (64, 4, 2), id="a block of drafts"),
        pytest.param(64, 4096, False, 64, False, (32, 8, 2), id="the same without products from shared memory"),
    ],
)
def test_tile_config_follows_program_bound(block_n, tokens, alone, block_m, wgmma, tile):
    config = tile_config(
        block_n=block_n, row_bytes=512, tokens=tokens, alone=alone, block_m=block_m, wgmma=wgmma
    )  # fmt: skip
    assert (config["BLOCK_N"], config["num_warps"], config["num_stages"]) == tile


@pytest.mark.parametrize(
    ("row_bytes", "block_m", "wgmma", "tile"),
    [
        pytest.param(512, 64, True, (32, 4, 2), id="a prompt"),
        pytest.param(512, 128, True, (32, 4, 2), id="a long prompt"),
        pytest.param(1024, 64, True, (32, 8, 3), id="wide rows"),
        pytest.param(2048, 64, True, (16, 8, 3), id="wider rows"),
        pytest.param(1024, 128, True, (64, 8, 2), id="wide heads"),
        pytest.param(256, 64, False, (32, 4, 2), id="narrow heads on other chips"),
        pytest.param(512, 64, False, (64, 8, 2), id="a prompt on other chips"),
    ],
)
def test_prompts_have_tiles_of_their_own(row_bytes, block_m, wgmma, tile):
    config = prompt_tile(row_bytes=row_bytes, block_m=block_m, wgmma=wgmma)
    assert (config["BLOCK_N"], config["num_warps"], config["num_stages"]) == tile


ROWS = {
    "wide heads": (256, 65, {}, 128),
    "over 8 bits": (256, 65, {"kv": torch.float8_e4m3fn}, 128),
    "no prompt": (256, 64, {}, 64),
    "a window": (256, 4096, {"more": True}, 64),
    "batch invariant": (256, 4096, {"invariant": True}, 16),
    "narrow heads": (64, 4096, {}, 64),
    "a long prompt": (128, 2048, {}, 128),
    "one that is not yet long": (128, 2047, {}, 64),
}


@pytest.mark.parametrize(("dim", "queries", "options", "rows"), ROWS.values(), ids=ROWS)
def test_prompts_that_are_faster_so_have_128_rows(dim, queries, options, rows, monkeypatch):
    prompt = PagedAttentionArguments(*served.paged(dim, 2, queries, 1, **options)[1])
    assert prompt.own_tile()["BLOCK_M"] == rows
    assert prompt._replace(query=prompt.query.float()).own_tile()["BLOCK_M"] <= 64
    monkeypatch.setattr(paged_attention, "room_of", lambda device: Room(132, 232448, wgmma=False))
    assert prompt.own_tile()["BLOCK_M"] <= 64


def arguments(**changes):
    """Two queries at the end of six tokens; changes: of the op's arguments."""
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(2, 4, 1, 16, generator=generator)
    return PagedAttentionArguments(**{
        "query": torch.randn(2, 1, 16, generator=generator), "key_cache": cache, "value_cache": cache.flip(3),
        "block_table": torch.tensor([[0, 1]], dtype=torch.int32), "seq_lens": torch.tensor([6], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2], dtype=torch.int32), "sinks": None, "tree_masks": None,
        "max_query_len": 2, "max_seq_len": 8, "num_splits": 1, "scale": 0.2, "sliding_window": None,
        "soft_cap": None, "causal": True, "batch_invariant": True, "key_scale": None, "value_scale": None, **changes,
    })  # fmt: skip


def test_batch_invariant_window_rejects_splits():
    for how in ("reference", "launch"):
        with pytest.raises(BatchError, match=r"got num_splits=2, sliding_window=3\. Pass num_splits=1"):
            getattr(arguments(num_splits=2, sliding_window=3), how)()
    for changes in ({"num_splits": 2}, {"sliding_window": 3}):
        assert arguments(**changes).reference().isfinite().all()
    assert arguments(num_splits=2, sliding_window=3, batch_invariant=False).reference().isfinite().all()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [None, 1])
def test_queries_before_first_token_give_zeros(invariant, window):
    short = arguments(seq_lens=torch.tensor([1], dtype=torch.int32), sliding_window=window, batch_invariant=invariant)
    out = short.reference()
    assert out[0].eq(0).all() and torch.equal(out[1, 0], short.value_cache[0, 0, 0])


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("queries", [2, 17])
def test_nan_reaches_only_heads_that_see_it(part, queries):
    case = PagedCase(PLAIN, [1, queries], [6, 17])
    getattr(case.cache, part)[case.table[1, 16 // 4], 16 % 4, 1] = float("nan")
    for name in names_for(PLAIN):
        wrong = torch.zeros(1 + queries, 4, 64, dtype=torch.bool)
        wrong[-1, 2:] = True
        assert torch.equal(case.run(name).isnan(), wrong)


def test_infinite_sinks_zero_output_or_have_no_effect():
    inf, case = float("inf"), PagedCase(replace(PLAIN, sinks=True), [1, 1], [6, 17])
    case.sinks = torch.tensor([-inf, inf, 0.5, -inf])
    for name in names_for(PLAIN):
        out, bare = case.run(name), PagedCase(PLAIN, [1, 1], [6, 17]).run(name)
        assert out[:, 1].eq(0).all() and (out[:, 2] - bare[:, 2]).abs().amax(1).gt(1e-3).all()
        torch.testing.assert_close(out[:, [0, 3]], bare[:, [0, 3]], rtol=1e-6, atol=1e-7)
