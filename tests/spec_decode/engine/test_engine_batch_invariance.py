from dataclasses import replace
from functools import cache

import pytest
import torch

from attn_backends import Feature, NoBackend, get
from builders import BatchError
from spec_decode.drafter import Strategy
from spec_decode.model_api import is_batch_invariant
from spec_decode.paged import GraphMode
from tests.factories import make_config, make_latent_config, make_pair, make_request
from tests.spec_decode.engine import engine_helpers
from tests.spec_decode.engine.engine_helpers import kept, pair, requests

SIZES = {"head_dim": 64, "max_positions": 400}


@cache
def bf16_pair(latent):
    """In bfloat16, whose roundings change tokens where a sum's order changes."""
    draft = make_latent_config(**{**SIZES, "head_dim": 64}) if latent else None
    target, draft = make_pair(make_config(**SIZES), draft)
    for model in (target, draft):
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return target, draft


def make_engine(count, *, latent=False, **options):
    options = {"backend": "triton_paged", "max_num_seqs": 4, "batch_invariant": True, **options}
    draft_backend = get("sparse_swa_mla") if latent else None
    return engine_helpers.make_engine(bf16_pair(latent), draft_backend=draft_backend, steps=count, **options)


def requests_at(temperature):
    generator = torch.Generator().manual_seed(5)
    lens = (3, 17, 9, 30, 11)
    prompts = [torch.randint(0, 24, (n,), generator=generator).tolist() for n in lens]
    return [
        make_request(prompt=prompt, max_tokens=7, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]


@cache
def eager(count=3):
    return kept(make_engine(count), requests_at(0.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("latent", [False, True])
def test_bfloat16_text_matches_request_alone(latent, temperature):
    engine, batch = make_engine(3, latent=latent), requests_at(temperature)
    assert kept(engine, batch) == [alone for request in batch for alone in kept(engine, [request])]


@pytest.mark.parametrize("name", ["pard", "dflash", "dspark", "dflash2"])
def test_block_in_batch_drafts_as_alone(name):
    engine, batch = engine_helpers.make_engine(pair(name), batch_invariant=True), requests(6, (0.8,))[1:]
    assert kept(engine, batch) == [alone for request in batch for alone in kept(engine, [request])]


@pytest.mark.parametrize("count", [1, 4])
def test_greedy_bfloat16_text_matches_plain_decoding(count):
    assert [text for text, _ in eager(count)] == [text for text, _ in eager(0)]


STRATEGIES = (Strategy.PER_STEP, Strategy.FULL_LOOP, Strategy.DEVICE_LOOP)
OTHERWISE = {
    **{strategy.value: {"strategy": strategy, "graph_mode": GraphMode.FULL} for strategy in STRATEGIES},
    "prefilled in small chunks": {"max_prefill_tokens": 7},
}


@pytest.mark.parametrize("options", OTHERWISE.values(), ids=OTHERWISE)
def test_capture_and_prefill_options_change_no_token(options):
    assert kept(make_engine(3, **options), requests_at(0.0)) == eager()


def test_preemption_changes_no_token():
    engine = make_engine(3, num_pages=14)
    found = kept(engine, requests_at(0.0))
    assert engine.stats.preemptions > 0
    assert [text for text, _ in found] == [text for text, _ in eager()]


def test_models_run_batch_invariant_only_inside_engine(monkeypatch):
    seen = []
    for model in bf16_pair(False):
        original = model.logits
        monkeypatch.setattr(model, "logits", lambda h, f=original: seen.append(is_batch_invariant()) or f(h))
    kept(make_engine(2), requests_at(0.0)[:1])
    assert seen and all(seen) and not is_batch_invariant()
    seen.clear()
    kept(make_engine(2, batch_invariant=False), requests_at(0.0)[:1])
    assert seen and not any(seen)


def test_backend_without_batch_invariance_is_rejected(monkeypatch):
    backend = get("triton_paged")
    lacking = replace(backend.capabilities, features=backend.capabilities.features - {Feature.BATCH_INVARIANT})
    monkeypatch.setattr(type(backend), "capabilities", lacking)
    with pytest.raises(NoBackend, match="has no batch_invariant"):
        make_engine(2)


def test_model_without_batch_invariance_is_rejected(monkeypatch):
    monkeypatch.setattr(type(bf16_pair(False)[0]), "batch_invariant", property(lambda self: False))
    with pytest.raises(BatchError, match="EagleDraft, which cannot"):
        make_engine(2)
