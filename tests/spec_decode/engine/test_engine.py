from dataclasses import replace

import pytest
import torch
from train_pair.attention import causal_attention, run_target
from train_pair.generation import speculate

from attn_backends import get
from builders import BatchError
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.engine import engine as module
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.paged import GraphMode
from spec_decode.verification import BlockVerification
from tests.factories import engine_config, make_config, make_pair, make_request, resampled

PAIR = make_pair()
VOCAB = PAIR[0].config.vocab_size
REFERENCE = get("torch_reference")


def make_engine(
    pair=PAIR, *, backend=REFERENCE, draft_backend=None, num_speculative_tokens=3, graph_mode=GraphMode.NONE, **options
):
    options = {"max_num_seqs": 3, "max_model_len": 64, "page_size": 4, **options}
    config = engine_config(num_speculative_tokens=num_speculative_tokens, graph_mode=graph_mode, **options)
    return Engine(*pair, backend, config, draft_backend=draft_backend)


def make_requests(count, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 12, (count,), generator=generator).tolist()
    new = torch.randint(1, 20, (count,), generator=generator).tolist()
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lens]
    return [
        make_request(prompt=prompt, max_tokens=n, seed=index, **options)
        for index, (prompt, n) in enumerate(zip(prompts, new, strict=True))
    ]


def texts(engine, requests, **options):
    return [generation.token_ids for generation in engine.generate(requests, **options)]


def dense_greedy(target, request):
    """The continuation by attention over the whole text each time, with no cache, page or batch."""
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        tokens.append(int(target.logits(run_target(target, torch.tensor([tokens])))[0, -1].argmax()))
    return tokens[len(request.prompt) :]


def test_plain_decoding_says_what_the_dense_target_says():
    requests = make_requests(5)
    assert texts(make_engine(num_speculative_tokens=0), requests) == [dense_greedy(PAIR[0], r) for r in requests]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_greedy_speculation_says_what_plain_decoding_says(steps, seed):
    pair, requests = make_pair(seed=seed), make_requests(6, seed)
    plain = texts(make_engine(pair, num_speculative_tokens=0), requests)
    assert texts(make_engine(pair, num_speculative_tokens=steps), requests) == plain


@pytest.mark.parametrize("strategy", [Strategy.FULL_LOOP, Strategy.PER_STEP])
def test_graphs_say_what_eager_says(strategy):
    requests = make_requests(5, temperature=1.0)
    graphs = make_engine(graph_mode=GraphMode.FULL, strategy=strategy)
    assert texts(graphs, requests) == texts(make_engine(), requests)
    assert graphs.plan.strategy is strategy


def test_triton_paged_says_what_the_reference_says():
    pair, requests = make_pair(make_config(hidden_size=64, head_dim=64)), make_requests(4)
    assert texts(make_engine(pair, backend=get("triton_paged")), requests) == texts(make_engine(pair), requests)


def test_a_draft_on_another_backend_says_the_same():
    pair, requests = make_pair(make_config(hidden_size=64, head_dim=64)), make_requests(4)
    other = make_engine(pair, draft_backend=get("triton_paged"))
    assert texts(other, requests) == texts(make_engine(pair), requests)


def test_a_model_with_a_sliding_window_says_the_same_with_speculation():
    pair, requests = make_pair(make_config(sliding_window=5)), make_requests(5)
    plain = texts(make_engine(pair, num_speculative_tokens=0), requests)
    assert texts(make_engine(pair), requests) == plain


def test_some_drafts_are_kept_and_some_are_not():
    engine = make_engine()
    engine.generate(make_requests(6))
    assert 0.2 < engine.stats.mean_accepted < 2.8


@pytest.mark.parametrize("steps", [0, 3])
def test_a_hot_request_says_the_same_alone_and_beside_others(steps):
    requests = make_requests(6, temperature=1.0)
    together = texts(make_engine(num_speculative_tokens=steps), requests)
    alone = [texts(make_engine(num_speculative_tokens=steps), [request])[0] for request in requests]
    assert alone == together


def test_a_hot_request_says_the_same_twice():
    engine, requests = make_engine(), make_requests(4, temperature=1.0)
    assert texts(engine, requests) == texts(engine, requests)


def test_another_seed_says_something_else():
    said = texts(make_engine(), [make_request(prompt=[3], max_tokens=20, temperature=1.5, seed=s) for s in range(4)])
    assert len({tuple(text) for text in said}) == 4


