"""The metadata built for ragged prompts."""

from types import SimpleNamespace

from spec_decode.paged.kv_groups import build_ragged
from tests.factories import make_tables


class SeenBuilder:
    def build(self, batch):
        return batch


def make_groups(count):
    """Groups whose metadata is the view that it would be built of."""
    return [
        SimpleNamespace(
            name=f"group {index}", caches={}, num_pages=100, make_builder=lambda tables, num_tokens: SeenBuilder()
        )
        for index in range(count)
    ]


def test_a_launch_is_sized_by_the_longest_of_ragged_prompts(monkeypatch):
    monkeypatch.setattr("spec_decode.paged.kv_groups.check_pools", lambda groups, tables: None)
    tables = make_tables([20, 9, 30], page_sizes=(4, 8), max_reqs=3, max_seq_len=32)

    batch, views = build_ragged(make_groups(2), tables, [5, 9, 1], [20, 9, 30])

    for view in views:
        assert (view.num_reqs, view.num_tokens, view.max_query_len, view.max_seq_len) == (3, 15, 9, 30)
        assert not view.uniform and view.host_query_lens == (5, 9, 1) and tuple(view.host_seq_lens) == (20, 9, 30)
    assert batch.positions[:15].tolist() == [*range(15, 20), *range(9), 29]


def test_prompts_of_one_length_are_uniform(monkeypatch):
    monkeypatch.setattr("spec_decode.paged.kv_groups.check_pools", lambda groups, tables: None)
    tables = make_tables([20, 9], page_sizes=(4,), max_reqs=2, max_seq_len=32)
    _, (view,) = build_ragged(make_groups(1), tables, [4, 4], [20, 9])
    assert view.uniform and view.max_query_len == 4
