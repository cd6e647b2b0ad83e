"""The scheduler's arithmetic, against a device of a few lines that grows texts at random and is heard of late."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import BatchError
from spec_decode.engine.pages import PagePool
from spec_decode.engine.request import Handle, Request
from spec_decode.engine.scheduler import Scheduler


class Device:
    """Steps a scheduler as the engine does, one round late, and checks what every round may rely on."""

    def __init__(self, scheduler, pool, ahead, seed):
        self.scheduler, self.pool, self.ahead, self.rng = scheduler, pool, ahead, random.Random(seed)
        self.lens, self.news, self.order, self.preempted = {}, [], [], []

    def step(self):
        scheduler = self.scheduler
        scheduler.reap()
        if self.short():
            while self.news:
                self.hear()
            scheduler.reap()
        preempted = False
        while self.short():
            before = set(scheduler.running)
            scheduler.preempt()
            self.preempted += before - set(scheduler.running)
            preempted = True
        scheduler.grow()
        if not preempted:
            scheduler.admit()
        older = len(self.news)
        chunks = scheduler.chunks()
        assert sum(chunk.end - chunk.start for chunk in chunks) <= scheduler._max_prefill_tokens
        done = [chunk.job for chunk in chunks if chunk.last]
        scheduler.advance(chunks)
        for job in done:
            first = not job.handle.generation.token_ids
            self.lens[job] = job.context + 1
            self.news += [("first", job, 1)] if first else []
        scheduler.reap()
        self.round()
        for _ in range(older if scheduler.running else len(self.news)):
            self.hear()

    def round(self):
        for job in self.scheduler.running:
            assert job.shortest <= self.lens[job] <= job.longest
            length = min(self.lens[job], job.max_len)
            assert len(job.pages) * self.pool.page_size >= length + self.ahead
            kept = self.rng.randint(0, max(0, min(self.ahead, job.max_len - length - 1)))
            self.lens[job] += kept + 1
            job.shortest += 1
            job.longest += 1 + self.ahead
            self.news.append(("round", job, kept + 1))

    def hear(self):
        kind, job, count = self.news.pop(0)
        if kind == "round":
            job.shortest += count - 1
            job.longest -= self.ahead + 1 - count
        for _ in range(count):
            if not job.handle.done:
                job.handle.take(0)

    def short(self):
        return sum(self.scheduler.growth().values()) > self.pool.free


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
    pool = PagePool(-(-longest // world["page_size"]) + world["spare_pages"], world["page_size"])
    scheduler = Scheduler(
        pool, max_reqs=world["max_reqs"], num_speculative_tokens=world["ahead"], max_prefill_tokens=world["chunk"]
    )
    handles = [Handle(Request(prompt=[0] * prompt, max_new_tokens=new)) for prompt, new in world["lens"]]
    for handle in handles:
        scheduler.submit(handle)
    device, steps = Device(scheduler, pool, world["ahead"], world["seed"]), 0
    while scheduler.busy or device.news:
        device.step()
        admitted = [*scheduler.running, *scheduler._prefilling]
        owned = [page for job in admitted for page in job.pages]
        assert len(admitted) <= world["max_reqs"]
        assert len(owned) == len(set(owned)) and len(owned) + pool.free == pool.num_pages
        assert all(job.handle is not handles[0] for job in device.preempted)
        steps += 1
        assert steps < 1000
    assert pool.free == pool.num_pages
    assert [len(h.generation.token_ids) for h in handles] == [new for _, new in world["lens"]]


def scheduler_of(num_pages=20, **options):
    options = {"max_reqs": 4, "num_speculative_tokens": 0, "max_prefill_tokens": 8, **options}
    return Scheduler(PagePool(num_pages, 1), **options)


def submitted(scheduler, *prompts):
    handles = [Handle(Request(prompt=[0] * length, max_new_tokens=3)) for length in prompts]
    for handle in handles:
        scheduler.submit(handle)
    scheduler.admit()
    return handles


def test_the_earliest_prompt_is_prefilled_first_and_the_next_gets_what_is_left():
    scheduler = scheduler_of()
    submitted(scheduler, 10, 4)
    assert [(c.start, c.end, c.last) for c in scheduler.chunks()] == [(0, 8, False)]
    scheduler.advance(scheduler.chunks())
    assert [(c.start, c.end, c.last) for c in scheduler.chunks()] == [(8, 10, True), (0, 4, True)]


def test_nobody_overtakes_a_request_that_waits_for_pages():
    scheduler = scheduler_of(num_pages=12)
    submitted(scheduler, 6, 9, 1)
    assert [len(job.text) for job in scheduler._prefilling] == [6]


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
    scheduler.advance(scheduler.chunks())
    [job] = scheduler.running
    for token in (7, 8):
        first.take(token)
    scheduler.preempt()
    assert scheduler.pool.free == 6
    scheduler.admit()
    assert [(c.job, c.start, c.end) for c in scheduler.chunks()] == [(job, 0, 4)]
    assert job.text == [0, 0, 0, 7, 8]


def test_a_pool_gives_no_page_that_it_does_not_have():
    pool = PagePool(3, 4)
    pool.take(2)
    with pytest.raises(BatchError, match="2 pages were asked for and 1 of 3 are free"):
        pool.take(2)
    assert pool.free == 1


@pytest.mark.parametrize("size", [(0, 4), (3, 0)])
def test_a_pool_without_room_is_refused(size):
    with pytest.raises(BatchError, match="1 page or more of 1 token or more"):
        PagePool(*size)
