"""A text that grows by several tokens at once equals one that grows by each of them in turn."""

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_decode.engine.request import Handle
from tests.factories import make_request

TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def one_by_one(handle, tokens, logprobs):
    """How a text grows by its definition."""
    generation, sampling = handle.generation, handle.request.sampling
    for token, found in zip(tokens, logprobs, strict=True):
        if token in sampling.stop_token_ids:
            generation.finish_reason = "stop"
            return
        generation.token_ids.append(token)
        generation.logprobs.append(found)
        if len(generation.token_ids) == sampling.max_tokens:
            generation.finish_reason = "length"
            return


@given(st.lists(TOKENS, max_size=4), st.sets(st.integers(0, 5), max_size=2), st.integers(1, 12))
def test_tokens_appended_together_end_text_like_single_ones(rounds, stop_ids, max_tokens):
    request = make_request([1], max_tokens=max_tokens, stop_token_ids=frozenset(stop_ids))
    together, alone = Handle(request), Handle(request)
    for tokens in rounds:
        if together.done:
            break
        logprobs, before = (
            [{token: -1.0 - place} for place, token in enumerate(tokens)],
            len(alone.generation.token_ids),
        )
        count = together.append_tokens(tokens, logprobs)
        one_by_one(alone, tokens, logprobs)
        assert astuple(together.generation) == astuple(alone.generation)
        assert count == len(alone.generation.token_ids) - before


@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset({7})])
def test_a_text_without_logprobs_gets_none(stop_ids):
    handle = Handle(make_request([1], max_tokens=4, stop_token_ids=stop_ids))
    assert handle.append_tokens([5, 7]) == (1 if stop_ids else 2) and handle.generation.logprobs == []
