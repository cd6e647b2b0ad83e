"""An engine over a target with recurrent layers: slots, rollback, preemption, and states that are lost."""

from functools import cache

import pytest
import torch

from attn_backends import get
from attn_backends.torch_state import TorchState
from builders import BatchError
from spec_decode.engine import Engine
from spec_decode.engine import engine as engine_module
from spec_decode.models import TransformersTarget
from spec_decode.models.load import load_draft
from spec_decode.paged import GraphMode
from spec_decode.trees import DraftTree
from tests.factories import engine_config, make_request
from tests.spec_decode.engine.hybrid_helpers import FAMILIES, NEW, PROMPTS, VOCAB, make_model, wanted
from tests.spec_decode.models.generated import make_causal

FAMILY = "Qwen3_5TextConfig"
TREE = DraftTree((0, 0, 1, 1, 2, 3))


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    @cache
    def pair(family):
        folder, target = tmp_path_factory.mktemp(family), TransformersTarget(make_model(family))
        make_causal(vocab_size=VOCAB, max_position_embeddings=96).write(folder)
        return target, load_draft(folder, target, dtype=torch.float32)

    return pair


@pytest.fixture
def pair(pair_of):
    return pair_of(FAMILY)


def make_engine(pair, *, backend=None, **options):
    """More requests than rows, few pages, and prompts in chunks that cut all but the shortest."""
    few = {"max_num_seqs": 3, "max_model_len": 48, "page_size": 4, "max_prefill_tokens": 7}
    backend = backend or get("torch_reference")
    return Engine(*pair, backend, engine_config(**{**few, "num_speculative_tokens": 3, **options}))


def generate(engine, **options):
    asked = [make_request(prompt=prompt, max_tokens=NEW) for prompt in PROMPTS]
    return [found.token_ids for found in engine.generate(asked, **options)]


OPTIONS = {
    "plain": {"num_speculative_tokens": 0},
    "draft": {},
    "few pages": {"num_pages": 14},
    "tree, few pages": {"num_pages": 18, "tree": TREE},
}
OFTEN = {
    FAMILY: [*OPTIONS],
    "Lfm2Config": [*OPTIONS][2:],
    "NemotronHConfig": [*OPTIONS][3:],
    "KimiLinearConfig": [*OPTIONS][3:],
}


@pytest.mark.parametrize(
    ("family", "mode", "options"),
    [
        pytest.param(family, mode, options, marks=() if often else [pytest.mark.slow, pytest.mark.long])
        for family in FAMILIES
        for mode in GraphMode
        for options in OPTIONS
        if (often := mode is GraphMode.FULL and options in OFTEN.get(family, ())) or family in OFTEN
    ],
)
def test_greedy_texts_match_those_of_transformers(pair_of, family, mode, options):
    options = OPTIONS[options]
    engine = make_engine(pair_of(family), graph_mode=mode, **options)
    assert generate(engine) == wanted(family)
    stats = engine.stats
    assert stats.lost_states == 0 and (stats.preemptions > 0) == ("num_pages" in options)
    assert (stats.accepted > 0) == (engine.config.num_speculative_tokens > 0)


def test_slots_are_as_many_as_requests_at_once(pair):
    engine = make_engine(pair)
    assert [group.num_pages for group in engine.target.groups] == [engine.pool.num_pages, 3]
    assert generate(engine) == generate(engine)  # in the slots of the texts before


@pytest.mark.parametrize("mode", [GraphMode.NONE, GraphMode.FULL])
def test_lost_state_is_computed_again(pair, mode, monkeypatch):
    engine, seen, logged = make_engine(pair, graph_mode=mode), [], []
    monkeypatch.setattr(engine_module._log, "warning", lambda message, count: logged.append(message % count))
    lengths = engine.target.groups[1].lengths

    def lose(index, token):
        seen.append(token)
        if len(seen) in (8, 30):
            lengths.base[engine._batched[0].slot] += 40

    assert generate(engine, on_token=lose) == wanted(FAMILY)
    assert engine.stats.lost_states == engine.stats.preemptions == len(logged) == 2
    assert "states of 1 requests did not fit their lengths" in logged[0]


@pytest.mark.parametrize("at", [4, NEW - 2], ids=["back in its row at once", "dropped as complete"])
def test_only_request_that_loses_its_state_is_finished(pair, at):
    engine, [prompt, *_] = make_engine(pair, max_num_seqs=1, num_speculative_tokens=0), PROMPTS
    lengths, seen = engine.target.groups[1].lengths, []

    def lose(token):
        seen.append(token)
        if len(seen) == at:
            lengths.base.add_(40)

    handle = engine.submit(make_request(prompt=prompt, max_tokens=NEW), on_token=lose)
    while engine.step():
        pass
    assert handle.generation.token_ids == wanted(FAMILY)[0] == seen and engine.stats.lost_states == 1


class Losing(TorchState):
    def end_step(self, lengths, metadata, *, spec):
        super().end_step(lengths, metadata, spec=spec)
        lengths.lost.fill_(1)


def test_request_that_keeps_losing_its_state_is_an_error(pair):
    engine = make_engine(pair, backend={"full": get("torch_reference"), "state": Losing()}, num_speculative_tokens=0)
    with pytest.raises(BatchError, match="a request of 0 new tokens lost its recurrent state again"):
        generate(engine)
