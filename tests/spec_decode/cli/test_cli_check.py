import os
import shlex
from importlib import import_module

import pytest
import torch

from attn_backends import registry
from attn_backends.engines.vllm.names import NAMES
from spec_decode.cli import output
from spec_decode.conformance.report import Report
from tests.mutants import mutant_named

OPTIONS = ("--device", "cpu", "--family", "graph", "--only", "graph.*", "--quick")


@pytest.mark.parametrize("names", [("torch_reference",), ("torch_reference", "triton_paged")])
@pytest.mark.parametrize(("how", "isolated"), [((), True), (("--isolate",), True), (("--no-isolate",), False)])
def test_check_runs_isolated_or_in_process_as_given(names, how, isolated, checks, run, tmp_path):
    """In this process a debugger works. Kernels are interpreted on the CPU."""
    path = tmp_path / "out" if len(names) > 1 else tmp_path / "one.json"
    result = run("check", *names, *OPTIONS, *how, "--json", path)
    assert result.exit_code == 0 and "torch_reference: 1 checks = 1 pass" in result.output
    assert result.stderr.splitlines() == [f"{name}: starting" for name in names] and "starting" not in result.stdout
    assert [name for name, *_ in checks.calls] == list(names) and checks.isolated == (list(names) if isolated else [])
    for name, options, interpreted in checks.calls:
        assert (str(options["device"]), options["families"], options["checks"]) == ("cpu", ["graph"], ["graph.*"])
        assert options["quick"] and interpreted == "1"
        command = f"attn-backends check {name} --device cpu --family graph --only 'graph.*' --quick"
        assert options["command"] == command
        assert Report.load(path if len(names) == 1 else path / f"check-{name}.json").command == command


SOAK = ("check", "torch_reference", "--device", "cpu", "--family", "soak")


def test_soak_command_records_rounds_and_seed(checks, run, tmp_path):
    for words, length in (
        ((), {"rounds": 5000, "seed": 0}),
        (("--rounds", 10, "--seed", 3), {"rounds": 10, "seed": 3}),
    ):
        run(*SOAK, *words, "--isolate", "--json", tmp_path)
        command = Report.load(tmp_path / "check-torch_reference.json").command
        assert command.endswith(f"--family soak --rounds {length['rounds']} --seed {length['seed']}")
        assert checks.calls[-1][1]["soak"] == length


def test_failed_soak_prints_repro_command(plug_in, run, tmp_path):
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


@pytest.mark.parametrize(
    ("outcome", "fails"),
    [("fail", 1), ("error", 1), ("xpass", 1), ("not_run", 1), ("preview", 0), ("xfail", 0)],
)
def test_non_pass_prints_reason_and_failure_prints_repro(checks, outcome, fails, run):
    checks.outcomes = ["pass", outcome]
    result = run("check", "torch_reference", "--device", "cpu")
    assert result.exit_code == fails and f"1 {outcome}" in result.output
    line = f"{outcome}: graph.replay[decode1]: [stale] seq_lens"
    assert line in result.output
    assert (f"{line}\n    attn-backends check torch_reference" in result.output) == bool(fails)


def test_check_without_any_check_fails(checks, run):
    checks.outcomes = []
    assert run("check", "torch_reference", "--device", "cpu").exit_code == 1


def test_all_names_every_backend_once(checks, run):
    run("check", "all", "torch_reference", "--device", "cpu")
    assert [name for name, *_ in checks.calls] == [*registry.names(), *registry.state_names()]


def test_broken_backend_leaves_others_checked(checks, plug_in, run):
    plug_in("broken", lambda: import_module("no_such_module"))
    result = run("check", "broken", "torch_reference", "--device", "cpu")
    assert result.exit_code == 1 and "error: backend 'broken'" in result.stderr
    assert "torch_reference: 1 checks" in result.output


def test_registered_backend_is_checked_in_this_process(checks, rebuilt, run):
    assert run("check", "rebuilt", "torch_reference", "--device", "cpu").exit_code == 0
    assert [name for name, *_ in checks.calls] == ["rebuilt", "torch_reference"]
    assert checks.isolated == ["torch_reference"]


def test_registered_backend_cannot_be_isolated(checks, rebuilt, refused):
    line = refused("check", "rebuilt", "torch_reference", "--device", "cpu", "--isolate")
    assert "rebuilt were registered by a call" in line and not checks.calls


