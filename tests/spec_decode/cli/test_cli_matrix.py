import json
from types import SimpleNamespace

import msgspec
import pytest

from spec_decode.conformance.coverage import EVERYTHING
from spec_decode.conformance.report import Claim, Report, Result
from spec_decode.environment import environment
from spec_decode.files import read_json, report_bytes, sealed
from spec_decode.source_digests import SourceRecord
from spec_decode.testing.outcome import Outcome
from tests.import_graph import ROOT
from tests.spec_decode.cli.conftest import CPU


@pytest.fixture
def subprocesses(monkeypatch):
    """A stand-in for the processes that check a backend; `outcome` is what each finds, `calls` who was asked for."""
    fake = SimpleNamespace(outcome={}, calls=[])

    def check_isolated(name, *, env, request, limits, on_result):
        fake.calls.append((name, request, limits))
        outcome = fake.outcome.get(name, "pass")
        if outcome == "interrupt":
            raise KeyboardInterrupt
        elsewhere = {EVERYTHING: Claim(claimed=False, reason="runs on cuda")} if outcome == "unsupported" else {}
        result = Result(
            check="graph.replay", case="decode", outcome=Outcome(outcome), tags=("graph:capture",),
            reason="for the test",
        )  # fmt: skip
        on_result(result)
        return Report(
            backend=name,
            version="1",
            env=environment(CPU),
            command=request["command"],
            claims=elsewhere or {"page:16": Claim(claimed=False)},
            results=(result,),
        )

    monkeypatch.setattr("spec_decode.cli.matrix_run.check_isolated", check_isolated)
    return fake


@pytest.fixture
def tagged(subprocesses, tmp_path, run):
    """The report of a run, in reports/."""
    run("matrix", "--run", "torch_reference", "--device", "cpu", "--into", tmp_path / "reports" / "cpu")
    subprocesses.calls.clear()
    return tmp_path / "reports" / "cpu" / "check-torch_reference.json"


def test_matrix_shows_reports_and_requested_columns(tagged, run):
    for words in ((), (tagged,), (tagged.parent,), ("--tag", "graph:*"), ("--installed",)):
        result = run("matrix", *words)
        assert result.exit_code == 0 and "verified 1/1" in result.output and "graph support" in result.output
        assert ("(stale)" in result.output) is ("--installed" in words)
    assert "graph support" not in run("matrix", "--tag", "page:*").output


def test_matrix_prints_only_output_to_stdout(tagged, run):
    assert run("matrix", "--html", "-").stdout.startswith("<!doctype html>")
    assert json.loads(run("matrix", "--json", "-").stdout)["schema"] == "attn-matrix/5"


def test_matrix_writes_files(tagged, tmp_path, run):
    result = run("matrix", "--json", "out/m.json", "--html", "out/m.html")
    assert result.output.splitlines() == ["wrote out/m.html", "wrote out/m.json"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"m.json", "m.html"}


@pytest.mark.parametrize("patterns", [["graph:captur"], ["graph:*", "graph:captrue"]])
def test_unmatched_tag_is_rejected_with_suggestion(tagged, refused, patterns):
    line = refused("matrix", *(word for pattern in patterns for word in ("--tag", pattern)))
    assert "matches none. Fix --tag. Did you mean graph:capture?" in line


def test_tag_missing_from_run_results_is_rejected(subprocesses, refused_after):
    assert "'graph:captur' matches none" in refused_after(
        "matrix", "--run", "torch_reference", "--device", "cpu", "--tag", "graph:captur"
    )


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "--run available"),
        (("absent.json",), "absent.json"),
        *(((f"bad_{at}.json",), f"bad_{at}.json") for at in range(4)),
        (("--resume",), ""),
        (("--into", "x"), ""),
        (("--run", "torch_reference", "--resume"), ""),
        (("--run", "torch_reference", "--check"), ""),
        (("--run", "torch_reference", "--check-limit", "0"), ""),
        (("--run", "nobody"), "nobody"),
        (("--html", "-", "--json", "-"), "--html and --json are all -, but stdout takes one."),
    ],
)
def test_matrix_rejects_invalid_reports_and_options(words, part, subprocesses, refused, tmp_path):
    for at, content in enumerate(("{", "[]", '{"schema": "other/9"}', '{"schema": "attn-report/1"}')):
        (tmp_path / f"bad_{at}.json").write_text(content)
    assert part in refused("matrix", *words) and not subprocesses.calls


