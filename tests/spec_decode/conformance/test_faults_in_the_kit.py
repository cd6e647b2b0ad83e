"""Plug-ins whose faults the kit itself must detect: kept memory, CUDA started on import, a lie in every claim."""

from __future__ import annotations

import gc
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from mmap import mmap
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_backends import AttentionBackend, BrokenBackend, Feature, Rejected, get, register, registry
from attn_backends.torch_reference import TorchReference
from builders import (
    CONTRACT_VERSION,
    AttentionBatch,
    AttentionKind,
    AttentionSpec,
    ReferenceBuilder,
    ReferenceMetadata,
)
from spec_decode.conformance import check, check_backend, parametrize_with_checks, runner
from spec_decode.conformance.report import Report, Result
from spec_decode.environment import Environment, environment
from spec_decode.matrix import Matrix, Status, build_matrix
from spec_decode.testing.outcome import Outcome
from spec_decode.testing.subject import Subject
from tests.factories import register_as
from tests.mutants.claims import cuda_that_starts
from tests.mutants.mutant import derived, with_builder

CPU = torch.device("cpu")
KEEPS_NOTHING = "builder.rounds_keep_no_memory"
LOADING = "contract.loading_touches_no_cuda"
NUMERICS = "numerics.attention_is_right"
Keep = Callable[[ReferenceMetadata], object]


def report_of(backend: AttentionBackend | str, *checks: str) -> Report:
    return check_backend(backend, device=CPU, checks=checks, report=True)


def only(report: Report) -> Result:
    (result,) = report.results
    return result


class Cycle:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.workspace = self


