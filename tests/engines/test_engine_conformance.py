"""The kit over an engine's own builders raises if that engine is missing; `make engines` runs it with the engine."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest
from click.testing import CliRunner

from attn_backends import BrokenBackend
from engine_kits import subjects
from spec_decode.cli.main import main

REMEDIES = {"vllm": "pip install 'vllm==0.33.*'", "sglang": "pip install 'sglang==0.5.23'"}


@pytest.fixture(params=REMEDIES)
def conformance(request: pytest.FixtureRequest) -> ModuleType:
    return import_module(f"engine_kits.{request.param}")


@pytest.mark.parametrize(
    ("conformance", "release"),
    [("vllm", "0.32.4"), ("vllm", "0.330.0"), ("vllm", "1.33.0"), ("sglang", "0.5.22"), ("sglang", "0.5.230")],
    indirect=["conformance"],
)
def test_unsupported_engine_release_is_rejected(
    conformance: ModuleType, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "version", lambda package: release)
    with pytest.raises(BrokenBackend, match=f"found {release}. Run `make engines`"):
        conformance.subjects()


def test_missing_engine_exits_with_remedy(conformance: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(subjects, "version", version)
    with pytest.raises(BrokenBackend, match="found none"):
        conformance.subjects()
    engine = conformance.__name__.split(".")[1]
    result = CliRunner().invoke(main, ["check", "--engine", engine, "--device", "cpu"])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and REMEDIES[engine] in result.stderr
