"""The tools behind the site: what they make of docstrings, drawings and reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_site"))

import vllm_figures  # noqa: E402
from inline_drawings import on_page_content  # noqa: E402
from strategy_times import on_page_markdown, table  # noqa: E402

CONFIG = SimpleNamespace(docs_dir=str(ROOT / "docs"), config_file_path=str(ROOT / "mkdocs.yml"))


@pytest.mark.parametrize("link", ["gone.md", "other.md#gone", "#gone", "gone.png", "/other.md"])
def test_a_link_that_leads_nowhere_fails_the_site(tmp_path: Path, link: str) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "other.md").write_text("# Here\n")
    (pages / "index.md").write_text(f"# Index\n\n[a](other.md#here) [b]({link})\n")
    settings = {"docs_dir": "docs", "site_dir": "site", "theme": {"name": "mkdocs"}, "nav": ["index.md", "other.md"]}
    settings |= {"INHERIT": str(ROOT / "mkdocs.yml"), "hooks": [], "plugins": [], "markdown_extensions": []}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings))

    built = subprocess.run([sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode and f"'{link}'" in built.stderr and "1 warnings in strict" in built.stdout


def test_a_drawing_becomes_part_of_its_page() -> None:
    page = on_page_content('<p><img alt="A round." src="../drawings/round.svg" /></p>', config=CONFIG)

    assert page.startswith("<p><svg ") and 'aria-label="A round."' in page and "<img" not in page


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs" / "drawings").glob("*.svg")), ids=lambda path: path.stem)
def test_a_drawing_loads_nothing(drawing: Path) -> None:
    text = drawing.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text and "href" not in text


def test_the_strategies_page_shows_what_the_report_holds() -> None:
    page = on_page_markdown("before\n\n<!-- strategy times -->\n\nafter", config=CONFIG)

    assert page.startswith("before") and page.endswith("after")
    assert {"| `full_loop` |", "| `device_loop` |", "| `per_step` |", "| `eager` |"} <= {
        line[: line.index("|", 2) + 1] for line in page.splitlines() if line.startswith("| `")
    }


def test_a_report_without_such_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to show on the strategies page"):
        table({"env": {}, "rows": []})


def test_columns_of_a_docstring_become_a_list_and_subscripts_code() -> None:
    pytest.importorskip("griffe", reason="needs the extra docs")
    from docstrings import to_markdown

    rows = "ids      int64 [n]   the tokens,\n                     in order\nseeds    int64 [n]"
    text = f"A round.\n\n{rows}\n\nBehind."
    assert [line.split() for line in to_markdown(text).split("\n") if line] == [
        ["A", "round."],
        ["-", "`ids`", "int64", "[n]", "the", "tokens,", "in", "order"],
        ["-", "`seeds`", "int64", "[n]"],
        ["Behind."],
    ]
    assert to_markdown("pages[request][group] and x[t, : n[t]], a `b[0]`, int64 [n]\n\n    a[0]") == (
        "`pages[request][group]` and `x[t, : n[t]]`, a `b[0]`, int64 [n]\n\n    a[0]"
    )


def vllm_arm(draft: str, steps: int, tokens_per_s: list[float], **more: object) -> dict[str, object]:
    row = {"requests": 4, "tokens_per_s": tokens_per_s, "host_us": [{"p50": 80.0}, {"p50": 90.0}, {"p50": 70.0}]}
    return {
        "arm": {"draft": draft, "steps": steps, "kept": 1.8, "num_gpus": 1, **more},
        "vllm": "0.33.0",
        "graph_mode": "FULL_DECODE_ONLY",
        "rows": [row if draft else {**row, "host_us": []}],
    }


VLLM_REPORT = {
    "env": {"device": "NVIDIA H200", "date": "2026-11-23T00:00:00", "commit": "0123456789abcdef"},
    "arms": [
        vllm_arm("FLASH_ATTN", 3, [100.0, 1200.0, 110.0]),
        vllm_arm("FLASHINFER_IN_GRAPH", 3, [130.0], num_gpus=2),
        vllm_arm("FLASH_ATTN", 7, [150.0]),
        vllm_arm("", 0, [50.0]),
        {**vllm_arm("TRITON_ATTN", 3, []), "rows": [{"requests": 4, "tokens_per_s": [], "host_us": []}]},
    ],
    "agreement": [
        {"draft": "TRITON_ATTN", "draft_tokens": 100, "equal": 90},
        {"draft": "TRITON_ATTN", "draft_tokens": 300, "equal": 300},
    ],
}


def test_vllms_figures_are_medians_by_draft_tokens_beside_no_speculation() -> None:
    said = vllm_figures.figures(VLLM_REPORT, "vllm.json")

    assert "| 3 draft tokens, 1.8 kept | graphs | 4 req. |" in said
    assert "| 7 draft tokens, 1.8 kept | graphs | 4 req. |" in said
    assert "| `FLASH_ATTN` | `FULL_DECODE_ONLY` | 110 (80) |" in said
    assert "| `FLASHINFER_IN_GRAPH`, 2 GPUs | `FULL_DECODE_ONLY` | 130 (80) |" in said
    assert said.count("| no speculation | `FULL_DECODE_ONLY` | 50 |") == 2 and "`TRITON_ATTN` 97.5%" in said
    assert "vLLM 0.33.0 on NVIDIA H200 (2026-11-23, commit `0123456789ab`)" in said


def test_figures_of_compiled_engines_stand_apart_from_others() -> None:
    arms = [vllm_arm("", 0, [50.0]), vllm_arm("FLASH_ATTN", 3, [100.0]), vllm_arm("", 0, [60.0], compiled=True)]
    arms.append(vllm_arm("FLASH_ATTN", 3, [120.0], compiled=True))
    said = vllm_figures.figures({**VLLM_REPORT, "arms": arms, "agreement": []}, "vllm.json")
    compiled, uncompiled = said.split("Without compilation")

    assert "| 50 |" in uncompiled and "| 100 (80) |" in uncompiled and "Draft tokens equal" not in said
    assert "vLLM's defaults" in compiled and "| 60 |" in compiled and "| 120 (80) |" in compiled


def test_a_report_of_vllm_without_timed_arms_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"vllm\.json has no arm that was timed"):
        vllm_figures.figures({**VLLM_REPORT, "arms": VLLM_REPORT["arms"][-1:]}, "vllm.json")


def test_vllms_page_says_that_nothing_was_measured_while_there_is_no_report(tmp_path: Path) -> None:
    config = SimpleNamespace(config_file_path=str(tmp_path / "mkdocs.yml"))
    assert "not measured yet" in vllm_figures.on_page_markdown("<!-- vllm figures -->", config=config)
    report = tmp_path / "reports" / "h200" / "vllm.json"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps(VLLM_REPORT))
    assert "output tokens a second" in vllm_figures.on_page_markdown("<!-- vllm figures -->", config=config)
    assert vllm_figures.on_page_markdown("no mark", config=config) == "no mark"
