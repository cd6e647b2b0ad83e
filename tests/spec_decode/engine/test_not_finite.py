"""Logits that define no distribution end their own request, with the tokens before them, and touch no other."""

import copy
from types import MethodType

import pytest
import torch

from spec_decode.drafter import Strategy
from spec_decode.paged import GraphMode
from spec_decode.trees import DynamicTreeConfig
from tests.factories import make_request
from tests.spec_decode.engine.engine_helpers import BLOCKS, PAIR, make_engine, overflows, pair

BAD = 5
"""The token after which no logits are sound."""
VOCAB = PAIR[0].vocab_size
LOGITS = {
    "nan": torch.full((VOCAB,), torch.nan),
    "one nan": torch.zeros(VOCAB).index_fill(0, torch.tensor(3), torch.nan),
    "one inf": torch.zeros(VOCAB).index_fill(0, torch.tensor(3), torch.inf),
    "no token": torch.full((VOCAB,), -torch.inf),
}
WAYS = {
    "plain": {"steps": 0},
    "drafted": {},
    "in graphs": {"graph_mode": GraphMode.FULL},
    "in two graphs": {"graph_mode": GraphMode.FULL, "one_graph": False},
    "plain in graphs": {"steps": 0, "graph_mode": GraphMode.FULL},
    "in trees": {"graph_mode": GraphMode.FULL, "tree": DynamicTreeConfig(width=2, num_tokens=6)},
    "in chunks": {"max_prefill_tokens": 2},
    "preempted": {"num_pages": 30, "page_size": 1},
    "a graph per step": {"graph_mode": GraphMode.FULL, "strategy": Strategy.PER_STEP},
    "in pieces": {"graph_mode": GraphMode.PIECEWISE},
    "in a device loop": {"graph_mode": GraphMode.FULL, "strategy": Strategy.DEVICE_LOOP},
    "block": {"verification": "block"},
}


def poisoned(kind):
    """A pair whose target overflows from BAD on, in states and caches, and has these logits there."""
    target, draft = copy.deepcopy(PAIR)
    with torch.no_grad():
        target.embed.weight[BAD] = torch.nan
    sound = type(target).logits

    def logits(self, hidden):
        bad = hidden.isnan().any(-1, keepdim=True)
        return torch.where(bad, LOGITS[kind], sound(self, hidden.nan_to_num(nan=0.0)))

    target.logits = MethodType(logits, target)
    return target, draft


def requests(temperatures=(0.0, 1.0, 0.7), **options):
    """Some meet BAD: in the prompt, at once, later, or as their last token; others never."""
    kinds = [{}, {"top_k": 7}, {"top_p": 0.9}]
    return [
        make_request(
            prompt=[*range(6 + at % 5, 10 + at % 7)] + [BAD] * (at == 7), max_tokens=6 + at, seed=at,
            temperature=temperatures[at % len(temperatures)], logprobs=2, **kinds[at % 3], **options,
        )
        for at in range(12)
    ]  # fmt: skip


def check(batch, sound, found):
    """Each text is the sound one up to BAD; returns how many ended there."""
    ended = 0
    for request, whole, got in zip(batch, sound, found, strict=True):
        text = [*request.prompt, *whole.token_ids]
        end = max(0, text.index(BAD) + 1 - len(request.prompt)) if BAD in text else len(whole.token_ids)
        assert got.token_ids == whole.token_ids[:end]
        assert [next(iter(each)) for each in got.logprobs[:end]] == got.token_ids
        assert got.logprobs[end:] == [{}] * (end < len(whole.token_ids)) and "nan" not in str(got.logprobs)
        assert got.finish_reason == ("not_finite" if end < len(whole.token_ids) else whole.finish_reason)
        ended += end < len(whole.token_ids)
    return ended


OFTEN = ("plain", "in graphs", "in trees", "block")


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        pytest.param(
            way, kind, marks=[] if kind == "one nan" and way in OFTEN else [pytest.mark.slow, pytest.mark.long]
        )
        for way in WAYS
        for kind in LOGITS
        if kind == "one nan" or way in OFTEN
    ],
)
def test_request_ends_at_non_finite_logits(way, kind, capsys):
    # Block verification may keep another number of tokens, so that only greedy texts are the same.
    batch = requests((0.0,) if way == "block" else (0.0, 1.0, 0.7))
    sound = make_engine(max_logprobs=2, **WAYS[way]).generate(batch)
    engine = make_engine(poisoned(kind), max_logprobs=2, **WAYS[way])
    found = engine.generate(batch)
    assert 0 < check(batch, sound, found) < len(batch)
    assert engine.pool.num_free == engine.pool.num_pages and not overflows(engine)
    assert "load it in bfloat16 or float32" in capsys.readouterr().err
    assert (way == "preempted") == (engine.stats.preemptions > 0)
    # The rows and pages that they had serve others.
    others = [at for at, each in enumerate(found) if each.finish_reason != "not_finite"]
    again = engine.generate([batch[at] for at in others])
    assert [each.token_ids for each in again] == [found[at].token_ids for at in others]


def test_callback_gets_tokens_before_non_finite_logits():
    batch, streamed = requests(), [[] for _ in range(12)]
    engine = make_engine(poisoned("nan"), max_logprobs=2)
    found = engine.generate(batch, on_token=lambda at, token: streamed[at].append(token))
    assert streamed == [each.token_ids for each in found]


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_draft_runs_until_host_ends_request(name):
    target, draft = copy.deepcopy(pair(name))
    target.logits = MethodType(lambda self, hidden: hidden.new_full((len(hidden), self.vocab_size), torch.nan), target)
    engine = make_engine((target, draft))
    found = engine.generate([make_request(prompt=[1, 2, 3], max_tokens=9, temperature=t) for t in (0.0, 1.0)])
    assert [(each.token_ids, each.finish_reason) for each in found] == [([], "not_finite")] * 2


@pytest.mark.parametrize("kind", LOGITS)
def test_synthetic_acceptance_ends_within_a_round(kind):
    batch = requests()
    found = make_engine(poisoned(kind), max_logprobs=2, verification="synthetic:1.5").generate(batch)
    met = 0
    for request, each in zip(batch, found, strict=True):
        text = [*request.prompt, *each.token_ids]
        if BAD in text:
            # The drafts that the round accepts after it; and the text can be full by then.
            met += 1
            assert len(text) - text.index(BAD) - 1 <= 3 and each.finish_reason in ("not_finite", "length")
        else:
            assert each.finish_reason == "length"
    assert met


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_nan_draft_logits_change_no_greedy_text(verification):
    batch = requests((0.0,))
    target, draft = copy.deepcopy(PAIR)
    draft.logits = MethodType(lambda self, hidden: target.logits(hidden) * torch.nan, draft)
    wanted = make_engine(steps=0, max_logprobs=2).generate(batch)
    found = make_engine((target, draft), max_logprobs=2, verification=verification).generate(batch)
    assert [(each.token_ids, each.finish_reason) for each in found] == [(w.token_ids, "length") for w in wanted]
