"""A request's biases change its own text as they change the target's logits, however the text is generated."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from train_pair.attention import run_target

from builders import BatchError
from spec_decode.paged import GraphMode
from spec_decode.trees import DynamicTreeConfig
from tests.factories import make_request, resampled
from tests.spec_decode.engine import engine_helpers
from tests.spec_decode.engine.engine_helpers import PAIR, texts

GRAPHS = {"graph_mode": GraphMode.FULL}
WAYS = {
    "plain": {"steps": 0},
    "plain in graphs": {"steps": 0, **GRAPHS},
    "drafted": {},
    "drafted in graphs": GRAPHS,
    "by blocks of drafts": {"verification": "block"},
    "in trees": {**GRAPHS, "tree": DynamicTreeConfig(width=2, num_tokens=6)},
    "batch-invariant": {**GRAPHS, "batch_invariant": True},
    "preempted": {**GRAPHS, "num_pages": 26, "page_size": 1},
}
SOME_WAYS = [
    pytest.param(way, marks=() if way in ("plain", "drafted in graphs", "in trees", "preempted") else pytest.mark.slow)
    for way in WAYS
]
EVERY = range(PAIR[0].vocab_size)
make_engine = partial(engine_helpers.make_engine, max_model_len=40)


def greedy(request, edit):
    """Return a request's greedy text, by attention over the whole text; edit(logits [V], output) changes the logits."""
    sampling, output = request.sampling, []
    while len(output) < sampling.max_tokens:
        states = run_target(PAIR[0], torch.tensor([[*request.prompt, *output]]))[0]
        token = int(edit(PAIR[0].logits(states)[-1].float(), output).argmax())
        if token in sampling.stop_token_ids:
            break
        output.append(token)
    return output


def forbidden_early(request):
    """Return the edit of min_tokens."""
    sampling = request.sampling

    def edit(logits, output):
        if len(output) < sampling.min_tokens:
            logits[[*sampling.stop_token_ids]] = -torch.inf
        return logits

    return edit


def biased(request):
    """Return the edit of logit_bias."""

    def edit(logits, output):
        for token, value in (request.sampling.logit_bias or {}).items():
            logits[token] += value
        return logits

    return edit


def penalised(request):
    """Return the edit of the penalties: the first as `transformers` applies it."""
    sampling, repetition = request.sampling, pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor

    def edit(logits, output):
        text = torch.tensor([[*request.prompt, *output]])
        logits = repetition(float(sampling.repetition_penalty))(text, logits[None].clone())[0]
        for token in output:
            logits[token] -= sampling.frequency_penalty
        for token in {*output}:
            logits[token] -= sampling.presence_penalty
        return logits

    return edit


PENALTIES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.4},
    {},
    {"repetition_penalty": 0.8, "presence_penalty": 1.5, "frequency_penalty": -0.1},
    {"repetition_penalty": 3.0, "frequency_penalty": 2.0},
]


def requests():
    """More than run at once; stop tokens that the text would draw early, with and without min_tokens."""
    return [
        make_request(
            prompt=[at + 1] * (at % 3 + 1), max_tokens=12, stop_token_ids=[*EVERY[at % 3 :: 3]], min_tokens=least
        )
        for at, least in enumerate([5, 0, 12, 1, 0, 8])
    ]


@pytest.mark.parametrize("way", WAYS)
def test_text_draws_no_stop_token_before_min_tokens(way):
    asked, engine = requests(), make_engine(**WAYS[way])
    found = texts(engine, asked)
    assert found == [greedy(request, forbidden_early(request)) for request in asked]
    assert all(len(text) >= request.sampling.min_tokens for text, request in zip(found, asked, strict=True))
    assert (engine.stats.preemptions > 0) == (way == "preempted")


@pytest.mark.parametrize("way", SOME_WAYS)
def test_logit_bias_is_added_at_every_token(way):
    biases = [{3: 2.0, 5: -1e30}, None, dict.fromkeys(EVERY[::2], -5.0), {}, {7: 1e30}, {0: 1.0, 23: 0.5}]
    asked = [
        make_request(prompt=[at + 1] * (at % 3 + 1), max_tokens=12, logit_bias=bias) for at, bias in enumerate(biases)
    ]
    found = texts(make_engine(**WAYS[way]), asked)
    assert found == [greedy(request, biased(request)) for request in asked] and found[4] == [7] * 12


