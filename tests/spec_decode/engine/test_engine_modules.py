"""Whole texts with a prediction module for each draft token: what plain decoding says, whoever runs beside them."""

import pytest
import torch

from attn_backends import get
from builders import BatchError
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models.load import load_draft
from spec_decode.paged import GraphMode
from spec_decode.trees import DynamicTreeConfig
from tests.factories import engine_config, make_config, make_pair, make_request
from tests.spec_decode.models.generated_mtp import V3_CONFIG, v3_modules, write

PROMPTS = ["The for statement", "def read(path):", "x", "A list, like a tuple, holds"]
TARGET = make_pair(make_config(vocab_size=256, max_positions=512, num_layers=2))[0]
CONFIG = {
    **V3_CONFIG,
    "num_nextn_predict_layers": 4,
    "vocab_size": TARGET.vocab_size,
    "hidden_size": TARGET.hidden_size,
    "max_position_embeddings": 512,
}
MOST_KEPT = "synthetic:3"
"""Texts are then drafts for the most part, so that they change with any entry of any module's cache."""


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("modules"), CONFIG, v3_modules(CONFIG, shared=True))
    return load_draft(folder, TARGET, dtype=torch.float32)


def make_engine(draft, steps, **options):
    """Eager, unless it is asked for another mode: graphs say what eager says."""
    options = {"max_num_seqs": 3, "max_model_len": 64, "page_size": 16, "graph_mode": GraphMode.NONE, **options}
    return Engine(TARGET, draft, get("torch_reference"), engine_config(num_speculative_tokens=steps, **options))


def requests(**options):
    return [
        make_request(prompt=encode(prompt), max_tokens=14 - 2 * i, seed=i, **options)
        for i, prompt in enumerate(PROMPTS)
    ]


def texts(engine, **options):
    return [generation.token_ids for generation in engine.generate(requests(**options))]


@pytest.fixture(scope="module")
def alone(draft):
    """The texts of one request after the other, each prefilled in one piece."""
    return texts(make_engine(draft, 4, verification=MOST_KEPT, max_num_seqs=1))


def test_a_tree_of_modules_is_refused(draft):
    with pytest.raises(BatchError, match="goes step by step or proposes a block, this one has a module for each token"):
        make_engine(draft, 4, tree=DynamicTreeConfig(width=4, num_tokens=8))


@pytest.fixture(scope="module")
def plain():
    """What plain decoding says."""
    return texts(make_engine(None, 0))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_greedy_text_drafted_by_modules_is_what_plain_decoding_says(draft, plain, steps):
    """And it is drafted to its end."""
    engine = make_engine(draft, steps, graph_mode=GraphMode.FULL)
    assert texts(engine) == plain
    assert not any(int(tables.overflow.sum()) for tables in engine._tables)


def test_one_graph_of_a_whole_round_says_what_eager_says(draft):
    modes = (GraphMode.FULL, GraphMode.NONE)
    graph, eager = (make_engine(draft, 4, graph_mode=mode, verification=MOST_KEPT) for mode in modes)
    for temperature in (0.0, 0.8):
        assert texts(graph, temperature=temperature) == texts(eager, temperature=temperature)
    assert graph.plan.strategy is Strategy.FULL_LOOP


def test_drafts_do_not_depend_on_who_runs_beside_a_request(draft, alone):
    assert texts(make_engine(draft, 4, verification=MOST_KEPT)) == alone
    assert texts(make_engine(draft, 4, verification=MOST_KEPT, max_num_seqs=2)) == alone


@pytest.mark.parametrize("chunk", [1, 3])
def test_drafts_do_not_depend_on_how_a_prompt_was_split(draft, alone, chunk):
    split = make_engine(draft, 4, verification=MOST_KEPT, max_prefill_tokens=chunk)
    assert texts(split) == alone


def test_drafts_after_a_preemption_are_those_without_one(draft, alone):
    tight = make_engine(draft, 4, verification=MOST_KEPT, page_size=4, num_pages=17)
    assert texts(tight) == alone and tight.stats.preemptions > 0


def test_more_tokens_than_modules_are_refused_before_anything_is_allocated(draft, monkeypatch):
    monkeypatch.setattr(torch, "zeros", None)
    with pytest.raises(BatchError, match=r"at most 4 a round, got num_speculative_tokens 5; .* Lower it to 4 or less"):
        make_engine(draft, 5)