def test_greedy_and_hot_requests_share_a_batch():
    requests = [make_request(prompt=[5, 6], max_tokens=12, temperature=t, seed=1) for t in (0.0, 1.0, 0.0)]
    together = texts(make_engine(), requests)
    assert together[0] == together[2] == texts(make_engine(), requests[:1])[0]
    assert together[1] == texts(make_engine(), requests[1:2])[0]


@pytest.mark.parametrize("length", [1, 9])
def test_as_much_is_kept_as_when_the_same_pair_speculates_without_a_cache(length):
    # The text is the target's whatever is drafted: only the counts show a draft at a wrong position or sta
    pair = make_pair(make_config(vocab_size=256, num_q_heads=4), context=0.5)
    prompts = ["aardvark!"[:length], "bumblebee"[:length], "crocodile"[:length]]
    rounds = 12
    kept, _ = speculate(*pair, prompts, rounds, 3)
    requests = [make_request(prompt=encode(prompt), max_tokens=50) for prompt in prompts]
    results = make_engine(pair).generate(requests)
    first = [accepted for result in results for accepted in result.accepted[:rounds]]
    assert len(first) == rounds * 3 and 0.2 < kept < 2.5
    assert sum(first) / len(first) == pytest.approx(kept)


def test_the_first_draft_is_the_dense_drafts_over_the_whole_prompt(monkeypatch):
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
        dense = draft.logits(draft(ids, hidden, torch.arange(len(ids)), causal_attention(1)))[-1]
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


def test_verification_gets_the_position_of_each_draft_token(monkeypatch):
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


@pytest.mark.parametrize("steps", [1, 3])
def test_block_verification_says_greedily_what_plain_decoding_says(steps):
    requests = make_requests(6)
    plain = texts(make_engine(num_speculative_tokens=0), requests)
    assert texts(make_engine(num_speculative_tokens=steps, verification="block"), requests) == plain


def test_block_verification_keeps_no_fewer_drafts_than_rejection():
    asked = [request for seed in range(6) for request in make_requests(6, seed, temperature=1.0)]
    kept = {}
    for name in ("rejection", "block"):
        engine = make_engine(verification=name, max_num_seqs=len(asked))
        engine.generate([resampled(request, max_tokens=30) for request in asked])
        kept[name] = engine.stats.mean_accepted
    assert kept["block"] >= 0.97 * kept["rejection"]


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.PIECEWISE])
def test_every_strategy_says_the_same_under_block_verification(strategy):
    requests = make_requests(4, temperature=1.0)
    mode = GraphMode.NONE if strategy is Strategy.EAGER else GraphMode.FULL
    engine = make_engine(verification="block", graph_mode=mode, strategy=strategy)
    assert texts(engine, requests) == texts(make_engine(verification="block"), requests)


def test_synthetic_acceptance_keeps_as_many_as_asked():
    engine = make_engine(verification="synthetic:2")
    # A first token from the prompt, then whole rounds of 3: the last is not cut short by the limit.
    engine.generate([make_request(prompt=[1, 2], max_tokens=31)])
    assert engine.stats.mean_accepted == 2.0


@pytest.mark.parametrize("max_tokens", [2, 5, 32])
def test_a_round_without_room_for_a_draft_token_counts_in_no_mean(max_tokens):
    engine = make_engine(verification="synthetic:2")
    # After the first token and whole rounds of 3, one is left: the last round could keep nothing.
    (made,) = engine.generate([make_request(prompt=[1, 2], max_tokens=max_tokens)])
    whole = (max_tokens - 2) // 3
    assert made.accepted == [2] * whole + [0] and engine.stats.drafted_for == whole + 1
    assert engine.stats.had_room_for == whole and engine.stats.mean_accepted == (2.0 if whole else 0.0)


def test_a_round_with_room_for_some_draft_tokens_counts_whole():
    engine = make_engine(verification="synthetic:2")
    engine.generate([make_request(prompt=[1, 2], max_tokens=6)])
    assert engine.stats.mean_accepted == 1.5  # 2, and 1 of the room for 1


def test_an_unknown_verifier_is_refused():
    with pytest.raises(BatchError, match=r"one of rejection, block, synthetic:MEAN, got 'other'"):
        make_engine(verification="other")


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 16])
def test_any_number_of_rows_gives_the_same_texts_in_order(max_num_seqs, steps):
    requests = make_requests(9)
    wanted = texts(make_engine(max_num_seqs=9, num_speculative_tokens=steps), requests)
    assert texts(make_engine(max_num_seqs=max_num_seqs, num_speculative_tokens=steps), requests) == wanted


