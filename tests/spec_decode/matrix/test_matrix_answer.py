"""Which backends serve an attention, and the checks that passed nearest to it."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from attn_backends import registry
from builders import AttentionSpec
from spec_decode.conformance.case_records import BatchRecord, SpecRecord
from spec_decode.conformance.coverage import with_case
from spec_decode.conformance.report import Claim, Report
from spec_decode.matrix.answer import answer_question, to_json
from spec_decode.matrix.answer_pages import NOTHING, to_html, to_lines
from spec_decode.matrix.question import Question
from spec_decode.testing.batches import DECODE, Case
from tests.spec_decode.matrix.evidence import report, result

SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=4, head_dim=128, page_size=16, sliding_window=4096)
WORDS = "window 4096, group 8, page 16, bf16"
CLAIMS = {"dtype:bfloat16": True, "page:16": True, "feature:sliding_window": True, "feature:gqa": True}
ROOT = Path(__file__).parents[3]
OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"


def seen(spec=SPEC, outcome="pass", *tags, check="numerics.right", case="a", batch=DECODE, **changes):
    """A result of a check on this spec with these changes."""
    record = SpecRecord.of(replace(spec, **changes))
    return result(outcome, *tags, check=check, case=case, spec=record, batch=BatchRecord.of(batch))


def unrecorded(spec=SPEC, outcome="pass", case="a", **changes):
    """The same as a report without specs holds it."""
    tags = with_case()(None, Case(replace(spec, **changes), DECODE))
    return result(outcome, *tags, case=case)


def ask(*reports, words=WORDS, installed=None, device=""):
    return answer_question(Question.of(words), reports, installed or {}, device=device)


def only(*results, words=WORDS, **fields):
    """The answer for one backend with these results."""
    (found,) = ask(report(*results, **{"claims": CLAIMS, **fields}), words=words).backends
    return found


def axes(near):
    return [difference.axis for difference in near.differences]


def test_exact_evidence_hides_the_rest():
    found = only(seen(), seen(case="b", sliding_window=17), seen(case="c", dtype=torch.float32, kv_dtype=torch.float32))
    assert found.exact and [(near.passed, near.total, near.differences) for near in found.near] == [(1, 1, ())]


def test_separate_passes_are_not_combined():
    """A window passed and bf16 passed, but no check had both."""
    in_fp32 = seen(case="window", dtype=torch.float32, kv_dtype=torch.float32)
    found = only(in_fp32, seen(case="bf16", sliding_window=None))
    assert not found.exact
    assert {near.case: axes(near) for near in found.near} == {"window": ["dtype"], "bf16": ["window"]}


def test_nearest_size_on_an_axis_is_shown():
    found = only(*(seen(case=str(size), sliding_window=size) for size in (17, 1024, 100_000)))
    (near,) = found.near
    assert (near.case, near.passed, near.total) == ("1024", 3, 3)
    assert near.differences[0].asked == "4096" and near.differences[0].found == "1024"


def test_no_window_is_further_than_another_size():
    found = only(seen(case="none", sliding_window=None), seen(case="small", sliding_window=17))
    assert [near.case for near in found.near] == ["small"]


def test_exact_failure_is_shown_beside_near_passes():
    found = only(seen(outcome="fail", case="exact"), seen(case="near", sliding_window=17))
    assert not found.exact
    assert [(near.case, near.passed, near.total, len(near.failures)) for near in found.near] == [
        ("exact", 0, 1, 1),
        ("near", 1, 1, 0),
    ]


@pytest.mark.parametrize(
    ("spec", "axis"),
    [
        ({"sinks": True}, "sinks"),
        ({"soft_cap": 2.0}, "soft cap"),
        ({"batch_invariant": True}, "batch invariant"),
        ({"causal": False}, "blocks"),
        ({"tree": True}, "trees"),
        ({"value_dim": 64}, "value dim"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv dtype"),
        ({"num_kv_heads": 8}, "group"),
        ({"page_size": 64}, "page"),
    ],
)
def test_unrequested_feature_is_a_difference(spec, axis):
    (near,) = only(seen(**spec)).near
    assert axes(near) == [axis]


def test_unnamed_axes_are_free():
    assert only(seen(head_dim=64, value_dim=64, num_q_heads=64, num_kv_heads=8, scale=0.3)).exact


@pytest.mark.parametrize(("words", "exact"), [("rows 7", True), ("rows 8", False), ("length 142, decode", True)])
def test_rows_and_length_are_covered_by_larger(words, exact):
    assert only(seen(SPEC, "pass", "mode:decode"), words=f"{WORDS}, {words}").exact is exact


def test_a_strategy_is_an_axis():
    drafted = seen(SPEC, "pass", "strategy:full_loop", "strategy:eager", check="drafter.agree", case="d")
    full = f"{WORDS}, full loop"
    assert only(drafted, words=full).exact and not only(drafted, words=f"{WORDS}, per step").exact
    (near,) = only(seen(), words=full).near
    assert [(each.axis, each.asked, each.found) for each in near.differences] == [("strategy", "full loop", "none")]


def test_only_checks_that_run_the_spec_are_evidence():
    found = only(seen(check="refusal.unclaimed_is_refused"), seen(check="contract.metadata_is_frozen"))
    assert not found.near
    assert not only(seen(outcome="unsupported")).near


def test_report_without_specs_uses_its_columns():
    (near,) = only(unrecorded()).near
    assert [(each.axis, each.found, each.recorded) for each in near.differences] == [
        ("window", "of unrecorded size", False),
        ("group", "of unrecorded size", False),
    ]
    (near,) = only(unrecorded(sliding_window=None, num_kv_heads=32)).near
    assert [(each.axis, each.found, each.recorded) for each in near.differences] == [
        ("window", "none", True),
        ("group", "1", True),
    ]
    drafted = result("pass", "strategy:full_loop", check="drafter.agree")
    (near,) = only(drafted, words=f"{WORDS}, full loop").near
    assert [each.found for each in near.differences] == ["the report does not record it"]


def test_newest_result_counts_with_its_own_date():
    older, newer = report(seen(), date=OLD, claims=CLAIMS), report(seen(outcome="fail"), date=NEW, claims=CLAIMS)
    found = ask(older, newer)
    (near,) = found.backends[0].near
    assert not found.backends[0].exact and found.runs[near.run].env.date == NEW


def test_exact_backends_come_first_and_refusing_last():
    reports = [
        report(seen(), backend="refuses", claims={**CLAIMS, "page:16": False}),
        report(seen(sliding_window=17), backend="a_near", claims=CLAIMS),
        report(seen(), backend="exact", claims=CLAIMS),
        report(seen(), backend="builder", engine="engine 1", claims=CLAIMS),
    ]
    found = ask(*reports)
    assert [each.backend for each in found.backends] == ["exact", "a_near", "refuses"]
    assert found.backends[2].acceptance.reasons == ("page 16: not claimed",)


NEEDS_SINKS = {"feature:sinks": Claim(claimed=True, reason="a spec must request it")}
NO_LOOP = {"strategy:full_loop": Claim(claimed=False, reason="REBUILD")}


@pytest.mark.parametrize(
    ("claims", "words", "reasons"),
    [
        ({"page:16": Claim(claimed=False, reason="page size 64")}, WORDS, ["page 16: page size 64"]),
        (NEEDS_SINKS, WORDS, ["serves only specs with sinks"]),
        (NEEDS_SINKS, f"{WORDS}, sinks", []),
        (NO_LOOP, f"{WORDS}, full loop", ["full loop: REBUILD"]),
        (NO_LOOP, WORDS, []),
        ({"*": Claim(claimed=False, reason="runs on cuda")}, WORDS, ["runs on cuda"]),
    ],
)
def test_recorded_claims_decide_for_absent_backend(claims, words, reasons):
    says = only(seen(), words=words, claims={**CLAIMS, **claims}).acceptance
    assert (says.support.value == "refused") is bool(reasons)
    assert list(says.reasons) == reasons


def test_committed_reports_name_required_features():
    """The words of that claim are the kit's."""
    found = ask(Report.load(ROOT / "reports/h100/check-flashmla_sparse.json"), words="mla, dim 512, page 64, bf16")
    says = found.backends[0].acceptance
    assert says.required == ("sliding_window",) and "serves only specs with sliding_window" in says.reasons


