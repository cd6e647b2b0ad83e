import errno
import os
import pickle
import time
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from attn_backends import get
from builders import BatchError, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, autotune, plan_draft
from spec_decode.drafter.autotune import MARGIN, StrategyCache, autotune_strategy
from spec_decode.model_api import BlockDraft
from spec_decode.models import EagleDraft, LlamaTarget, quantise_draft
from spec_decode.paged import GraphMode
from spec_decode.paged.kv_groups import make_group
from spec_decode.trees import DraftTree
from tests.factories import CPU, make_config

CONFIG = make_config(vocab_size=32, hidden_size=16, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=64)
K = 3
MEASURED = (Strategy.FULL_LOOP, *(s for s in Strategy if s.implementation.autotuned and s is not Strategy.FULL_LOOP))
"""The rule's choice, then every other strategy that autotuning measures."""


class AutotuneFixture:
    """A tiny draft over a small pool, and a clock whose times are given."""

    def __init__(self, folder, *, num_pages=12, max_reqs=2, trees=False):
        torch.manual_seed(0)
        self.model = EagleDraft(CONFIG, LlamaTarget(CONFIG)).requires_grad_(False)
        (layers,) = self.model.layer_groups(4)
        backend = get("torch_reference")
        spec = replace(layers.spec, tree=trees)
        self.group = make_group("draft", backend, spec, layers.layers, num_pages=num_pages, device=CPU)
        self.tables = RequestTables(
            page_sizes=[4], num_pages=[num_pages], max_reqs=max_reqs, max_seq_len=24, device=CPU
        )
        self.cache = StrategyCache(folder)
        self.seen = []

    def measure(self, times=None, proposes=False, **options):
        """proposes: whether the drafters that are timed also draft, for which each must capture its graphs."""

        def clock(drafter):
            if proposes:
                drafter.propose()
            self.seen.append((drafter.plan.strategy, self.tables.num_live, self.tables.longest))
            return times[drafter.plan.strategy]

        options.setdefault("num_speculative_tokens", K)
        config = DrafterConfig(**options)
        return autotune_strategy(
            self.model,
            [self.group],
            self.tables,
            config,
            plan_draft(self.model, [self.group], CPU, config),
            cache=self.cache,
            clock=times and clock,
        )


def times(full=100.0, device=100.0, per_step=100.0):
    named = {Strategy.FULL_LOOP: full, Strategy.DEVICE_LOOP: device, Strategy.PER_STEP: per_step}
    return {**dict.fromkeys(MEASURED, 100.0), **named}


@pytest.fixture
def fixture(tmp_path):
    return AutotuneFixture(tmp_path)


@pytest.mark.parametrize(
    ("us", "strategy"), [(50.0, Strategy.DEVICE_LOOP), (100.0 * (1 - MARGIN / 2), Strategy.FULL_LOOP)]
)
def test_the_fastest_strategy_is_chosen_unless_by_noise(fixture, us, strategy):
    assert fixture.measure(times(device=us)).strategy is strategy


def test_every_strategy_that_may_be_fastest_is_measured_over_live_requests_of_full_length(fixture):
    fixture.measure(times(), proposes=True)
    assert fixture.seen == [(strategy, 2, 24) for strategy in MEASURED]
    assert not {Strategy.PIECEWISE, Strategy.EAGER} & {*MEASURED}
    assert fixture.tables.num_live == 0 and not fixture.tables.token_limits.any()


def test_each_drafter_is_gone_before_the_next_is_made(fixture, monkeypatch):
    made, init = [], Drafter.__init__

    def spy(self, *args):
        assert not any(earlier() for earlier in made)
        init(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Drafter, "__init__", spy)
    fixture.measure(times(), proposes=True)
    assert len(made) == len(MEASURED)


def test_rounds_are_measured_with_the_steps_that_a_device_loop_repeats_at_once_and_captured_for_them_alone(
    fixture, monkeypatch
):
    configs = []

    def drafter_of(*arguments):
        configs.extend(each for each in arguments if isinstance(each, DrafterConfig))
        return Drafter(*arguments)

    monkeypatch.setattr(autotune, "Drafter", drafter_of)
    fixture.measure(times(), loop_steps=2)
    assert [(config.loop_steps, config.capture_sizes) for config in configs] == [(2, [2])] * len(MEASURED)