@pytest.mark.parametrize("steps", [0, 3])
def test_every_request_says_as_much_as_was_asked(steps):
    requests = make_requests(9)
    said = texts(make_engine(num_speculative_tokens=steps), requests)
    assert [len(text) for text in said] == [request.sampling.max_tokens for request in requests]


def test_every_page_is_returned():
    engine = make_engine()
    before = engine.pool.num_free
    engine.generate(make_requests(9))
    assert engine.pool.num_free == before


def test_pages_are_returned_when_a_callback_fails_on_the_way():
    engine = make_engine()
    before, seen = engine.pool.num_free, []

    def fail(index, token):
        seen.append(token)
        if len(seen) == 12:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        engine.generate(make_requests(5), on_token=fail)
    assert engine.pool.num_free == before


def test_no_request_ever_overflows_its_pages():
    engine = make_engine(max_model_len=30)
    engine.generate(make_requests(9))
    assert all(tables.overflow.eq(0).all() for tables in engine._tables)


def test_a_request_that_fills_the_engine_to_the_brim_is_served():
    request = make_request(prompt=[1] * 20, max_tokens=44)
    assert texts(make_engine(), [request])[0] == texts(make_engine(num_speculative_tokens=0), [request])[0]


def test_no_requests_give_no_results():
    assert make_engine().generate([]) == []


@pytest.mark.parametrize("steps", [0, 3])
def test_a_prompt_of_one_token_is_continued(steps):
    request = make_request(prompt=[7], max_tokens=10)
    assert texts(make_engine(num_speculative_tokens=steps), [request]) == [dense_greedy(PAIR[0], request)]


@pytest.mark.parametrize("steps", [0, 3])
def test_one_new_token_needs_no_round(steps):
    engine = make_engine(num_speculative_tokens=steps)
    assert [len(text) for text in texts(engine, [make_request(prompt=[1, 2], max_tokens=1)])] == [1]
    assert engine.stats.rounds == 0


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_a_stop_id_ends_the_text_and_is_no_part_of_it(steps, at):
    prompt = [2, 9, 4]
    whole = texts(make_engine(num_speculative_tokens=0), [make_request(prompt=prompt, max_tokens=12, temperature=1.3)])[
        0
    ]
    stop = whole[at]
    request = make_request(prompt=prompt, max_tokens=12, stop_token_ids=frozenset([stop]), temperature=1.3)
    said = texts(make_engine(num_speculative_tokens=0), [request])[0]
    assert said == whole[: whole.index(stop)]
    spoken = texts(make_engine(num_speculative_tokens=steps), [request])[0]
    assert stop not in spoken


@pytest.mark.parametrize("steps", [0, 3])
def test_greedy_texts_stop_where_plain_ones_do(steps):
    requests = make_requests(6)
    stop = frozenset(range(0, VOCAB, 3))
    whole = [dense_greedy(PAIR[0], request) for request in requests]
    wanted = [text[: next((i for i, t in enumerate(text) if t in stop), len(text))] for text in whole]
    stopping = [resampled(request, stop_token_ids=stop) for request in requests]
    assert texts(make_engine(num_speculative_tokens=steps), stopping) == wanted


@pytest.mark.parametrize("steps", [0, 3])
def test_a_prompt_that_ends_in_a_stop_id_is_continued(steps):
    request = make_request(prompt=[2, 9], max_tokens=6)
    whole = dense_greedy(PAIR[0], request)
    assert 9 not in whole
    assert texts(make_engine(num_speculative_tokens=steps), [resampled(request, stop_token_ids=[9])]) == [whole]


def test_a_stop_id_that_is_the_last_token_asked_for_is_no_part_of_the_text():
    request = make_request(prompt=[2, 9, 4], max_tokens=6)
    whole = dense_greedy(PAIR[0], request)
    stop = frozenset([whole[-1]])
    said = texts(make_engine(), [make_request(prompt=[2, 9, 4], max_tokens=6, stop_token_ids=stop)])[0]
    assert said == whole[: whole.index(whole[-1])]


@pytest.mark.parametrize("steps", [0, 3])
def test_streaming_tells_each_requests_tokens_in_order(steps):
    streamed, requests = {}, make_requests(7)
    said = texts(
        make_engine(num_speculative_tokens=steps), requests,
        on_token=lambda index, token: streamed.setdefault(index, []).append(token),
    )  # fmt: skip
    assert [streamed[index] for index in range(7)] == said


