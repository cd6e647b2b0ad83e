"""Prompts on their way into the caches."""

import pytest
import torch

from attn_backends import get
from spec_decode.engine import Engine
from spec_decode.paged import GraphMode
from tests.factories import engine_config, make_pair, make_request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def draft_caches(max_prefill_tokens):
    """What the draft's caches hold after a prompt and a round."""
    config = engine_config(
        num_speculative_tokens=2, max_num_seqs=1, max_model_len=32, page_size=4, max_prefill_tokens=max_prefill_tokens,
        graph_mode=GraphMode.NONE,
    )  # fmt: skip
    engine = Engine(*make_pair(), get("torch_reference"), config)
    engine.generate([make_request(prompt=PROMPT, max_tokens=2)])
    return [
        part for group in engine.drafter.groups for cache in group.caches.values() for part in (cache.key, cache.value)
    ]


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_the_drafts_caches_after_a_prompt_in_chunks_are_those_after_a_whole_one(chunk):
    found, expected = draft_caches(chunk), draft_caches(512)
    assert all(torch.allclose(mine, its, atol=1e-6) for mine, its in zip(found, expected, strict=True))
