"""The tables on the strategies and vLLM pages, made from small reports."""

from __future__ import annotations

from typing import Any

import pytest

from scripts import strategy_times, vllm_tables


def test_report_without_needed_rounds_is_rejected() -> None:
    with pytest.raises(ValueError, match="nothing to show on the strategies page"):
        strategy_times.table({"env": {}, "rows": []})
    with pytest.raises(ValueError, match="no rounds with fp8 weights"):
        strategy_times.fp8_table({"env": {}, "rows": []})


def test_fp8_round_row_follows_bf16_row() -> None:
    kind = {"backend": "triton_paged", "num_speculative_tokens": 7, "temperature": 0.0}
    rows = [
        {**kind, "case": case, "strategy": strategy, "num_reqs": n, "gpu_us": [0, us * n, 0]}
        for case, us in (("x/round", 300.0), ("x/fp8-round", 200.0), ("y/round", 100.0))
        for strategy, us in (("full_loop", us), ("eager", 9.0))
        for n in (1, 4, 16, 32)
    ]
    env = {"device": "NVIDIA H100", "date": "2026-11-26T00:00:00"}
    lines = strategy_times.fp8_table({"env": env, "rows": rows}).splitlines()
    assert lines[0].startswith(
        "GPU time of a greedy round with 7 draft tokens on `triton_paged`, NVIDIA H100, 2026-11-26"
    )
    assert lines[4:] == ["| `x` | bf16 | 300 | 1,200 | 4,800 | 9,600 |", "| `x` | fp8 | 200 | 800 | 3,200 | 6,400 |"]


def tree_row(case: str, tree: bool, num_reqs: int = 32, **more: float) -> dict[str, Any]:
    draft = "a draft, 4x9" if tree else "a draft"
    return {"case": case, "draft": draft, "tree": tree, "num_speculative_tokens": 7, "num_reqs": num_reqs, **more}


TREE_ROWS = [
    tree_row("block-trees", False, temperature=0.0, accepted=4.0),
    tree_row("block-trees", False, temperature=1.0, accepted=2.0),
    tree_row("block-trees", True, temperature=0.0, accepted=5.0, chain_ratio=9.0),
    tree_row("block-trees", True, temperature=1.0, accepted=3.0, chain_ratio=9.0),
    tree_row("block-tree-rounds", False, 1, accepted=0.0),
    tree_row("block-tree-rounds", False, 20, accepted=0.0),
    tree_row("block-tree-rounds", True, 1, accepted=0.0, chain_ratio=0.99),
    tree_row("block-tree-rounds", True, 20, accepted=0.0, chain_ratio=0.8),
]


def test_tree_row_shows_accepted_tokens_and_time() -> None:
    env = {"device": "NVIDIA H200", "date": "2026-11-26T00:00:00"}
    lines = strategy_times.tree_table({"env": env, "rows": TREE_ROWS}).splitlines()
    assert lines[0] == "NVIDIA H200, 2026-11-26, `attn-backends bench trees`."
    assert lines[2].endswith("| accepted, greedy | accepted, temperature 1 | time, 1 req. | time, 20 req. |")
    assert lines[4:] == [
        "| 7 tokens in a row | 4.00 | 2.00 | 1.00 | 1.00 |",
        "| tree of 9 tokens, `width` 4 | 5.00 | 3.00 | 1.01 | 1.25 |",
    ]
    for rows in ([], TREE_ROWS[:-2]):
        with pytest.raises(ValueError, match="must have the same trees in both"):
            strategy_times.tree_table({"env": env, "rows": rows})


def test_states_are_shown_beside_the_faster_kernel() -> None:
    def row(backend: str, us: float, requests: int = 1) -> dict[str, Any]:
        spec = {"spec": "gated_delta, 48/16 heads", "num_speculative_tokens": 7, "num_reqs": requests}
        return {"backend": backend, "gpu_us": [0.0, us, 1e9], **spec}

    env = {"device": "NVIDIA H200", "date": "2026-11-29T00:00:00"}
    timed = [row("triton_state", 20.0), row("columns 16x1", 50.0), row("columns 32x2", 40.0), row("vllm", 30.0)]
    # Without vLLM, and a step whose peers are missing.
    others = [row("triton_state", 40.0, 8), row("columns 16x1", 20.0, 8), row("triton_state", 1.0, 32)]
    lines = strategy_times.state_table({"env": env, "rows": others + timed}).splitlines()
    assert lines[0].startswith("Microseconds of a layer's step, NVIDIA H200, 2026-11-29")
    assert lines[4:] == [
        "| `gated_delta` | 7 | 1 | 20.0 | 40.0 | 30.0 | 1.50 |",
        "| `gated_delta` | 7 | 8 | 40.0 | 20.0 | – | 0.50 |",
    ]
    with pytest.raises(ValueError, match="no step of states with its peers"):
        strategy_times.state_table({"env": env, "rows": others[2:]})


