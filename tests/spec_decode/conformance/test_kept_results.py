"""A run that ends early keeps its results and resumes from them, never from another run's."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from attn_backends import registry
from spec_decode.cli.main import main
from spec_decode.conformance.kept_results import KeptResults
from spec_decode.conformance.report import Report
from spec_decode.conformance.runner import CheckList, check_list, run
from spec_decode.files import ReportError, parse_json, report_bytes
from spec_decode.testing.outcome import Outcome
from tests.factories import install_plug_in
from tests.forked import fork_isolated

FAMILY = "contract"


class Ended(KeyboardInterrupt):
    """As a signal is: no check catches it."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


def listed() -> CheckList:
    return check_list("torch_reference", device=torch.device("cpu"), families=[FAMILY])


def names() -> list[str]:
    return [check.name for check in listed().checks]


def counting(calls: list[str], end_at: int | None = None) -> CheckList:
    """The list with checks that note their calls; the one of that number ends the run."""
    whole = listed()

    def instead(number: int, name: str) -> dict[str, float]:
        if number == end_at:
            raise Ended
        calls.append(name)
        return {"error": float("nan")}

    checks = [replace(c, run=lambda n=n, c=c: instead(n, c.name)) for n, c in enumerate(whole.checks)]
    return replace(whole, checks=tuple(checks))


def in_env(report: Report, **changes: str) -> Report:
    return msgspec.structs.replace(report, env=msgspec.structs.replace(report.env, **changes))


def end_after_three(target: Path) -> list[str]:
    calls: list[str] = []
    with pytest.raises(Ended):
        run(counting(calls, end_at=3), kept=KeptResults(target))
    return calls


def run_after(target: Path, *, resume: bool = True) -> list[str]:
    """What another run of the same checks runs."""
    after: list[str] = []
    run(counting(after), kept=KeptResults(target, resume=resume))
    return after


def test_ended_run_keeps_results_and_resumes(target: Path) -> None:
    before, after, results = end_after_three(target), [], []
    lines = KeptResults(target).path.read_text().splitlines()
    assert [Report.of(parse_json(line, ""), "").results[0].check for line in lines] == before
    report = run(counting(after), kept=KeptResults(target, resume=True), on_result=results.append)
    assert [result.check for result in report.results] == [*before, *after] == names()
    assert report.counts[Outcome.PASS] == len(report.results) and results == list(report.results)


def test_run_without_resume_starts_again(target: Path) -> None:
    end_after_three(target)
    assert run_after(target, resume=False) == names()


def test_truncated_line_is_run_again(target: Path) -> None:
    end_after_three(target)
    kept = KeptResults(target).path
    kept.write_bytes(kept.read_bytes()[:-9])
    assert run_after(target) == names()[2:]


def test_resume_takes_complete_report_as_is(target: Path) -> None:
    run(counting([]), kept=KeptResults(target)).save(target)
    KeptResults(target).discard()
    assert run_after(target) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: msgspec.structs.replace(r, backend="other"), "backend was torch_reference, is other"),
        (lambda r: msgspec.structs.replace(r, version="0"), "version was .*, is 0"),
        (lambda r: in_env(r, commit="f00"), "commit was .*, is f00"),
        (lambda r: in_env(r, device="H"), "device was .*, is H"),
        (lambda r: msgspec.structs.replace(r, sources={"checks": "0"}), "sources of the checks have changed"),
    ],
)
def test_resume_rejects_results_of_another_run(target: Path, change: object, says: str) -> None:
    end_after_three(target)
    kept = KeptResults(target, resume=True)
    before = kept.path.read_bytes()
    other = listed()
    with pytest.raises(ReportError, match=f"{says}.*Omit --resume"):
        run(replace(other, report=change(other.report)), kept=kept)  # type: ignore[operator]
    assert kept.path.read_bytes() == before


def test_resume_ignores_date(target: Path) -> None:
    end_after_three(target)
    other = listed()
    later = in_env(other.report, date="2099-01-01")
    assert len(KeptResults(target, resume=True).begin(later)) == 3