def test_fresh_run_is_shown_but_not_kept(subprocesses, run, tmp_path):
    limits = ("--check-limit", "3", "--limit", "9")
    result = run("matrix", "--run", "torch_reference", "--device", "cpu", "--tag", "graph:*", *limits)
    assert result.exit_code == 0 and "verified 1/1" in result.output
    ((name, ask, limits),) = subprocesses.calls
    assert (name, ask["tags"], limits.check, limits.backend) == ("torch_reference", ["graph:*"], 3.0, 9.0)
    assert not list(tmp_path.iterdir())


def test_failing_backend_fails_run_but_not_others(subprocesses, run, tmp_path):
    subprocesses.outcome["triton_paged"] = "error"
    names = ("--run", "triton_paged", "--run", "torch_reference")
    result = run("matrix", *names, "--device", "cpu", "--into", "out")
    assert result.exit_code == 1 and "broken 0/1" in result.output and "verified 1/1" in result.output
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_available_skips_absent_and_unsupported_backends(subprocesses, run):
    subprocesses.outcome |= {"flashinfer": "unavailable", "flash_attn3": "unsupported"}
    result = run("matrix", "--run", "available", "--device", "cpu")
    assert "flashinfer: not available: for the test" in result.stderr
    assert "flash_attn3: not available: runs on cuda" in result.stderr
    assert "flash_attn3@" not in result.stdout and "triton_paged@1" in result.stdout


def test_named_backend_is_shown_even_if_absent(subprocesses, run):
    subprocesses.outcome["flashinfer"] = "unavailable"
    result = run("matrix", "--run", "flashinfer", "--run", "available", "--device", "cpu")
    assert "flashinfer@1" in result.stdout and result.exit_code == 1


def test_interrupted_run_resumes_after_finished_backends(subprocesses, run, tmp_path):
    words = ("matrix", "--run", "torch_reference", "--run", "triton_paged", "--device", "cpu", "--into", "out")
    subprocesses.outcome["triton_paged"] = "interrupt"
    stopped = run(*words)
    assert stopped.exit_code == 130 and "1 finished reports are in out: continue with --resume" in stopped.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["check-torch_reference.json"]
    subprocesses.outcome.clear()
    subprocesses.calls.clear()
    result = run(*words, "--resume")
    assert [name for name, _, _ in subprocesses.calls] == ["triton_paged"]
    assert result.exit_code == 0 and "torch_reference@1" in result.output and "triton_paged@1" in result.output


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"command": "other"},
        {"env": "commit"},
        {"results": "not_run"},
        {"schema": "x/1"},
        {"sources": {"modules": {"builders": {"errors": "00000000"}}}},
    ],
)
def test_resume_repeats_only_foreign_or_unfinished_reports(tagged, subprocesses, run, change):
    document = read_json(tagged)
    if "env" in change:
        document["env"]["commit"] = "other"
    elif "results" in change:
        document["results"][0]["outcome"] = "not_run"
    else:
        document |= change
    tagged.write_text(json.dumps(sealed(document)))
    run("matrix", "--run", "torch_reference", "--device", "cpu", "--into", tagged.parent, "--resume")
    assert len(subprocesses.calls) == bool(change)


@pytest.mark.parametrize("option", ["--into", "--json", "--html"])
def test_unwritable_path_is_rejected_before_running(option, subprocesses, refused, tmp_path):
    (tmp_path / "file").touch()
    words = ("matrix", "--run", "torch_reference", "--device", "cpu", option, "file/below")
    assert "cannot be written" in refused(*words) and not subprocesses.calls