def test_draft_steps_are_shown_beside_compiled_ones() -> None:
    rows = [
        {
            "case": "x-compiled",
            "num_speculative_tokens": 4,
            "context": 1024,
            "num_reqs": n,
            "gpu_us": [0, us, 0],
            **more,
        }
        for n in (1, 32)
        for us, more in ((30.0 * n, {}), (40.0 * n, {"peer": True}))
    ]
    env = {"device": "NVIDIA H200", "date": "2026-11-26T00:00:00", "torch": "2.11.0"}
    report = {"env": env, "rows": rows}
    lines = strategy_times.compiled_table([report]).splitlines()
    assert lines[0].startswith("GPU time of the 3 later steps of a round with 4 draft tokens, 1,024 tokens of context")
    assert lines[4] == "| `x` | 40 | 30 | 0.75 | 1,280 | 960 | 0.75 |"
    later = {**env, "date": "2026-11-27T00:00:00"}
    assert "H200, 2026-11-26 and 2026-11-27, torch" in strategy_times.compiled_table([report, {**report, "env": later}])
    for other in ({"device": "NVIDIA H100"}, {"torch": "2.13.0"}):
        with pytest.raises(ValueError, match="must share a device, torch, K and context"):
            strategy_times.compiled_table([report, {**report, "env": env | other}])


ARM = {"kind": "eagle", "size": "llama3-8b", "num_gpus": 1, "compiled": False, "watched": False}


def vllm_arm(draft: str, tokens_per_s: list[float], **more: object) -> dict[str, object]:
    row = {"requests": 4, "tokens_per_s": tokens_per_s, "host_us": [{"p50": 80.0}, {"p50": 90.0}, {"p50": 70.0}]}
    row |= {"gpu_us": [{"p50": 1400.0}, {"p50": 1500.0}, {"p50": 1600.0}]}
    return {
        "arm": {"draft": draft, "steps": 3 if draft else 0, "kept": 1.8 if draft else 0.0, **ARM, **more},
        "vllm": "0.33.0",
        "graph_mode": "FULL_DECODE_ONLY",
        "rows": [row if draft else {**row, "host_us": [], "gpu_us": []}],
    }


VLLM_REPORT = {
    "env": {"device": "NVIDIA H200", "date": "2026-11-23T00:00:00", "commit": "0123456789abcdef"},
    "arms": [
        vllm_arm("FLASH_ATTN", [100.0, 1200.0, 110.0]),
        vllm_arm("FLASHINFER_IN_GRAPH", [130.0], num_gpus=2),
        vllm_arm("FLASH_ATTN", [150.0], kind="dflash", size="qwen3-8b", steps=15, kept=5.0),
        vllm_arm("", [50.0]),
        vllm_arm("", [60.0], size="qwen3-8b"),
        {**vllm_arm("TRITON_ATTN", []), "rows": [{"requests": 4, "tokens_per_s": [], "host_us": []}]},
    ],
    "agreement": [
        {"kind": "eagle", "num_gpus": 1, "draft": "TRITON_ATTN", "draft_tokens": 100, "equal": 90},
        {"kind": "eagle", "num_gpus": 1, "draft": "TRITON_ATTN", "draft_tokens": 300, "equal": 300},
        {"kind": "eagle", "num_gpus": 2, "draft": "TRITON_ATTN", "draft_tokens": 4, "equal": 1},
    ],
}