def test_rounds_are_measured_with_the_trees_that_are_drafted(tmp_path, monkeypatch):
    fixture, depths, propose = AutotuneFixture(tmp_path, trees=True), [], Drafter.propose

    def spy(self):
        drafts = propose(self)
        depths.append([DraftTree(tuple(row)).max_depth for row in drafts.parents.tolist()])
        return drafts

    monkeypatch.setattr(Drafter, "propose", spy)
    first = [(choice,) for choice in range(4)]
    wide = DraftTree.from_paths([*first, *((*path, 0) for path in first), (0, 0, 0)])
    chain = DraftTree.chain(K)
    assert fixture.measure(tree=chain) == fixture.measure(tree=chain) != fixture.measure(tree=wide)
    assert len(depths) > 2 * len(MEASURED) and all(found == [K, K] for found in depths)


def test_a_measurement_that_fails_leaves_no_request_and_keeps_nothing(fixture):
    with pytest.raises(KeyError):
        fixture.measure({MEASURED[0]: 100.0})
    assert len(fixture.seen) == 1 + 1 and fixture.tables.num_live == 0
    assert fixture.measure(times(device=50.0)).strategy is Strategy.DEVICE_LOOP


def test_a_second_call_measures_nothing_and_says_where_its_answer_is_from(fixture):
    first = fixture.measure(times(device=50.0))
    fixture.seen.clear()
    again = fixture.measure(times(full=1.0))
    assert not fixture.seen and again == first
    assert "device_loop: fastest of full_loop 100 us" in again.explain() and again.env.date in again.explain()


def test_another_shape_is_measured_anew(fixture):
    fixture.measure(times(device=50.0))
    assert fixture.measure(times(per_step=50.0), num_speculative_tokens=K - 1).strategy is Strategy.PER_STEP


def test_a_draft_of_other_weights_is_measured_anew_in_8_bits_too(fixture):
    for size, fastest in ((16, Strategy.DEVICE_LOOP), (32, Strategy.PER_STEP)):
        config = replace(CONFIG, intermediate_size=size)
        fixture.model = EagleDraft(config, LlamaTarget(config).bfloat16()).bfloat16()
        quantise_draft(fixture.model)
        assert fixture.measure({**times(), fastest: 50.0}).strategy is fastest


def bytes_of(content):
    return lambda path: path.write_bytes(content(path.read_bytes()) if callable(content) else content)


def fields(**changes):
    return bytes_of(lambda kept: msgspec.json.encode({**msgspec.json.decode(kept), **changes}))


def in_its_place(make):
    return lambda path: (path.unlink(), make(path))


