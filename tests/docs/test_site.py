"""The tools behind the site: what they make of docstrings, drawings, reports and links."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_site"))

import vllm_figures  # noqa: E402
from check_links import problems  # noqa: E402
from inline_drawings import on_page_content  # noqa: E402
from strategy_times import on_page_markdown, table  # noqa: E402

CONFIG = SimpleNamespace(docs_dir=str(ROOT / "docs"), config_file_path=str(ROOT / "mkdocs.yml"))


def site(tmp_path: Path, **pages: str) -> Path:
    for name, html in {"index": "", **pages}.items():
        (tmp_path / f"{name}.html").write_text(html)
    return tmp_path


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ('<a href="gone.html">', "leads to no file"),
        ('<a href="other.html#gone">', "leads to no anchor of other.html"),
        ('<a href="#gone">', "leads to no anchor of index.html"),
        ('<a href="../outside.html">', "leads to no file"),
        ('<img src="gone.png">', "leads to no file"),
        ('<a href="http://">', "no address that a browser can follow"),
        ('<a href="javascript:alert(1)">', "no address that a browser can follow"),
        ('<script src="https://example.org/x.js"></script>', "loaded from another host"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "loaded from another host"),
    ],
)
def test_a_bad_link_is_named_with_its_page(tmp_path: Path, link: str, says: str) -> None:
    found = list(problems(site(tmp_path, index=link, other="")))

    assert len(found) == 1
    assert found[0].startswith("index.html: ") and says in found[0]


@pytest.mark.parametrize(
    "link",
    [
        '<a href="other.html">',
        '<a href="other.html#here">',
        '<a href=".">',
        '<a href="">',
        '<a href="https://example.org/a?b=c#d">',
        '<img src="data:image/png;base64,AAAA">',
    ],
)
def test_a_good_link_is_not(tmp_path: Path, link: str) -> None:
    assert not list(problems(site(tmp_path, index=link, other='<p id="here">')))


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


def test_field_tables_of_a_docstring_become_tables() -> None:
    pytest.importorskip("griffe", reason="needs the extra docs")
    from docstrings import to_markdown

    rows = "ids      int64 [n]   the tokens,\n                     in order\nseeds    int64 [n]"
    text = f"What a round has.\n\n{rows}\n\nBehind."
    assert to_markdown(text, []).splitlines() == [
        "What a round has.",
        "",
        "",
        "| field | type | meaning |",
        "| --- | --- | --- |",
        "| `ids` | int64\N{NO-BREAK SPACE}[n] | the tokens, in order |",
        "| `seeds` | int64\N{NO-BREAK SPACE}[n] |  |",
        "",
        "",
        "Behind.",
    ]


def test_a_parameter_is_marked_where_it_is_explained_and_prose_is_left_alone() -> None:
    pytest.importorskip("griffe", reason="needs the extra docs")
    from docstrings import to_markdown

    text = "Runs. limit: bytes; other.limit: no. A note: the limit\n\n    limit: in a drawing"
    assert to_markdown(text, ["limit"]) == text.replace("Runs. limit:", "Runs. `limit`:")
    assert to_markdown("size, end and limit: both", ["limit", "size"]) == "size, end and `limit`: both"
    assert to_markdown("size, end and limit: all", ["limit", "size", "end"]) == "`size`, `end` and `limit`: all"


def test_a_subscript_is_code_and_no_link() -> None:
    pytest.importorskip("griffe", reason="needs the extra docs")
    from docstrings import to_markdown

    assert to_markdown("pages[request][group] and x[t, : n[t]], a `b[0]`, int64 [n]", []) == (
        "`pages[request][group]` and `x[t, : n[t]]`, a `b[0]`, int64 [n]"
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
