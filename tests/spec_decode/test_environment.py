import subprocess

import pytest
import torch

from spec_decode import environment as environment_module
from spec_decode.environment import environment
from spec_decode.matrix.cells import Run

CPU = torch.device("cpu")


def test_the_environment_of_the_cpu_has_no_driver_and_no_cuda():
    env = environment(CPU)
    assert env.driver is None and env.cuda is None
    assert env.torch == torch.__version__ and env.device


def test_the_date_is_utc_to_the_second():
    assert environment(CPU).date.endswith("+00:00") and len(environment(CPU).date) == 25


def test_a_failing_probe_becomes_a_value_with_its_reason(monkeypatch):
    def broken() -> str:
        raise OSError("no such table")

    monkeypatch.setattr(environment_module, "_cpu_name", broken)
    assert environment(CPU).device == "unknown: OSError: no such table"


def test_a_machine_without_git_has_an_unknown_commit(monkeypatch, tmp_path):
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    for name in ("ATTN_BACKENDS_COMMIT", "ATTN_BACKENDS_DIRTY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "run", absent)
    monkeypatch.setattr(environment_module, "_PACKAGE", tmp_path / "spec_decode")
    env = environment(CPU)
    assert env.commit.startswith("unknown") and env.dirty is None


def test_a_package_inside_somebody_elses_checkout_has_an_unknown_commit(monkeypatch, tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.delenv("ATTN_BACKENDS_COMMIT", raising=False)
    monkeypatch.setattr(environment_module, "_PACKAGE", tmp_path / "spec_decode")
    assert environment(CPU).commit.startswith("unknown")


@pytest.mark.parametrize(("said", "dirty"), [("0", False), ("1", True), ("maybe", None), ("", None)])
def test_the_variables_overrule_git(monkeypatch, said, dirty):
    monkeypatch.setenv("ATTN_BACKENDS_COMMIT", "abc123")
    monkeypatch.setenv("ATTN_BACKENDS_DIRTY", said)
    env = environment(CPU)
    assert (env.commit, env.dirty) == ("abc123", dirty)


@pytest.fixture
def git(monkeypatch):
    """A checkout at commit f00dfeed, without changes."""
    for name in ("ATTN_BACKENDS_COMMIT", "ATTN_BACKENDS_DIRTY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment_module, "_git_state", lambda package: ("f00dfeed", False))


def test_git_is_asked_once_a_process(monkeypatch, tmp_path):
    """A fresh clone's git reads every file each time."""
    asked = []
    monkeypatch.setattr(environment_module, "_PACKAGE", tmp_path / "spec_decode")
    monkeypatch.setattr(environment_module, "_run", lambda *command: asked.append(command) or "f00dfeed")
    assert {environment(CPU).commit for _ in range(3)} == {"f00dfeed"}
    assert [command[-1] for command in asked if "status" in command] == [":!reports"]


def test_a_commit_that_git_gave_is_marked_by_nothing(git):
    assert (environment(CPU).commit, environment(CPU).stated) == ("f00dfeed", None)


STATED = {
    "as git has it": ({"COMMIT": "f00dfeed", "DIRTY": "0"}, "ATTN_BACKENDS_COMMIT and ATTN_BACKENDS_DIRTY"),
    "shortened": ({"COMMIT": "f00d", "DIRTY": "0"}, "ATTN_BACKENDS_COMMIT and ATTN_BACKENDS_DIRTY"),
    "another commit": ({"COMMIT": "abc1", "DIRTY": "0"},
        "ATTN_BACKENDS_COMMIT and ATTN_BACKENDS_DIRTY; git says f00dfeed"),
    "another state of the tree": ({"DIRTY": "1"}, "ATTN_BACKENDS_DIRTY; git says f00dfeed"),
}  # fmt: skip


@pytest.mark.parametrize(("variables", "stated"), STATED.values(), ids=STATED)
def test_what_variables_stated_is_marked_and_what_git_says_otherwise_beside_it(git, monkeypatch, variables, stated):
    for name, value in variables.items():
        monkeypatch.setenv(f"ATTN_BACKENDS_{name}", value)
    assert environment(CPU).stated == f"stated by {stated}"


@pytest.mark.parametrize("value", ["HEAD", "<script>", "f" * 65, "a b"])
def test_a_stated_commit_that_is_no_hash_is_unknown(git, monkeypatch, value):
    monkeypatch.setenv("ATTN_BACKENDS_COMMIT", value)
    env = environment(CPU)
    assert env.commit.startswith("unknown: ATTN_BACKENDS_COMMIT is not a commit")
    assert env.stated == "stated by ATTN_BACKENDS_COMMIT; git says f00dfeed"


def test_a_stated_commit_is_marked_where_the_matrix_shows_it(git, monkeypatch):
    monkeypatch.setenv("ATTN_BACKENDS_COMMIT", "abc123")
    run = Run(subject="it", env=environment(CPU), command="")
    assert run.commit == "abc123 (dirty or not: unknown) (stated by ATTN_BACKENDS_COMMIT; git says f00dfeed)"
