import pytest
import torch

from attn_backends import get, torch_reference
from builders import BatchBuffers
from tests.factories import CPU, make_cache, make_spec, make_tables

SPEC = make_spec(sliding_window=6, sinks=True)


def prefill():
    tables = make_tables([30, 30], max_seq_len=32)
    batch = BatchBuffers(tables, max_tokens=40)
    num_reqs, num_tokens = batch.load([11, 7], [11, 20])
    view = batch.view(0, num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=11, uniform=False)
    backend = get("torch_reference")
    metadata = backend.builder(SPEC, CPU, max_reqs=2, max_tokens=40, max_seq_len=32).build(view)
    query = torch.randn(num_tokens, 4, 16, generator=torch.Generator().manual_seed(0))
    return backend.forward(query, make_cache(SPEC, tables.num_pages[0]), metadata, spec=SPEC, sinks=torch.arange(4.0))


@pytest.mark.parametrize("tokens", [1, 4, 17, 18])
def test_gathering_in_chunks_changes_nothing(monkeypatch, tokens):
    whole = prefill()
    monkeypatch.setattr(torch_reference, "_GATHERED_ELEMENTS", tokens * 32 * 2 * 16)
    torch.testing.assert_close(prefill(), whole, rtol=1e-6, atol=1e-6)


def test_a_chunk_holds_one_token_where_even_that_is_too_much(monkeypatch):
    whole = prefill()
    monkeypatch.setattr(torch_reference, "_GATHERED_ELEMENTS", 1)
    torch.testing.assert_close(prefill(), whole, rtol=1e-6, atol=1e-6)


def test_the_chunk_bound_is_kept(monkeypatch):
    gathered = []
    real = torch_reference._gather

    def gather(cache, part, slot, seen):
        gathered.append(slot.numel() * part.shape[2] * part.shape[3])
        return real(cache, part, slot, seen)

    monkeypatch.setattr(torch_reference, "_gather", gather)
    monkeypatch.setattr(torch_reference, "_GATHERED_ELEMENTS", 5 * 32 * 2 * 16)
    prefill()
    assert len(gathered) == 2 * 4 and max(gathered) <= 5 * 32 * 2 * 16


def visible_ranges(query_lens, seq_lens, window, pad_reqs, more_tokens=0):
    batch = BatchBuffers(make_tables([30] * len(seq_lens), max_reqs=4, max_seq_len=32), max_tokens=40)
    num_reqs, num_tokens = batch.load(query_lens, seq_lens, pad_reqs=pad_reqs)
    view = batch.view(0, num_reqs=num_reqs, num_tokens=num_tokens + more_tokens, max_query_len=max(query_lens))
    spec = make_spec(sliding_window=window)
    metadata = get("torch_reference").builder(spec, CPU, max_reqs=4, max_tokens=40, max_seq_len=32).build(view)
    return list(zip(metadata.token_to_req.tolist(), metadata.kv_start.tolist(), metadata.kv_end.tolist(), strict=True))


def test_every_token_sees_its_prefix():
    assert visible_ranges([2, 1], [5, 9], None, 2) == [(0, 0, 4), (0, 0, 5), (1, 0, 9)]


def test_every_token_sees_its_window():
    assert visible_ranges([2, 1], [5, 9], 4, 2) == [(0, 0, 4), (0, 1, 5), (1, 5, 9)]


@pytest.mark.parametrize("window", [None, 4])
def test_a_padding_token_sees_nothing(window):
    assert [r[1:] for r in visible_ranges([2], [5], window, 3)[2:]] == [(0, 0)] * 4


@pytest.mark.parametrize("window", [None, 4])
def test_a_token_after_the_last_request_sees_nothing(window):
    assert [r[1:] for r in visible_ranges([2, 1], [5, 9], window, 2, more_tokens=3)[3:]] == [(0, 0)] * 3
