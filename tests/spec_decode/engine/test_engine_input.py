"""Callers' input and interruptions: an error message, every page returned, and a correct next call."""

import inspect
import sys
import threading
from functools import cache
from pathlib import Path

import pytest
import torch

from builders import BatchError, tables
from spec_decode.engine import Engine, Request
from spec_decode.engine import engine as module
from spec_decode.engine.request import Handle
from spec_decode.engine.target_runner import TargetRunner
from spec_decode.paged import GraphMode
from tests.factories import make_request, resampled
from tests.spec_decode.engine import engine_helpers
from tests.spec_decode.engine.engine_helpers import texts

ENGINE, TABLES = Path(module.__file__).parent, Path(tables.__file__)
REQUESTS = [make_request(prompt=[i, 3, 1], max_tokens=n) for i, n in enumerate([4, 6, 3, 5])]


def make_engine(**options):
    return engine_helpers.make_engine(**{"steps": 2, "max_model_len": 40, "num_pages": 24, **options})


WHOLE = texts(make_engine(), REQUESTS)
LONG = [resampled(request, max_tokens=26 + i) for i, request in enumerate(REQUESTS)]
"""For many interrupts of one run."""
SHORT = [resampled(request, max_tokens=2) for request in REQUESTS[:2]]


@cache
def whole_long():
    return texts(make_engine(), LONG)


def submitted(engine, requests=REQUESTS):
    return [engine.submit(request) for request in requests]


def serve(engine, handles, whole=WHOLE):
    """Steps until every text has ended as it would have; how many steps broke off, each with every page back."""
    broke, num_pages, trace = 0, engine.pool.num_pages, sys.gettrace()
    while not all(handle.done for handle in handles):
        try:
            engine.step()
        except (RuntimeError, KeyboardInterrupt):
            broke += 1
            assert engine.pool.num_free == num_pages
        finally:
            sys.settrace(trace)
    engine.step()
    assert [handle.generation.token_ids for handle in handles] == whole and engine.pool.num_free == num_pages
    assert {handle.generation.finish_reason for handle in handles} == {"length"}
    return broke


def request(**changes):
    return make_request(**{"prompt": [1, 2], "max_tokens": 3, **changes})


