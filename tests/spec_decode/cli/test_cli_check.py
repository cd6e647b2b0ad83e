import os
import shlex
from importlib import import_module

import pytest
import torch

from attn_backends import registry
from spec_decode.cli import output
from spec_decode.conformance.report import Report
from tests.mutants import mutant_named


def test_check_prints_the_summary_and_interprets_kernels_on_the_cpu(checks, run):
    result = run("check", "torch_reference", "--device", "cpu")
    assert result.exit_code == 0 and "torch_reference: 1 checks = 1 pass" in result.output
    assert checks.calls[0][2] == "1"


def test_check_passes_on_what_was_asked_for(checks, run, tmp_path):
    run("check", "torch_reference", "--device", "cpu", "--family", "graph", "--only", "graph.*", "--json", tmp_path)
    _, asked, _ = checks.calls[0]
    assert asked["families"] == ["graph"] and asked["checks"] == ["graph.*"]
    report = Report.load(tmp_path / "check-torch_reference.json")
    assert report.command == "attn-backends check torch_reference --device cpu --family graph --only 'graph.*'"


SOAK = ("check", "torch_reference", "--device", "cpu", "--family", "soak")


def test_a_soak_is_recorded_with_its_rounds_and_seed(checks, run, tmp_path):
    for words, length in (
        ((), {"rounds": 5000, "seed": 0}),
        (("--rounds", 10, "--seed", 3), {"rounds": 10, "seed": 3}),
    ):
        run(*SOAK, *words, "--isolate", "--json", tmp_path)
        command = Report.load(tmp_path / "check-torch_reference.json").command
        assert command.endswith(f"--family soak --rounds {length['rounds']} --seed {length['seed']}")
        assert checks.calls[-1][1]["soak"] == length


def test_rounds_without_a_soak_are_refused(checks, refused):
    assert "Add --family soak" in refused("check", "torch_reference", "--device", "cpu", "--rounds", 10, "--seed", 3)
    assert not checks.calls


def test_a_failed_soak_is_printed_with_the_command_that_repeats_it(plug_in, run, tmp_path):
    stale = mutant_named("stale_seq_lens").backend
    plug_in(stale.name, lambda: stale)
    only = "soak.long_runs_stay_right*r10-s3-full_loop*"
    words = ("check", stale.name, "--device", "cpu", "--rounds", "10", "--seed", "3", "--only", only)
    result = run(*words, "--json", "soak.json")
    assert result.exit_code == 1
    report = Report.load(tmp_path / "soak.json")
    (failure,) = report.results
    assert shlex.join(["attn-backends", *words]) == report.command == report.repro(failure.check, failure.case)
    assert f"{failure.reason}\n    {report.command}\n" in result.output and "with seed 3" in failure.reason


@pytest.mark.parametrize("outcome", ["fail", "error", "xpass", "not_run"])
def test_a_failure_is_printed_with_its_reason_and_repro(checks, outcome, run):
    checks.outcomes = ["pass", outcome]
    result = run("check", "torch_reference", "--device", "cpu")
    assert result.exit_code == 1
    assert (
        f"{outcome}: graph.replay[decode1]: [stale] seq_lens\n    attn-backends check torch_reference" in result.output
    )


@pytest.mark.parametrize("outcome", ["preview", "xfail"])
def test_a_preview_and_a_known_failure_are_printed_with_their_reason_and_fail_nobody(outcome, checks, run):
    checks.outcomes = ["pass", outcome]
    result = run("check", "torch_reference", "--device", "cpu")
    assert result.exit_code == 0
    assert f"{outcome}: graph.replay[decode1]: [stale] seq_lens" in result.output and f"1 {outcome}" in result.output


def test_no_check_at_all_is_a_failure(checks, run):
    checks.outcomes = []
    assert run("check", "torch_reference", "--device", "cpu").exit_code == 1


def test_all_names_every_backend_once(checks, run):
    run("check", "all", "torch_reference", "--device", "cpu")
    assert [name for name, *_ in checks.calls] == registry.names()


