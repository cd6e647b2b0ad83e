"""The tables, sentences and plot of long contexts, made from small reports."""

from __future__ import annotations

import re
from html import unescape
from statistics import median
from typing import Any

import pytest

from scripts import context_tables
from scripts.context_arm import FA2, FLASH_ATTN, NEW_TOKENS, OURS, TRITON
from scripts.readme import CONTEXT_PAGE, ROOT, context_reports

SHORT, LONG = 1024, 98304
LEFT_OUT = "786432 tokens of context; at most 262144 are timed"


def row(context: int, requests: int, *speeds: float, prompts: float = 1000.0) -> dict[str, Any]:
    more = {"tokens_per_s": [*speeds], "prompt_tokens_per_s": prompts} if speeds else {"left_out": LEFT_OUT}
    return {"context": context, "requests": requests, **more}


def arm(target: str, draft: str | None, *rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An arm with these rows. draft: None for the target's backend."""
    draft = target if draft is None else draft
    of = {"target": target, "draft": draft, "version": 0, "kind": "eagle", "size": "llama3-8b", "compiled": False}
    of |= {"steps": 7, "kept": 3.2} if draft else {"steps": 0, "kept": 0.0}
    return {"arm": of | more, "vllm": "0.33.0", "rows": [*rows]}


def timed(one: list[float], eight: list[float], prompts: float = 1000.0) -> list[dict[str, Any]]:
    """Rows of a short and a long context for one request, and of a short one for 8."""
    rows = [row(context, 1, speed, prompts=prompts) for context, speed in zip((SHORT, LONG), one, strict=True)]
    return [*rows, row(SHORT, 8, *eight), row(LONG, 8)]


ARMS = [
    arm(FLASH_ATTN, None, *timed([460.0, 59.0], [3400.0, 3500.0], 9000.0), version=2),
    arm(FLASH_ATTN, "", *timed([190.0, 118.0], [1400.0]), version=2),
    arm(OURS[0], None, *timed([500.0, 340.0], [3600.0, 3550.0], 13500.0)),
    arm(OURS[1], None, *timed([490.0, 295.0], [3420.0, 3480.0], 900.0)),
    arm(TRITON, None, *timed([495.0, 145.0], [3300.0], 450.0)),
    arm(FLASH_ATTN, None, *timed([400.0, 400.0], [4000.0], 18000.0)),
]
ENV = {"device": "NVIDIA H200", "date": "2026-11-29T00:00:00"}


def report(*arms: dict[str, Any], date: str = ENV["date"]) -> list[dict[str, Any]]:
    return [{"env": {**ENV, "date": date}, "arms": [*arms] or ARMS}]


def test_speeds_have_a_table_for_each_number_of_requests() -> None:
    title, one, eight, left_out = context_tables.speeds(report()).split("\n\n")
    assert title == (
        "8B Llama, heads of 128 dims, EAGLE with 7 draft tokens, 3.2 accepted. vLLM 0.33.0, H200, 2026-11-29:"
    )
    assert one.splitlines()[:2] == ["| target, one request | draft | 1k | 96k |", "| --- | --- | ---: | ---: |"]
    assert one.splitlines()[2:5] == [
        "| `FLASH_ATTN`, FlashAttention-2 | none | 190 [190-190] | 118 [118-118] |",
        "| `FLASH_ATTN`, FlashAttention-2 | the same | 460 [460-460] | 59 [59-59] |",
        "| `FLASHINFER_IN_GRAPH` (ours) | the same | 500 [500-500] | 340 [340-340] |",
    ]
    assert one.splitlines()[-1].startswith("| `FLASH_ATTN`, FlashAttention-3 | the same | 400 ")
    assert eight.splitlines()[0] == "| target, 8 requests | draft | 1k |", "no arm timed more"
    assert eight.splitlines()[3] == "| `FLASH_ATTN`, FlashAttention-2 | the same | 3,450 [3,400-3,500] |"
    assert left_out == f"Left out: 8 requests of 96k: {LEFT_OUT}."


def test_what_one_arm_left_out_has_its_name() -> None:
    whole = arm(TRITON, None, row(SHORT, 1, 5.0), row(SHORT, 8, 9.0))
    moved = arm(TRITON, OURS[0], row(SHORT, 1, 5.0), row(SHORT, 8))
    page = context_tables.speeds(report(whole, moved))
    assert "| `TRITON_ATTN` | `FLASHINFER_IN_GRAPH` | – |" in page
    assert f"Left out: 8 requests of 1k on `TRITON_ATTN`, draft `FLASHINFER_IN_GRAPH`: {LEFT_OUT}." in page
    prompts = context_tables.prompts(report(whole, moved))
    assert "| `TRITON_ATTN` | `FLASHINFER_IN_GRAPH` | 1,000 / – |" in prompts


def test_each_model_and_kind_of_draft_has_tables() -> None:
    dflash = {"kind": "dflash", "size": "qwen3-8b", "steps": 15, "kept": 5.0}
    others = [arm(TRITON, None, row(SHORT, 1, 7.0), **dflash), arm(TRITON, None, row(SHORT, 1, 8.0), size="dim-256")]
    compiled = arm("FLASHINFER", None, row(SHORT, 1, 6.0), compiled=True)
    failed = arm(OURS[0], None, size="llama-1b")
    page = context_tables.speeds(report(*ARMS, *others, compiled, failed))
    eagle, rest = page.split("8B Qwen3, heads of 128 dims, DFlash with 15 draft tokens, 5 accepted.")
    block, wide = rest.split("a Llama of 8B's width, heads of 256 dims, EAGLE with 7 draft tokens")
    assert "| `FLASHINFER`, compiled | the same | 6 [6-6] | – |" in eagle
    assert [part.count("\n| `") for part in (eagle, block, wide)] == [13 + 1, 1, 1]
    assert "| 7 [7-7] |" in block and "| 8 [8-8] |" in wide and "1B Llama" not in page
    for made in (context_tables.ratios, context_tables.prompts):
        assert "8B Qwen3" in made(report(*ARMS, *others))


def test_plain_arms_are_beside_every_draft_of_their_model() -> None:
    plain, other = (
        arm(TRITON, "", row(SHORT, 1, speed), size=size) for speed, size in ((3.0, "qwen3-8b"), (4.0, "llama-1b"))
    )
    drafts = [arm(TRITON, None, row(SHORT, 1, 7.0), kind=kind, size="qwen3-8b") for kind in ("dflash", "eagle")]
    page = context_tables.speeds(report(*drafts, plain, other))
    assert page.count("| `TRITON_ATTN` | none | 3 [3-3] |") == 2 and "| none | 4" not in page


def test_ratios_divide_ours_by_theirs() -> None:
    title, table = context_tables.ratios(report()).split("\n\n")
    head, rule, *rows = table.splitlines()
    assert title.endswith("requests × context:")
    assert head == "| ours | vLLM's | its draft | 1 × 1k | 1 × 96k | 8 × 1k |"
    assert rule == "| --- | --- | --- | ---: | ---: | ---: |"
    assert len(rows) == 8
    assert rows[0] == "| `FLASHINFER_IN_GRAPH` | `FLASH_ATTN`, FlashAttention-2 | none | 2.63 | 2.88 | 2.55 |"
    assert (
        rows[3] == "| `ATTN_BACKENDS_TRITON_PAGED` | `FLASH_ATTN`, FlashAttention-2 | the same | 1.07 | 5.00 | ~1.00 |"
    )
    assert rows[6] == "| `FLASHINFER_IN_GRAPH` | `FLASH_ATTN`, FlashAttention-3 | the same | 1.25 | 0.85 | 0.89 |"
    ours_left_out = [ARMS[0], arm(OURS[0], None, row(SHORT, 1, 920.0), row(LONG, 1))]
    assert context_tables.ratios(report(*ours_left_out)).splitlines()[-1].endswith("| the same | 2.00 | – | – |")


def test_runs_are_compared_one_by_one() -> None:
    """Both runs of an arm keep what was drawn for them, so ranges overlap where one side was always faster."""

    def last(*speeds: float) -> str:
        arms = [arm(FLASH_ATTN, None, row(SHORT, 1, 400.0, 500.0)), arm(OURS[0], None, row(SHORT, 1, *speeds))]
        return context_tables.ratios(report(*arms)).splitlines()[-1]

    assert last(390.0, 495.0).endswith("| 0.98 |") and last(404.0, 505.0).endswith("| 1.01 |")
    assert last(390.0, 505.0).endswith("| ~0.99 |") and last(400.0, 495.0).endswith("| ~0.99 |")


def test_prompts_have_a_number_for_each_number_of_requests() -> None:
    title, table = context_tables.prompts(report()).split("\n\n")
    assert title.endswith(", one request / 8 requests:")
    assert table.splitlines()[1] == "| --- | --- | ---: | ---: |"
    assert table.splitlines()[4] == "| `FLASHINFER_IN_GRAPH` (ours) | the same | 13,500 / 1,000 | 13,500 / – |"


def test_cost_begins_where_a_draft_stays_slower() -> None:
    assert context_tables.cost(report()) == (
        "On FlashAttention-2, a draft made one request slower from 96k of context on (59 tokens/s, 118 without) and "
        "left 8 requests faster at 1k, the longest timed (3,450 tokens/s, 1,400 without). After 96k tokens, one "
        "request got 59 tokens/s on it with the draft and 118 without; with target and draft, 340 on our "
        "`FLASHINFER_IN_GRAPH` and 295 on our `ATTN_BACKENDS_TRITON_PAGED`."
    )
    slow = arm(FLASH_ATTN, None, *timed([180.0, 59.0], [1.0]), version=2)
    found = context_tables.cost(report(slow, *ARMS[1:]))
    assert "one request slower from 1k of context on (180 " in found and "made 8 requests slower from 1k" in found
    dips = arm(FLASH_ATTN, None, *timed([180.0, 119.0], [1500.0]), version=2)
    assert "left one request faster at 96k, the longest timed (119 " in context_tables.cost(report(dips, *ARMS[1:]))


def test_behind_names_the_worst_context() -> None:
    first, second = context_tables.behind(report()).splitlines()
    assert first == (
        "- `FLASHINFER_IN_GRAPH` decodes slower than FlashAttention-3 by at most 15 % with one request (96k of "
        "context) and 11 % with 8 requests (1k of context). A prompt of 96k has 0.75 times FlashAttention-3's, 1.50 "
        "times FlashAttention-2's and 30.00 times `TRITON_ATTN`'s tokens/s."
    )
    assert "26 % with one request" in second and "0.05 times FlashAttention-3's" in second
    slow = arm(FLASH_ATTN, None, *timed([40.0, 40.0], [4000.0]))
    assert "by at most 0 % with one request (96k" in context_tables.behind(report(*ARMS[:5], slow))


def test_readme_shows_the_longest_context_and_the_faster_of_ours() -> None:
    assert context_tables.readme_row(report()) == [
        "EAGLE, 7 draft tokens, 96k of context, FlashAttention-2",
        "59, without a draft 118 (`FLASH_ATTN`)",
        "145 (`TRITON_ATTN`)",
        "340 (`FLASHINFER_IN_GRAPH`)",
    ]
    slow = arm(OURS[0], None, *timed([1.0, 1.0], [1.0]))
    assert context_tables.readme_row(report(*ARMS[:2], slow, *ARMS[3:]))[-1] == "295 (`ATTN_BACKENDS_TRITON_PAGED`)"


def test_plot_has_a_line_for_each_engine_of_one_request() -> None:
    drawn = unescape(context_tables.plot(report()))
    assert re.findall(r"; ([^:;]+): \d+ at 1k, (\d+) at 96k", drawn) == [
        ("FLASHINFER_IN_GRAPH (ours)", "340"),
        ("TRITON_PAGED (ours)", "295"),
        ("TRITON_ATTN (vLLM's)", "145"),
        ("FlashAttention-2, no draft", "118"),
        ("FlashAttention-2, draft", "59"),
    ]
    assert "FlashAttention-3 (vLLM's): 400 at 1k, 400 at 96k" in drawn
    assert drawn.count("stroke-dasharray") == 3, "lines of a colour differ in dashes"
    assert drawn.count('class="line strong"') == 2 and 'text-anchor="middle">96k</text>' in drawn


def test_report_without_what_the_page_shows_is_rejected() -> None:
    with pytest.raises(ValueError, match="must have an arm with a draft"):
        context_tables.speeds(report(ARMS[1]))
    with pytest.raises(ValueError, match=r"no arm has the draft and the model \('eagle', 'llama3-8b'\)"):
        context_tables.cost(report(arm(TRITON, None, row(SHORT, 1, 1.0), size="dim-256")))
    with pytest.raises(ValueError, match="no arm has target FLASH_ATTN, version 2, no draft"):
        context_tables.cost(report(ARMS[0], *ARMS[2:]))
    with pytest.raises(ValueError, match="no arm has target FLASH_ATTN, version 2, a draft"):
        context_tables.plot(report(*ARMS[1:]))


def test_sentences_of_the_page_hold_in_the_report() -> None:
    page, found = (ROOT / CONTEXT_PAGE).read_text(encoding="utf-8"), context_reports(ROOT)
    speeds: dict[tuple[str, int, int], dict[str, float]] = {}
    prompts: dict[str, dict[str, float]] = {}
    for each in (each for _, arms in context_tables.groups(found) for each in arms):
        settings = each["arm"]
        name, model = f"{settings['target']} {settings['version']}", f"{settings['kind']} {settings['size']}"
        for timed in each["rows"] if settings["draft"] == settings["target"] else ():
            if runs := timed.get("tokens_per_s"):
                assert len(runs) == 2 and "median of two runs" in page
                speeds.setdefault((model, timed["context"], timed["requests"]), {})[name] = median(runs)
            if (timed["context"], timed["requests"]) == (32768, 1):
                prompts.setdefault(model, {})[name] = timed["prompt_tokens_per_s"]
    assert f"{NEW_TOKENS} new tokens" in page
    first, second, old, triton = (*(f"{name} 0" for name in OURS), f"{FLASH_ATTN} {FA2}", f"{TRITON} 0")
    assert "they decode within 7 % of each other; the former's prompts are faster from 8k on, with heads" in page
    assert "with heads of 256 dims from 32k on |" in page
    both = [of for of in speeds.values() if {first, second} <= of.keys()]
    assert len(both) == 7 + 4 + 4 + 4 and all(0.93 < of[first] / of[second] < 1.07 for of in both)
    assert "and within 14 % with heads of 256 dims" in page
    leads = {model: of[first] / of[second] for model, of in prompts.items()}
    assert all(lead > 1.1 for model, lead in leads.items() if "256" not in model)
    assert round(leads["eagle dim-256"], 2) == 1.03
    assert "With contexts of 1k tokens, FlashAttention-2 was within 10 %" in page
    beside = {key: of for key, of in speeds.items() if old in of}
    short = {model: of[old] / max(of.values()) for (model, context, _), of in beside.items() if context == SHORT}
    assert all(share > (0.86 if "256" in model else 0.9) for model, share in short.items())
    assert "With EAGLE, it was faster than\nFlashAttention-2 from 8k of context on in our figures, but slower" in page
    assert "with DFlash's block, it was the slowest at every\nlength" in page
    for (model, context, _), of in beside.items():
        if model.startswith("dflash"):
            assert of[triton] == min(of.values())
        else:
            assert context < 8192 or of[old] < of[triton] < min(of[first], of[second])
    assert all(of[triton] == min(of.values()) for of in prompts.values() if triton in of)
    assert "32k took 2.4 to 3.5 times as long" in page
    ratios = [round(of[old] / of[triton], 1) for of in prompts.values() if {old, triton} <= of.keys()]
    assert (min(ratios), max(ratios)) == (2.4, 3.5)


def test_the_newest_report_of_a_model_is_shown_whole() -> None:
    wide = [arm(name, None, row(SHORT, 1, speed), size="dim-256") for name, speed in ((TRITON, 7.0), (OURS[1], 9.0))]
    older = report(*ARMS, arm(FLASH_ATTN, None, row(SHORT, 1, 3.0), size="dim-256"), date="2026-11-28T00:00:00")
    both = [*report(*wide), *older]
    llama, others = context_tables.speeds(both).split("a Llama of 8B's width")
    assert "H200, 2026-11-28:" in llama and "H200, 2026-11-29:" in others
    assert "| 9 [9-9] |" in others and "| 3 [3-3] |" not in others, "one run's arms are compared"
    assert context_tables.shown(both) is older[0]


def test_attention_alone_has_both_times_and_their_ratio() -> None:
    def timed(backend: str, context: int, us: float, **more: Any) -> dict[str, Any]:
        row = {"spec": "32/8 heads, dim 128, page 16, bfloat16", "num_reqs": 1, "context": context, "backend": backend}
        return {**row, "gpu_us": [0.0, us, 0.0], **more}

    rows = [timed("triton_paged", 1024, 6.0), timed("flash_attn3", 1024, 12.0), timed("triton_paged", 98304, 1100.0)]
    rows += [timed("flashinfer", 98304, 1.0), timed("triton_paged", 1024, 5.0, num_reqs=8)]
    found = {**report()[0], "command": "attn-backends bench paged-verify --device cuda", "rows": rows}
    title, table = context_tables.kernels(found).split("\n\n")
    assert title.endswith(", `attn-backends bench paged-verify`:")
    assert table.splitlines() == [
        "| query / KV heads | req. | 1k | 96k |",
        "| --- | ---: | ---: | ---: |",
        "| 32/8 heads, dim 128 | 1 | 6 / 12 (0.50) | – |",
    ]
    with pytest.raises(ValueError, match="no times of triton_paged and flash_attn3"):
        context_tables.kernels({**found, "rows": rows[-1:]})