UNWRITABLE = {"a folder": in_its_place(Path.mkdir), "a pipe": in_its_place(os.mkfifo)}
SPOILED = {
    "truncated": bytes_of(lambda kept: kept[:40]),
    "nothing": bytes_of(b""),
    "garbage": bytes_of(bytes(range(256))),
    "a pickle": bytes_of(pickle.dumps(os.getcwd)),
    "no object": bytes_of(b"[1, 2]"),
    "deeper than a parser goes": bytes_of(b'{"shape":' + b"[" * 100_000),
    "larger than any measurement": bytes_of(b" " * (1 << 17)),
    "a symlink to a device": in_its_place(lambda path: path.symlink_to("/dev/zero")),
    "a symlink to nothing": in_its_place(lambda path: path.symlink_to("target")),
    "another schema": fields(schema="attn-strategy/0"),
    "a time in words": fields(wall_us={"full_loop": "fast"}),
    "times of other strategies": fields(wall_us={"full_loop": 1.0}),
    "no times": fields(wall_us={}),
    "a time below nothing": fields(wall_us={"full_loop": 3.0, "device_loop": -1.0, "per_step": 2.0}),
    "another choice than the times lead to": fields(strategy="per_step"),
    "a choice that cannot run here": fields(strategy="piecewise"),
    "an unknown strategy": fields(strategy="__import__('os')"),
    "a field too many": fields(run="rm"),
    "a shape that is none": fields(shape=5),
    "another machine's": fields(shape={"device": "NVIDIA H200"}),
    **UNWRITABLE,
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_could_not_have_been_measured_here_is_measured_again(fixture, name):
    fixture.measure(times(device=50.0))
    (path,) = fixture.cache.folder.glob("*.json")
    SPOILED[name](path)
    fixture.seen.clear()
    with warnings.catch_warnings(record=True) as warned:
        assert fixture.measure(times(full=50.0)).strategy is Strategy.FULL_LOOP and fixture.seen
    told = ["the measured strategy, full_loop, is used, but could not be saved in "] if name in UNWRITABLE else []
    assert [str(each.message).partition(str(fixture.cache.folder))[0] for each in warned] == told


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"ATTN_BACKENDS_CACHE": "/own", "XDG_CACHE_HOME": "/caches"}, "/own/strategies"),
        ({"ATTN_BACKENDS_CACHE": "~/own", "HOME": "/home/me"}, "/home/me/own/strategies"),
        ({"XDG_CACHE_HOME": "/caches", "HOME": "/home/me"}, "/caches/attn-backends/strategies"),
        ({"HOME": "/home/me"}, "/home/me/.cache/attn-backends/strategies"),
    ],
)
def test_the_folder_follows_the_environment(monkeypatch, variables, folder):
    for name in ("ATTN_BACKENDS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert StrategyCache().folder == Path(folder)


def test_without_a_home_folder_a_folder_is_asked_for(monkeypatch):
    for name in ("ATTN_BACKENDS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(BatchError, match=r"saves its result in ~.*no home folder.*Set ATTN_BACKENDS_CACHE to a folder"):
        StrategyCache()


def test_without_graphs_there_is_nothing_to_measure_or_keep(fixture):
    found = fixture.measure(times(), graph_mode=GraphMode.NONE)
    assert found.strategy is Strategy.EAGER and not fixture.seen and not list(fixture.cache.folder.glob("*"))
    assert all("graphs are turned off" in reason for reason in found.not_measured.values())


def test_a_small_pool_measures_with_fewer_requests_and_one_without_room_for_any_is_refused(tmp_path):
    fixture = AutotuneFixture(tmp_path, num_pages=4)
    fixture.measure(times())
    assert {live for _, live, _ in fixture.seen} == {1}
    with pytest.raises(BatchError, match="room for a request of 9 tokens"):
        AutotuneFixture(tmp_path / "other", num_pages=2).measure(times())


def test_wall_time_is_measured_where_no_clock_is_given(fixture):
    found = fixture.measure()
    assert set(found.wall_us) == {strategy.value for strategy in MEASURED} and min(found.wall_us.values()) > 0


@pytest.mark.parametrize(("device", "us"), [("cpu", 3.0), ("cuda", 3.0 + 7.0)])
def test_a_strategys_time_is_that_of_its_rounds_until_the_device_is_done(monkeypatch, device, us):
    """By a clock that stands still but for a round and what the device does when it is waited for."""
    now, rounds = [0.0], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: now.append(now[-1] + 7e-6))
    monkeypatch.setattr(time, "perf_counter", lambda: now[-1])
    drafter = SimpleNamespace(
        tables=SimpleNamespace(device=torch.device(device), longest=40),
        inputs=SimpleNamespace(context_lens=torch.zeros(2, dtype=torch.int32)),
        propose=lambda: rounds.append(now.append(now[-1] + 3e-6)),
    )
    assert autotune._wall_us(drafter, 8) == pytest.approx(us) and len(rounds) > 15


def test_a_folder_that_cannot_be_written_is_warned_of_and_the_measurement_is_used(tmp_path):
    (tmp_path / "file").touch()
    fixture = AutotuneFixture(tmp_path / "file" / "strategies")
    with pytest.warns(
        RuntimeWarning, match=r"device_loop, is used, but could not.*file/strategies.*ATTN_BACKENDS_CACHE"
    ):
        found = fixture.measure(times(device=50.0))
    assert found.strategy is Strategy.DEVICE_LOOP and fixture.tables.num_live == 0


def test_a_measurement_that_could_not_be_kept_leaves_the_earlier_one_and_no_part(fixture, monkeypatch):
    earlier = fixture.measure(times(device=50.0))

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="no space left"):
        fixture.cache.put(msgspec.structs.replace(earlier, strategy=Strategy.PER_STEP))
    assert fixture.cache.get(earlier.shape) == earlier and len(list(fixture.cache.folder.iterdir())) == 1


class EagleBlock(BlockDraft, EagleDraft):
    mask_token_id = 1


def test_a_draft_that_proposes_all_tokens_at_once_is_measured_without_strategies_of_later_steps(fixture):
    fixture.model = EagleBlock(CONFIG, LlamaTarget(CONFIG)).requires_grad_(False)
    result = fixture.measure(times())
    assert "no later steps" in result.not_measured[Strategy.DEVICE_LOOP.value]
    assert Strategy.DEVICE_LOOP not in {strategy for strategy, *_ in fixture.seen}
