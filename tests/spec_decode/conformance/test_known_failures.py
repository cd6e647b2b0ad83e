"""Failures that a backend's author knows of are read from a file beside the backend, by every face of the kit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from attn_backends import AttentionBackend, BrokenBackend, get
from spec_decode.conformance import check_backend
from spec_decode.conformance.known_failures import known_failures_of
from spec_decode.testing.outcome import Outcome

CPU = torch.device("cpu")
_MODULE = """
from attn_backends.torch_reference import TorchReference

class Crashes(TorchReference):
    name = "crashes"

    def forward(self, *args, **kwargs):
        raise RuntimeError("no kernel image")
"""


@pytest.fixture
def crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """A third party's backend, in a module of its own folder."""
    (tmp_path / "crashing_backend.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "crashing_backend", raising=False)
    from crashing_backend import Crashes  # type: ignore[import-not-found]

    backend: AttentionBackend = Crashes()
    return backend


def test_a_file_beside_the_backend_makes_its_failures_expected(crashes: AttentionBackend, tmp_path: Path) -> None:
    entry = (
        '[[known_failure]]\ncheck = "numerics.*"\ncase = "base-*"\nreason = "no kernel"\nissue = "#7"\nerror = true\n'
    )
    (tmp_path / "known_failures.toml").write_text(entry)

    found = {
        r.case: r.outcome
        for r in check_backend(
            crashes,
            device=CPU,
            checks=["numerics.attention*[[]scale-decode]", "numerics.attention*[[]base-decode]"],
            report=True,
        ).results
    }

    assert found == {"base-decode": Outcome.XFAIL, "scale-decode": Outcome.ERROR}


def test_a_backend_without_the_file_has_none(crashes: AttentionBackend) -> None:
    assert known_failures_of(crashes) == ()
    assert known_failures_of(get("torch_reference")) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[known_failure]]\ncheck = "a.b"\nreason = "later"\n', "missing required field `issue`"),
        ('[[known_failure]]\ncheck = "a.b"\nreason = "later"\nissue = ""\n', "needs a reason and an issue"),
        ('[[known_failure]]\ncheck = "a.b"\ncases = "x"\nreason = "r"\nissue = "#7"\n', "unknown field `cases`"),
        ('[[known_failures]]\ncheck = "a.b"\n', "unknown field `known_failures`"),
        ("[[known_failure", "is not that"),
    ],
)
def test_a_file_that_says_something_else_is_refused(
    crashes: AttentionBackend, tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "known_failures.toml").write_text(text)

    with pytest.raises(BrokenBackend, match=says) as refusal:
        known_failures_of(crashes)
    assert "known_failures.toml" in str(refusal.value)


def test_a_broken_file_makes_the_backend_unavailable(crashes: AttentionBackend, tmp_path: Path) -> None:
    (tmp_path / "known_failures.toml").write_text("[[known_failure]]")

    report = check_backend(crashes, device=CPU, report=True)

    assert [result.outcome for result in report.results] == [Outcome.UNAVAILABLE] and not report.ok


def test_an_error_says_where_it_was_raised(crashes: AttentionBackend) -> None:
    (result,) = check_backend(crashes, device=CPU, checks=["*.attention_is_right[[]base-decode]"], report=True).results

    assert result.reason == "RuntimeError: no kernel image (in forward, crashing_backend.py:8)"