def test_a_broken_backend_costs_the_others_nothing(checks, plug_in, run):
    plug_in("broken", lambda: import_module("no_such_module"))
    result = run("check", "broken", "torch_reference", "--device", "cpu")
    assert result.exit_code == 1 and "error: backend 'broken'" in result.stderr
    assert "torch_reference: 1 checks" in result.output


@pytest.mark.parametrize("names", [("torch_reference",), ("torch_reference", "triton_paged")])
def test_in_this_process_a_debugger_works(names, checks, run):
    run("check", *names, "--device", "cpu", "--no-isolate")
    assert [name for name, *_ in checks.calls] == list(names) and not checks.isolated


def test_each_of_several_runs_in_a_subprocess(checks, run):
    run("check", "torch_reference", "triton_paged", "--device", "cpu", "--family", "graph", "--only", "graph.*")
    assert checks.isolated == ["torch_reference", "triton_paged"]
    _, asked, _ = checks.calls[1]
    assert (asked["device"], asked["families"], asked["checks"]) == ("cpu", ["graph"], ["graph.*"])
    assert asked["command"] == "attn-backends check triton_paged --device cpu --family graph --only 'graph.*'"


@pytest.mark.parametrize("options", [(), ("--isolate",)])
def test_one_backend_runs_in_a_subprocess_too(options, checks, run):
    assert run("check", "torch_reference", "--device", "cpu", *options).exit_code == 0
    assert checks.isolated == ["torch_reference"]


def test_what_was_registered_by_a_call_runs_in_this_process_among_several(checks, rebuilt, run):
    assert run("check", "rebuilt", "torch_reference", "--device", "cpu").exit_code == 0
    assert [name for name, *_ in checks.calls] == ["rebuilt", "torch_reference"]
    assert checks.isolated == ["torch_reference"]


def test_what_was_registered_by_a_call_cannot_be_isolated(checks, rebuilt, refused):
    line = refused("check", "rebuilt", "torch_reference", "--device", "cpu", "--isolate")
    assert "rebuilt were registered by a call" in line and not checks.calls


def test_reports_go_to_a_folder_one_a_backend(checks, tmp_path, run):
    names = ("torch_reference", "triton_paged")
    assert run("check", *names, "--device", "cpu", "--json", tmp_path / "out").exit_code == 0
    assert Report.load(tmp_path / "out" / "check-torch_reference.json").ok


def test_one_report_goes_to_a_file(checks, tmp_path, run):
    run("check", "torch_reference", "--device", "cpu", "--json", tmp_path / "one.json")
    assert Report.load(tmp_path / "one.json").backend == "torch_reference"


def test_several_reports_do_not_fit_a_file(checks, refused):
    assert "need a folder" in refused("check", "all", "--device", "cpu", "--json", "one.json")
    assert not checks.calls


def test_a_path_that_cannot_be_written_is_refused_before_anything_runs(checks, tmp_path, refused):
    (tmp_path / "file").write_text("")
    assert "writable" in refused("check", "all", "--device", "cpu", "--json", tmp_path / "file" / "out")
    assert not checks.calls


def test_an_interrupt_leaves_no_report(checks, tmp_path, run):
    checks.outcomes = ["interrupt"]
    result = run("check", "torch_reference", "--device", "cpu", "--json", tmp_path / "one.json")
    assert result.exit_code == 130 and "no report" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_backend_is_refused_with_the_known_ones(checks, refused):
    assert "torch_reference" in refused("check", "nonesuch", "--device", "cpu")


def test_an_unknown_family_is_refused_with_the_known_ones(checks, refused):
    assert "numerics" in refused("check", "all", "--device", "cpu", "--family", "nonesuch")


def test_an_unknown_name_gets_the_one_that_was_meant(checks, refused):
    assert refused("check", "triton_pagd", "--device", "cpu").endswith("Did you mean triton_paged?")
    assert refused("check", "all", "--device", "cpu", "--family", "numeric").endswith("Did you mean numerics?")