def test_vllm_figures_are_medians_by_draft() -> None:
    page = vllm_tables.figures(VLLM_REPORT, "vllm.json")
    eagle, dflash = page.split("An 8B Qwen3 with a DFlash draft. ")

    assert "| 3 draft tokens, 1.8 accepted | graphs | 4 req. |" in eagle
    assert "| 15 draft tokens, 5 accepted | graphs | 4 req. |" in dflash
    assert "| `FLASH_ATTN` | `FULL_DECODE_ONLY` | 110 [100-1,200] (80 / 1,500) |" in eagle
    assert "| `FLASH_ATTN` | `FULL_DECODE_ONLY` | 150 [150-150] (80 / 1,500) |" in dflash
    assert "| `FLASHINFER_IN_GRAPH`, 2 GPUs | `FULL_DECODE_ONLY` | 130 [130-130] (80 / 1,500) |" in eagle
    assert "| no speculation | `FULL_DECODE_ONLY` | 50 [50-50] |" in eagle
    assert "| no speculation | `FULL_DECODE_ONLY` | 60 [60-60] |" in dflash and page.count("no speculation") == 2
    assert "`TRITON_ATTN` 97.5%, `TRITON_ATTN` on 2 GPUs 25.0%." in page
    assert page.count("vLLM 0.33.0, mode 0, on NVIDIA H200 (2026-11-23, commit `0123456789ab`):") == 2


def test_compiled_engines_have_separate_figures() -> None:
    arms = [vllm_arm("", [50.0]), vllm_arm("FLASH_ATTN", [100.0]), vllm_arm("", [60.0], compiled=True)]
    arms.append(vllm_arm("FLASH_ATTN", [120.0], compiled=True))
    page = vllm_tables.figures({**VLLM_REPORT, "arms": arms, "agreement": []}, "vllm.json")
    compiled, uncompiled = page.split("vLLM 0.33.0, mode 0, on")

    assert "| 50 [50-50] |" in uncompiled and "| 100 [100-100] (80 / 1,500) |" in uncompiled
    assert "vLLM 0.33.0, defaults, on" in compiled and "A small model" not in page
    assert "| 60 [60-60] |" in compiled and "| 120 [120-120] (80 / 1,500) |" in compiled


def test_latent_figures_have_table_and_base_per_size() -> None:
    sizes = ("deepseek-v3", "deepseek-v3-shard")
    arms = [vllm_arm("", [10.0 + at], size=size) for at, size in enumerate(sizes)]
    arms += [vllm_arm("FLASHMLA", [70.0 + at], size=size, kind="mtp") for at, size in enumerate(sizes)]
    agreed = [{"kind": "mtp", "num_gpus": 1, "draft": "FLASHMLA", "draft_tokens": 4, "equal": 3}]
    page = vllm_tables.figures({**VLLM_REPORT, "arms": arms, "agreement": agreed}, "vllm.json")
    whole, shard = page.split("One GPU's eighth of four layers")

    assert "128 heads" in whole and "| 10 [10-10] |" in whole and "| 70 [70-70] (80 / 1,500) |" in whole
    assert "16 heads" in shard and "| 11 [11-11] |" in shard and "| 71 [71-71] (80 / 1,500) |" in shard
    assert "those on vLLM's `FLASH_ATTN_MLA`: `FLASHMLA` 75.0%" in shard


def test_ratios_are_of_medians_and_mark_overlap() -> None:
    runs = {"FLASHINFER": [50.0, 40.0, 60.0], "FLASH_ATTN": [99.0, 100.0, 110.0], "FLASHINFER_IN_GRAPH": [80.0, 100.0]}
    arms = [vllm_arm(draft, tokens) for draft, tokens in runs.items()]
    latent = [vllm_arm("FLASHMLA", [10.0], size="deepseek-v3", kind="mtp")]
    latent.append(vllm_arm("ATTN_BACKENDS_FLASHMLA", [25.0], size="deepseek-v3", kind="mtp"))
    table = vllm_tables.ratios([{**VLLM_REPORT, "arms": latent}, {**VLLM_REPORT, "arms": arms}])

    assert table.splitlines()[0] == "| draft | vLLM's backend | our backend | 4 req. | vLLM | GPU, date |"
    llama, source = "| EAGLE, 8B Llama, 3 tokens", "mode 0 | H200, 2026-11-23 |"
    latents = "| MTP, four layers of DeepSeek-V3, 128 heads, 3 tokens"
    assert table.splitlines()[2:] == [
        f"{llama} | `FLASHINFER` | `FLASHINFER_IN_GRAPH` | 1.80 | {source}",
        f"{llama} | `FLASH_ATTN` | `FLASHINFER_IN_GRAPH` | ~0.90 | {source}",
        f"{latents} | `FLASHMLA` | `ATTN_BACKENDS_FLASHMLA` | 2.50 | {source}",
    ]