@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset(range(0, VOCAB, 7))], ids=["to the end", "stop ids"])
def test_streaming_changes_no_text_and_no_total(stop_ids):
    engine, requests = make_engine(max_logprobs=2), make_requests(7, stop_token_ids=stop_ids, logprobs=2)
    found = []
    for on_token in (None, lambda index, token: None):
        results = engine.generate(requests, on_token=on_token)
        found.append((results, replace(engine.stats, launch_seconds=0)))
    assert found[0] == found[1] and found[0][1].accepted > 0
    results, stats = found[0]
    stopped = sum(each.finish_reason == "stop" for each in results)
    assert stats.new_tokens == sum(len(each.token_ids) for each in results) + stopped and bool(stopped) == bool(
        stop_ids
    )


def test_streaming_tells_no_stop_id():
    request = make_request(prompt=[2, 9, 4], max_tokens=10)
    whole, streamed = dense_greedy(PAIR[0], request), []
    stopping = make_request(prompt=[2, 9, 4], max_tokens=10, stop_token_ids=frozenset([whole[3]]))
    said = texts(make_engine(), [stopping], on_token=lambda index, token: streamed.append(token))[0]
    assert streamed == said and whole[3] not in streamed


def test_a_shorter_request_is_told_to_the_end_before_one_that_waits_for_its_row():
    told, requests = [], make_requests(3)
    make_engine(max_num_seqs=1).generate(requests, on_token=lambda index, token: told.append(index))
    assert told == sorted(told)


REFUSED = {
    "an empty prompt": (make_request(prompt=[], max_tokens=3), "needs a prompt and new tokens.*got 0 and 3"),
    "too long": (make_request(prompt=[1] * 60, max_tokens=5), "at most 64 together, got 60 and 5"),
    "out of the vocabulary": (make_request(prompt=[1, VOCAB], max_tokens=3), f"to {VOCAB - 1}, got {VOCAB} at place 1"),
    "a negative token": (make_request(prompt=[-1, 3], max_tokens=3), "got -1 at place 0"),
    "a stop token out of the vocabulary": (
        make_request(prompt=[1], max_tokens=3, stop_token_ids=[3, VOCAB]), rf"stop_token_ids.*got \[{VOCAB}\]"
    ),
    "a negative stop token": (
        make_request(prompt=[1], max_tokens=3, stop_token_ids=[-1]), r"stop_token_ids.*got \[-1\]"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("request_", "message"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_no_row_can_hold_is_refused_before_anything_runs(request_, message):
    told = []
    with pytest.raises(BatchError, match=f"request 1 .*{message}"):
        make_engine().generate(
            [make_request(prompt=[1], max_tokens=3), request_], on_token=lambda index, token: told.append(index)
        )
    assert told == []


def test_an_engine_serves_on_after_a_refusal():
    engine, good = make_engine(), make_request(prompt=[1], max_tokens=3)
    with pytest.raises(BatchError):
        engine.generate([REFUSED["an empty prompt"][0]])
    assert texts(engine, [good]) == texts(make_engine(), [good])


@pytest.mark.parametrize("longest", [157, 400])
def test_an_engine_beyond_the_models_positions_is_refused(longest):
    with pytest.raises(BatchError, match=r"the target has 160 positions\. Pass a max_model_len of at most 156"):
        make_engine(num_speculative_tokens=3, max_model_len=longest)


def test_plain_decoding_has_no_plan_and_no_drafter():
    engine = make_engine(num_speculative_tokens=0)
    assert engine.plan is None and engine.drafter is None


def test_statistics_count_what_was_kept():
    engine = make_engine()
    results = engine.generate(make_requests(6))
    kept = [accepted for result in results for accepted in result.accepted]
    assert engine.stats.accepted == sum(kept) and engine.stats.drafted_for == len(kept)
    assert all(0 <= accepted <= 3 for accepted in kept)
    assert engine.stats.launch_seconds > 0 and engine.stats.host_us_a_round > 0


def test_statistics_start_anew_with_every_call():
    engine, requests = make_engine(), make_requests(3)
    engine.generate(requests)
    first = engine.stats.rounds
    engine.generate(requests)
    assert engine.stats.rounds == first > 0


def test_pages_are_returned_when_a_callback_fails_on_the_first_token():
    engine = make_engine()
    before = engine.pool.num_free

    def fail(index, token):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        engine.generate(make_requests(3), on_token=fail)
    assert engine.pool.num_free == before
