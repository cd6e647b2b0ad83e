"""Build the table of the trained model that vLLM served, from its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from attn_backends.engines.vllm.names import PLAIN
from scripts.engine_arm import CHANNELS
from scripts.markdown_table import markdown_table
from scripts.vllm_tables import source

_BITS = {"16": "our head in 16 bits", "fp8": "our head in 8 bits"}


def table(report: Mapping[str, Any]) -> str:
    """Return each engine's texts and acceptance beside its peer's: vLLM's own backend and draft in as many bits. Raises
    ValueError if nothing was compared."""
    if not report.get("agreement"):
        raise ValueError("the report of trained arms compares nothing: nothing to show on the page of vLLM's figures")
    arms = {each["arm"]["name"]: each for each in report["arms"]}
    rows = [_row(arms, *pair) for _, pair in groupby(report["agreement"], key=lambda row: row["arm"])]
    texts = next(iter(arms.values()))["rows"]
    vllm = next(each["vllm"] for each in arms.values())
    sizes = " and ".join(f"{row['requests']} at temperature {row['temperature']:g}" for row in texts)
    heads = [
        "backend, draft",
        "compared with",
        "equal texts, greedy",
        "rounds for the same tokens",
        "drafts kept, drawn",
    ]
    return f"vLLM {vllm}, {source(report)}; texts: {sizes}.\n\n{markdown_table(heads, rows, heads[2:])}"


def _row(arms: Mapping[str, Any], greedy: Mapping[str, Any], drawn: Mapping[str, Any]) -> list[str]:
    return [
        _engine(arms[greedy["arm"]]["arm"]),
        _engine(arms[greedy["against"]]["arm"]),
        f"{greedy['equal_texts']} of {greedy['texts']}",
        f"{greedy['rounds_ratio']:.3f} ± {greedy['error']:.3f}",
        f"{drawn['kept_ratio']:.3f} ± {drawn['error']:.3f}",
    ]


def _engine(arm: Mapping[str, Any]) -> str:
    return ", ".join((f"`{arm['backend']}`", *_reads(arm)))


def _reads(arm: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a draft multiplies and reads its head, if not as vLLM does by default."""
    if arm["linears"] == CHANNELS:
        yield "draft in 8 bits"
    elif arm["linears"]:
        yield f"our layers in {16 if arm['linears'] == PLAIN else 8} bits"
    if arm["head"]:
        yield _BITS[arm["head"]]
    if arm.get("cache"):
        yield "cache in 8 bits"
    if arm.get("draft_cache"):
        yield "the draft's in 16"
