"""Whole texts with drafts that propose a block at once: what plain decoding says, and blocks to the last token."""

import pytest
import torch

from attn_backends import get
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models.load import load_draft
from spec_decode.paged import GraphMode
from tests.factories import engine_config, make_config, make_pair, make_request
from tests.spec_decode.models.generated import make_causal, make_dflash, make_dflash2

PROMPTS = ["The for statement", "def read(path):", "x"]
TARGET = make_pair(make_config(vocab_size=256, head_dim=64, max_positions=512, num_layers=2))[0]
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


def requests(temperatures, new=12):
    return [
        make_request(prompt=encode(prompt), max_tokens=new, seed=3, temperature=temperature)
        for prompt in PROMPTS
        for temperature in temperatures
    ]


def texts(engine, *temperatures):
    return [generation.token_ids for generation in engine.generate(requests(temperatures))]


@pytest.fixture(scope="module")
def plain():
    """What plain decoding says."""
    return texts(make_engine(None, 0), 0.0)


@pytest.mark.parametrize("steps", [1, 7])
def test_a_greedy_text_drafted_in_blocks_is_what_plain_decoding_says(draft, plain, steps):
    """And whole blocks are drafted to its end."""
    engine = make_engine(draft, steps)
    assert texts(engine, 0.0) == plain
    assert not any(int(tables.overflow.sum()) for tables in engine._tables)


def test_one_graph_of_a_whole_round_says_what_eager_says(draft, plain):
    graph, eager = (make_engine(draft, 3, graph_mode=mode) for mode in (GraphMode.FULL, GraphMode.NONE))
    said = texts(graph, 0.0, 0.8)
    assert said == texts(eager, 0.0, 0.8) and said[::2] == plain
    assert graph.plan.strategy is Strategy.FULL_LOOP


def test_a_batch_invariant_text_drafts_in_a_batch_what_it_drafts_alone(draft):
    engine = make_engine(draft, 3, batch_invariant=True, graph_mode=GraphMode.NONE)
    asked = requests([0.8], new=6)
    together = [(made.token_ids, made.accepted) for made in engine.generate(asked)]
    alone = [engine.generate([request])[0] for request in asked]
    assert together == [(made.token_ids, made.accepted) for made in alone]
