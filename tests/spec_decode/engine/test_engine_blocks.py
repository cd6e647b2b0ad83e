"""Whole texts with drafts that propose a block at once: what plain decoding says, and blocks to the last token."""

import pytest
import torch

from attn_backends import get
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models import SHIPPED_PAIR, load_pair
from spec_decode.models.load import load_draft
from spec_decode.paged import GraphMode
from tests.factories import engine_config, make_request
from tests.spec_decode.models.generated import make_causal, make_dflash, make_dflash2

PROMPTS = ["The for statement", "def read(path):", "x"]
TARGET = load_pair(SHIPPED_PAIR)[0]
SIZES = {"vocab_size": TARGET.vocab_size, "max_position_embeddings": 512}
CHECKPOINTS = {
    "pard": make_causal(pard_token=0, **SIZES),
    "dflash": make_dflash(num_states=1, target_hidden=TARGET.hidden_size, hidden_size=TARGET.hidden_size, **SIZES),
}
CHECKPOINTS["dspark"] = make_dflash(
    num_states=1, target_hidden=TARGET.hidden_size, hidden_size=TARGET.hidden_size, markov_rank=4, **SIZES
)
CHECKPOINTS["dflash2"] = make_dflash2(
    num_states=1, target_hidden=TARGET.hidden_size, hidden_size=TARGET.hidden_size, group=16, **SIZES
)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def draft(request, tmp_path_factory):
    folder = CHECKPOINTS[request.param].write(tmp_path_factory.mktemp(request.param))
    return load_draft(folder, TARGET, dtype=torch.float32)


def make_engine(draft, steps, **options):
    config = engine_config(num_speculative_tokens=steps, max_num_seqs=3, max_model_len=64, page_size=16, **options)
    return Engine(TARGET, draft, get("torch_reference"), config)


def texts(engine, **options):
    requests = [make_request(prompt=encode(prompt), max_tokens=20, seed=3, **options) for prompt in PROMPTS]
    return [generation.token_ids for generation in engine.generate(requests)]


@pytest.fixture(scope="module")
def plain():
    """What plain decoding says."""
    return texts(make_engine(None, 0))


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_greedy_text_drafted_in_blocks_is_what_plain_decoding_says(draft, plain, steps):
    assert texts(make_engine(draft, steps)) == plain


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_graph_of_a_whole_round_says_what_eager_says(draft, temperature):
    graph = make_engine(draft, 3, graph_mode=GraphMode.FULL)
    eager = make_engine(draft, 3, graph_mode=GraphMode.NONE)
    assert texts(graph, temperature=temperature) == texts(eager, temperature=temperature)
    assert graph.plan.strategy is Strategy.FULL_LOOP


def test_a_request_drafts_whole_blocks_to_the_end_of_its_text(draft):
    engine = make_engine(draft, 7)
    texts(engine)
    assert not any(int(tables.overflow.sum()) for tables in engine._tables)


def test_a_batch_invariant_text_drafts_in_a_batch_what_it_drafts_alone(draft):
    engine = make_engine(draft, 3, batch_invariant=True)
    requests = [make_request(prompt=encode(prompt), max_tokens=8, seed=3, temperature=0.8) for prompt in PROMPTS]
    together = [(made.token_ids, made.accepted) for made in engine.generate(requests)]
    alone = [engine.generate([request])[0] for request in requests]
    assert together == [(made.token_ids, made.accepted) for made in alone]