REFUSED = {
    "no request": ("say something", "must be a Request, got str"),
    "a prompt of None": (request(prompt=None), "got NoneType. Encode"),
    "a generator": (request(prompt=(i for i in range(3))), "a list, tuple or range of token ids, got generator"),
    "a set": (request(prompt={1, 2}), "got set. Encode"),
    "a dict": (request(prompt={1: 2}), "got dict"),
    "a text": (request(prompt="hello"), "got str.*Encode a text"),
    "bytes": (request(prompt=b"hello"), "got bytes.*Encode a text"),
    "a tensor": (request(prompt=torch.tensor([1, 2])), r"got Tensor.*pass tolist\(\)"),
    "an array": (request(prompt=torch.tensor([1, 2]).numpy()), r"got ndarray.*pass tolist\(\)"),
    "numbers of an array": (request(prompt=list(torch.tensor([1, 2]).numpy())), r"must hold token ids.* at index 0"),
    "mixed types": (request(prompt=[1, "2", None]), "got '2' at index 1"),
    "a truth": (request(prompt=[1, True]), "got True at index 1"),
    "a fraction": (request(prompt=[1.0]), "got 1.0 at index 0"),
    "beyond the vocabulary": (request(prompt=[1, 10**30]), f"got {10**30} at index 1"),
    "sampling in words": (Request(prompt=[1, 2], sampling="greedy"), "SamplingParams as sampling, got str"),
    "stop strings": (request(stop=["end"]), r"has stop strings, \('end',\), but an engine knows only tokens"),
    "two completions": (request(n=2, temperature=1.0), "has n 2, but an engine continues a request once"),
    "a bias of a foreign token": (request(logit_bias={3: 1.0, 24: 1.0}), r"0 to 23.* in logit_bias, got \[24\]"),
    "an empty prompt": (request(prompt=[]), "has an empty prompt. Pass at least one token"),
    "too long": (request(prompt=[1] * 36, max_tokens=5), "has 36 prompt .* 5, together more than max_model_len, 40"),
    "a negative token": (request(prompt=[-1, 3]), "0 to 23, got -1 at index 0"),
    "one token too many": (request(prompt=[1, 24]), "0 to 23, got 24 at index 1"),
    "a foreign stop token": (request(stop_token_ids=[3, 24]), r"stop_token_ids.*got \[24\]"),
    "a negative stop token": (request(stop_token_ids=[-1]), r"stop_token_ids.*got \[-1\]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.mark.parametrize(("wrong", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_request_is_rejected_before_running(engine, wrong, message):
    tokens = []
    with pytest.raises(BatchError, match=f"(?s){message}"):
        engine.submit(wrong)
    with pytest.raises(BatchError, match=f"(?s)request 1 .*{message}"):
        engine.generate([REQUESTS[0], wrong], on_token=lambda index, token: tokens.append(token))
    assert not tokens and not engine.step() and engine.pool.num_free == 24


@pytest.mark.parametrize("wrong", [REQUESTS[0], None, 3])
def test_requests_must_be_a_list(engine, wrong):
    with pytest.raises(BatchError, match=r"a list of requests.*Pass \[request\] for one"):
        engine.generate(wrong)


def test_generator_of_requests_works_after_bad_input(engine):
    assert texts(engine, (request for request in REQUESTS)) == WHOLE


def test_invalid_callback_is_rejected_before_running(engine):
    with pytest.raises(BatchError, match="on_token must be a function of a token, got int"):
        engine.submit(REQUESTS[0], on_token=5)
    with pytest.raises(BatchError, match="an on_token of an index and a token, or None, got list and int"):
        engine.generate(REQUESTS, on_token=5)
    assert not engine.step()


def test_submitted_requests_are_copied_and_may_repeat(engine):
    prompt, stop = list(REQUESTS[0].prompt), set()
    original = make_request(prompt=prompt, max_tokens=4, stop_token_ids=stop)
    handles = [engine.submit(original), engine.submit(original)]
    prompt += [999] * 50
    stop.update(range(99))
    while engine.step():
        pass
    assert [handle.generation.token_ids for handle in handles] == WHOLE[:1] * 2 and engine.pool.num_free == 24


def test_step_in_another_thread_is_rejected():
    engine, raised = make_engine(), []
    handles, recover = submitted(engine), engine._recover

    def beside():
        try:
            engine.step()
        except BatchError as error:
            raised.append(str(error))

    def recover_beside_a_step():
        """What a step does first: here the other thread begins one."""
        engine._recover = recover
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        recover()

    engine._recover = recover_beside_a_step
    assert serve(engine, handles) == 0 and len(raised) == 1 and "by another thread. Only" in raised[0]


def test_cancel_in_another_thread_is_safe_beside_step():
    engine = make_engine()
    handles, run_round = submitted(engine), engine._run_round
    other = engine.submit(REQUESTS[0])

    def cancel_beside_a_round():
        thread = threading.Thread(target=engine.cancel_all, args=([other],))
        thread.start()
        thread.join()
        run_round()

    engine._run_round = cancel_beside_a_round
    assert serve(engine, handles) == 0 and other.generation.finish_reason == "abort"


def test_generate_inside_callback_is_rejected():
    engine, raised = make_engine(), []

    def nested(index, token):
        with pytest.raises(BatchError, match="a step cannot start inside another"):
            engine.generate(REQUESTS[:1])
        raised.append(token)

    assert texts(engine, REQUESTS, on_token=nested) == WHOLE
    assert len(raised) == sum(map(len, WHOLE)) == engine.stats.new_tokens


@pytest.mark.parametrize(
    "options", [{"page_size": 10**9}, {"num_pages": 10**12}, {"max_num_seqs": 10**12, "num_pages": None}]
)
def test_caches_larger_than_memory_are_rejected(options):
    with pytest.raises(BatchError, match=r"\d+ pages of \d+ tokens .* GiB, but cpu has [\d.]+\. Use fewer"):
        make_engine(**options)


def test_eager_target_runs_batches_above_capture_size():
    engine = make_engine()
    runner = engine.target
    engine.target = TargetRunner(
        runner.model, runner.groups, runner.tables, query_len=3, graph_mode=GraphMode.NONE, capture_sizes=[1]
    )
    assert texts(engine, REQUESTS) == WHOLE


def broken_once(monkeypatch, owner, name, at, error):
    """Has the method raise in its call number `at`, before or after it did its work."""
    work, calls = getattr(owner, name), []

    def method(*args, **options):
        calls.append(name)
        if len(calls) == at:
            raise error
        return work(*args, **options)

    monkeypatch.setattr(owner, name, method)


PLACES = {
    "the drafter": lambda engine: (engine.drafter, "propose"),
    "the target": lambda engine: (engine.target, "run"),
    "prefill": lambda engine: (engine._prefill, "run"),
    "the tables": lambda engine: (engine._tables[0], "condense"),
    "the tables of prefill": lambda engine: (engine._prefill._tables, "load"),
    "their growth": lambda engine: (engine._tables[1], "grow"),
    "the batch": lambda engine: (engine._batch, "add"),
    "reading": lambda engine: (engine._outputs, "process_oldest"),
    "pages": lambda engine: (engine.pool, "allocate"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_failed_round_is_recovered_by_next_step(place, monkeypatch):
    engine = make_engine()
    handles = submitted(engine)
    with monkeypatch.context() as context:
        broken_once(context, *place(engine), 1, RuntimeError("broken"))
        assert serve(engine, handles) == 1
    broken_once(monkeypatch, *place(engine), 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.generate(REQUESTS)
    assert engine.pool.num_free == 24 and texts(engine, SHORT) == [text[:2] for text in WHOLE[:2]]


def test_failed_round_after_callback_returns_every_page(monkeypatch):
    after_a_callback = 0
    for at in range(3, 7):
        engine, tokens = make_engine(), []
        for each in REQUESTS:
            engine.submit(each, on_token=tokens.append)
        broken_once(monkeypatch, engine._outputs, "process_oldest", at, RuntimeError("broken"))
        while engine._scheduler.has_unfinished:
            before = len(tokens)
            try:
                engine.step()
            except RuntimeError:
                after_a_callback += len(tokens) > before
                assert engine.pool.num_free == 24
                break
    assert after_a_callback


def test_capture_passes_progress_to_target_and_drafter(monkeypatch):
    engine, seen = make_engine(), []
    for part in (engine.target, engine.drafter):
        monkeypatch.setattr(part, "capture", lambda *_, progress, part=part, **__: seen.append((part, progress)))
    engine.capture(progress=True)
    assert seen == [(engine.target, True), (engine.drafter, True)]


RECOVERY = ("_recover", "restart", "requests", "clear", "reset", "finish_if_full")
"""What puts things right after a step that broke off."""
CANCELLING = ("cancel_all", "cancel", "free_finished", "_free", "free")


@cache
def is_interrupted(filename):
    """Asked for every call of a step, those within torch too."""
    return Path(filename).parent == ENGINE or Path(filename) == TABLES


SOURCE, FIRST = inspect.getsourcelines(Engine._guarded_step)
BLOCKS = [line.strip() for line in SOURCE]
IN_A_STEP = range(FIRST + BLOCKS.index("try:") + 1, FIRST + BLOCKS.index("finally:"))
"""The lines of a step within which an interrupt breaks it off."""


class Interrupt:
    """Raises KeyboardInterrupt at lines of the engine's own code or of its tables', counted while it is started.

    gaps: how many lines to the first, from there to the second, and so on. within: names of the only functions to
    interrupt; without them it is all but RECOVERY. where: the lines that were interrupted.
    """

    def __init__(self, gaps, within=()):
        self.gaps, self.within, self.where = iter(gaps), within, []
        self.left = next(self.gaps)

    def start(self):
        if self.left is not None:
            sys.settrace(self)

    def __call__(self, frame, event, arg):
        code = frame.f_code
        # A generator's frame cannot be interrupted twice.
        mine = is_interrupted(code.co_filename) and not code.co_name.startswith("<")
        # In these no step has begun, or it has ended, and nothing is broken off.
        if mine and code.co_name in ("step", "generate", "_require_exclusive", "_with_lock"):
            return self
        if code is Engine._guarded_step.__code__ and frame.f_lineno not in IN_A_STEP:
            return self
        if not mine or (code.co_name not in self.within if self.within else code.co_name in RECOVERY):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where.append(f"{Path(code.co_filename).name}:{frame.f_lineno}")
                self.left = next(self.gaps, None)
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


IN_TABLES = ("condense", "_allocated_to", "grow", "_write_growth")


@pytest.mark.parametrize(("gaps", "within"), [(range(1, 1000, 17), ()), (range(1, 140, 2), IN_TABLES)])
def test_interrupt_at_any_line_loses_nothing(gaps, within, monkeypatch):
    engine = make_engine(num_pages=14, max_prefill_tokens=4)
    handles, interrupt, step = submitted(engine, LONG), Interrupt(gaps, within), engine.step
    monkeypatch.setattr(engine, "step", lambda: interrupt.start() or step())
    assert serve(engine, handles, whole_long()) == len(interrupt.where) == len(gaps), interrupt.where
    assert len(set(interrupt.where)) > 30


def interrupted_twice(monkeypatch, engine, gaps, within):
    """Every third target step is interrupted, and what follows within these functions after so many lines."""
    work, calls, second = engine.target.run, [], Interrupt(gaps, within)

    def run(*args):
        calls.append(args)
        if len(calls) % 3 == 0 and second.left is not None:
            second.start()
            raise KeyboardInterrupt
        return work(*args)

    monkeypatch.setattr(engine.target, "run", run)
    return second


def test_second_interrupt_during_recovery_loses_nothing(monkeypatch):
    engine, lines = make_engine(), range(1, 36, 2)
    handles, second = submitted(engine, LONG), interrupted_twice(monkeypatch, engine, lines, RECOVERY)
    assert serve(engine, handles, whole_long()) >= len(second.where) == len(lines), second.where


def test_second_interrupt_in_generate_returns_every_page(monkeypatch):
    engine = make_engine()
    for line in range(1, 81, 4):
        with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
            second = interrupted_twice(context, engine, [line], (*RECOVERY, *CANCELLING))
            try:
                engine.generate(REQUESTS)
            finally:
                sys.settrace(None)
        assert second.where and engine.pool.num_free == 24, (line, second.where)
        assert texts(engine, SHORT) == [text[:2] for text in WHOLE[:2]], second.where


def interrupted_three_times(monkeypatch, engine):
    """The third step is interrupted, and so is each of its recoveries."""
    with monkeypatch.context() as context:
        broken_once(context, engine.target, "run", 3, KeyboardInterrupt())
        broken_once(context, engine.pool, "reset", 1, KeyboardInterrupt())
        broken_once(context, engine.pool, "reset", 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                engine.step()


def test_third_interrupt_is_repaired_by_next_step(monkeypatch):
    engine = make_engine()
    handles = submitted(engine)
    interrupted_three_times(monkeypatch, engine)
    assert serve(engine, handles) == 0


def test_third_interrupt_is_repaired_by_cancel_all(monkeypatch):
    engine = make_engine()
    handles = submitted(engine)
    other = engine.submit(request())
    interrupted_three_times(monkeypatch, engine)
    engine.cancel_all([other])
    assert engine.pool.num_free == engine.pool.num_pages and serve(engine, handles) == 0


def test_interrupt_at_full_length_does_not_lengthen_text(monkeypatch):
    engine = make_engine()
    handles, ended, full = submitted(engine), Handle.finish_if_full, []

    def finish_if_full(handle):
        if len(handle.generation.token_ids) == handle.request.sampling.max_tokens and not full:
            full.append(handle)
            raise KeyboardInterrupt
        ended(handle)

    monkeypatch.setattr(Handle, "finish_if_full", finish_if_full)
    assert serve(engine, handles) == 1
