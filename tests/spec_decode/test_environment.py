import subprocess

import pytest
import torch

from spec_decode import environment as environment_module
from spec_decode.environment import environment

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


def test_a_machine_without_git_has_an_unknown_commit(monkeypatch):
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    for name in ("ATTN_BACKENDS_COMMIT", "ATTN_BACKENDS_DIRTY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "run", absent)
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
