"""What messages and pages say about installation: there is no release on a package index, so nothing mentions one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attn_backends.extras import install_hint
from tests.import_graph import ROOT, module_files

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md")), ROOT / "README.md"]
_MENTIONS_RELEASE = re.compile(r"pip install '?attn-backends\b|attn-backends\[")


def test_install_hint_names_extra_and_checkout() -> None:
    assert install_hint("vllm") == "pip install '.[vllm]' in a checkout of attn-backends"


@pytest.mark.parametrize(
    "text", ["pip install attn-backends", "Install attn-backends[vllm]", "pip install 'attn-backends"]
)
def test_release_pattern_matches_install_commands(text: str) -> None:
    assert _MENTIONS_RELEASE.search(text)


def test_no_page_or_module_mentions_a_release() -> None:
    texts: list[Path] = [*PAGES, *module_files().values()]
    assert [path.name for path in texts if _MENTIONS_RELEASE.search(path.read_text(encoding="utf-8"))] == []
