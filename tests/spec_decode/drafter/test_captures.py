from dataclasses import replace

import pytest
import torch

from attn_backends import get
from attn_backends.torch_reference import TorchReference
from builders import BatchError, ReferenceBuilder
from spec_decode.drafter import Strategy
from spec_decode.graphs import default_capture_sizes
from spec_decode.graphs.emulator import EmulatedRuntime
from tests.spec_decode.drafter.drafter_fixture import (
    CAPTURING,
    MAX_SEQ_LEN,
    DrafterFixture,
    K,
    advancing,
    assert_same,
    decode_only,
)
from tests.spec_decode.drafter.third_party_backends import Bound


@pytest.mark.parametrize("strategy", CAPTURING)
@pytest.mark.parametrize("make", [advancing, decode_only])
def test_capture_leaves_live_requests_unchanged(make, strategy):
    fixture = make(strategy=strategy, capture_sizes=[2, 4])
    tables = fixture.tables
    live = [*fixture.caches(), tables.block_tables, tables.token_limits, tables.overflow]
    for rounds in (0, 1):
        fixture.rounds(rounds)
        before = [tensor.clone() for tensor in live]
        fixture.drafter.graphs.release()
        fixture.drafter.capture()
        assert fixture.drafter.graphs.complete and all(map(torch.equal, before, live)), f"after {rounds} rounds"


class ShortBuilder(ReferenceBuilder):
    """Its kernels are captured for lengths up to 24."""

    def capture_constants(self, metadata):
        return replace(super().capture_constants(metadata), max_seq_len=24)


class Short(TorchReference):
    builder = ShortBuilder


@pytest.mark.parametrize(
    ("strategy", "backends"),
    [
        *((strategy, (Short(), TorchReference())) for strategy in CAPTURING),
        (Strategy.FULL_LOOP, (TorchReference(), Short())),
    ],
)
def test_round_longer_than_captured_is_rejected(strategy, backends):
    fixture = DrafterFixture(backends, strategy=strategy, limits=[20, 24, 23])
    fixture.rounds(1)
    fixture.limits[1] = 25
    fixture.load(range(3))
    before = [tensor.clone() for tensor in fixture.caches()]
    with pytest.raises(BatchError, match="max_seq_len: captured with 24, needed 25"):
        fixture.rounds(1)
    assert all(map(torch.equal, before, fixture.caches()))


@pytest.mark.parametrize("field", ["max_reqs", "max_query_len"])
@pytest.mark.parametrize("narrow_first", [True, False])
def test_round_larger_than_any_group_capture_is_rejected(narrow_first, field):
    class NarrowBuilder(ReferenceBuilder):
        def capture_constants(self, metadata):
            return replace(super().capture_constants(metadata), **{field: 0})

    class Narrow(TorchReference):
        builder = NarrowBuilder

    backends = (Narrow(), TorchReference()) if narrow_first else (TorchReference(), Narrow())
    with pytest.raises(BatchError, match=f"{field}: captured with 0, needed"):
        DrafterFixture(backends, strategy=Strategy.FULL_LOOP).rounds(1)


@pytest.mark.parametrize("again", [True, False], ids=["captured by hand", "captured by the next round"])
def test_early_capture_or_release_changes_no_token(again):
    fixture = advancing()
    fixture.drafter.capture()

    def release():
        fixture.drafter.graphs.release()
        if again:
            fixture.drafter.capture()

    assert_same(fixture.rounds(after_round=release), advancing().rounds())


def test_eager_drafter_captures_nothing():
    fixture = advancing(capture_sizes=[2], strategy=Strategy.EAGER)
    fixture.drafter.capture()
    fixture.rounds(1)
    assert fixture.drafter.graphs.reports == []


def test_builder_gets_upper_bound_per_row_at_capture():
    DrafterFixture([Bound(), get("torch_reference")], capture_sizes=None).drafter.capture()


@pytest.mark.parametrize(("max_reqs", "sizes"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_capture_sizes_are_powers_of_two_and_maximum(max_reqs, sizes):
    assert default_capture_sizes(max_reqs) == sizes


@pytest.mark.parametrize("strategy", CAPTURING)
def test_two_token_rounds_match_at_every_capture_size(strategy):
    found = advancing(steps=2, strategy=strategy, limits=(MAX_SEQ_LEN,) * 4, capture_sizes=[1, 2, 3, 4])
    expected = advancing(steps=2, strategy=Strategy.EAGER, limits=(MAX_SEQ_LEN,) * 4, capture_sizes=[1, 2, 3, 4])
    for count in (4, 3, 2, 1):
        tokens = []
        for fixture in (found, expected):
            fixture.load(range(count))
            verified = fixture.verified(round_=count, contexts=[3, 7, 15, 0][:count])
            tokens.append(fixture.drafter.propose(verified).tokens.tolist())
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize("strategy", CAPTURING)
def test_sizes_left_out_use_next_larger_graph(strategy):
    whole = advancing(strategy=strategy, capture_sizes=None)
    whole.drafter.capture()
    largest = sum(report.bytes for report in whole.drafter.graphs.reports if report.key.num_reqs == 4)
    fixture = advancing(strategy=strategy, capture_sizes=None, graph_memory_limit=largest + 1)
    fixture.load([0])
    wanted = advancing(strategy=Strategy.EAGER)
    wanted.load([0])
    tokens = [s.drafter.propose(s.verified(rows=slice(0, 1))).tokens.tolist() for s in (fixture, wanted)]
    assert set(fixture.drafter.graphs.left_out) == {1, 2} and tokens[0] == tokens[1]


@pytest.mark.parametrize(("loop_steps", "limits"), [(1, [K - 2]), (2, [1]), (K - 1, []), (9, [])])
def test_loop_stops_at_last_step_with_same_drafts(monkeypatch, loop_steps, limits):
    found, capture_loop = [], EmulatedRuntime.capture_loop

    def spy(self, first, body, continue_flag, limit):
        found.append(limit)
        return capture_loop(self, first, body, continue_flag, limit)

    monkeypatch.setattr(EmulatedRuntime, "capture_loop", spy)
    fixture = advancing(strategy=Strategy.DEVICE_LOOP, loop_steps=loop_steps)
    assert_same(fixture.rounds(), advancing(strategy=Strategy.EAGER).rounds())
    assert found == limits
