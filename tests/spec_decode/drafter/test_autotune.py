import errno
import os
import pickle
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from attn_backends import get
from builders import BatchError, RequestTables
from spec_decode.drafter import DrafterConfig, Strategy, autotune, plan_draft
from spec_decode.drafter.autotune import MARGIN, StrategyCache, autotune_strategy
from spec_decode.models import BlockDraft, EagleDraft, LlamaTarget, quantise_draft
from spec_decode.paged import GraphMode
from spec_decode.paged.kv_groups import make_group
from tests.factories import CPU, make_config

CONFIG = make_config(vocab_size=32, hidden_size=16, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=64)
K = 3
MEASURED = (Strategy.FULL_LOOP, *(s for s in Strategy if s.implementation.autotuned and s is not Strategy.FULL_LOOP))
"""The rule's choice, then every other strategy that autotuning measures."""


class AutotuneFixture:
    """A tiny draft over a small pool, and a clock whose times are given."""

    def __init__(self, folder, *, num_pages=12, max_reqs=2):
        torch.manual_seed(0)
        self.model = EagleDraft(CONFIG, LlamaTarget(CONFIG)).requires_grad_(False)
        (layers,) = self.model.layer_groups(4)
        backend = get("torch_reference")
        self.group = make_group("draft", backend, layers.spec, layers.layers, num_pages=num_pages, device=CPU)
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


def test_the_fastest_strategy_is_chosen(fixture):
    assert fixture.measure(times(device=50.0)).strategy is Strategy.DEVICE_LOOP


def test_noise_does_not_replace_the_rules_choice(fixture):
    assert fixture.measure(times(device=100.0 * (1 - MARGIN / 2))).strategy is Strategy.FULL_LOOP


def test_every_strategy_that_can_run_is_measured_over_live_requests_of_full_length(fixture):
    fixture.measure(times(), proposes=True)
    assert fixture.seen == [(s, 2, 24) for s in MEASURED]


def test_what_is_never_the_fastest_is_not_measured():
    assert not {Strategy.PIECEWISE, Strategy.EAGER} & {*MEASURED}


def test_a_measurement_leaves_no_request_in_the_tables(fixture):
    fixture.measure(times(), proposes=True)
    assert fixture.tables.num_live == 0 and not fixture.tables.token_limits.any()


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


@pytest.mark.parametrize("change", ["truncated", "of another shape", "of another schema"])
def test_a_cached_file_that_does_not_fit_is_measured_again(fixture, change):
    fixture.measure(times(device=50.0))
    (path,) = fixture.cache.folder.glob("*.json")
    text = path.read_text()
    broken = {
        "truncated": text[:40],
        "of another shape": text.replace('"num_reqs":"2"', '"num_reqs":"3"'),
        "of another schema": text.replace("attn-strategy/1", "attn-strategy/0"),
    }
    path.write_text(broken[change])
    assert fixture.measure(times(per_step=50.0)).strategy is Strategy.PER_STEP


def poison(path, text):
    """What an enemy, or an accident, may have put in place of a measurement."""
    path.unlink()
    target = path.with_name("target")
    if text == "a folder":
        path.mkdir()
    elif text == "a pipe":
        os.mkfifo(path)
    elif text == "a symlink to a device":
        path.symlink_to("/dev/zero")
    elif text == "a symlink to nothing":
        path.symlink_to(target)
    else:
        path.write_bytes(text)


POISON = {
    "nothing": b"",
    "garbage": bytes(range(256)),
    "a pickle": pickle.dumps(os.getcwd),
    "no object": b"[1, 2]",
    "deeper than a parser goes": b'{"shape":' + b"[" * 100_000,
    "larger than any measurement": b" " * (1 << 17),
    "a folder": "a folder",
    "a pipe": "a pipe",
    "a symlink to a device": "a symlink to a device",
    "a symlink to nothing": "a symlink to nothing",
}


@pytest.mark.parametrize("text", POISON.values(), ids=POISON)
def test_whatever_lies_in_place_of_a_measurement_is_measured_again(fixture, text):
    fixture.measure(times(device=50.0))
    (path,) = fixture.cache.folder.glob("*.json")
    poison(path, text)
    with warnings.catch_warnings(record=True) as warned:
        assert fixture.measure(times(per_step=50.0)).strategy is Strategy.PER_STEP
    assert [str(each.message).partition(",")[0] for each in warned] == (
        ["a measured strategy is kept in a folder that can be written"] if text in ("a folder", "a pipe") else []
    )


