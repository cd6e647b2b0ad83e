import subprocess

import msgspec
import pytest
import torch

from spec_decode import environment as environment_module
from spec_decode.environment import Environment, environment
from spec_decode.matrix.cells import Run

CPU = torch.device("cpu")


def test_cpu_environment_has_no_driver_or_cuda():
    env = environment(CPU)
    assert env.driver is None and env.cuda is None
    assert env.torch == torch.__version__ and env.device


def test_the_date_is_utc_to_the_second():
    assert environment(CPU).date.endswith("+00:00") and len(environment(CPU).date) == 25


def test_failing_probe_becomes_value_with_reason(monkeypatch):
    def broken() -> str:
        raise OSError("no such table")

    monkeypatch.setattr(environment_module, "_cpu_name", broken)
    assert environment(CPU).device == "unknown: OSError: no such table"


def test_machine_without_git_has_unknown_commit(monkeypatch, tmp_path):
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    for name in ("ATTN_BACKENDS_COMMIT", "ATTN_BACKENDS_DIRTY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "run", absent)
    monkeypatch.setattr(environment_module, "_PACKAGE", tmp_path / "spec_decode")
    env = environment(CPU)
    assert env.commit.startswith("unknown") and env.dirty is None


def test_package_in_foreign_checkout_has_unknown_commit(monkeypatch, tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.delenv("ATTN_BACKENDS_COMMIT", raising=False)
    monkeypatch.setattr(environment_module, "_PACKAGE", tmp_path / "spec_decode")
    assert environment(CPU).commit.startswith("unknown")


@pytest.mark.parametrize(("value", "dirty"), [("0", False), ("1", True), ("maybe", None), ("", None)])
def test_variables_state_commit_of_copy_without_git(no_git, monkeypatch, value, dirty):
    monkeypatch.setenv("ATTN_BACKENDS_COMMIT", "abc123")
    monkeypatch.setenv("ATTN_BACKENDS_DIRTY", value)
    env = environment(CPU)
    assert (env.commit, env.dirty) == ("abc123", dirty)
    assert env.stated == f"stated by ATTN_BACKENDS_COMMIT{' and ATTN_BACKENDS_DIRTY' if value else ''}"


@pytest.fixture
def no_git(monkeypatch):
    """A copy that git does not know."""
    monkeypatch.setattr(environment_module, "_git_state", lambda package: ("unknown: no git", None))


@pytest.fixture
def git(monkeypatch):
    """A checkout at commit f00dfeed, without changes."""
    for name in ("ATTN_BACKENDS_COMMIT", "ATTN_BACKENDS_DIRTY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment_module, "_git_state", lambda package: ("f00dfeed", False))


def test_git_runs_once_per_process(monkeypatch, tmp_path):
    """A fresh clone's git reads every file each time."""
    commands = []
    monkeypatch.setattr(environment_module, "_PACKAGE", tmp_path / "spec_decode")
    monkeypatch.setattr(environment_module, "_run", lambda *command: commands.append(command) or "f00dfeed")
    assert {environment(CPU).commit for _ in range(3)} == {"f00dfeed"}
    assert [command[-1] for command in commands if "status" in command] == [":!reports"]


def test_commit_from_git_is_not_marked_stated(git):
    assert (environment(CPU).commit, environment(CPU).stated) == ("f00dfeed", None)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("variables", [{"COMMIT": "f00dfeed", "DIRTY": "0"}, {"COMMIT": "abc1"}, {"DIRTY": "1"}])
def test_git_state_overrides_variables_in_checkout(monkeypatch, variables, changed):
    monkeypatch.setattr(environment_module, "_git_state", lambda package: ("f00dfeed", changed))
    for name, value in variables.items():
        monkeypatch.setenv(f"ATTN_BACKENDS_{name}", value)
    env = environment(CPU)
    assert (env.commit, env.dirty, env.stated) == ("f00dfeed", changed, None)


@pytest.mark.parametrize(
    ("change", "dirty"),
    [
        ({}, False),
        ({"spec_decode/__init__.py": "changed"}, True),
        ({"README.md": "changed"}, True),
        ({"spec_decode/new.py": ""}, True),
        ({"spec_decode/new/deep.py": ""}, True),
        ({"shadow.py": ""}, True),
        ({"spec_decode/__init__.py": None}, True),
        # What lies beside the source is no part of it.
        ({"reports/cpu/check.json": "{}", "reports/old.json": "changed"}, False),
        ({"unpacked/package/__init__.py": "", "run.log": "", "name with space/x": ""}, False),
    ],
)
def test_tree_is_dirty_if_its_source_changed(monkeypatch, tmp_path, change, dirty):
    monkeypatch.setattr(environment_module, "_PACKAGE", tmp_path / "spec_decode")
    for name in ("ATTN_BACKENDS_COMMIT", "ATTN_BACKENDS_DIRTY"):
        monkeypatch.delenv(name, raising=False)
    files = {"spec_decode/__init__.py": "", "README.md": "", "reports/old.json": ""}
    _write(tmp_path, files)
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.com")
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    _write(tmp_path, change)
    assert environment(CPU).dirty is dirty


def _write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_text(content)


@pytest.mark.parametrize("value", ["HEAD", "<script>", "f" * 65, "a b"])
def test_stated_commit_that_is_no_hash_is_unknown(no_git, monkeypatch, value):
    monkeypatch.setenv("ATTN_BACKENDS_COMMIT", value)
    env = environment(CPU)
    assert env.commit.startswith("unknown: ATTN_BACKENDS_COMMIT is not a commit")
    assert env.stated == "stated by ATTN_BACKENDS_COMMIT"


def test_stated_commit_is_marked_in_matrix(no_git, monkeypatch):
    monkeypatch.setenv("ATTN_BACKENDS_COMMIT", "abc123")
    run = Run(subject="it", env=environment(CPU), command="")
    assert run.commit == "abc123 (dirty or not: unknown) (stated by ATTN_BACKENDS_COMMIT)"


def test_conflicting_git_and_variables_leave_dirty_unknown(git):
    stated = "stated by ATTN_BACKENDS_COMMIT and ATTN_BACKENDS_DIRTY; git says f00dfeed dirty"
    earlier = {**msgspec.to_builtins(environment(CPU)), "dirty": False, "stated": stated}
    env = msgspec.convert(earlier, Environment)
    assert env.dirty is None and env.stated == stated
    assert "(dirty or not: unknown)" in Run(subject="it", env=env, command="").commit
