"""The shipped pair's texts are the same alone and in a batch that chunks, waits and preempts."""

from functools import cache

import pytest

from attn_backends import get
from spec_decode.engine import Engine
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models import SHIPPED_PAIR, load_pair
from spec_decode.paged import GraphMode
from spec_decode.testing.held_out_text import held_out_prompts
from tests.factories import engine_config, make_request


@cache
def pair():
    return load_pair(SHIPPED_PAIR)


def requests(temperature):
    prompts = [encode(text) for text in held_out_prompts(4, 16)]
    return [
        make_request(prompt=prompt[: 16 - 2 * index], max_tokens=14 + index, temperature=temperature, seed=index)
        for index, prompt in enumerate(prompts)
    ]


def make_engine(steps=4, **options):
    config = engine_config(
        num_speculative_tokens=steps, max_model_len=64, page_size=4, graph_mode=GraphMode.NONE, **options
    )
    return Engine(*pair(), get("triton_paged"), config)


def texts(engine, requests):
    return [generation.token_ids for generation in engine.generate(requests)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verification", ["rejection", "block", "synthetic:2"])
def test_a_crowded_engine_says_what_each_request_says_alone(verification, temperature):
    asked = requests(temperature)
    crowded = make_engine(verification=verification, max_num_seqs=4, num_pages=18, max_prefill_tokens=20)
    single = make_engine(verification=verification, max_num_seqs=1)
    said = texts(crowded, asked)
    assert said == [texts(single, [request])[0] for request in asked]
    assert crowded.stats.preemptions > 0 and crowded.pool.num_free == 18
    if temperature == 0 and verification != "synthetic:2":
        assert said == texts(make_engine(steps=0, max_num_seqs=3), asked)
