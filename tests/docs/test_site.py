"""The pages as files, and the tools behind the site: their treatment of docstrings and drawings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.docs.pages import DOCS, ROOT

sys.path.insert(0, str(DOCS / "_site"))

from inline_drawings import on_page_content

CONFIG = SimpleNamespace(docs_dir=str(DOCS))
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
GENERATED = [
    ROOT / line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.startswith("/docs/")
]
"""What `make docs` makes, which is no file of a checkout."""


FOLDERS = "builders|attn_backends|spec_decode|engines|engine_kits|benchmarks|scripts|tests|examples|reports"
"""Of a checkout, today or once: their files are named from its root."""


def missing_files(text: str) -> list[str]:
    """Return the files and folders of this project that a page names and that do not exist."""
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text)
    return [name for name in named if not (ROOT / name).exists()]


def problems(page: Path, text: str) -> list[str]:
    """What in a page's text only a built site would show."""
    prose = re.sub(r"^(`{3,}).*?^\1$|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^--8<--.*|^<!-- [\w ]+ -->$", text, re.MULTILINE) + re.findall(r"\]\[[^]]*\]", prose)
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        target = (page.parent / link).resolve()
        if ":" not in link and (not target.exists() or any(path in (target, *target.parents) for path in GENERATED)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_can_be_read_as_file(page: Path) -> None:
    assert problems(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_on_a_page_exist(page: Path) -> None:
    assert missing_files(page.read_text(encoding="utf-8")) == []


def test_a_file_that_moved_is_found() -> None:
    assert missing_files("`builders/` and `builders/gone.py`, not `v1/gone.py`") == ["builders/gone.py"]


@pytest.mark.parametrize(
    "text",
    ["--8<-- 'file.py'", "<!-- times -->", "[`LLM`][spec_decode.LLM]", "[a](gone.md)", "[a](compatibility.html#speed)"],
)
def test_site_only_syntax_is_reported(text: str) -> None:
    assert problems(DOCS / "index.md", f"# Page\n\n{text}\n") != []


def test_dead_link_fails_the_site_build(tmp_path: Path) -> None:
    links = ["gone.md", "other.md#gone", "#gone", "gone.png", "/other.md"]
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "other.md").write_text("# Here\n")
    wrong = " ".join(f"[b]({link})" for link in links)
    (pages / "index.md").write_text(f"# Index\n\n[a](other.md#here) {wrong}\n")
    settings = {"docs_dir": "docs", "site_dir": "site", "theme": {"name": "mkdocs"}, "nav": ["index.md", "other.md"]}
    settings |= {"INHERIT": str(ROOT / "mkdocs.yml"), "hooks": [], "plugins": [], "markdown_extensions": []}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings))

    built = subprocess.run([sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True)
    assert [link for link in links if f"'{link}'" not in built.stderr] == []
    assert built.returncode and f"{len(links)} warnings in strict" in built.stdout


def test_drawing_is_inlined_into_page() -> None:
    page = on_page_content('<p><img alt="A round." src="../drawings/round.svg" /></p>', config=CONFIG)

    assert page.startswith("<p><svg ") and 'aria-label="A round."' in page and "<img" not in page


@pytest.mark.parametrize("drawing", sorted((DOCS / "drawings").glob("*.svg")), ids=lambda path: path.stem)
def test_a_drawing_loads_nothing(drawing: Path) -> None:
    text = drawing.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text and "href" not in text


def test_docstring_columns_become_list_and_subscripts_code() -> None:
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