REFUSED = {
    "rounds without a soak": (("torch_reference", "--rounds", 10, "--seed", 3), "Add --family soak"),
    "several reports in a file": (("all", "--json", "one.json"), "need a folder"),
    "a folder in a file": (("all", "--json", "file/out"), "cannot be written"),
    "an unknown backend": (("nonesuch",), "torch_reference"),
    "a backend that was meant": (("triton_pagd",), "Did you mean triton_paged?"),
    "an unknown family": (("all", "--family", "nonesuch"), "numerics"),
    "a family that was meant": (("all", "--family", "numeric"), "Did you mean numerics?"),
    "nothing to resume": (("torch_reference", "--resume"), "Add --json"),
    "an unknown engine": (
        ("--engine", "vlm"),
        "there is no kit for engine 'vlm'. Use --engine vllm or --engine sglang. Did you mean",
    ),
    "an unknown builder": (
        ("--engine", "vllm", "KpoolTail"),
        "a builder of vllm must be one of FlashAttentionMetadataBuilder, ",
    ),
    "an engine on a GPU": (("--engine", "vllm", "--device", "cuda"), "--device is cuda"),
    "an engine in a subprocess": (("--engine", "vllm", "--isolate"), "got --isolate. Omit"),
}


@pytest.mark.parametrize(("words", "why"), REFUSED.values(), ids=REFUSED)
def test_invalid_check_arguments_are_rejected_before_running(words, why, checks, tmp_path, refused):
    (tmp_path / "file").write_text("")
    assert why in refused("check", *(() if "--engine" in words else ("--device", "cpu")), *words)
    assert not checks.calls


def test_an_interrupt_leaves_no_report(checks, tmp_path, run):
    checks.outcomes = ["interrupt"]
    result = run("check", "torch_reference", "--device", "cpu", "--json", tmp_path / "one.json")
    assert result.exit_code == 130 and "no report" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_unmatched_pattern_is_rejected_with_suggestion(refused_after, tmp_path):
    words = ("torch_reference", "--no-isolate", "--device", "cpu", "--json", "x.json")
    line = refused_after("check", *words, "--only", "graph.replay_folows*")
    assert "graph.replay_folows*' matches none" in line and "Did you mean graph.replay_" in line
    assert not (tmp_path / "x.json").exists()


def test_torch_uses_one_thread_by_default(checks, monkeypatch, run):
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    for words in ((), ("--threads", 3)):
        run("check", "torch_reference", "--device", "cpu", *words)
        counts.append(os.environ["OMP_NUM_THREADS"])
    assert counts == [1, "1", 3, "3"]


def test_progress_is_printed_after_some_seconds(checks, monkeypatch, run):
    monkeypatch.setattr(output, "_SECONDS_BETWEEN_LINES", 0.0)
    result = run("check", "torch_reference", "--device", "cpu")
    assert result.stderr.splitlines()[1] == "torch_reference: 1 checks, 0 failed; last graph.replay"


@pytest.mark.parametrize("options", [(), ("--no-isolate",)])
def test_results_are_kept_beside_report(checks, run, tmp_path, options):
    run("check", "torch_reference", "--device", "cpu", "--json", tmp_path, "--resume", *options)
    _, arguments, _ = checks.calls[0]
    path = tmp_path / "check-torch_reference.json"
    if options:
        assert (arguments["kept"].report, arguments["kept"].resume) == (path, True)
    else:
        assert arguments["keep"] == {"report": str(path), "resume": True}


def test_check_needs_a_name_or_engine(run, monkeypatch):
    nameless = run("check")
    assert nameless.exit_code == 2 and "Missing argument 'NAME...'" in nameless.output
    monkeypatch.setattr("engine_kits.subjects.version", lambda package: "none")
    result = run("check", "--engine", "vllm", "KpoolTailMetadataBuilder")

    assert result.exit_code == 2
    assert "checks of vLLM's builders need 0.33.*, found none" in result.output


def test_engine_check_without_checkout_names_its_folder(refused, monkeypatch, tmp_path):
    monkeypatch.setattr("spec_decode.cli.checkout._ROOT", tmp_path)
    line = refused("check", "--engine", "vllm")
    assert "the checks of vllm's own builders are not in the wheel, only in engine_kits/vllm/" in line


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_vllm_is_told_from_its_kernels(name, run):
    own = name.removeprefix("ATTN_BACKENDS_").removesuffix("_IN_GRAPH").lower()
    said = run("check", name)
    assert said.exit_code == 2 and f"{name} is a name in vLLM: its kernels are those of {own}." in said.stderr
