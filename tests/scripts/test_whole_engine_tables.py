"""The tables of whole engines, made from small reports."""

from __future__ import annotations

from typing import Any

import pytest

from scripts import engine_tables
from scripts.engine_arm import OURS, PLUGGED, VLLM

SIZES = (1, 32)
EAGLE: dict[str, Any] = {"steps": 7, "kept": 3.2}
NARROW_DRAFT, NARROW = EAGLE | {"draft_weights": True}, EAGLE | {"draft_weights": True, "weights": True}
EAGLE3: dict[str, Any] = EAGLE | {"kind": "eagle3", "size": "qwen3-8b"}
MTP = EAGLE3 | {"kind": "mtp", "size": "deepseek-v3-shard"}
BOTH: dict[str, Any] = {"models": "draft target", "head": "fp8"}


def whole(engine: str, *speeds: float, prefill: float = 1.0, decoding: float = 1.0, **settings: Any) -> dict[str, Any]:
    """An arm with these median speeds of whole requests, and of their decoding."""
    rows = [
        {"requests": size, "tokens_per_s": [speed, speed * 9, 0.1], "decode_tokens_per_s": [decoding * speed] * 3}
        for size, speed in zip(SIZES, speeds or (1.0, 1.0), strict=True)
    ]
    plain = {"steps": 0, "kept": 0.0, "weights": False, "draft_weights": False, "local_argmax": False}
    return {
        "arm": {**plain, "engine": engine, **settings},
        "rows": rows,
        "prefill": {"requests": 16, "tokens_per_s": [prefill, prefill * 9, 0.1]},
        **({} if engine == OURS else {"vllm": "0.33.0"}),
    }


def report(*arms: dict[str, Any], device: str = "NVIDIA H200", day: int = 29) -> dict[str, Any]:
    return {"env": {"device": device, "date": f"2026-11-{day}T00:00:00"}, "arms": arms}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_engines_with_the_same_settings_are_neighbours() -> None:
    dflash = EAGLE3 | {"kind": "dflash"}
    arms = [
        *(whole(VLLM, **EAGLE3, local_argmax=True), whole(VLLM, **EAGLE3), whole(VLLM, **dflash)),
        *(whole(OURS, **NARROW_DRAFT), whole(OURS, **EAGLE), whole(OURS), whole(PLUGGED, **EAGLE, models="draft")),
        *(whole(VLLM, **NARROW_DRAFT, local_argmax=True), whole(VLLM), whole(VLLM, **NARROW_DRAFT)),
        *(whole(VLLM, **EAGLE), whole(PLUGGED, **EAGLE, **BOTH)),
    ]
    title, _, _, _, *lines = engine_tables.figures("engines.json", report(*arms)).splitlines()
    assert title == "`engines.json`, H200, 2026-11-29:"
    assert [cells(line)[:2] for line in lines] == [
        ["no draft", "vLLM 0.33.0"], ["no draft", "`LLM`"], ["EAGLE", "vLLM 0.33.0"], ["EAGLE", "`LLM`"],
        ["EAGLE", "vLLM 0.33.0, our layers in draft"],
        ["EAGLE", "vLLM 0.33.0, our layers in draft and target, our head in 8 bits"],
        ["EAGLE, draft in 8 bits", "vLLM 0.33.0"],
        ["EAGLE, draft in 8 bits, local argmax", "vLLM 0.33.0"], ["EAGLE, draft in 8 bits", "`LLM`"],
        ["DFlash, 8B Qwen3", "vLLM 0.33.0"], ["EAGLE-3, 8B Qwen3", "vLLM 0.33.0"],
        ["EAGLE-3, 8B Qwen3, local argmax", "vLLM 0.33.0"],
    ]  # fmt: skip


def test_speeds_are_those_at_the_mean_number_of_drafts_kept() -> None:
    lucky = whole(VLLM, 100.0, 100.0, **EAGLE)
    for row in lucky["rows"]:
        row |= {"tokens_per_s": [110.0, 210.0, 40.0], "kept": [3.62, 7.4, 0.68], "decode_kept": [11.6] * 3}
    *_, line = engine_tables.figures("engines.json", report(lucky)).splitlines()
    assert cells(line)[2:4] == ["100 / 33", "100 / 33"], "medians of 100, 105 and 100, and a third of 100"


