"""After every step, tables and batch match their requests, even as others join, grow, are preempted or cancelled."""

import random
from functools import cache, partial

import pytest
import torch

from spec_decode.sampling import Sampling
from tests.factories import make_request
from tests.spec_decode.engine import engine_helpers

REQUESTS = [
    make_request(prompt=[i, 3, 1], max_tokens=n, temperature=i % 3 / 2, top_k=i % 2 * 9, top_p=1 - i % 2 / 8, seed=i)
    for i, n in enumerate([15, 9, 17, 4, 13, 10, 3, 14])
]
make_engine = partial(
    engine_helpers.make_engine, max_num_seqs=4, steps=2, max_model_len=40, num_pages=10, max_prefill_tokens=5
)


@cache
def whole(steps):
    """What an engine says that nothing breaks off and that has room."""
    return engine_helpers.texts(make_engine(steps=steps, num_pages=None), REQUESTS)


def check_tables(engine):
    """Compares the tables with what the requests in the batch own; without any, nothing reads them."""
    if not engine._batched:
        return
    owned = [request.pages for request in engine._batched]
    limits = [engine._token_limit(request) for request in engine._batched]
    for tables in engine._tables:
        padded = [pages + [-1] * (tables.max_pages - len(pages)) for pages in owned]
        empty = [[-1] * tables.max_pages] * (tables.max_reqs - len(owned))
        assert tables.block_tables.tolist() == [padded + empty] * tables.num_groups
        assert tables.token_limits.tolist() == limits + [0] * len(empty)
        assert tables.limits_host == tuple(limits) and tables.num_live == len(owned)
        assert tables._allocated == [{page for pages in owned for page in pages}] * tables.num_groups


def check_batch(engine):
    """Compares the rows of the batch with its requests: of the others nothing must be left."""
    batch, requests = engine._batch, [request.handle.request for request in engine._batched]
    if not requests:
        return
    padding = batch.lens.shape[0] - len(requests)
    assert batch.max_lens.tolist() == [request.max_len for request in requests] + [0] * padding
    assert batch.lens[len(requests) :].tolist() == [0] * padding
    expected = Sampling.allocate(batch.lens.shape[0], "cpu")
    expected.load([request.sampling for request in requests])
    assert all(map(torch.equal, batch.sampling.rows, expected.rows))
    if engine.drafter:
        assert torch.equal(engine.drafter.inputs.temperature, expected.temperature)


def run(engine, handles, before_step=lambda: None):
    """Steps to the end with a check after each; how often one broke off."""
    broke = 0
    while any(not handle.done for handle in handles):
        before_step()
        try:
            engine.step()
        except RuntimeError:
            broke += 1
        else:
            check_tables(engine)
            check_batch(engine)
    engine.step()
    assert not engine._batched
    assert engine.pool.num_free == engine.pool.num_pages
    return broke


@pytest.mark.parametrize(("num_pages", "steps"), [(10, 0), (10, 2), (None, 2)])
def test_tables_match_requests_after_every_step(num_pages, steps):
    engine = make_engine(num_pages=num_pages, steps=steps)
    handles = [engine.submit(request) for request in REQUESTS]
    run(engine, handles)
    assert [handle.generation.token_ids for handle in handles] == whole(steps)
    assert bool(engine.stats.preemptions) == bool(num_pages)


def test_requests_that_are_cancelled_leave_the_tables():
    engine, rng, seen = make_engine(), random.Random(1), []
    handles = [engine.submit(request) for request in REQUESTS * 2]

    def cancel_one():
        if rng.random() < 0.4:
            running = [request.handle for request in engine._batched if not request.handle.done]
            if running:
                seen.append(rng.choice(running))
                engine.cancel(seen[-1])

    run(engine, handles, cancel_one)
    assert len(seen) >= 3
    for handle, text_alone in zip(handles, whole(2) * 2, strict=True):
        text = handle.generation.token_ids
        assert text == (text_alone[: len(text)] if handle in seen else text_alone)


PLACES = {
    "before the tables": lambda engine: (engine._prefill, "run"),
    "between the tables": lambda engine: (engine._tables[1], "condense"),
    "before they grow": lambda engine: (engine._tables[0], "grow"),
    "between their growth": lambda engine: (engine._tables[1], "grow"),
    "behind the tables": lambda engine: (engine.target, "run"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_failed_steps_leave_nothing_in_tables(place, monkeypatch):
    engine, rng = make_engine(), random.Random(2)
    owner, name = place(engine)
    work = getattr(owner, name)

    def fails_now_and_then(*args):
        if rng.random() < 0.2:
            raise RuntimeError("broken")
        return work(*args)

    monkeypatch.setattr(owner, name, fails_now_and_then)
    handles = [engine.submit(request) for request in REQUESTS]
    assert run(engine, handles) >= 2
    assert [handle.generation.token_ids for handle in handles] == whole(2)
