"""Logprobs of a text's tokens equal those of the target over the whole text, however the text was generated."""

from functools import partial

import pytest
import torch
from train_pair.attention import run_target

from builders import BatchError
from spec_decode.paged import GraphMode
from spec_decode.trees import DynamicTreeConfig
from tests.factories import make_request, resampled
from tests.spec_decode.engine import engine_helpers
from tests.spec_decode.engine.engine_helpers import PAIR

WAYS = {
    "plain": {"steps": 0},
    "drafted": {},
    "in graphs": {"graph_mode": GraphMode.FULL},
    "plain in graphs": {"steps": 0, "graph_mode": GraphMode.FULL},
    "in trees": {"graph_mode": GraphMode.FULL, "tree": DynamicTreeConfig(width=2, num_tokens=6)},
    "preempted": {"graph_mode": GraphMode.FULL, "num_pages": 26, "page_size": 1},
}
make_engine = partial(engine_helpers.make_engine, max_model_len=40)


def requests():
    """Of one batch: greedy and hot ones that ask for different numbers of logprobs, and one that asks for none."""
    return [
        make_request(prompt=[i + 1] * (i + 2), max_tokens=9 + i, seed=i, temperature=i / 2, logprobs=count)
        for i, count in enumerate([3, None, 1])
    ]


def dense_logprobs(request, token_ids):
    """fp32 [T, V]: of each token's place in the text, by attention over the whole text."""
    text = [*request.prompt, *token_ids]
    logits = PAIR[0].logits(run_target(PAIR[0], torch.tensor([text]))[0])
    return logits.float().log_softmax(-1)[len(request.prompt) - 1 : -1]


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_match_target_and_change_no_text(way):
    batch = requests()
    engine = make_engine(max_logprobs=4, **WAYS[way])
    found = engine.generate(batch)
    for request, generation in zip(batch, found, strict=True):
        count = request.sampling.logprobs
        assert len(generation.logprobs) == (len(generation.token_ids) if count else 0)
        for token, got, wanted in zip(
            generation.token_ids, generation.logprobs, dense_logprobs(request, generation.token_ids), strict=False
        ):
            values, ids = wanted.topk(count)
            assert list(got) == list(dict.fromkeys([token, *ids.tolist()]))
            assert torch.tensor(list(got.values())).allclose(wanted[list(got)], atol=1e-4)
            assert max(got.values()) == pytest.approx(float(values[0]), abs=1e-4)
    assert (engine.stats.preemptions > 0) == (way == "preempted")
    without = make_engine(**WAYS[way]).generate([resampled(request, logprobs=None) for request in batch])
    assert [g.token_ids for g in without] == [g.token_ids for g in found]
    assert [g.logprobs for g in without] == [[]] * 3


def test_stop_token_has_no_logprobs_entry():
    engine = make_engine(max_logprobs=1)
    (whole,) = engine.generate([make_request(prompt=[1], max_tokens=12, logprobs=1)])
    stop = whole.token_ids[5]
    (ended,) = engine.generate([make_request(prompt=[1], max_tokens=12, logprobs=1, stop_token_ids=[stop])])
    assert ended.finish_reason == "stop" and len(ended.logprobs) == len(ended.token_ids) <= 5


def test_tree_moves_no_logits_without_logprobs(monkeypatch):
    moved, vocab = [], PAIR[0].vocab_size
    gather = torch.Tensor.gather

    def noted(tensor, *args):
        moved.append(tensor.shape)
        return gather(tensor, *args)

    engine = make_engine(tree=DynamicTreeConfig(width=2, num_tokens=6))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "gather", noted)
        engine.generate([make_request(prompt=[1], max_tokens=4)])
    assert moved and not [shape for shape in moved if shape[1:] == (7, vocab)]


def test_more_logprobs_than_maximum_are_rejected():
    with pytest.raises(BatchError, match=r"requests 3 logprobs, more than max_logprobs, 2\. Request fewer, or raise"):
        make_engine(max_logprobs=2).generate(requests())
