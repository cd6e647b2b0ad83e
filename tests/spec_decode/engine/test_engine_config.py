"""Which settings an engine rejects, and which strategy they lead to."""

from dataclasses import FrozenInstanceError

import pytest

from attn_backends import get
from builders import BatchError
from spec_decode.engine import Engine, EngineConfig
from spec_decode.engine.config import make_pool
from spec_decode.paged import GraphMode
from spec_decode.trees import DraftTree
from tests.factories import engine_config, make_config, make_pair
from tests.spec_decode.engine.engine_helpers import PAIR, make_engine

REFUSED = {
    "a negative number of drafts": ({"num_speculative_tokens": -1}, "num_speculative_tokens must be 1 or more, got -1"),
    "a fraction of a token": ({"num_speculative_tokens": 1.5}, "num_speculative_tokens must be an int, got 1.5"),
    "a truth": ({"max_num_seqs": True}, "max_num_seqs must be an int, got True"),
    "no rows": ({"max_num_seqs": 0}, "max_num_seqs is 0. Pass 1 or more"),
    "fewer than no rows": ({"max_num_seqs": -1}, "max_num_seqs is -1. Pass 1 or more"),
    "no room for a new token": ({"max_model_len": 1}, "max_model_len is 1. Pass 2 or more"),
    "no pages": ({"num_pages": 0}, "num_pages is 0. Pass 1 or more"),
    "pages in parts": ({"num_pages": 2.0}, "num_pages must be an int or None, got 2.0"),
    "empty pages": ({"page_size": 0}, "page_size is 0. Pass 1 or more"),
    "a page in words": ({"page_size": "16"}, "page_size must be an int, got '16'"),
    "a cache dtype of torch": (
        {"kv_cache_dtype": "float8_e4m3fn"},
        "kv_cache_dtype is 'float8_e4m3fn'.* Pass one of auto",
    ),
    "a cache of another format": (
        {"draft_kv_cache_dtype": "fp8_e5m2"},
        "draft_kv_cache_dtype is 'fp8_e5m2'. Did you mean",
    ),
    "a cache dtype that is none": ({"kv_cache_dtype": None}, "kv_cache_dtype must be a string, got None"),
    "no prefill": ({"max_prefill_tokens": 0}, "max_prefill_tokens is 0. Pass 1 or more"),
    "fewer than no logprobs": ({"max_logprobs": -1}, "max_logprobs is -1"),
    "a verification that has no name": ({"verification": 3}, "verification must be a string or None, got 3"),
    "an answer in words": ({"batch_invariant": "no"}, "batch_invariant must be True or False, got 'no'"),
    "a graph mode in words": ({"graph_mode": "none"}, "graph_mode must be of type GraphMode, got 'none'"),
    "a strategy in words": ({"strategy": "full_loop"}, "strategy must be of type Strategy or None, got 'full_loop'"),
    "a confidence in words": ({"min_confidence": "x"}, "min_confidence must be a finite number, got 'x'"),
    "no confidence": ({"min_confidence": float("nan")}, "min_confidence must be a finite number, got nan"),
    "a certainty": ({"min_confidence": 1.0}, "min_confidence must be a probability below 1"),
    "less than no confidence": ({"min_confidence": -0.1}, "min_confidence must be a probability below 1"),
    "a capture size in words": ({"capture_sizes": ["4"]}, "capture_sizes must be ints, got '4'"),
    "no capture size": ({"capture_sizes": []}, "capture_sizes is empty. Pass batch sizes, leave it out"),
    "one capture size": ({"capture_sizes": 4}, "capture_sizes must be of type Sequence or None, got 4"),
    "a memory limit in parts": ({"graph_memory_limit": 1e9}, "graph_memory_limit must be an int or None, got 1000"),
    "a loop of no steps": ({"loop_steps": 0}, "loop_steps must be 1 or more, got 0"),
    "a loop of parts of a step": ({"loop_steps": 1.5}, "loop_steps must be an int, got 1.5"),
    "confidence in a tree": (
        {"min_confidence": 0.5, "tree": DraftTree.chain(3)},
        "min_confidence is 0.5, but a tree keeps",
    ),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_settings_are_rejected(changed, message):
    with pytest.raises(BatchError, match=f"(?s){message}"):
        engine_config(**{"num_speculative_tokens": 3, **changed})


def test_config_is_frozen_and_keyword_only():
    config = engine_config(num_speculative_tokens=3)
    with pytest.raises(FrozenInstanceError):
        config.max_num_seqs = 4
    with pytest.raises(TypeError):
        EngineConfig(3)


def test_default_pool_fits_longest_requests():
    config = engine_config(num_speculative_tokens=3, max_num_seqs=2, max_model_len=30, page_size=16)
    pool = make_pool(config, None)
    assert pool.slots_for(30) == 33 and pool.num_pages == 2 * 3
    assert make_pool(engine_config(num_speculative_tokens=3, num_pages=7), None).num_pages == 7


OTHER_MODELS = {
    "another vocabulary": ({"vocab_size": 30}, {}, "its vocabulary size is 30, this target's 24"),
    "another width": ({"hidden_size": 64}, {}, "its size of target hidden states is .*, this target's"),
    "a shorter draft": ({"max_positions": 60}, {}, "the draft has 60 positions. Pass a max_model_len of at most 56"),
    "a position too many": (
        {},
        {"max_model_len": 157},
        "the target has 160 positions. Pass a max_model_len of at most 156",
    ),
    "more logprobs than tokens": ({}, {"max_logprobs": 25}, "max_logprobs is 25, the target has 24 tokens"),
}


@pytest.mark.parametrize(("draft", "options", "message"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_models_that_do_not_fit_are_rejected(draft, options, message):
    with pytest.raises(BatchError, match=message):
        make_engine((PAIR[0], make_pair(make_config(**draft))[1]), **options)


def test_a_target_without_room_for_a_text_is_rejected():
    target, _ = make_pair(make_config(max_positions=2))
    needs = "max_model_len is 2, and a token after it needs a position too"
    with pytest.raises(BatchError, match=rf"{needs}; the target has 2 positions\. Pass a model with more positions"):
        make_engine((target, None), steps=0, max_model_len=2)


def test_more_drafts_than_positions_are_rejected():
    pair = make_pair(make_config(max_positions=8))
    why = "num_speculative_tokens is 6: a round writes 6 draft tokens after a text, and the target has 8 positions"
    with pytest.raises(BatchError, match=rf"{why}\. Pass fewer\."):
        make_engine(pair, steps=6, max_model_len=2)


def test_speculation_needs_draft_and_backends():
    with pytest.raises(BatchError, match="num_speculative_tokens is 3, but there is no draft model"):
        make_engine((PAIR[0], None))
    with pytest.raises(BatchError, match="KV group 'layers' of the target has no backend among"):
        make_engine(backend={"full": get("torch_reference")})
    with pytest.raises(BatchError, match="KV group 'layers' of the draft has no backend among"):
        make_engine(draft_backend={})
    with pytest.raises(
        BatchError, match=r"backend of the target is 'torch_reference'\. Pass attn_backends\.get\(NAME\)"
    ):
        Engine(PAIR[0], None, "torch_reference", EngineConfig(max_model_len=32))


WRONG_TYPES = {
    "config": (*PAIR, None),
    "target": (PAIR[1], PAIR[1], EngineConfig()),
    "draft": (PAIR[0], PAIR[0], EngineConfig()),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_arguments_of_another_type_are_named(name):
    target, draft, config = WRONG_TYPES[name]
    with pytest.raises(BatchError, match=rf"^{name} must be of type \w+, got \w+\. Pass an instance"):
        Engine(target, draft, get("torch_reference"), config)


def test_capture_sizes_must_reach_max_num_seqs():
    with pytest.raises(BatchError, match=r"capture_sizes end at 2, but up to 3 requests run at once.* Add 3 to"):
        make_engine(graph_mode=GraphMode.FULL, capture_sizes=[1, 2])
    make_engine(graph_mode=GraphMode.FULL, capture_sizes=[3])
    make_engine(graph_mode=GraphMode.NONE, capture_sizes=[1, 2])
