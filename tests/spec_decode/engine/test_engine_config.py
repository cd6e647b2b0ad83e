"""What an engine's settings refuse, and which strategy they lead to."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from attn_backends import get
from builders import BatchError
from spec_decode.drafter.plan import Strategy
from spec_decode.engine import Engine, EngineConfig
from spec_decode.engine import engine as module
from spec_decode.engine.config import make_pool
from tests.factories import engine_config, make_pair

REFUSED = {
    "a negative number of drafts": ({"num_speculative_tokens": -1}, "num_speculative_tokens must be 1 or more, got -1"),
    "no rows": ({"max_num_seqs": 0}, "max_num_seqs is 0. Pass 1 or more"),
    "no room for a new token": ({"max_model_len": 1}, "max_model_len is 1. Pass 2 or more"),
    "no pages": ({"num_pages": 0}, "num_pages is 0. Pass 1 or more"),
    "empty pages": ({"page_size": 0}, "page_size is 0. Pass 1 or more"),
    "a verification that has no name": ({"verification": 3}, "verification must be a string or None, got 3"),
    "an answer in words": ({"autotune": "no"}, "autotune must be True or False, got 'no'"),
    "a confidence in words": ({"min_confidence": "x"}, "min_confidence must be a finite number, got 'x'"),
    "no prefill": ({"max_prefill_tokens": 0}, "max_prefill_tokens is 0. Pass 1 or more"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_a_size_with_which_no_request_could_run_is_refused(changed, message):
    with pytest.raises(BatchError, match=f"(?s){message}"):
        engine_config(**{"num_speculative_tokens": 3, **changed})


def test_a_confidence_that_is_no_probability_is_refused_with_the_drafter():
    with pytest.raises(BatchError, match="min_confidence must be a probability below 1"):
        engine_config(num_speculative_tokens=3, min_confidence=1.0)


def test_settings_are_frozen_and_named():
    config = engine_config(num_speculative_tokens=3)
    with pytest.raises(FrozenInstanceError):
        config.max_num_seqs = 4
    with pytest.raises(TypeError):
        EngineConfig(3)


def test_without_a_number_of_pages_the_longest_requests_fit():
    config = engine_config(num_speculative_tokens=3, max_num_seqs=2, max_model_len=30, page_size=16)
    pool = make_pool(config, None)
    assert pool.slots_for(30) == 33 and pool.num_pages == 2 * 3
    assert make_pool(engine_config(num_speculative_tokens=3, num_pages=7), None).num_pages == 7


class Autotuned:
    strategy, wall_us = Strategy.PER_STEP, {"per_step": 1.0}

    def explain(self):
        return "per_step: fastest"


def make_engine(monkeypatch, device="cuda", **options):
    """An engine on the CPU that takes itself for one on `device` when it chooses a strategy."""
    calls = []

    def autotune(model, groups, tables, config, plan):
        calls.append(config)
        return Autotuned()

    monkeypatch.setattr(module, "autotune_strategy", autotune)
    make_drafter = Engine._make_drafter

    def on_device(self, *args):
        self.device = torch.device(device)
        try:
            return make_drafter(self, *args)
        finally:
            self.device = torch.device("cpu")

    monkeypatch.setattr(Engine, "_make_drafter", on_device)
    config = engine_config(num_speculative_tokens=3, max_model_len=32, page_size=4, **options)
    return Engine(*make_pair(), get("torch_reference"), config), len(calls)


def test_on_cuda_without_a_strategy_the_fastest_is_taken(monkeypatch):
    engine, calls = make_engine(monkeypatch)
    assert calls == 1 and engine.plan.strategy is Strategy.PER_STEP and engine.plan.reason == "per_step: fastest"


NOT_AUTOTUNED = {
    "switched off": {"autotune": False},
    "a strategy was named": {"strategy": Strategy.FULL_LOOP},
    "emulated graphs": {"device": "cpu"},
}


@pytest.mark.parametrize("options", NOT_AUTOTUNED.values(), ids=NOT_AUTOTUNED)
def test_nothing_is_autotuned(options, monkeypatch):
    engine, calls = make_engine(monkeypatch, **options)
    assert calls == 0 and engine.autotuned is None and engine.plan.strategy is Strategy.FULL_LOOP
