"""The engine's run on a GPU, small and on the CPU: it passes for an engine that is right, and not for wrong texts."""

import json
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from train_pair.attention import run_target

from attn_backends import NoBackend, get
from scripts import engine_run
from spec_decode.engine import Finish, Generation, Handle, Request

CPU = torch.device("cpu")
CONFIG = engine_run.RunConfig(get("triton_paged"), torch.float32, CPU, page_size=1)
GREEDY = Request(prompt=list(b"def "), max_new_tokens=6)


def busy_run_of(*handles):
    return engine_run.BusyRun("rejection", list(handles), None, 1.0, 0, {"preemptions": 1, "finished": {"stop": 1}})


@cache
def alone():
    return CONFIG.make_engine(CONFIG.load_pair(), "rejection", max_reqs=1)


def finished(request, **changes):
    generation = alone().generate([request])[0]
    return Handle(request, generation=replace(generation, **changes))


def compared(handle):
    noisy = engine_run.NoisyEngine(CONFIG, "rejection")
    return engine_run.compare(busy_run_of(handle), [handle], alone(), noisy)


def test_a_run_serves_every_kind_of_request_and_reports_no_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_run, "POOL", 120)
    monkeypatch.setattr(engine_run, "MAX_REQS", 8)
    path = tmp_path / "run.json"

    engine_run.main(["--requests", "40", "--sample", "4", "--device", "cpu", "--json", str(path)])

    report = json.loads(path.read_text())
    assert report["dtype"] == "float32" and [row["verification"] for row in report["rows"]] == ["rejection", "block"]
    for row in report["rows"]:
        assert sum(row["finished"].values()) == row["requests"] == 20
        assert row["preemptions"] > 0 and row["sample"]["equal"] == 2


def test_a_text_that_is_not_its_own_fails_the_run(monkeypatch):
    monkeypatch.setattr(engine_run, "TRIES", 6)
    handle = finished(GREEDY)
    handle.generation.token_ids[3] += 1

    sample = compared(handle)

    assert [row["token"] for row in sample.wrong] == [3] and not sample.equal and not sample.excused
    assert "1 texts differ from those decoded alone" in engine_run.problems_of(busy_run_of(handle), sample)


def test_a_cancelled_text_is_held_to_its_own_as_far_as_it_went():
    own = finished(GREEDY).generation.token_ids
    short = Handle(GREEDY, generation=Generation(own[:3], finish=Finish.CANCELLED))
    cut = Handle(GREEDY, generation=Generation(own[:3], finish=Finish.LENGTH))

    assert (compared(short).equal, compared(cut).equal) == (1, 0)


@pytest.mark.parametrize(("noise", "tries", "excused"), [(0.05, 32, True), (1e-4, 6, False)])
def test_a_difference_is_excused_where_noise_of_that_size_tips_the_decision_only(noise, tries, excused, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(engine_run, "TRIES", tries)
    monkeypatch.setitem(engine_run.NOISE, torch.float32, noise)
    handle, target = finished(GREEDY), CONFIG.load_pair().target
    logits = target.logits(run_target(target, torch.tensor([GREEDY.prompt]))[0, -1])
    handle.generation.token_ids[0] = int(logits.topk(2).indices[1])

    sample = compared(handle)

    assert (len(sample.excused), len(sample.wrong)) == (excused, not excused)


def test_a_run_in_which_something_never_happened_is_no_proof():
    busy_run = busy_run_of(finished(GREEDY))
    busy_run.counts["preemptions"] = 0
    busy_run.pages_lost = 2

    found = engine_run.problems_of(busy_run, engine_run.Sample(greedy=1, equal=1))

    assert found == ["2 pages did not come back", "nobody was preempted", "nobody was cancelled"]


def test_requests_are_of_every_kind():
    requests = engine_run.make_requests(200, random.Random(0))

    assert {r.temperature for r in requests} == {0.0, 1.0} and {bool(r.stop_ids) for r in requests} == {True, False}
    assert {r.top_k > 0 for r in requests} == {r.top_p < 1 for r in requests} == {True, False}


def test_a_backend_that_cannot_serve_the_pair_is_refused_with_its_reasons():
    with pytest.raises(NoBackend, match=r"triton_mla refuses: torch\.float32: .*; torch\.bfloat16: "):
        engine_run.dtype_for("triton_mla", 16, CPU)
