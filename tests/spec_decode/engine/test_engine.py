"""An engine's texts equal the dense target's, with any draft, streaming, stops or other requests."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import takewhile

import pytest
import torch
from train_pair.attention import causal_attention, run_target
from train_pair.generation import speculate

from spec_decode.drafter import Strategy
from spec_decode.engine import engine as module
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.model_api import DraftInputs
from spec_decode.paged import GraphMode
from spec_decode.verification import BlockVerification
from tests.factories import make_config, make_pair, make_request, resampled
from tests.spec_decode.engine.engine_helpers import PAIR, make_engine, overflows, texts

VOCAB = PAIR[0].config.vocab_size
STOP = frozenset(range(0, VOCAB, 3))


def make_requests(count, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 12, (count,), generator=generator).tolist()
    new = torch.randint(1, 20, (count,), generator=generator).tolist()
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lens]
    return [
        make_request(prompt=prompt, max_tokens=n, seed=index, **options)
        for index, (prompt, n) in enumerate(zip(prompts, new, strict=True))
    ]


def until_stop(token_ids, stop_ids):
    return list(takewhile(lambda token: token not in stop_ids, token_ids))


def dense_greedy(target, request):
    """The continuation by attention over the whole text each time, with no cache, page or batch."""
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        tokens.append(int(target.logits(run_target(target, torch.tensor([tokens])))[0, -1].argmax()))
    return until_stop(tokens[len(request.prompt) :], request.sampling.stop_token_ids)


REQUESTS = [
    *make_requests(4),
    *(resampled(request, stop_token_ids=STOP) for request in make_requests(3, 1)),
    make_request(prompt=[7], max_tokens=10),
    make_request(prompt=[1] * 20, max_tokens=44),
    make_request(prompt=[2, 9], max_tokens=6, stop_token_ids=[9]),
]
"""The last three: a prompt of one token, a text that fills the engine, and a prompt that ends in a stop id."""


@cache
def dense(seed):
    """The pair of this seed, and what its target says."""
    pair = make_pair(seed=seed)
    return pair, [dense_greedy(pair[0], request) for request in REQUESTS]


@pytest.mark.parametrize(
    ("steps", "seed", "verification"),
    [(0, 0, None), (1, 1, None), (3, 0, None), (5, 1, None), (1, 0, "block"), (3, 1, "block")],
)
def test_greedy_texts_match_dense_target(steps, seed, verification):
    pair, wanted = dense(seed)
    engine = make_engine(pair, steps=steps, verification=verification)
    assert texts(engine, REQUESTS) == wanted
    assert engine.pool.num_free == engine.pool.num_pages and not overflows(engine)


@pytest.mark.parametrize("steps", [0, 3])
def test_texts_do_not_depend_on_row_count(steps):
    requests = [resampled(request, temperature=at % 2 * 1.0) for at, request in enumerate(make_requests(6))]
    engine = make_engine(steps=steps)
    wanted = texts(engine, requests)
    assert [len(text) for text in wanted] == [request.sampling.max_tokens for request in requests]
    for other in (engine, *(make_engine(steps=steps, max_num_seqs=rows) for rows in (1, 16))):
        assert texts(other, requests) == wanted
    assert texts(engine, []) == []


def test_seeds_give_different_texts():
    found = texts(make_engine(), [make_request(prompt=[3], max_tokens=20, temperature=1.5, seed=s) for s in range(4)])
    assert len({tuple(text) for text in found}) == 4


@pytest.mark.parametrize("length", [1, 9])
def test_acceptance_matches_pair_without_cache(length):
    # The text is the target's whatever is drafted: only the counts show a draft at a wrong position or sta
    pair = make_pair(make_config(vocab_size=256, num_q_heads=4), context=0.5)
    prompts = ["aardvark!"[:length], "bumblebee"[:length], "crocodile"[:length]]
    rounds = 8
    kept, _ = speculate(*pair, prompts, rounds, 3)
    requests = [make_request(prompt=encode(prompt), max_tokens=4 * rounds) for prompt in prompts]
    results = make_engine(pair).generate(requests)
    first = [accepted for result in results for accepted in result.accepted[:rounds]]
    assert len(first) == rounds * 3 and 0.2 < kept < 2.5
    assert sum(first) / len(first) == pytest.approx(kept)


def test_first_draft_matches_dense_draft_over_prompt(monkeypatch):
    target, draft = make_pair(make_config(num_q_heads=4), context=1.0)
    draft.fuse.weight[:, draft.config.hidden_size :] *= 10
    engine, logits, requests = make_engine((target, draft), max_num_seqs=4), [], make_requests(4)
    propose = engine.drafter.propose

    def spy(verified):
        drafts = propose(verified)
        logits.append(drafts.logits.clone())
        return drafts

    monkeypatch.setattr(engine.drafter, "propose", spy)
    requests = [make_request(prompt=request.prompt, max_tokens=5) for request in requests]
    for request, result, found in zip(requests, engine.generate(requests), logits[0], strict=True):
        hidden = run_target(target, torch.tensor([request.prompt]))[0]
        ids = torch.tensor([*request.prompt[1:], result.token_ids[0]])
        dense = draft.logits(draft(DraftInputs(ids, hidden, torch.arange(len(ids)), causal_attention(1))))[-1]
        torch.testing.assert_close(found[0], dense, rtol=1e-4, atol=1e-5)


class Recording(BlockVerification):
    """Notes the positions at which it is asked for seeds and to verify."""

    def __init__(self):
        self.seeded, self.verified = [], []

    def verify(self, *args, draft_positions, **options):
        self.verified.extend(draft_positions.tolist())
        return super().verify(*args, draft_positions=draft_positions, **options)

    def draft_seeds(self, seeds, draft_positions):
        self.seeded.extend(draft_positions.tolist())
        return super().draft_seeds(seeds, draft_positions)


def test_verification_gets_position_of_each_draft_token(monkeypatch):
    request, recording = make_request(prompt=[3, 1, 4], max_tokens=20, temperature=1.0), Recording()
    monkeypatch.setattr(module, "verifier", lambda name, **options: recording)
    [result] = make_engine().generate([request])
    # The host reads of the end one round late; the positions of that round do not matter.
    verified = [position for position in recording.verified if position < 23]
    # The first token comes from the prompt; each round then adds what it keeps and one more.
    expected = [4 + sum(result.accepted[:index]) + index for index in range(len(result.accepted))]
    assert verified == expected and len(verified) > 3
    # Twice a round: for the draft and for verification.
    assert all(recording.seeded.count(position) == 2 for position in expected)


def test_block_verification_accepts_as_many_as_rejection():
    requests = [request for seed in range(6) for request in make_requests(6, seed, temperature=1.0)]
    kept = {}
    for name in ("rejection", "block"):
        engine = make_engine(verification=name, max_num_seqs=len(requests))
        engine.generate([resampled(request, max_tokens=30) for request in requests])
        kept[name] = engine.stats.mean_accepted
    assert kept["block"] >= 0.97 * kept["rejection"]


GRAPHED = (Strategy.PER_STEP, Strategy.FULL_LOOP, Strategy.DEVICE_LOOP)


def test_strategies_agree_under_block_verification():
    requests = make_requests(4, temperature=1.0)
    modes = [{}, *({"graph_mode": GraphMode.FULL, "strategy": s} for s in GRAPHED)]
    found = [texts(make_engine(verification="block", **m), requests) for m in modes]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    ("max_tokens", "accepted", "mean"),
    [(1, [], 0.0), (2, [0], 0.0), (5, [2, 0], 2.0), (6, [2, 1], 1.5), (31, [2] * 10, 2.0), (32, [2] * 10 + [0], 2.0)],
)
def test_mean_counts_only_rounds_with_draft_room(max_tokens, accepted, mean):
    """After the first token and whole rounds of 3; one with room for the target's own token alone could keep none."""
    engine = make_engine(verification="synthetic:2")
    (generation,) = engine.generate([make_request(prompt=[1, 2], max_tokens=max_tokens)])
    assert generation.accepted == accepted and engine.stats.mean_accepted == mean
    assert engine.stats.drafted_for == len(accepted) and engine.stats.had_room_for == sum(map(bool, accepted))
    assert bool(engine.stats.rounds) == bool(accepted)