def test_llm_is_shown_beside_the_best_of_vllm() -> None:
    newer = report(
        whole(VLLM, 350.0, 6296.0, prefill=30_000.0, **EAGLE),
        whole(OURS, 412.0, 6433.0, prefill=31_000.0, **EAGLE),
        whole(VLLM, 418.0, 6746.0, **NARROW_DRAFT),
        whole(VLLM, 420.0, 6700.0, **NARROW_DRAFT, local_argmax=True),
        whole(OURS, 485.0, 6414.0, **NARROW_DRAFT),
        whole(OURS, 1.0, 1.0, weights=True),
        device="NVIDIA H100 80GB",
    )
    older = report(whole(VLLM, 203.0, 4432.0), whole(OURS, 232.0, 4765.0), whole(OURS, 1.0, 1.0, **EAGLE), day=28)
    model, command = "Tokens/s of an 8B Llama", "`scripts/vllm_figures.py --engines`"
    new, old = f"H100, 2026-11-29, {command}", f"H200, 2026-11-28, {command}"
    # Without a draft, the newest report has nothing.
    assert engine_tables.readme_rows([newer, older]) == [
        [f"{model} without a draft, 1 / 32 requests", "203 / 4,432 (vLLM 0.33.0)", "232 / 4,765 (`LLM`)", old],
        [f"{model} with EAGLE, 1 / 32 requests", "350 / 6,296 (vLLM 0.33.0)", "412 / 6,433 (`LLM`)", new],
        [
            "Prompt tokens/s of an 8B Llama with EAGLE, 16 prompts of 1,000 tokens",
            "30,000 (vLLM 0.33.0)",
            "31,000 (`LLM`)",
            new,
        ],
        [
            f"{model} with an EAGLE draft in 8 bits, 1 / 32 requests",
            "420 / 6,746 (vLLM 0.33.0)",
            "485 / 6,414 (`LLM`)",
            new,
        ],
    ]


def test_vllm_with_our_layers_is_shown_beside_its_own_options() -> None:
    plain, both = whole(VLLM, 700.0, 9700.0, **NARROW), whole(PLUGGED, 740.0, 10600.0, **NARROW, **BOTH)
    [row] = engine_tables.readme_rows([report(plain), report(both), report(plain, both, day=27)])
    assert row[1:3] == ["700 / 9,700 (its own options)", "740 / 10,600 (our layers and head)"] and "11-27" in row[3]


def test_our_layers_are_compared_with_the_fastest_options() -> None:
    arms = [
        *(whole(VLLM, 100.0, 100.0, decoding=2.0, **EAGLE), whole(PLUGGED, 110.0, 90.0, decoding=4.0, **EAGLE, **BOTH)),
        *(whole(VLLM, 100.0, 300.0, **NARROW_DRAFT), whole(VLLM, 200.0, 200.0, **NARROW_DRAFT, local_argmax=True)),
        whole(PLUGGED, 300.0, 300.0, **NARROW_DRAFT, **BOTH),
        # Neither has our layers in both models and our head.
        whole(PLUGGED, 1.0, 1.0, **NARROW_DRAFT, models="draft target"),
        whole(PLUGGED, 1.0, 1.0, **EAGLE, models="draft", head="16"),
        whole(VLLM, 100.0, 100.0, **NARROW),
        *(whole(VLLM, 100.0, 100.0, **EAGLE3), whole(PLUGGED, 1.0, 1.0, **EAGLE3, head="16")),
        whole(PLUGGED, 130.0, 140.0, **EAGLE3, models="draft", head="16"),
        *(whole(VLLM, 100.0, 100.0, **MTP), whole(PLUGGED, 120.0, 110.0, **MTP, models="", head="16")),
    ]
    older = report(whole(VLLM, 100.0, 100.0, **EAGLE), whole(PLUGGED, 1.0, 1.0, **EAGLE, **BOTH), day=27)
    lines = engine_tables.our_layers([report(*arms), older]).splitlines()
    assert cells(lines[0]) == ["draft, weights", "1 req.", "32 req.", "GPU, date"]
    source = "H200, 2026-11-29"
    assert [*map(cells, lines[2:])] == [
        ["EAGLE, 16 bits", "~1.10", "~0.90", source],
        ["EAGLE, 16 bits, decoding alone", "2.20", "1.80", source],
        ["EAGLE, draft in 8 bits", "~1.50", "~1.00", source],
        ["EAGLE, draft in 8 bits, decoding alone", "1.50", "~1.00", source],
        ["EAGLE-3, 16 bits; draft alone", "~1.30", "~1.40", source],
        ["EAGLE-3, 16 bits; draft alone, decoding alone", "1.30", "1.40", source],
    ], "MTP is left out"
    with pytest.raises(ValueError, match="no report of whole engines has vLLM with our layers"):
        engine_tables.our_layers([report(whole(VLLM, **EAGLE))])