@pytest.mark.parametrize(("allocated", "frees"), [(1 << 30, False), ((1 << 30) + 1, True)])
def test_check_first_frees_memory_left_on_device(
    allocated: int, frees: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(gc.enable)
    gc.disable()
    left = weakref.ref(Cycle())
    freed: list[bool] = []

    def frees_memory(subject: Subject, case: object) -> None:
        freed.append(left() is None)

    monkeypatch.setattr(check, "_definitions", [])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    check.Family("contract", covers=lambda subject, case: ())("A line.")(frees_memory)
    (one,) = check.expand(Subject(get("torch_reference"), torch.device("cuda")))
    one()
    assert freed == [frees]


def every_metadata() -> Keep:
    kept: list[ReferenceMetadata] = []
    return kept.append


def into_one_tensor() -> Keep:
    history = [torch.zeros(0)]

    def keep(metadata: ReferenceMetadata) -> None:
        history[0] = torch.cat([history[0], torch.zeros(1)])

    return keep


def outside_of_tensors() -> Keep:
    """As a library does that forgets to unmap: 256 KiB, written to. A long-lived heap might have had them to spare."""
    kept: list[mmap] = []

    def keep(metadata: ReferenceMetadata) -> None:
        kept.append(mmap(-1, 256 << 10))
        kept[-1].write(b"1" * (256 << 10))

    return keep


def up_to_a_bound() -> Keep:
    kept: list[torch.Tensor] = []
    return lambda metadata: kept.append(torch.zeros(4)) if len(kept) < 12 else None


RESIDENT = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the resident set is read from /proc")
NEW = "new in contract 1.1, the backend was built for 1.0: "


@pytest.mark.parametrize(
    ("keeps", "built_for", "outcome", "reason"),
    [
        (
            every_metadata,
            CONTRACT_VERSION,
            Outcome.FAIL,
            "16 equal rounds.* more tensors",
        ),
        (every_metadata, (1, 0), Outcome.PREVIEW, f"^{NEW}"),
        (into_one_tensor, CONTRACT_VERSION, Outcome.FAIL, "0 more tensors and 128 more bytes in tensors"),
        pytest.param(
            outside_of_tensors,
            CONTRACT_VERSION,
            Outcome.FAIL,
            "a resident set ",
            marks=RESIDENT,
        ),
        (up_to_a_bound, CONTRACT_VERSION, Outcome.PASS, "^$"),
    ],
)
def test_memory_kept_by_advance_is_reported(
    keeps: Callable[[], Keep], built_for: tuple[int, int], outcome: Outcome, reason: str
) -> None:
    keep = keeps()

    class Builder(ReferenceBuilder):
        def advance(self, metadata: ReferenceMetadata) -> None:
            super().advance(metadata)
            keep(metadata)

    namespace = {"name": "keeper", "builder": Builder, "contract_version": built_for}
    liar_results = only(report_of(type("Keeper", (TorchReference,), namespace)(), KEEPS_NOTHING))
    assert liar_results.outcome is outcome and re.search(reason, liar_results.reason)


def build_of_its_own(self: Any, batch: AttentionBatch, *, horizon: int = 0) -> ReferenceMetadata:
    """Its tensors live as long as the metadata, and what a graph reads goes with it."""
    built = ReferenceBuilder.build(self, batch, horizon=horizon)
    return replace(built, kv_start=built.kv_start.clone(), kv_end=built.kv_end.clone())


def test_captured_loop_keeps_metadata_its_graph_reads() -> None:
    owner = with_builder(derived("OwnsItsTensors", build=build_of_its_own))
    check_backend(owner, device=CPU, checks=["graph.loop_replays_over_other_batches[[]base-decode]"])


@pytest.fixture
def machine_with_cuda() -> Iterator[None]:
    """Where a backend `starter` starts CUDA when it is loaded."""

    def start() -> AttentionBackend:
        torch.cuda.init()
        return Later()

    with cuda_that_starts():
        register_as("starter", start)
        yield


class Later(TorchReference):
    name = "later"


def test_starting_cuda_while_loading_fails(machine_with_cuda: None) -> None:
    liar_results = only(report_of("starter", LOADING))
    assert liar_results.outcome is Outcome.FAIL and "initialised while it was loaded" in liar_results.reason


def test_reading_environment_does_not_hide_cuda_start(machine_with_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report reads the device before the check runs."""

    def look(device: torch.device) -> Environment:
        torch.cuda.init()
        return environment(device)

    monkeypatch.setattr(runner, "environment", look)
    assert only(report_of("starter", LOADING)).outcome is Outcome.FAIL


def test_cuda_start_is_blamed_on_right_backend(machine_with_cuda: None) -> None:
    register(Later)
    get("starter")
    assert only(report_of("later", LOADING)).outcome is Outcome.PASS


def build_without_window(self: Any, batch: Any, *, horizon: int = 0) -> ReferenceMetadata:
    windowed, self.spec = self.spec, replace(self.spec, sliding_window=None)
    built = ReferenceBuilder.build(self, batch, horizon=horizon)
    ReferenceBuilder.advance(self, built)
    self.spec = windowed
    return built


class Liar(TorchReference):
    """Serves fp32 heads of 64 in pages of 16 and nothing else, with no advance, and claims all there is."""

    name = "liar"
    version = "1"
    contract_version = (1, 0)
    builder = derived("Narrow", build=build_without_window, advance=lambda self, metadata: None)
    capabilities = replace(TorchReference.capabilities, devices=("cpu", "cuda", "xpu", "meta"))

    def forward(
        self, query: torch.Tensor, cache: Any, metadata: Any, *, spec: AttentionSpec, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        shape = (spec.dtype, spec.cache_dtype, spec.head_dim, spec.out_dim, spec.page_size, spec.kind)
        if shape != (torch.float32, torch.float32, 64, 64, 16, AttentionKind.MHA):
            return query.new_zeros(query.shape[0], spec.num_q_heads, spec.out_dim)
        plain = replace(spec, soft_cap=None, sinks=False)
        return super().forward(query, cache, metadata, spec=plain, sinks=None)


FALSE_CLAIMS = {
    "dtype:bfloat16": (NUMERICS, "bf16-decode"),
    "dtype:float16": (NUMERICS, "fp16-decode"),
    "kv:float8_e4m3fn": (NUMERICS, "fp8_cache-decode"),
    "kv:mixed": (NUMERICS, "bf16_over_fp32_cache-decode"),
    "dim:80": (NUMERICS, "dim_80-decode"),
    "dim:256": (NUMERICS, "dim_256-decode"),
    "page:1": (NUMERICS, "page_1-decode"),
    "page:128": (NUMERICS, "page_128-decode"),
    "feature:sliding_window": (NUMERICS, "window-decode"),
    "feature:soft_cap": (NUMERICS, "soft_cap-decode"),
    "feature:sinks": (NUMERICS, "sinks-decode"),
    "feature:value_dim": (NUMERICS, "value_dim-decode"),
    "feature:mla": (NUMERICS, "mla_base-decode"),
    "graph:advance": ("builder.advance_means_a_rebuild", "base-single"),
    "graph:capture": ("graph.verify_replays_over_other_batches", "base-verify"),
    "contract:declared": ("contract.supports_answers_with_reasons", "any"),
}
"""The column of each claim, and the check and case that must find it false."""


@pytest.fixture(scope="module")
def liar_results() -> tuple[Report, Matrix]:
    """What is told of the liar, and the matrix of it beside the reference, whose claims are true."""
    patterns = [f"{check}[[]{case}]" for check, case in FALSE_CLAIMS.values()]
    liar, truthful = report_of(Liar(), *patterns), report_of(TorchReference(), *patterns)
    return liar, build_matrix([liar, truthful])


def test_liar_claims_every_feature_and_best_levels(liar_results: tuple[Report, Matrix]) -> None:
    claims = liar_results[0].claims
    assert all(claims[f"feature:{feature.value}"].claimed for feature in Feature)
    assert all(claims[tag].claimed for tag in FALSE_CLAIMS if tag != "contract:declared")
    assert (claims["graph:capture"].level, claims["graph:advance"].level) == ("always", "in graph")


@pytest.mark.parametrize("tag", FALSE_CLAIMS)
def test_false_claim_fails_and_is_broken_in_matrix(tag: str, liar_results: tuple[Report, Matrix]) -> None:
    report, matrix = liar_results
    (lie,) = [result for result in report.results if (result.check, result.case) == FALSE_CLAIMS[tag]]
    assert lie.outcome is Outcome.FAIL and lie.reason.startswith("contract: ") and "; got: " in lie.reason
    words = {row.backend: row.cells[tag].status for row in matrix.rows}
    assert tag in lie.tags and words == {"liar": Status.BROKEN, "torch_reference": Status.VERIFIED}


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Registers a backend with these attributes, until the test ends, and returns its name."""
    for store in ("_registered", "_loaded"):
        monkeypatch.setattr(registry, store, dict(getattr(registry, store)))

    def declare(**attributes: Any) -> str:
        register_as("odd", type("Odd", (TorchReference,), {"contract_version": (1, 0), **attributes}))
        return "odd"

    return declare


VERSIONS = [("contract_version", version) for version in [(1, -1), (1,), "1.0", None, (1, 0.5)]]
VALUES = [(name, value) for name in ("capabilities", "builder") for value in (None, "all", ModuleType)]


@pytest.mark.parametrize(("attribute", "value"), [*VERSIONS, *VALUES])
def test_backend_without_version_or_builder_is_rejected(
    attribute: str, value: Any, declared: Callable[..., str]
) -> None:
    """By another version every check would be a preview."""
    with pytest.raises(BrokenBackend, match=f"must state {attribute}, .*got "):
        get(declared(**{attribute: value}))


def fail(*args: object) -> Any:
    raise KeyError("no table")


@pytest.mark.parametrize(
    "attributes",
    [
        {"supports": fail},
        {"capabilities": replace(TorchReference.capabilities, dtypes=(torch.int8,))},
        {"builder": type("Silent", (ReferenceBuilder,), {"advance_support": classmethod(fail)})},
    ],
    ids=["supports", "dtypes", "advance_support"],
)
def test_raising_backend_gets_complete_error_report(attributes: dict[str, Any], declared: Callable[..., str]) -> None:
    report = check_backend(declared(**attributes), device=CPU, families=["contract"], report=True)
    assert not report.ok and not report.counts[Outcome.NOT_RUN] and report.counts[Outcome.ERROR]
    assert all(result.reason for result in report.results if result.outcome is Outcome.ERROR)
    assert any("cannot be read: " in claim.reason for claim in report.claims.values())


def test_error_in_supports_is_explained_as_rejection(declared: Callable[..., str]) -> None:
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
    verdict = registry.explain(declared(supports=fail), spec, CPU)
    assert not verdict and "backend 'odd' failed in supports(): KeyError: 'no table'" in str(verdict)


def refusing(*reasons: str) -> Callable[..., Rejected]:
    return lambda self, spec, device: Rejected(reasons)


def test_backend_refusing_every_spec_is_not_ok(declared: Callable[..., str]) -> None:
    report = runner.run(runner.check_list(declared(supports=refusing("not today, sorry")), device=CPU, quick=True))
    assert not report.ok and report.counts[Outcome.PASS] and not report.counts[Outcome.FAIL]


def refuses_sinks(self: Any, spec: AttentionSpec, device: torch.device) -> Any:
    return Rejected(("",)) if spec.sinks else TorchReference.supports(self, spec, device)


@pytest.mark.parametrize("supports", [refusing(), refusing(""), refusing(" "), refuses_sinks])
def test_refusal_without_reason_fails(supports: Any, declared: Callable[..., str]) -> None:
    cases = "[[]sinks-single]" if supports is refuses_sinks else ""
    liar_results = only(report_of(declared(supports=supports), f"{NUMERICS}{cases}"))
    assert liar_results.outcome is Outcome.FAIL and "a rejection has a reason, and none is blank" in liar_results.reason


def test_check_without_cases_is_error_in_every_column(declared: Callable[..., str]) -> None:
    liar_results = only(report_of(declared(supports=fail), NUMERICS))
    assert (liar_results.case, liar_results.outcome, liar_results.tags) == ("any", Outcome.ERROR, ("*",))


class Abrupt(BaseException):
    """What no `except Exception` catches."""


@pytest.mark.parametrize("error", [SystemExit(0), Abrupt("enough")], ids=["exit", "abrupt"])
@pytest.mark.parametrize("method", ["supports", "advance_support"])
def test_system_exit_in_backend_does_not_end_run(
    method: str, error: BaseException, declared: Callable[..., str]
) -> None:
    def abrupt(*_: object) -> None:
        raise error

    attributes: dict[str, Any] = {"supports": abrupt}
    if method == "advance_support":
        attributes = {"builder": type("Builder", (ReferenceBuilder,), {method: abrupt})}
    report = report_of(declared(**attributes), "contract.version_matches", "builder.*any*")
    assert not report.ok and report.results[0].outcome is Outcome.PASS
    assert any(f"{type(error).__name__}: {error}" in result.reason for result in report.results)


def test_os_exit_in_check_is_an_error(
    declared: Callable[..., str],
) -> None:
    report = report_of(declared(forward=lambda *_, **__: os._exit(0)), f"{NUMERICS}[[]base-*", "contract.v*")
    ended = [result for result in report.results if result.check == NUMERICS]
    assert len(ended) == 4 and {result.outcome for result in ended} == {Outcome.ERROR}
    assert all("os._exit(0) would end the process that checks the backend" in result.reason for result in ended)
    assert report.counts[Outcome.PASS] == 1


def test_forked_process_may_exit(declared: Callable[..., str]) -> None:
    def forward(self: TorchReference, *inputs: Any, **options: Any) -> torch.Tensor:
        if not (child := os.fork()):
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return TorchReference.forward(self, *inputs, **options)

    check_backend(declared(forward=forward), device=CPU, checks=[f"{NUMERICS}[[]base-single]"])


def test_os_exit_at_collection_is_an_error(declared: Callable[..., str]) -> None:
    name = declared(supports=lambda *_: os._exit(0))
    params = parametrize_with_checks(name, device=CPU).args[1]
    (collected,) = [param.values[0] for param in params if param.id.endswith(f"-{NUMERICS}[any]")]
    with pytest.raises(RuntimeError, match=r"os._exit\(0\) would end the process"):
        collected()