@pytest.mark.parametrize("at", [1, 12])
def test_failing_callback_returns_every_page(at):
    engine, tokens = make_engine(), []

    def fail(index, token):
        tokens.append(token)
        if len(tokens) == at:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        engine.generate(make_requests(5), on_token=fail)
    assert engine.pool.num_free == engine.pool.num_pages


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("stop_ids", [frozenset(), STOP], ids=["to the end", "stop ids"])
def test_streaming_delivers_each_text_in_order(stop_ids, steps):
    engine, requests = make_engine(steps=steps, max_logprobs=2), make_requests(5, temperature=1.3, logprobs=2)
    wanted = [until_stop(text, stop_ids) for text in texts(engine, requests)]
    requests = [resampled(request, stop_token_ids=stop_ids) for request in requests]
    found, streamed = [], defaultdict(list)
    for on_token in (None, lambda index, token: streamed[index].append(token)):
        results = engine.generate(requests, on_token=on_token)
        found.append((results, replace(engine.stats, launch_seconds=0)))
    assert found[0] == found[1] and bool(engine.stats.accepted) == bool(steps)
    assert [result.token_ids for result in results] == wanted == [streamed[index] for index in range(5)]
    stopped = sum(result.finish_reason == "stop" for result in results)
    assert engine.stats.new_tokens == sum(map(len, wanted)) + stopped and bool(stopped) == bool(stop_ids)


def test_shorter_request_streams_fully_before_waiting_one():
    order, requests = [], make_requests(3)
    make_engine(max_num_seqs=1).generate(requests, on_token=lambda index, token: order.append(index))
    assert order == sorted(order)


def test_statistics_count_accepted_and_reset_per_call():
    engine, found = make_engine(), []
    for _ in range(2):
        results = engine.generate(make_requests(6))
        kept = [accepted for result in results for accepted in result.accepted]
        assert engine.stats.accepted == sum(kept) and engine.stats.drafted_for == len(kept)
        assert all(0 <= accepted <= 3 for accepted in kept) and 0.2 < engine.stats.mean_accepted < 2.8
        assert engine.stats.launch_seconds > 0 and engine.stats.host_us_a_round > 0
        found.append(engine.stats.rounds)
    assert found[0] == found[1] > 0
