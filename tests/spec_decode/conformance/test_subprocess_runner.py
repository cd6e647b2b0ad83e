"""A backend that crashes, hangs or returns nonsense is named, and its report is complete."""

import os
import sys

import msgspec
import pytest
import torch

from spec_decode.conformance.coverage import EVERYTHING
from spec_decode.conformance.subprocess_runner import TimeLimits, check_isolated
from tests.factories import install_plug_in
from tests.hanging import HANG, UNLIMITED, pass_limits_at
from tests.spec_decode.matrix.evidence import env, report, result

PLAN = report(*(result("not_run", case=str(n)) for n in range(4)), version="7").document()
PRELUDE = f"""
import json, os, signal, sys, time
fd = int(sys.argv[2])
def say(**message): os.write(fd, json.dumps(message).encode() + b"\\n")
plan = json.loads({msgspec.json.encode(PLAN).decode()!r})
def done(n):
    passed = {{**plan["results"][n], "outcome": "pass", "evidence": {{"error_over_budget": "nan"}}}}
    say(result={{**plan, "results": [passed]}})
"""


def run(script: str, **options):
    child = [sys.executable, "-c", PRELUDE + script]
    return check_isolated("k", env=env(), request={"command": "c"}, child=child, **options)


def outcomes(report) -> list[str]:
    return [result.outcome.value for result in report.results]


def test_complete_run_matches_process_and_prints_notes_first():
    events = []
    found = run(
        "say(report=plan, notes=['advance is REBUILD'])\nfor n in range(4): done(n)",
        on_note=events.append,
        on_result=events.append,
    )
    assert outcomes(found) == ["pass"] * 4 and found.version == "7"
    assert events == ["advance is REBUILD", *found.results]


def test_crash_is_error_of_running_check():
    found = run("say(report=plan); done(0); print('kernel fault', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    assert outcomes(found) == ["pass", "error", "not_run", "not_run"]
    assert "SIGSEGV; it printed: kernel fault" in found.results[1].reason
    assert found.results[2].reason == "numerics.right[1] ended the process"


def test_process_exiting_between_checks_is_an_error():
    found = run("say(report=plan); done(0); os._exit(0)")
    assert outcomes(found)[:2] == ["pass", "error"] and "exit status 0" in found.results[1].reason


def test_crash_after_last_check_is_an_error():
    found = run("say(report=plan)\nfor n in range(4): done(n)\nos._exit(3)")
    assert outcomes(found) == ["pass", "pass", "pass", "error"] and "exit status 3" in found.results[3].reason


@pytest.fixture
def hang(tmp_path, monkeypatch):
    """Code that hangs, whereupon a limit of half a second passes."""
    pass_limits_at(tmp_path / "hangs", 0.5, monkeypatch)
    return HANG.format(mark=str(tmp_path / "hangs"))


def test_silent_process_is_killed_at_limit():
    found = run("__import__('threading').Event().wait()", limits=TimeLimits(check=0.3))
    assert outcomes(found) == ["error"] and "limit of 0.3 s for a check" in found.results[0].reason


def test_hanging_check_is_killed_at_limit(hang):
    found = run(f"say(report=plan); done(0); {hang}", limits=TimeLimits(check=0.3))
    assert outcomes(found) == ["pass", "error", "not_run", "not_run"]
    assert "limit of 0.3 s for a check" in found.results[1].reason


def test_slow_backend_is_killed_at_limit(hang):
    found = run(f"say(report=plan); done(0); {hang}", limits=TimeLimits(check=UNLIMITED, backend=0.5))
    assert outcomes(found)[0] == "pass" and outcomes(found)[-1] == "not_run"
    assert any("limit of 0.5 s for a backend" in result.reason for result in found.results)


def test_backend_crashing_at_load_is_named():
    found = run("print('no driver', flush=True); os.abort()")
    assert outcomes(found) == ["error"] and found.results[0].tags == (EVERYTHING,)
    assert found.results[0].check == "contract.loads" and "SIGABRT; it printed: no driver" in found.results[0].reason


def test_processes_started_by_backend_end_with_it(tmp_path, hang):
    os.mkfifo(fifo := str(tmp_path / "fifo"))
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    start = f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 600; echo late'], stdout=open({fifo!r}, 'w'))"
    run(f"{start}; say(report=plan); {hang}", limits=TimeLimits(check=0.2))
    with open(reader) as pipe:
        assert pipe.read() == ""


@pytest.mark.slow
def test_real_process_checks_backend_and_names_its_thread(tmp_path, monkeypatch):
    install_plug_in(
        tmp_path,
        "lent",
        "lent",
        "import threading\n"
        "from attn_backends.torch_reference import TorchReference as Backend\n"
        "threading.Thread(target=threading.Event().wait, name='watcher').start()\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    notes = []
    request = {"device": "cpu", "checks": ["contract.version_matches"], "command": "c"}
    found = check_isolated("lent", env=env(), request=request, on_note=notes.append)
    assert outcomes(found) == ["pass"] and found.env.torch == torch.__version__ and found.claims
    assert "still running after the last check: watcher" in notes[-1]


def test_crash_without_selected_checks_leaves_empty_report():
    found = run("say(report={**plan, 'results': []}); os._exit(3)")
    assert found.results == () and found.version == "7"
