"""Results on cuda:1 while cuda:0 is current equal the CPU's. Needs two GPUs."""

from __future__ import annotations

import pytest
import torch

from attn_backends import AttentionBackend, get, names, registry
from spec_decode.cli.options import available_names
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.paged import GraphMode
from spec_decode.testing.batches import DECODE, VERIFY
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject
from tests.factories import engine_config, make_config, make_pair, make_request
from tests.spec_decode.drafter.drafter_fixture import CAPTURING, advancing, mixed, preplanned

SECOND = torch.device("cuda", 1)
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(autouse=True)
def first_device_is_current() -> None:
    torch.cuda.set_device(0)


@pytest.fixture(params=names())
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param not in available_names(SECOND):
        pytest.skip("is not available here")
    return registry.get(request.param)


@pytest.mark.parametrize("batch", [DECODE, VERIFY], ids=["decode", "verify"])
def test_backend_works_on_second_device(backend: AttentionBackend, batch: object) -> None:
    subject = Subject(backend, SECOND)
    built = BuiltBatch(PagedFixture(subject, subject.base_spec(), batch.rows), batch, horizon=1)  # type: ignore[attr-defined]
    built.expect_attention("as built", cache="as built")
    if batch is DECODE:
        built.advance()
        built.expect_attention("after an advance", cache="after an advance")
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("strategy", [*CAPTURING, Strategy.EAGER])
@pytest.mark.parametrize("make", [advancing, preplanned, mixed])
def test_drafter_on_second_device_matches_cpu(make: object, strategy: Strategy) -> None:
    try:
        there = make(strategy=strategy, device=SECOND)  # type: ignore[operator]
    except ValueError as unsupported:
        pytest.skip(str(unsupported))
    expected = make(strategy=Strategy.EAGER).rounds()  # type: ignore[operator]
    found = there.rounds()
    assert [tokens.tolist() for tokens, _ in found] == [tokens.tolist() for tokens, _ in expected]


@pytest.mark.parametrize("graph_mode", [GraphMode.NONE, GraphMode.FULL])
def test_engine_on_second_device_matches_first(graph_mode: GraphMode) -> None:
    requests = [make_request(prompt=[1, 2, 3 + i], max_tokens=12, seed=i) for i in range(3)]
    texts = []
    for device in (torch.device("cuda", 0), SECOND):
        target, draft = (model.to(device) for model in make_pair(make_config(hidden_size=64, head_dim=64)))
        config = engine_config(
            num_speculative_tokens=3,
            max_num_seqs=3,
            max_model_len=64,
            page_size=4,
            graph_mode=graph_mode,
        )
        engine = Engine(target, draft, get("triton_paged"), config)
        texts.append([generation.token_ids for generation in engine.generate(requests)])
    assert texts[0] == texts[1] and torch.cuda.current_device() == 0