def test_latest_report_of_a_card_gives_ratio() -> None:
    def report(card: str, date: str, tokens: float) -> dict[str, Any]:
        env = {**VLLM_REPORT["env"], "device": f"NVIDIA {card}", "date": date}
        arms = [vllm_arm("FLASH_ATTN", [10.0]), vllm_arm("FLASHINFER_IN_GRAPH", [tokens])]
        return {**VLLM_REPORT, "env": env, "arms": arms}

    runs = [("H100", "2026-11-24", 10.0), ("H200", "2026-11-23", 20.0), ("H100", "2026-11-25", 30.0)]
    rows = vllm_tables.ratios([report(*run) for run in runs]).splitlines()[2:]
    assert [line.split(" | ")[3::2] for line in rows] == [
        ["3.00", "H100, 2026-11-25 |"],
        ["2.00", "H200, 2026-11-23 |"],
    ]


def test_draft_gpu_time_is_median_of_runs() -> None:
    theirs, ours = vllm_arm("FLASH_ATTN", [10.0]), vllm_arm("FLASHINFER_IN_GRAPH", [20.0])
    ours["rows"] = [ours["rows"][0] | {"gpu_us": [{"p50": 900.4}, {"p50": 1.0}, {"p50": 2000.0}]}]
    [row] = vllm_tables.draft_times([{**VLLM_REPORT, "arms": [theirs, ours]}]).splitlines()[2:]
    assert row.split(" | ")[3:5] == ["1,500 / 900", "mode 0"]


def test_ratios_separate_modes_and_gpu_counts() -> None:
    more: list[dict[str, object]] = [{}, {"compiled": True}, {"num_gpus": 2}]
    arms = [
        vllm_arm(draft, [tokens + at * (draft == "FLASH_ATTN")], **arm)
        for draft, tokens in (("FLASH_ATTN", 10.0), ("FLASHINFER_IN_GRAPH", 20.0))
        for at, arm in enumerate(more)
    ]
    report = {**VLLM_REPORT, "arms": arms}
    on_one, on_two = vllm_tables.ratios([report]).splitlines()[2:], vllm_tables.ratios([report], 2).splitlines()[2:]
    assert [line.split(" | ")[3:5] for line in on_one] == [["1.82", "defaults"], ["2.00", "mode 0"]]
    assert [line.split(" | ")[3:5] for line in on_two] == [["1.67", "mode 0"]]


def test_two_gpus_are_compared_with_one() -> None:
    one, two = vllm_arm("FLASHINFER_IN_GRAPH", [100.0]), vllm_arm("FLASHINFER_IN_GRAPH", [160.0], num_gpus=2)
    others = [vllm_arm("FLASHINFER_IN_GRAPH", [1.0], compiled=True), vllm_arm("FLASHINFER", [2.0])]
    report = {**VLLM_REPORT, "arms": [two, *others, one]}
    assert vllm_tables.scaling(report).splitlines()[2:] == [
        "| EAGLE, 8B Llama, 3 tokens | `FLASHINFER_IN_GRAPH` | 1.60 | H200, 2026-11-23 |"
    ]
    # Of one GPU, and no row of two.
    assert vllm_tables.ratios([{**report, "arms": [one, others[1], two]}]).splitlines()[2].split(" | ")[3] == "50.00"


def test_validated_arms_are_compared_only_with_themselves() -> None:
    plain, watched = (vllm_arm("FLASHINFER_IN_GRAPH", [99.0, 97.0, 98.0], watched=on) for on in (False, True))
    watched["rows"][0] |= {
        "unwatched_tokens_per_s": [101.0, 99.0, 100.0],
        "compared": 7,
    }  # type: ignore[index]
    report = {**VLLM_REPORT, "arms": [plain, watched]}
    row = "| EAGLE, 8B Llama, 3 tokens | `FLASHINFER_IN_GRAPH` | 0.980 ± 0.008 (7) | mode 0 | H200, 2026-11-23 |"
    assert vllm_tables.validated([report]).splitlines()[2:] == [row]
    theirs = vllm_arm("FLASHINFER", [98.0])
    assert vllm_tables.ratios([{**report, "arms": [watched, theirs]}]).count("\n") == 1
    with pytest.raises(ValueError, match="no timed arm"):
        vllm_tables.figures({**report, "arms": [watched]}, "vllm.json")


def test_vllm_report_without_timed_arms_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"vllm\.json has no timed arm"):
        vllm_tables.figures({**VLLM_REPORT, "arms": VLLM_REPORT["arms"][-1:]}, "vllm.json")
