"""Engines with every kind of draft, and their texts."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from attn_backends import get
from spec_decode.engine import Engine
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models import SHIPPED_PAIR, load_pair
from spec_decode.models.load import load_draft
from spec_decode.paged import GraphMode
from tests.factories import engine_config, make_config, make_pair, make_request
from tests.spec_decode.models.generated import make_causal, make_dflash, make_dflash2, make_eagle3
from tests.spec_decode.models.generated_mtp import V3_CONFIG, make_mtp

PROMPTS = ["The for statement", "def read(path):", "x", "An assignment to a list"]
PAIR = make_pair()
"""The smallest, with 24 tokens: its draft sometimes agrees."""
TARGET = make_pair(make_config(vocab_size=256, head_dim=64, max_positions=512, num_layers=2))[0]
"""The drafts below were not trained for it: they rarely agree."""
SIZES = {"vocab_size": TARGET.vocab_size, "max_position_embeddings": 512}
BLOCK = {"num_states": 1, "target_hidden": TARGET.hidden_size, "hidden_size": TARGET.hidden_size, **SIZES}
MODULES = {**V3_CONFIG, **SIZES, "num_nextn_predict_layers": 4, "hidden_size": TARGET.hidden_size}


def peagle(draft_vocab):
    return make_eagle3(**BLOCK, mask=(), ptd_token_id=7, eagle_aux_hidden_state_layer_ids=[0], draft_vocab=draft_vocab)


BLOCKS = {
    "pard": make_causal(pard_token=0, **SIZES),
    "dflash": make_dflash(**BLOCK),
    "dspark": make_dflash(**BLOCK, markov_rank=4, enable_confidence_head=True),
    "dflash2": make_dflash2(**BLOCK, group=16),
    "peagle": peagle(100),
}


@cache
def pair(name):
    """Return target and draft: the shipped ones, or a draft of this kind."""
    if name in ("draft", "block_draft"):
        return load_pair(SHIPPED_PAIR, draft=name)
    with TemporaryDirectory() as folder:
        if name == "modules":
            make_mtp(MODULES).write(Path(folder))
        else:
            BLOCKS[name].write(Path(folder))
        return TARGET, load_draft(Path(folder), TARGET, dtype=torch.float32)


def make_engine(pair=PAIR, *, backend="torch_reference", draft_backend=None, steps=3, **options):
    """Make an engine, by default eager, with few rows and small pages; without steps it decodes plainly."""
    options = {"max_num_seqs": 3, "max_model_len": 64, "page_size": 4, "graph_mode": GraphMode.NONE, **options}
    target, draft = pair
    chosen = get(backend) if isinstance(backend, str) else backend
    config = engine_config(num_speculative_tokens=steps, **options)
    return Engine(target, draft, chosen, config, draft_backend=draft_backend)


def requests(new=10, temperatures=(0.0, 0.8), **options):
    """Return one request per prompt and temperature, of several lengths, more than run at once."""
    return [
        make_request(prompt=encode(prompt), max_tokens=new - at, temperature=temperature, seed=3 + at, **options)
        for at, prompt in enumerate(PROMPTS)
        for temperature in temperatures
    ]


def texts(engine, batch, **options):
    return [generation.token_ids for generation in engine.generate(batch, **options)]


def kept(engine, batch):
    """Return the texts, and how many drafts each round kept."""
    return [(generation.token_ids, generation.accepted) for generation in engine.generate(batch)]


def overflows(engine):
    return any(bool(tables.overflow.any()) for tables in engine._tables)
