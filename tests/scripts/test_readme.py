"""README and pages show the figures of the committed reports, and change with them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts import context_tables, readme
from scripts.line_plot import GAP, Line, line_plot
from spec_decode.conformance.report import Report
from spec_decode.files import read_json
from tests.users import USERS

ROOT = readme.ROOT


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    """Those of the checkout."""
    return readme.Sources.read([ROOT / "reports"]).reports


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the reports and the pages that show them."""
    shutil.copytree(ROOT / "reports", tmp_path / "reports")
    for page in (
        readme.README,
        readme.STRATEGIES,
        readme.LLM_PAGE,
        readme.ENGINE,
        readme.VLLM_PAGE,
        readme.VLLM_FIGURES,
        readme.CONTEXT_PAGE,
        readme.STATE_PAGE,
        readme.SUITES_PAGE,
    ):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_tables_and_plot_match_reports() -> None:
    for path, text in readme.contents(ROOT).items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run python scripts/readme.py"


FIGURES = [
    ("h100/vllm.json", '"kept":3.2', '"kept":3.4', "round: 3.4 of 7, 5 of 15, 4.4 of 7"),
    ("h100/vllm.json", "[356.7,361.4,353.1]", "[366.7,369.4,353.1]", "367 / 6,284 (`FLASH_ATTN`)"),
    ("h100/vllm.json", "[3593.3,3697.5,4105.1]", "[3593.3,3997.5,4105.1]", "156 / 3,998 (`FLASHINFER`)"),
    ("h100/vllm.json", "[663.4,666.7,665.9]", "[663.4,686.7,675.9]", "676 / 6,739 (`FLASHINFER_IN_GRAPH`)"),
    ("h100/vllm.json", "[1070.4,1036.7,1064.7]", "[1070.4,1036.7,1067.7]", "1,068 / 15,382 (best of 3)"),
    ("h100/vllm.json", '"kept":1.8', '"kept":1.9', "1.9 of 3 in vLLM"),
    ("h200/contexts.json", "[59.6,58.0]", "[63.7,60.0]", "| 62, without a draft 121 (`FLASH_ATTN`) | 146 "),
    ("h200/contexts.json", "[119.2,119.1]", "[120.2,121.2]", "got 62 tokens/s on it with the draft and 121 without"),
    ("h200/contexts.json", "[349.2,339.6]", "[359.2,339.6]", "| 349 (`ATTN_BACKENDS_TRITON_PAGED`) |"),
    ("h200/contexts.json", "[343.1,334.5]", "[289.2,271.2]", "280 on our `FLASHINFER_IN_GRAPH`"),
    (
        "h200/contexts.json",
        "[145.5,146.8]",
        "[164.8,166.2]",
        "slower from 96k of context on (62 tokens/s, 121 without)",
    ),
    ("h200/contexts.json", "[1684.6,1680.6]", "[1455.6,1455.6]", "20 % with 8 requests (32k of context)"),
    ("h200/contexts.json", "14638.4", "10000.0", "has 1.37 times FlashAttention-3's"),
    ("h200/engines.json", "[7344.1,7328.0,7356.4]", "[7377.7,7366.6,7356.4]", "579 / 7,367 (`LLM`)"),
    ("h200/engines-hybrid.json", "[19071.8,19238.6,19246.2]", "[19071.8,19338.6,19346.2]", "889 / 18,648 (`LLM`)"),
    ("h200/engines.json", "[688.1,705.5,681.4]", "[708.1,705.5,706.4]", "706 / 9,572 (its own options)"),
    ("h200/engines-hybrid.json", '"kept":1.8', '"kept":1.7', "with EAGLE and 1.7 of 3 with MTP"),
    ("h100/bench-drafter.json", "15674.0", "8674.0", "8.7 ms"),
    ("h100/bench-llama3-8b-eagle-compiled.json", "3229.4", "3354.2", "3.35 / 3.95 ms (`torch.compile`"),
    ("h100/bench-llama3-8b-eagle-compiled.json", "3702.6", "3786.1", "3.07 / 3.79 ms"),
]
"""Of some figures: the report, what it says, what it is to say, and how the pages then show it."""


def speeds(root: Path) -> str:
    vllm = read_json(root / "reports" / readme.VLLM)
    contexts = readme.context_reports(root)
    sentences = context_tables.cost(contexts) + context_tables.behind(contexts)
    work = readme.work(vllm, readme.newest_first(root, readme.ENGINES).values())
    return readme.vllm_speeds(vllm, contexts) + readme.speeds(root) + work + sentences


def test_a_door_of_the_readme_shows_its_budget() -> None:
    doors = re.findall(r"^\| .* \| ([\d,]+) lines at most", (ROOT / readme.README).read_text(encoding="utf-8"), re.M)
    assert doors == [f"{USERS[user][1]:,}" for user in ("plug-in", "drafter", "kit", "LLM")]


def test_every_figure_comes_from_its_report(copy: Path) -> None:
    before = speeds(copy)
    for name, old, new, shown in FIGURES:
        path = copy / "reports" / name
        text = msgspec.json.encode(read_json(path)).decode()
        assert old in text and shown not in before, shown
        path.write_text(text.replace(old, new))
    after = speeds(copy)
    assert [shown for *_, shown in FIGURES if shown not in after] == []


