"""Run vLLM's or SGLang's own tests over our names: python scripts/others_suites.py vllm --tests FOLDER --json FILE.

FOLDER is the unpacked source distribution of vLLM 0.33.0, which holds tests/; SGLang's wheel holds its kit. The
engine's Python is on PYTHONPATH. Without a GPU, set TRITON_INTERPRET=1: torch replaces compiled kernels. The exit
status is 1 if a case failed, or if a name ran in none.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = "attn-others-suites/1"
REFUSED = "cannot serve this"
"""What each refusal of a layer or a draft says."""


@dataclass(frozen=True)
class Row:
    """A case of a suite over one of our names.

    outcome    "pass", "fail", "skip" or "refused"; "not run": it passed without reaching the backend
    """

    suite: str
    test: str
    backend: str
    outcome: str
    reason: str = ""


class Outcomes:
    """The plug-in that keeps a row for every case."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        report: Any = yield
        if call.when == "call" or not report.passed:
            backend = item.callspec.params["ours"]  # type: ignore[attr-defined]  # every case has one
            outcome = _outcome(report, call, ("reached", True) in item.user_properties)
            self.rows.append(Row(item.path.name, item.name, backend, *outcome))
        return report


def _outcome(report: Any, call: pytest.CallInfo[Any], reached: bool) -> tuple[str, str]:
    if report.skipped:
        return "skip", str(report.longrepr[2]).removeprefix("Skipped: ")
    if call.excinfo is not None:
        said = call.excinfo.exconly(tryshort=True)
        refused = REFUSED in said or call.excinfo.errisinstance(NotImplementedError)
        return "refused" if refused else "fail", said[:400]
    return (
        ("pass", "")
        if reached
        else ("not run", "the test has no list with a place for the name, or the name does not claim the cache's dtype")
    )


def run(paths: Sequence[Path], folder: Path, plugins: Sequence[Any] = (), more: Sequence[str] = ()) -> list[Row]:
    """Run the tests of these files, without the conftest.py and the configuration beside them."""
    alone = (
        "--noconftest",
        "-c",
        os.devnull,
        f"--rootdir={folder}",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    )
    outcomes = Outcomes()
    pytest.main([*map(str, paths), *alone, "-q", "--tb=short", "--show-capture=no", *more], [outcomes, *plugins])
    return outcomes.rows


def failures(rows: Sequence[Row], names: Iterable[str]) -> list[str]:
    """List what is wrong: cases that failed, and names that no case ran."""
    selected = {row.backend for row in rows}
    ran = {row.backend for row in rows if row.outcome in ("pass", "fail")}
    failed = [f"{row.test}: {row.reason}" for row in rows if row.outcome == "fail"]
    reasons = {True: "see each case's reason in the report", False: "-k selects none of its cases"}
    return failed + [f"no case ran {name}; {reasons[name in selected]}" for name in names if name not in ran]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("--tests", type=Path, help="vLLM's source distribution, unpacked")
    parser.add_argument("-k", dest="only", default="", help="only these cases, as pytest selects them")
    parser.add_argument("--json", type=Path, required=True)
    flags = parser.parse_args()
    if find_spec(flags.engine) is None:
        parser.error(
            f"{flags.engine} is not installed, nor on PYTHONPATH. Unpack it: see docs/engines/others-suites.md."
        )
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("without a GPU, Triton's kernels run in its interpreter only. Set TRITON_INTERPRET=1.")
    paths, names, roots, rows = (_vllm if flags.engine == "vllm" else _sglang)(flags)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    from scripts.script_report import write_report

    write_report(
        flags.json,
        SCHEMA,
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        roots,
        engine=f"{flags.engine} {version(flags.engine)}",
        files=digests,
        rows=[asdict(row) for row in rows],
    )
    for (backend, outcome), count in sorted(Counter((row.backend, row.outcome) for row in rows).items()):
        print(f"{backend:32} {outcome:8} {count}")
    if wrong := failures(rows, names):
        sys.exit("\n".join(wrong))


def _vllm(flags: argparse.Namespace) -> tuple[list[Path], list[str], list[str], list[Row]]:
    from scripts import vllm_suite

    if flags.tests is None or not (flags.tests / "tests").is_dir():
        sys.exit(
            f"--tests must be vLLM's unpacked source distribution, with tests/, got {flags.tests}. Download "
            "vllm-0.33.0.tar.gz from PyPI, and unpack it."
        )
    import tests

    tests.__path__.append(str(flags.tests / "tests"))  # vLLM's modules import each other by this name
    if not vllm_suite.CUDA:
        from engine_kits.vllm.stand_in import enter

        enter()
    from attn_backends.engines import vllm

    vllm.register()
    paths = [flags.tests / "tests" / file for file in vllm_suite.FILES]
    with tempfile.TemporaryDirectory() as folder:
        vllm_suite.write_configs(Path(folder))
        more = [] if vllm_suite.CUDA else ["-p", "tests.engines.conftest"]
        more += ["-k", flags.only] if flags.only else []
        rows = run(paths, flags.tests, [vllm_suite.InTheirPlaces()], more)
    modules = [f"attn_backends.engines.vllm.{name}" for name in ("flashinfer", "paged", "mla")]
    return paths, [*vllm_suite.DENSE, *vllm_suite.LATENT], modules, rows


def _sglang(flags: argparse.Namespace) -> tuple[list[Path], list[str], list[str], list[Row]]:
    from attn_backends.engines.sglang import NAMES

    path = ROOT / "scripts" / "sglang_suite.py"
    rows = run([path], ROOT, more=["-k", flags.only] if flags.only else [])
    return [path], list(NAMES), ["attn_backends.engines.sglang.v0_5_23.draft_steps"], rows


if __name__ == "__main__":
    main()