def test_undecided_claims_are_reported():
    says = only(seen(), words="window 4096, group 8, page 32, bf16", claims=CLAIMS).acceptance
    assert says.support.value == "accepted" and says.unsaid == ("page 32", "group 8", "window 4096")
    gone = only(result("unavailable", "*", check="contract.loads", reason="no package"), claims={}).acceptance
    assert (gone.support.value, gone.reasons) == ("unknown", ("no package",))


def test_refused_mha_check_decides_attention_kind():
    refused = result("pass", "contract:refusals", check="refusal.unclaimed_is_refused", case="mha")
    assert only(refused).acceptance.reasons == ("serves mla, not mha",)
    assert only(refused, words=f"{WORDS}, mla").acceptance.reasons == ()


def test_installed_backend_decides_with_its_reasons():
    backends = {name: registry.get(name) for name in ("torch_reference", "triton_mla")}
    reports = [report(seen(), backend=name, cuda=None, claims=CLAIMS) for name in backends]
    found = ask(*reports, installed=backends)
    accepted, refused = (each.acceptance for each in found.backends)
    assert accepted.example == "32/4 heads, dim 128, page 16, bfloat16, window 4096"
    assert refused.reasons[0] == "serves mla, not mha" and refused.required == ("value_dim",)
    assert "installed here" in refused.source


