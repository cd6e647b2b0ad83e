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


@pytest.mark.parametrize("tokens", [0, 1, 4, 17, 18])
def test_gathering_in_chunks_matches_whole_and_bound(monkeypatch, tokens):
    """Of one token where even that is too much."""
    whole, gathered, gather = prefill(), [], torch_reference._gather

    def counted(cache, part, slot, scale):
        gathered.append(len(slot))
        return gather(cache, part, slot, scale)

    monkeypatch.setattr(torch_reference, "_gather", counted)
    monkeypatch.setattr(torch_reference, "_GATHERED_ELEMENTS", max(1, tokens * 32 * 2 * 16))
    torch.testing.assert_close(prefill(), whole, rtol=1e-6, atol=1e-6)
    assert len(gathered) == 2 * -(-18 // max(1, tokens)) and max(gathered) <= max(1, tokens)


def visible_ranges(query_lens, seq_lens, window, pad_reqs, more_tokens=0):
    batch = BatchBuffers(make_tables([30] * len(seq_lens), max_reqs=4, max_seq_len=32), max_tokens=40)
    num_reqs, num_tokens = batch.load(query_lens, seq_lens, pad_reqs=pad_reqs)
    view = batch.view(0, num_reqs=num_reqs, num_tokens=num_tokens + more_tokens, max_query_len=max(query_lens))
    spec = make_spec(sliding_window=window)
    metadata = get("torch_reference").builder(spec, CPU, max_reqs=4, max_tokens=40, max_seq_len=32).build(view)
    return list(zip(metadata.token_to_req.tolist(), metadata.kv_start.tolist(), metadata.kv_end.tolist(), strict=True))


@pytest.mark.parametrize(("window", "first"), [(None, [0, 0, 0]), (4, [0, 1, 5])])
def test_visible_ranges_cover_prefix_or_window_only(window, first):
    seen = list(zip([0, 0, 1], first, [4, 5, 9], strict=True))
    assert visible_ranges([2, 1], [5, 9], window, 2) == seen
    assert [each[1:] for each in visible_ranges([2], [5], window, 3)[2:]] == [(0, 0)] * 4
    later = visible_ranges([2, 1], [5, 9], window, 2, more_tokens=3)
    assert later[:3] == seen and [each[1:] for each in later[3:]] == [(0, 0)] * 3
