"""The scheduler's arithmetic, with a device of a few lines that grows texts at random and is read late."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import BatchError
from spec_decode.engine import scheduler as scheduler_module
from spec_decode.engine.page_pool import PagePool
from spec_decode.engine.request import Handle
from spec_decode.engine.scheduler import Scheduler
from tests.factories import engine_config, make_request


class Device:
    """Runs what a scheduler plans, is read one round late, and checks what every round may rely on."""

    def __init__(self, scheduler, pool, ahead, seed):
        self.scheduler, self.pool, self.ahead, self.rng = scheduler, pool, ahead, random.Random(seed)
        self.lens, self.outputs = {}, []

    @property
    def admitted(self):
        return [*self.scheduler.running, *self.scheduler._prefilling]

    def make_room(self):
        before = self.admitted
        preempted = self.scheduler.make_room(self.read_all)
        left = [request for request in before if not request.finished]
        if preempted:
            assert self.outputs == []
            assert self.admitted == left[: len(left) - preempted] and self.admitted
        else:
            assert self.admitted[: len(left)] == left

    def step(self):
        scheduler = self.scheduler
        self.make_room()
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
                request.handle.append_tokens([0])

    def read_all(self):
        while self.outputs:
            self.read()


WORLDS = st.fixed_dictionaries(
    {
        "page_size": st.integers(1, 5),
        "spare_pages": st.integers(0, 8) | st.integers(0, 100),
        "max_num_seqs": st.integers(1, 4),
        "ahead": st.integers(0, 4),
        "chunk": st.integers(1, 9),
        "lens": st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=7),
        "seed": st.integers(0, 99),
    }
)


def serve(world):
    """Every step's admitted requests, by number, until all have ended; checks what every step may rely on."""
    longest = max(prompt + new for prompt, new in world["lens"])
    num_pages = -(-(longest + world["ahead"]) // world["page_size"]) + world["spare_pages"]
    pool = PagePool(num_pages, world["page_size"], world["ahead"])
    config = engine_config(
        max_num_seqs=world["max_num_seqs"],
        num_speculative_tokens=world["ahead"],
        max_model_len=longest,
        max_prefill_tokens=world["chunk"],
    )
    scheduler = Scheduler(pool, config)
    handles = [Handle(make_request(prompt=[0] * prompt, max_tokens=new)) for prompt, new in world["lens"]]
    for handle in handles:
        scheduler.submit(handle)
    device, admitted = Device(scheduler, pool, world["ahead"], world["seed"]), []
    while scheduler.has_unfinished or device.outputs:
        device.step()
        owned = [page for request in device.admitted for page in request.pages]
        assert len(device.admitted) <= world["max_num_seqs"]
        assert len(owned) == len(set(owned)) and len(owned) + pool.num_free == pool.num_pages
        admitted.append([handles.index(request.handle) for request in device.admitted])
        assert len(admitted) < 1000
    assert pool.num_free == pool.num_pages
    assert [len(h.generation.token_ids) for h in handles] == [new for _, new in world["lens"]]
    return admitted


@given(WORLDS)
@settings(max_examples=150, deadline=None)
def test_pages_allocated_ahead_delay_no_request(world):
    """`serve` also checks that every request ends within its pages."""
    early = serve(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "_ROUNDS_AHEAD", 0)
        assert early == serve(world)


def scheduler_of(num_pages=20, **options):
    options = {"max_num_seqs": 4, "num_speculative_tokens": 0, "max_prefill_tokens": 8, **options}
    return Scheduler(PagePool(num_pages, 1), engine_config(**options))


def submitted(scheduler, *prompts):
    handles = [Handle(make_request(prompt=[0] * length, max_tokens=3)) for length in prompts]
    for handle in handles:
        scheduler.submit(handle)
    scheduler.make_room(lambda: None)
    return handles


def running(scheduler, *prompts):
    """Has them prefilled, and a step of each enqueued."""
    handles = submitted(scheduler, *prompts)
    scheduler.chunks_prefilled(scheduler.next_chunks())
    for request in scheduler.running:
        request.step_enqueued(0)
    return handles


def test_earliest_prompt_is_prefilled_first():
    scheduler = scheduler_of()
    submitted(scheduler, 10, 4)
    assert [(c.start, c.end, c.last) for c in scheduler.next_chunks()] == [(0, 8, False)]
    scheduler.chunks_prefilled(scheduler.next_chunks())
    assert [(c.start, c.end, c.last) for c in scheduler.next_chunks()] == [(8, 10, True), (0, 4, True)]


def test_request_waiting_for_pages_is_not_overtaken():
    scheduler = scheduler_of(num_pages=12)
    submitted(scheduler, 6, 9, 1)
    assert [len(request.token_ids) for request in scheduler._prefilling] == [6]


@pytest.mark.parametrize(("num_pages", "admitted"), [(8, 1), (9, 2)])
def test_one_page_per_admitted_request_stays_free(num_pages, admitted):
    scheduler = scheduler_of(num_pages=num_pages)
    submitted(scheduler, 3, 3)
    assert len(scheduler._prefilling) == admitted


POOLS = {
    # Of the 4 free pages the running request takes one, and 3 are too few for 3 and one more for who runs.
    "that may be short": ({"num_pages": 8}, (3, 2), 5, 0),
    # The first owns its 8 pages before it needs them, and the 8 that are left hold the longest request.
    "that holds the longest in every row": ({"num_pages": 16, "max_num_seqs": 2, "max_model_len": 8}, (5, 7), 8, 1),
}


@pytest.mark.parametrize(("options", "prompts", "pages", "prefilling"), POOLS.values(), ids=POOLS)
def test_running_requests_get_pages_before_admission(options, prompts, pages, prefilling):
    scheduler = scheduler_of(**options)
    running(scheduler, prompts[0])
    submitted(scheduler, prompts[1])
    assert len(scheduler.running[0].pages) == pages and len(scheduler._prefilling) == prefilling


def short_scheduler():
    """Two requests run and a third waits; the pool of 9 pages lacks one for the next round of both."""
    scheduler = scheduler_of(num_pages=9)
    handles = submitted(scheduler, 3, 3, 1)
    scheduler.chunks_prefilled(scheduler.next_chunks())
    for request in scheduler.running:
        request.handle.append_tokens([7])
        request.step_enqueued(0)
        request.handle.append_tokens([8])
    return scheduler, handles


def test_outputs_are_read_before_preemption():
    scheduler, handles = short_scheduler()

    def read():
        handles[0].generation.finish_reason = "stop"

    assert scheduler.make_room(read) == 0
    assert [request.handle for request in scheduler.running] == [handles[1]]


def test_youngest_is_preempted_and_nobody_admitted():
    scheduler, handles = short_scheduler()
    assert scheduler.make_room(lambda: None) == 1
    assert [request.handle for request in scheduler.running] == [handles[0]]
    assert scheduler.next_chunks() == [] and scheduler.pool.num_free == 4


def test_preempted_request_waits_first_with_its_text():
    scheduler, handles = short_scheduler()
    scheduler.make_room(lambda: None)
    handles[0].generation.finish_reason = "abort"
    scheduler.make_room(lambda: None)
    first, second = scheduler.next_chunks()
    assert [first.request.handle, second.request.handle] == handles[1:]
    assert (first.start, first.end, first.request.token_ids) == (0, 4, [0, 0, 0, 7, 8])


def test_pool_never_allocates_more_than_free():
    pool = PagePool(3, 4)
    pool.allocate(2)
    with pytest.raises(BatchError, match="2 pages were requested and 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_restart_clears_cached_state_of_requests():
    scheduler = scheduler_of()
    running(scheduler, 3)
    (request,) = scheduler.running
    scheduler.restart([])
    assert (request.len_lower_bound, request.len_upper_bound, request.num_prefilled, request.pages) == (0, 0, 0, [])
    assert scheduler.pool.num_free == 20 and not scheduler.running and scheduler.has_unfinished