def test_unreadable_backend_leaves_answer_unknown():
    class Odd(type(registry.get("torch_reference"))):
        def unsupported_reasons(self, spec, device):
            raise RuntimeError("no reason")

    (found,) = ask(report(seen(), claims=CLAIMS), installed={"k": Odd()}).backends
    assert found.acceptance.support.value == "unknown" and "RuntimeError: no reason" in found.acceptance.reasons[0]


def test_page_shows_nearest_groups_and_json_all():
    combinations = product(*([{}, change] for change in FLAGS))
    specs = [{name: value for part in parts for name, value in part.items()} for parts in combinations]
    four = [each for each in specs if len(each) == 3]
    found = ask(report(*(seen(case=str(n), **each) for n, each in enumerate(four)), claims=CLAIMS))
    assert len(found.backends[0].near) == len(four) == 35
    assert "And 15 other groups of checks, in the JSON" in to_html(found)
    assert "and 29 other groups of checks, in the JSON" in "\n".join(to_lines(found))


FLAGS = (
    {"sinks": True},
    {"soft_cap": 2.0},
    {"batch_invariant": True},
    {"value_dim": 64},
    {"page_size": 64},
    {"kv_dtype": torch.float8_e4m3fn},
    {"tree": True},
)


def test_device_matches_by_name_part_or_kind():
    reports = [report(device="NVIDIA H100 80GB"), report(device="NVIDIA H200"), report(device="Xeon", cuda=None)]
    for device, count in {"": 3, "h100": 1, "cuda": 2, "CPU": 1, "B200": 0}.items():
        assert len(ask(*reports, device=device).backends) == count
    assert NOTHING in list(to_lines(ask(*reports, device="B200"))) and NOTHING in to_html(ask(device="B200"))


def test_every_format_has_answer_reason_and_date():
    reports = [
        report(seen(sliding_window=17), claims=CLAIMS, date=NEW),
        report(seen(), backend="refuses", claims={**CLAIMS, "page:16": False}),
    ]
    found = ask(*reports)
    parts = ("window: 17, asked 4096", "NVIDIA H200", "2026-02-01", "accepted", "page 16: not claimed", "feature:gqa")
    for text in ("\n".join(to_lines(found)), to_html(found)):
        assert [words for words in parts if words not in text] == []
    document = json.loads(to_json(found))
    assert [column["tag"] for column in document["needs"]] == [
        "dtype:bfloat16",
        "page:16",
        "feature:sliding_window",
        "feature:gqa",
    ]
    assert document["backends"][0]["near"][0]["differences"][0]["found"] == "17"


def test_text_from_a_report_is_escaped():
    hostile = report(seen(case="<script>\x1b[31m"), backend="<b>", claims=CLAIMS)
    page, text = to_html(ask(hostile)), "\n".join(to_lines(ask(hostile)))
    assert "<script>" not in page and "<b>@" not in page and "\x1b" not in page + text