def test_check_passes_on_intact_reports_and_writes_nothing(tagged, tmp_path, run):
    before = sorted(tmp_path.rglob("*"))
    result = run("matrix", "--check")
    assert result.exit_code == 0 and "1 reports are intact and unedited" in result.output
    assert sorted(tmp_path.rglob("*")) == before


def test_check_fails_on_edited_report(tagged, tmp_path, run):
    soak = tagged.with_name("soak-k.json")
    soak.write_bytes(report_bytes({"schema": "attn-soak/4", "rounds": 7}).replace(b"7", b"8"))
    result = run("matrix", "--check")
    assert result.exit_code == 2 and "soak-k.json was changed after it was written" in result.stderr


def test_check_fails_if_page_rendering_raises(tagged, run, monkeypatch):
    monkeypatch.setattr("spec_decode.matrix.to_html", lambda matrix: 1 / 0)
    assert run("matrix", "--check").exit_code != 0


def test_older_source_warns_and_fails_if_strict(tagged, run):
    sources = SourceRecord(modules={"builders": {"errors": "00000000"}})
    msgspec.structs.replace(Report.load(tagged), sources=sources).save(tagged)
    for words in (("matrix",), ("matrix", "--check")):
        shown = run(*words)
        assert shown.exit_code == 0 and "from older source (1 file changed)" in shown.output
        assert "warning: 1 of 1 reports are from older source" in shown.output
    assert run("matrix", "--check", "--strict").exit_code == 1
    assert run("matrix", "--strict").exit_code == 2


def test_each_report_is_read_once(tagged, run, monkeypatch):
    read = []

    def counted(path):
        read.append(path)
        return read_json(path)

    monkeypatch.setattr("spec_decode.matrix.sources.read_json", counted)
    monkeypatch.setattr("spec_decode.conformance.report.read_json", counted)
    assert run("matrix").exit_code == 0
    assert [path.resolve() for path in read] == [tagged.resolve()]


def test_question_is_answered_as_text_page_and_json(tagged, run, tmp_path):
    words = ("matrix", "--spec", "window 4096, heads 32/4, page 16, bf16")
    result = run(*words)
    assert result.exit_code == 0
    assert "torch_reference@1 on" in result.output and "accepted by the capability record" in result.output
    assert run(*words, "--html", "-").stdout.startswith("<!doctype html>")
    document = json.loads(run(*words, "--json", "-").stdout)
    assert document["schema"] == "attn-answer/1" and document["backends"][0]["backend"] == "torch_reference"
    assert "wrote" in run(*words, "--html", tmp_path / "page.html").output and (tmp_path / "page.html").exists()
    assert "no report of a backend matches" in run(*words, "--device", "H100").output


def test_backend_option_shows_covered_columns(tagged, run):
    result = run("matrix", "--backend", "torch_reference")
    assert result.exit_code == 0 and "passed checks covered" in result.output and "graph support" in result.output
    assert json.loads(run("matrix", "--backend", "torch_reference", "--json", "-").stdout)["schema"] == "attn-covered/1"
    states = run("matrix", ROOT / "reports/cpu", "--backend", "torch_state").output
    assert "only recurrent states; see --tag 'state*'" in " ".join(states.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--spec", "windw 4"), "--spec: 'windw 4' is no word of a spec. Words are window 4096"),
        (("--spec", ""), "a question needs words"),
        (("--spec", "bf16", "--run", "all"), "--spec reads existing reports and shows no columns, got --run too"),
        (("--spec", "bf16", "--tag", "page:*"), "got --tag too"),
        (("--spec", "bf16", "--check"), "got --check too"),
        (("--spec", "bf16", "--backend", "torch_reference"), "got --backend too"),
        (("--backend", "torch_reference", "--html", "-"), "--backend has no form for --html. Use --json"),
        (("--backend", "torch_referense"), "no report is of 'torch_referense'"),
        (("--backend", "torch_reference", "--device", "H100"), "no report is of 'torch_reference' on H100"),
    ],
)
def test_invalid_question_is_rejected(tagged, run, words, message):
    result = run("matrix", *words)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