@pytest.mark.parametrize("way", SOME_WAYS)
def test_penalties_count_the_tokens_of_prompt_and_text(way):
    asked = [make_request(prompt=[at + 1] * (at % 3 + 1), max_tokens=12, **each) for at, each in enumerate(PENALTIES)]
    engine = make_engine(**WAYS[way])
    found = texts(engine, asked)
    assert found == [greedy(request, penalised(request)) for request in asked]
    assert (engine.stats.preemptions > 0) == (way == "preempted")
    assert engine.stats.mean_accepted > 0 or not engine.drafter
    # The rows of ended requests leave nothing to others.
    plain = [make_request(prompt=request.prompt, max_tokens=12) for request in asked]
    assert texts(engine, plain) == [greedy(request, lambda logits, output: logits) for request in plain]


def test_preempted_text_counts_each_token_once():
    asked = [
        make_request(prompt=[at + 1] * (at % 3 + 1), max_tokens=20, frequency_penalty=0.1 + at / 50) for at in range(12)
    ]
    engine = make_engine(**WAYS["preempted"])
    assert texts(engine, asked) == [greedy(request, penalised(request)) for request in asked]
    assert engine.stats.preemptions > 3


@pytest.mark.parametrize("way", ["plain", "in trees"])
def test_penalised_draws_equal_those_of_plain_decoding_alone(way):
    asked = [
        make_request(prompt=[at + 1], max_tokens=12, temperature=0.9, seed=at, **each)
        for at, each in enumerate(PENALTIES)
    ]
    together = texts(make_engine(**WAYS[way]), asked)
    assert together == [texts(make_engine(steps=0), [request])[0] for request in asked]


def test_biases_and_min_tokens_add_up(monkeypatch):
    request = make_request(
        prompt=[1], max_tokens=12, min_tokens=6, stop_token_ids=[4, 9], logit_bias={4: 1e4, 9: 1e3, 2: 10.0}
    )
    assert texts(make_engine(), [request]) == [[2] * 6]
    monkeypatch.setattr("spec_decode.engine.config.MAX_BIASES", 4)
    with pytest.raises(BatchError, match=r"has 5 tokens in logit_bias and among the stop tokens.*more than 4"):
        make_engine().submit(request)


@pytest.mark.parametrize("way", SOME_WAYS)
def test_min_tokens_holds_at_any_temperature(way):
    asked = [resampled(request, temperature=0.8, seed=at, top_k=at % 2 * 5) for at, request in enumerate(requests())]
    found = make_engine(**WAYS[way]).generate(asked)
    for request, generation in zip(asked, found, strict=True):
        assert len(generation.token_ids) >= request.sampling.min_tokens
    if way in ("plain", "plain in graphs", "in trees", "preempted"):
        alone = [texts(make_engine(**WAYS[way]), [request])[0] for request in asked]
        assert [generation.token_ids for generation in found] == alone


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("way", SOME_WAYS)
def test_end_tokens_are_forbidden_before_min_tokens_and_then_may_be_ignored(way, temperature):
    engine, sampling = make_engine(**WAYS[way]), {"max_tokens": 8, "temperature": temperature, "logit_bias": {5: 1e4}}
    for least, ignored, reason, tail in ((4, True, "length", [5] * 4), (4, False, "stop", []), (0, False, "stop", [])):
        request = make_request(prompt=[1, 2], min_tokens=least, ignore_eos=ignored, **sampling)
        (found,) = engine.generate([replace(request, end_token_ids=(5,))])
        assert 5 not in found.token_ids[:least] and found.token_ids[least:] == tail and found.finish_reason == reason


@pytest.mark.parametrize("token", [24, -1, None])
def test_end_token_of_another_vocabulary_is_refused(token):
    with pytest.raises(BatchError, match=rf"end tokens from 0 to 23, the model's vocabulary, got \[{token}\]"):
        make_engine().submit(replace(make_request(prompt=[1], ignore_eos=True), end_token_ids=[token]))


@pytest.mark.parametrize(
    ("stop", "told"),
    [(range(24), "every token of the model ends its text"), (range(2), None)],
)
def test_min_tokens_must_leave_tokens_to_draw(stop, told):
    request = make_request(prompt=[1], max_tokens=4, min_tokens=2, stop_token_ids=[*stop])
    if told is None:
        make_engine().submit(request)
    else:
        with pytest.raises(BatchError, match=told):
            make_engine().submit(request)
