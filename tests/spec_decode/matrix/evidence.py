"""Handmade reports for the tests of the matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from spec_decode.conformance.report import Claim, Report, Result
from spec_decode.environment import Environment
from spec_decode.matrix.sources import Agreement, Timing
from spec_decode.testing.outcome import Outcome

ENV = {
    "device": "NVIDIA H200",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "python": "3.11.7",
    "commit": "0123456789abcdef",
    "dirty": False,
    "date": "2026-01-02T03:04:05+00:00",
    "driver": "580.1",
    "cuda": "13.0",
    "platform": "Linux",
}
TAG = "mode:decode"


def env(**fields) -> Environment:
    return Environment(**{**ENV, **fields})


def result(outcome: str, *tags: str, **fields) -> Result:
    given = {"check": "numerics.right", "case": "decode"}
    return Result(**{**given, **fields}, outcome=Outcome(outcome), tags=tags or (TAG,))


def report(
    *results: Result, backend="k", version="1", package="", engine="", contract="", claims=None, **where
) -> Report:
    claims = {tag: Claim(claimed=yes) if isinstance(yes, bool) else yes for tag, yes in (claims or {}).items()}
    return Report(
        backend=backend, version=version, package=package, engine=engine, contract=contract, env=env(**where),
        command="c", claims=claims, results=on_own_cases(results),
    )  # fmt: skip


def on_own_cases(results: Sequence[Result]) -> tuple[Result, ...]:
    """Give each result its own case, which few tests care about."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for each in results:
        seen[key := (each.check, each.case)] += 1
        found.append(each if seen[key] == 1 else msgspec.structs.replace(each, case=f"{each.case}-{seen[key]}"))
    return tuple(found)


def agreement(**fields) -> Agreement:
    row = {
        "draft": "draft", "backend": "k", "dtype": "float32", "strategy": "full_loop", "graph_modes": ["full"],
        "num_speculative_tokens": 4, "temperature": 0.0,
        "refusal": "", "prompts": 6, "unlike_eager": 0, "unlike_plain": 0, "unlike_alone": 0, "accepted": 3.351,
        "batch_invariant": False,
    }  # fmt: skip
    document = {
        "env": ENV,
        "command": "pair",
        "rows": [{**row, **fields}],
    }
    return msgspec.convert(document, Agreement)


def limit(column: str, bound: float, met: bool | None) -> list[object]:
    return [column, bound, False, met]


def timing(**fields) -> Timing:
    row = {
        "case": "paged-decode", "backend": "k", "spec": "32/8 heads, dim 128",
        "num_reqs": 1, "context": 1024, "gpu_us": [9.0, 10.0, 12.0], "floor_us": 5.0,
        "env": {**ENV, "copy_bytes_per_us": 4.0}, "command": "bench", "title": "Attention",
    }  # fmt: skip
    return msgspec.convert({**row, **fields}, Timing)