def test_a_pattern_that_matches_no_check_is_refused_with_the_one_that_was_meant(refused_after, tmp_path):
    line = refused_after(
        "check",
        "torch_reference",
        "--no-isolate",
        "--device",
        "cpu",
        "--only",
        "graph.replay_folows*",
        "--json",
        "x.json",
    )
    assert "graph.replay_folows* is like none" in line and "Did you mean graph.replay_" in line
    assert not (tmp_path / "x.json").exists()


def test_torch_has_one_thread_unless_asked_otherwise(checks, monkeypatch, run):
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    for words in ((), ("--threads", 3)):
        run("check", "torch_reference", "--device", "cpu", *words)
        counts.append(os.environ["OMP_NUM_THREADS"])
    assert counts == [1, "1", 3, "3"]


def test_without_a_terminal_progress_is_lines_on_stderr(checks, run):
    result = run("check", "torch_reference", "--device", "cpu")
    assert result.stderr.splitlines() == ["torch_reference: starting"] and "starting" not in result.stdout


def test_progress_is_told_again_after_some_seconds(checks, monkeypatch, run):
    monkeypatch.setattr(output, "_SECONDS_BETWEEN_LINES", 0.0)
    result = run("check", "torch_reference", "--device", "cpu")
    assert result.stderr.splitlines()[1] == "torch_reference: 1 checks, 0 failed; last graph.replay"


def test_quick_is_asked_of_the_kit_and_stands_in_the_command(checks, run, tmp_path):
    run("check", "torch_reference", "--device", "cpu", "--quick", "--json", tmp_path)
    assert checks.calls[0][1]["quick"]
    assert Report.load(tmp_path / "check-torch_reference.json").command.endswith("--device cpu --quick")


@pytest.mark.parametrize("options", [(), ("--no-isolate",)])
def test_what_a_run_finds_is_kept_beside_its_report(checks, run, tmp_path, options):
    run("check", "torch_reference", "--device", "cpu", "--json", tmp_path, "--resume", *options)
    _, asked, _ = checks.calls[0]
    path = tmp_path / "check-torch_reference.json"
    if options:
        assert (asked["kept"].report, asked["kept"].resume) == (path, True)
    else:
        assert asked["keep"] == {"report": str(path), "resume": True}


def test_there_is_nothing_to_resume_without_a_report(checks, refused):
    assert "Add --json" in refused("check", "torch_reference", "--device", "cpu", "--resume")
    assert not checks.calls


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--engine", "vlm"), "an engine whose builders can be checked is vllm or sglang, got 'vlm'"),
        (("--engine", "vllm", "KpoolTail"), "a builder of vllm must be one of FlashAttentionMetadataBuilder, "),
        (("--engine", "vllm", "--device", "cuda"), "device cuda was asked for"),
        (("--engine", "vllm", "--isolate"), "got --isolate. Leave"),
    ],
)
def test_what_an_engine_cannot_be_asked_is_refused(words, why, refused):
    assert why in refused("check", *words)


def test_without_the_engine_nothing_of_it_is_checked(run, monkeypatch):
    monkeypatch.setattr("engines.vllm.conformance.stand_in.version", lambda package: "none")
    result = run("check", "--engine", "vllm", "KpoolTailMetadataBuilder")

    assert result.exit_code == 2
    assert "vLLM's builders are checked as 0.33.x has them, found none" in result.output


def test_without_a_checkout_the_check_of_an_engine_says_where_it_is(refused, monkeypatch, tmp_path):
    monkeypatch.setattr("spec_decode.cli.checkout._ROOT", tmp_path)
    line = refused("check", "--engine", "vllm")
    assert "the checks of vllm's own builders are not in the wheel, they are in engines/vllm/conformance/" in line


def test_without_a_name_there_is_nothing_to_check(run):
    result = run("check")

    assert result.exit_code == 2 and "Missing argument 'NAME...'" in result.output