TERMINATING = """
import os, signal, time
from pathlib import Path
from attn_backends.torch_reference import TorchReference

AT_WORK = Path({at_work!r})

class Backend(TorchReference):
    name = "terminating"
    def write_kv(self, *args):
        if not AT_WORK.exists():
            AT_WORK.write_text(str(os.getpid()))
            os.kill({command}, signal.SIGTERM)
            time.sleep(600)
        super().write_kv(*args)
"""
"""Has the process of the command terminated, once, and says in a file which process was at work then."""


@pytest.fixture
def at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the plug-in that terminates this process, which is on the path of those it forks, too."""
    file = tmp_path / "at_work"
    source = TERMINATING.format(at_work=str(file), command=os.getpid())
    install_plug_in(tmp_path, "terminating", "terminating", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    fork_isolated(monkeypatch)
    # Where nothing else hears the signal, it fails the test instead of ending it with all the others.
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nothing listened for SIGTERM"))
    yield file
    signal.signal(signal.SIGTERM, before)
    sys.modules.pop("terminating", None)


def runs(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


@pytest.mark.parametrize("options", [[], ["--no-isolate"]])
def test_terminated_check_keeps_results_and_ends_children(target: Path, at_work: Path, options: list[str]) -> None:
    only = ["--only", "contract.version_matches", "--only", "contract.c*"]
    command = ["check", "terminating", "--device", "cpu", "--json", str(target), *only, *options]
    ended = CliRunner().invoke(main, command)
    part = KeptResults(target).path
    assert ended.exit_code == 143 and f"results so far are in {part}, continue with --resume" in ended.stderr
    assert len(part.read_bytes().splitlines()) == 2 and not target.exists()
    assert runs(int(at_work.read_text())) is bool(options)
    done = CliRunner().invoke(main, [*command, "--resume"])
    assert done.exit_code == 0 and "3 pass" in done.stdout and Report.load(target).ok and not part.exists()


def test_a_terminated_matrix_ends_its_children(at_work: Path) -> None:
    ended = CliRunner().invoke(
        main, ["matrix", "--run", "terminating", "--device", "cpu", "--tag", "contract:declared"]
    )
    assert ended.exit_code == 143 and "interrupted in terminating" in ended.stderr
    assert not runs(int(at_work.read_text()))


@pytest.mark.parametrize("whole", [True, False], ids=["a whole report", "kept results"])
def test_edited_results_are_rejected(target: Path, whole: bool) -> None:
    report = run(counting([]), kept=KeptResults(target))
    if whole:
        report.save(target)
        KeptResults(target).discard()
    file = target if whole else KeptResults(target).path
    file.write_bytes(file.read_bytes().replace(b'"pass"', b'"xfail"', 1))
    with pytest.raises(ReportError, match="was changed after it was written"):
        run(counting([]), kept=KeptResults(target, resume=True))


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["a folder", "a pipe"])
def test_irregular_results_file_is_rejected_before_running(target: Path, make: object) -> None:
    make(KeptResults(target).path)  # type: ignore[operator]
    with pytest.raises(ReportError, match="is not a regular file"):
        run(counting([], end_at=0), kept=KeptResults(target))


def test_deeply_nested_line_is_rejected(target: Path) -> None:
    KeptResults(target).path.write_text("[" * 100_000 + "\n")
    with pytest.raises(ReportError, match="not valid JSON"):
        run(counting([]), kept=KeptResults(target, resume=True))


def test_rejected_resume_is_one_line_from_subprocess(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_isolated(monkeypatch)
    end_after_three(target)
    part = KeptResults(target).path
    other = [parse_json(line, "") | {"backend": "other"} for line in part.read_bytes().splitlines()]
    part.write_bytes(b"".join(map(report_bytes, other)))
    command = ["check", "torch_reference", "--device", "cpu", "--isolate", "--json", str(target), "--resume"]
    result = CliRunner().invoke(main, [*command, "--only", "contract.version_matches"])
    assert result.exit_code == 2 and "backend was other, is torch_reference" in result.stderr
