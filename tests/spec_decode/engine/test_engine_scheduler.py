"""The scheduler's arithmetic, against a device of a few lines that grows texts at random and is read late."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import BatchError
from spec_decode.engine.block_pool import BlockPool
from spec_decode.engine.config import EngineConfig
from spec_decode.engine.request import Handle, Request
from spec_decode.engine.scheduler import Scheduler


class Device:
    """Steps a scheduler as the engine does, one round late, and checks what every round may rely on."""

    def __init__(self, scheduler, pool, ahead, seed):
        self.scheduler, self.pool, self.ahead, self.rng = scheduler, pool, ahead, random.Random(seed)
        self.lens, self.outputs, self.preempted = {}, [], []

    def step(self):
        scheduler = self.scheduler
        scheduler.free_finished()
        if self.short():
            while self.outputs:
                self.read()
            scheduler.free_finished()
        preempted = False
        while self.short():
            before = set(scheduler.running)
            scheduler.preempt()
            self.preempted += before - set(scheduler.running)
            preempted = True
        scheduler.allocate_missing()
        if not preempted:
            scheduler.admit()
        older = len(self.outputs)
        chunks = scheduler.next_chunks()
        assert sum(chunk.end - chunk.start for chunk in chunks) <= scheduler._config.max_prefill_tokens
        done = [chunk.request for chunk in chunks if chunk.last]
        scheduler.chunks_prefilled(chunks)
        for request in done:
            first = not request.handle.generation.token_ids
            self.lens[request] = request.prefill_len + 1
            self.outputs += [("first", request, 1)] if first else []
        scheduler.free_finished()
        self.round()
        for _ in range(older if scheduler.running else len(self.outputs)):
            self.read()

    def round(self):
        for request in self.scheduler.running:
            assert request.len_lower_bound <= self.lens[request] <= request.len_upper_bound
            length = min(self.lens[request], request.max_len)
            assert len(request.pages) * self.pool.page_size >= length + self.ahead
            kept = self.rng.randint(0, max(0, min(self.ahead, request.max_len - length - 1)))
            self.lens[request] += kept + 1
            request.step_enqueued(self.ahead)
            self.outputs.append(("round", request, kept + 1))

    def read(self):
        kind, request, count = self.outputs.pop(0)
        if kind == "round":
            request.step_read(self.ahead, count - 1)
        for _ in range(count):
            if not request.handle.done:
                request.handle.append_token(0)

    def short(self):
        return sum(self.scheduler.missing_pages().values()) > self.pool.num_free


WORLDS = st.fixed_dictionaries(
    {
        "page_size": st.integers(1, 5),
        "spare_pages": st.integers(0, 8),
        "max_reqs": st.integers(1, 4),
        "ahead": st.integers(0, 4),
        "chunk": st.integers(1, 9),
        "lens": st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=7),
        "seed": st.integers(0, 99),
    }
)


@given(WORLDS)
@settings(max_examples=150, deadline=None)
def test_every_request_ends_within_its_pages_whatever_the_device_keeps(world):
    longest = max(prompt + new for prompt, new in world["lens"]) + world["ahead"]
    pool = BlockPool(-(-longest // world["page_size"]) + world["spare_pages"], world["page_size"])
    config = EngineConfig(
        max_reqs=world["max_reqs"], num_speculative_tokens=world["ahead"], max_prefill_tokens=world["chunk"]
    )
    scheduler = Scheduler(pool, config)
    handles = [Handle(Request(prompt=[0] * prompt, max_new_tokens=new)) for prompt, new in world["lens"]]
    for handle in handles:
        scheduler.submit(handle)
    device, steps = Device(scheduler, pool, world["ahead"], world["seed"]), 0
    while scheduler.has_unfinished or device.outputs:
        device.step()
        admitted = [*scheduler.running, *scheduler._prefilling]
        owned = [page for request in admitted for page in request.pages]
        assert len(admitted) <= world["max_reqs"]
        assert len(owned) == len(set(owned)) and len(owned) + pool.num_free == pool.num_pages
        assert all(request.handle is not handles[0] for request in device.preempted)
        steps += 1
        assert steps < 1000
    assert pool.num_free == pool.num_pages
    assert [len(h.generation.token_ids) for h in handles] == [new for _, new in world["lens"]]


def scheduler_of(num_pages=20, **options):
    options = {"max_reqs": 4, "num_speculative_tokens": 0, "max_prefill_tokens": 8, **options}
    return Scheduler(BlockPool(num_pages, 1), EngineConfig(**options))


def submitted(scheduler, *prompts):
    handles = [Handle(Request(prompt=[0] * length, max_new_tokens=3)) for length in prompts]
    for handle in handles:
        scheduler.submit(handle)
    scheduler.admit()
    return handles


def test_the_earliest_prompt_is_prefilled_first_and_the_next_gets_what_is_left():
    scheduler = scheduler_of()
    submitted(scheduler, 10, 4)
    assert [(c.start, c.end, c.last) for c in scheduler.next_chunks()] == [(0, 8, False)]
    scheduler.chunks_prefilled(scheduler.next_chunks())
    assert [(c.start, c.end, c.last) for c in scheduler.next_chunks()] == [(8, 10, True), (0, 4, True)]


def test_nobody_overtakes_a_request_that_waits_for_pages():
    scheduler = scheduler_of(num_pages=12)
    submitted(scheduler, 6, 9, 1)
    assert [len(request.token_ids) for request in scheduler._prefilling] == [6]


def test_a_page_more_for_everybody_admitted_before_is_kept_free():
    scheduler = scheduler_of(num_pages=8)
    submitted(scheduler, 3, 3)
    assert len(scheduler._prefilling) == 1
    scheduler = scheduler_of(num_pages=9)
    submitted(scheduler, 3, 3)
    assert len(scheduler._prefilling) == 2


def test_a_preempted_request_waits_ahead_of_the_others_and_starts_anew_with_its_text():
    scheduler = scheduler_of(num_pages=6)
    first, _ = submitted(scheduler, 3, 2)
    scheduler.chunks_prefilled(scheduler.next_chunks())
    [request] = scheduler.running
    for token in (7, 8):
        first.append_token(token)
    scheduler.preempt()
    assert scheduler.pool.num_free == 6
    scheduler.admit()
    assert [(c.request, c.start, c.end) for c in scheduler.next_chunks()] == [(request, 0, 4)]
    assert request.token_ids == [0, 0, 0, 7, 8]


def test_a_pool_gives_no_page_that_it_does_not_have():
    pool = BlockPool(3, 4)
    pool.allocate(2)
    with pytest.raises(BatchError, match="2 pages were asked for and 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
