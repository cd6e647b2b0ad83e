"""Prompts from graphs: the texts are those of eager prompts."""

import gc
import weakref

import pytest
import torch

from attn_backends import get
from spec_decode.engine import Engine, EngineConfig
from spec_decode.engine import engine as engine_module
from spec_decode.engine.prompt_graphs import PROMPT, prompt_sizes
from spec_decode.graphs import GraphManager
from spec_decode.models import TransformersTarget
from spec_decode.paged import GraphMode
from tests.factories import engine_config, make_request
from tests.spec_decode.engine.engine_helpers import TARGET, make_engine, texts
from tests.spec_decode.engine.hybrid_helpers import NEW, PROMPTS, make_model

SIZES = [8, 20]
"""Tokens of the graphs. Steps have fewer, as many, and more."""


@pytest.fixture
def replayed(monkeypatch):
    """Return the sizes of the prompts' graphs that run; engines have those of SIZES."""
    seen, replay = [], GraphManager.replay

    def watched(graphs, key, needed):
        seen.extend([key.num_reqs] if key.kind == PROMPT else [])
        replay(graphs, key, needed)

    monkeypatch.setattr(engine_module, "prompt_sizes", lambda *args: SIZES)
    monkeypatch.setattr(GraphManager, "replay", watched)
    return seen


def requests(vocab, **options):
    """Return more requests than run at once, of prompts of 1 to 23 tokens."""
    prompts = [[(7 * i + 5 * j) % vocab for j in range(i)] for i in (1, 4, 3, 9, 8, 3, 23)]
    return [make_request(prompt=prompt, max_tokens=8, **options) for prompt in prompts]


@pytest.mark.parametrize("options", [{}, {"steps": 0}, {"max_prefill_tokens": 11}, {"num_pages": 20}], ids=str)
def test_texts_are_those_of_eager_prompts(replayed, options):
    asked = requests(24)
    expected = texts(make_engine(**options), asked)
    assert not replayed
    engine = make_engine(graph_mode=GraphMode.FULL, **options)
    assert texts(engine, asked) == expected and set(replayed) == {*SIZES}


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=str)
def test_sampled_texts(replayed, options):
    asked = requests(256, temperature=0.8)
    expected = texts(make_engine((TARGET, None), steps=0, **options), asked)
    assert texts(make_engine((TARGET, None), steps=0, graph_mode=GraphMode.FULL, **options), asked) == expected
    assert replayed


@pytest.mark.parametrize("family", ["Qwen3_5TextConfig", "Lfm2Config", "NemotronHConfig"])
def test_recurrent_layers(replayed, family):
    def generate(**options):
        few = {
            "max_num_seqs": 3,
            "max_model_len": 48,
            "page_size": 4,
            "max_prefill_tokens": 20,
            "num_speculative_tokens": 0,
        }
        engine = Engine(target, None, get("torch_reference"), engine_config(**{**few, **options}))
        return texts(engine, [make_request(prompt=prompt, max_tokens=NEW) for prompt in PROMPTS])

    target = TransformersTarget(make_model(family))
    expected = generate(graph_mode=GraphMode.NONE)
    assert not replayed
    assert generate(graph_mode=GraphMode.FULL) == expected and set(replayed) == {*SIZES}


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_dropped_engine_frees_its_caches(replayed, mode):
    """At once: a cycle would keep a GPU full until garbage is collected."""
    engine = make_engine(graph_mode=mode)
    texts(engine, requests(24))
    caches = [weakref.ref(group.caches[0].key) for group in (*engine.target.groups, *engine.drafter.groups)]
    gc.disable()
    try:
        del engine
        assert replayed and [cache() for cache in caches] == [None, None]
    finally:
        gc.enable()


def test_padding_is_never_attended(replayed):
    """Attention sees the tokens of the batch alone."""
    engine = make_engine(steps=0, graph_mode=GraphMode.FULL)
    seen = []
    attend = type(engine._groups[0][0].backend).forward

    def forward(backend, query, *args, **options):
        seen.append(len(query))
        return attend(backend, query, *args, **options)

    engine.capture()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine._groups[0][0].backend), "forward", forward)
        texts(engine, [make_request(prompt=[1, 2, 3, 4, 5], max_tokens=1)])
    assert set(seen) == {5} and replayed == [8]


def test_logits_of_every_number_of_prompts_are_compiled(replayed, monkeypatch):
    engine, seen = make_engine(steps=0, graph_mode=GraphMode.FULL), []
    logits = engine.target.model.logits
    monkeypatch.setattr(engine.target.model, "logits", lambda hidden: seen.append(len(hidden)) or logits(hidden))
    engine.target.prompts.capture()
    assert seen == [1, 2, 3]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, [64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]),
        ({"max_prefill_tokens": 300}, [64, 128, 192, 256, 300]),
        ({"max_num_seqs": 1, "max_model_len": 50}, [50]),
    ],
)
def test_sizes_end_at_a_step(config, sizes):
    assert prompt_sizes(EngineConfig(**config), torch.device("cuda")) == sizes
    assert prompt_sizes(EngineConfig(**config), torch.device("cpu")) == []
