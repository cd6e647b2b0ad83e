"""Prompts from graphs: the texts are those of eager prompts."""

import gc
import weakref

import pytest
import torch

from attn_backends import get
from attn_backends.torch_reference import TorchReference
from builders import AdvanceLevel, AdvanceSupport, GraphSupport, HostLengths, ReferenceBuilder
from spec_decode.engine import Engine, EngineConfig
from spec_decode.engine import engine as engine_module
from spec_decode.engine.one_prompt import OnePrompt
from spec_decode.engine.prompt_graphs import ONE_PROMPT, PROMPT, prompt_sizes
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
    """Return the kinds and sizes of the prompts' graphs that run; engines have those of SIZES."""
    seen, replay = [], GraphManager.replay

    def watched(graphs, key, needed):
        seen.extend([key] if key.kind in (PROMPT, ONE_PROMPT) else [])
        replay(graphs, key, needed)

    monkeypatch.setattr(engine_module, "prompt_sizes", lambda *args: SIZES)
    monkeypatch.setattr(GraphManager, "replay", watched)
    return seen


def requests(vocab, **options):
    """Return more requests than run at once, of prompts of 1 to 23 tokens."""
    prompts = [[(7 * i + 5 * j) % vocab for j in range(i)] for i in (1, 4, 3, 9, 8, 3, 23)]
    return [make_request(prompt=prompt, max_tokens=8, **options) for prompt in prompts]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in pieces"])
@pytest.mark.parametrize("options", [{}, {"steps": 0}, {"max_prefill_tokens": 11}, {"num_pages": 20}], ids=str)
def test_texts_are_those_of_eager_prompts(replayed, options, whole, monkeypatch):
    asked = requests(24)
    expected = texts(make_engine(**options), asked)
    assert not replayed
    if not whole:
        monkeypatch.setattr(OnePrompt, "serves", lambda groups, plan: False)
    engine = make_engine(graph_mode=GraphMode.FULL, **options)
    assert texts(engine, asked) == expected and {key.num_reqs for key in replayed} == {*SIZES}
    assert whole or {key.kind for key in replayed} == {PROMPT}


def test_one_prompt_after_another_reads_its_own_cache(replayed):
    """Each arrives alone, in parts, and the graph's buffers hold what the one before left there."""
    prompts = [[(31 * i + 57 * j) % 256 for j in range(length)] for i, length in enumerate((19, 2, 20, 7, 13))]
    asked = [make_request(prompt=prompt, max_tokens=4, temperature=0.8) for prompt in prompts]

    def one_by_one(mode):
        engine = make_engine((TARGET, None), steps=0, graph_mode=mode, max_prefill_tokens=17)
        return [texts(engine, [each]) for each in asked]

    expected = one_by_one(GraphMode.NONE)
    assert not replayed and one_by_one(GraphMode.FULL) == expected
    assert {key.kind for key in replayed} == {ONE_PROMPT} and {key.num_reqs for key in replayed} == {*SIZES}


def test_padding_of_one_prompt_writes_nothing(replayed):
    engine = make_engine(steps=0, graph_mode=GraphMode.FULL)
    engine.capture()
    (group,) = engine.target.groups
    for cache in group.caches.values():
        cache.key.fill_(torch.nan)
    texts(engine, [make_request(prompt=[1, 2, 3, 4, 5], max_tokens=1)])
    written = {int(cache.key.flatten(0, 1)[..., 0, 0].isfinite().sum()) for cache in group.caches.values()}
    assert written == {5} and replayed == [(ONE_PROMPT, 8)]


def test_other_tables_are_served_in_pieces(replayed):
    engine = make_engine(steps=0, graph_mode=GraphMode.FULL)
    engine.capture()
    for tables in (engine._prefill._tables, engine._tables[0]):
        tables.load([[[0, 1]]], [5])
        engine.target.prefill(tables, [5], [5], torch.arange(5))
    assert replayed == [(ONE_PROMPT, 8), (PROMPT, 8)]


def test_batch_invariant_prompts_run_in_pieces(replayed):
    """A graph would split every prompt as the longest one."""
    engine = make_engine((TARGET, None), steps=0, graph_mode=GraphMode.FULL, batch_invariant=True)
    texts(engine, [make_request(prompt=[1, 2, 3], max_tokens=1)])
    assert replayed == [(PROMPT, 8)]


def test_padded_tokens_are_no_uniform_batch(replayed):
    """A builder may take the path of decodes for one."""
    seen = []

    class Watches(ReferenceBuilder):
        def build(self, batch, *, horizon=0):
            seen.append((batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.uniform))
            return super().build(batch, horizon=horizon)

        @classmethod
        def advance_support(cls, spec, device):
            return ReferenceBuilder.advance_support(spec, device)

    backend = type("Theirs", (TorchReference,), {"builder": Watches})()
    make_engine(backend=backend, steps=0, graph_mode=GraphMode.FULL).target.prompts.capture()
    assert set(seen) == {(1, size, size, False) for size in SIZES}


def test_piecewise_mode_keeps_attention_out_of_the_graphs_of_prompts(replayed):
    engine = make_engine((TARGET, None), steps=0, graph_mode=GraphMode.PIECEWISE)
    texts(engine, [make_request(prompt=[1, 2, 3], max_tokens=1)])
    assert replayed == [(PROMPT, 8)]


class Decodes(ReferenceBuilder):
    graph_support = GraphSupport.UNIFORM_BATCH


class Waits(ReferenceBuilder):
    host_lengths = HostLengths.EXACT


class Builds(ReferenceBuilder):
    build_per_round = True


class Rebuilds(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.REBUILD, "a test")


@pytest.mark.parametrize("builder", [Decodes, Waits, Builds, Rebuilds])
def test_attention_that_a_graph_cannot_hold_over_any_batch_stays_outside(replayed, builder):
    backend = type("Theirs", (TorchReference,), {"builder": builder})()
    engine = make_engine(backend=backend, steps=0, graph_mode=GraphMode.FULL)
    texts(engine, [make_request(prompt=[1, 2, 3], max_tokens=1)])
    assert replayed == [(PROMPT, 8)]


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
    assert generate(graph_mode=GraphMode.FULL) == expected and set(replayed) == {(PROMPT, size) for size in SIZES}


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
    """Between the pieces of a graph, attention sees the tokens of the batch alone."""
    engine = make_engine(steps=0, graph_mode=GraphMode.FULL)
    seen = []
    attend = type(engine._groups[0][0].backend).forward

    def forward(backend, query, *args, **options):
        seen.append(len(query))
        return attend(backend, query, *args, **options)

    engine.capture()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine._groups[0][0].backend), "forward", forward)
        texts(engine, [make_request(prompt=prompt, max_tokens=1) for prompt in ([1, 2, 3], [4, 5])])
    assert set(seen) == {5} and replayed == [(PROMPT, 8)]


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