CHANGED = {
    "a time in words": {"wall_us": {"full_loop": "fast"}},
    "times of other strategies": {"wall_us": {"full_loop": 1.0}},
    "no times": {"wall_us": {}},
    "a time below nothing": {"wall_us": {"full_loop": 3.0, "device_loop": -1.0, "per_step": 2.0}},
    "another choice than the times lead to": {"strategy": "per_step"},
    "an unknown strategy": {"strategy": "__import__('os')"},
    "a field too many": {"run": "rm"},
    "a shape that is none": {"shape": 5},
    "another machine's": {"shape": {"device": "NVIDIA H200"}},
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_measurement_that_could_not_have_been_made_here_is_measured_again(fixture, change):
    fixture.measure(times(device=50.0))
    (path,) = fixture.cache.folder.glob("*.json")
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), **change}))
    assert fixture.measure(times(full=50.0)).strategy is Strategy.FULL_LOOP and fixture.seen


def test_without_a_home_folder_a_folder_is_asked_for(monkeypatch):
    for name in ("ATTN_BACKENDS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(BatchError, match=r"no home folder to make ~.*Name a folder in ATTN_BACKENDS_CACHE"):
        StrategyCache()


def test_a_tilde_in_the_variable_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ATTN_BACKENDS_CACHE", "~/kept")
    assert StrategyCache().folder == tmp_path / "kept" / "strategies"


def test_a_cached_strategy_that_cannot_run_here_is_measured_again(fixture):
    found = fixture.measure(times(device=50.0))
    fixture.cache.put(msgspec.structs.replace(found, strategy=Strategy.PIECEWISE))
    assert fixture.measure(times(per_step=50.0)).strategy is Strategy.PER_STEP


def test_without_graphs_there_is_nothing_to_measure_or_keep(fixture):
    found = fixture.measure(times(), graph_mode=GraphMode.NONE)
    assert found.strategy is Strategy.EAGER and not fixture.seen and not list(fixture.cache.folder.glob("*"))
    assert all("graphs are turned off" in reason for reason in found.not_measured.values())


def test_a_small_pool_measures_with_fewer_requests(tmp_path):
    fixture = AutotuneFixture(tmp_path, num_pages=4)
    fixture.measure(times())
    assert {live for _, live, _ in fixture.seen} == {1}


def test_a_pool_without_room_for_a_round_is_refused(tmp_path):
    fixture = AutotuneFixture(tmp_path, num_pages=2)
    with pytest.raises(BatchError, match="room for a request of 9 tokens"):
        fixture.measure(times())


def test_wall_time_is_measured_where_no_clock_is_given(fixture):
    found = fixture.measure()
    assert set(found.wall_us) == {strategy.value for strategy in MEASURED} and min(found.wall_us.values()) > 0


def test_a_gpus_time_ends_when_the_device_is_done(monkeypatch):
    """By a clock that stands still but for what the device does when it is waited for."""
    now = [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: now.append(now[-1] + 7e-6))
    monkeypatch.setattr(time, "perf_counter", lambda: now[-1])
    tables = SimpleNamespace(device=torch.device("cuda"), longest=40)
    inputs = SimpleNamespace(context_lens=torch.zeros(2, dtype=torch.int32))
    drafter = SimpleNamespace(tables=tables, inputs=inputs, num_speculative_tokens=3, propose=lambda: None)
    assert autotune._wall_us(drafter) == pytest.approx(7.0)


def test_a_strategys_time_is_that_of_its_rounds(monkeypatch):
    """By a clock that a round alone moves on."""
    now, rounds = [0.0], []

    def propose():
        rounds.append(now.append(now[-1] + 3e-6))

    monkeypatch.setattr(time, "perf_counter", lambda: now[-1])
    tables = SimpleNamespace(device=torch.device("cpu"), longest=40)
    inputs = SimpleNamespace(context_lens=torch.zeros(2, dtype=torch.int32))
    drafter = SimpleNamespace(tables=tables, inputs=inputs, num_speculative_tokens=3, propose=propose)
    assert autotune._wall_us(drafter) == pytest.approx(3.0) and len(rounds) > 15


def test_a_folder_that_cannot_be_written_is_warned_of_and_the_measurement_is_used(tmp_path):
    (tmp_path / "file").touch()
    fixture = AutotuneFixture(tmp_path / "file" / "strategies")
    with pytest.warns(RuntimeWarning, match=r"file/strategies is not.*device_loop is used.*ATTN_BACKENDS_CACHE"):
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


@pytest.mark.parametrize(("variable", "tail"), [("ATTN_BACKENDS_CACHE", ""), ("XDG_CACHE_HOME", "attn-backends")])
def test_the_folder_follows_the_environment(monkeypatch, tmp_path, variable, tail):
    monkeypatch.delenv("ATTN_BACKENDS_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert StrategyCache().folder == tmp_path / tail / "strategies"


class EagleBlock(BlockDraft, EagleDraft):
    mask_token_id = 1


def test_a_draft_that_proposes_all_tokens_at_once_is_measured_without_strategies_of_later_steps(fixture):
    fixture.model = EagleBlock(CONFIG, LlamaTarget(CONFIG)).requires_grad_(False)
    result = fixture.measure(times())
    assert "no later ones" in result.not_measured[Strategy.DEVICE_LOOP.value]
    assert Strategy.DEVICE_LOOP not in {strategy for strategy, *_ in fixture.seen}