def test_a_backend_without_figures_has_a_dash() -> None:
    report, contexts = read_json(ROOT / "reports" / readme.VLLM), readme.context_reports(ROOT)
    arms = [arm for arm in report["arms"] if arm["arm"]["draft"] != "FLASH_ATTN"]
    eagle, *_, mtp, _ = readme.vllm_speeds({**report, "arms": arms}, contexts).splitlines()[-5:]
    assert "| – | 156 / 3,698 (`FLASHINFER`) |" in eagle and "–" not in mtp


@pytest.mark.parametrize(
    "change", [{"watched": True}, {"num_gpus": 2}, {"compiled": False}, {"kind": "dflash"}, {"size": "small"}]
)
def test_arms_of_other_settings_do_not_count(change: dict[str, Any]) -> None:
    report = read_json(ROOT / "reports" / readme.VLLM)
    shown = {"draft": readme.OURS, "kind": "eagle", "size": "llama3-8b", "watched": False}
    [other] = [arm for arm in report["arms"] if arm["arm"].items() >= shown.items()]
    slow = {
        **other,
        "arm": {**other["arm"], **change},
        "rows": [{**row, "tokens_per_s": [1.0]} for row in other["rows"]],
    }
    failed = {**other, "rows": []}
    with_them = {"arms": [*report["arms"], slow, failed]}
    assert readme.vllm_arms(with_them, *readme.EAGLE) == readme.vllm_arms(report, *readme.EAGLE)


def test_claim_is_refuted_by_failed_or_known_check(copy: Path) -> None:
    claims = {report.backend: report for report in readme.in_place_claims(copy)}
    assert "KpoolTailMetadataBuilder" in claims and "FlashInferMetadataBuilder" not in claims
    assert "FlashMLASparseWithAnEmptyUpdate" not in claims, "a copy of ours is no builder of vLLM's"
    (copy / "reports/cpu/check-vllm-KpoolTailMetadataBuilder.json").unlink()
    assert "5 of the metadata builders" in readme.findings(copy) and "refuted 0 of" in readme.findings(copy)


def test_sglang_backend_counts_if_steps_miss_tokens(copy: Path) -> None:
    assert "In 5 of 8 draft backends" in readme.findings(copy)
    (copy / "reports/cpu/check-sglang-FlashMLAMultiStepDraftBackend.json").unlink()
    assert "In 4 of 7 draft backends" in readme.findings(copy)


def test_outdated_pages_are_written_and_named(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readme, "ROOT", copy)
    monkeypatch.setattr("sys.argv", ["readme.py"])
    page = copy / "README.md"
    page.write_text(page.read_text().replace("360 / 6,327", "999 / 9,999"))

    readme.main()
    assert "360 / 6,327" in page.read_text() and (copy / readme.PLOT).exists()
    written = [readme.PLOT, readme.CONTEXT_PLOT, readme.README]
    assert capsys.readouterr().out.splitlines() == [f"wrote {path}" for path in written]
    readme.main()
    assert not capsys.readouterr().out


def test_reports_of_several_processors_share_a_column(reports: list[Report]) -> None:
    old = next(each for each in reports if each.backend == "torch_reference" and not each.env.cuda)
    env = msgspec.structs.replace(old.env, device="another processor", date="2031-01-02T03:04:05+00:00")
    table = readme.summary([*reports, msgspec.structs.replace(old, env=env)])
    assert table.splitlines()[0].count("CPU") == 1 and table.count("(2031-01-02)") == 1


@pytest.mark.parametrize("part", ["--family numerics", "--only 'numerics.*'", "--quick"])
def test_partial_kit_report_does_not_replace_whole_one(part: str, reports: list[Report]) -> None:
    old = next(each for each in reports if each.backend == "torch_reference" and not each.env.cuda)
    env = msgspec.structs.replace(old.env, date="2031-01-02T03:04:05+00:00")
    newer = msgspec.structs.replace(old, env=env, command=f"{old.command} {part}", results=old.results[:1])
    assert readme.summary([*reports, newer]) == readme.summary(reports)


def test_the_newest_report_of_a_device_counts(reports: list[Report]) -> None:
    table = readme.summary(reports)
    assert table.splitlines()[0] == "| backend | H100 | H200 | CPU |"
    assert "| 4 of 4" not in table, "a newer report of soaks alone is no report of all checks"
    assert "| not run |" in next(line for line in table.splitlines() if "`flashinfer`" in line)


BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


@pytest.mark.parametrize("page", ["", BEGIN, f"{END} {BEGIN}", f"{BEGIN}{END}{BEGIN}", f"{BEGIN}{END}{END}"])
def test_a_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(SystemExit, match="once each"):
        readme.between(page, "figures", "table")


def test_text_around_markers_is_kept() -> None:
    assert readme.between(f"before\n{BEGIN}\nold\n{END}\nafter", "figures", "new") == (
        f"before\n{BEGIN}\nnew\n{END}\nafter"
    )


def test_plot_labels_keep_their_distance() -> None:
    drawn = line_plot(
        [Line("a", {1: 10.0, 2: 100.0}), Line("b & c", {1: 20.0, 2: 101.0}, strong=True), Line("d", {1: 5.0, 2: 99.0})],
        title="t", subtitle="s", x="n", x_name="<{}>".format,
    )  # fmt: skip
    heights = sorted(float(y) for y in re.findall(r'class="label[^"]*" x="\d+" y="([\d.]+)"', drawn))
    assert len(heights) == 3 and heights[1] - heights[0] >= GAP and heights[2] - heights[1] >= GAP
    assert "b &amp; c: 20 at &lt;1&gt;, 101 at &lt;2&gt;" in drawn and drawn.count("<circle") == 6
    assert "prefers-color-scheme: dark" in drawn
