"""What vLLM's page says was measured, from the reports that hold it, or that nothing was."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

_MARK = "<!-- vllm figures -->"
_REPORTS = ("reports/h200/vllm-compiled.json", "reports/h200/vllm.json")
_NOTHING = (
    "How much faster a draft becomes is not measured yet: no figures of vLLM with these backends are among the "
    "[reports](../compatibility.html)."
)
_NO_DRAFT = "no speculation"
_ENGINES = {
    True: "vLLM's defaults: layers compiled by torch, graphs of pieces where full ones cannot be",
    False: "Without compilation (`mode` 0), full graphs of decodes or none",
}


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """The page with the figures where it asks for them."""
    if _MARK not in markdown:
        return markdown
    paths = [Path(config.config_file_path).parent / name for name in _REPORTS]
    said = [figures(json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.exists()]
    return markdown.replace(_MARK, "\n\n".join(said) or _NOTHING)


def figures(report: dict[str, Any]) -> str:
    """Output tokens a second of each draft backend, a table for each number of draft tokens, and how far drafts agree.

    Raises ValueError for a report without an arm that was timed.
    """
    env = report["env"]
    timed = [each for each in report["arms"] if each["rows"] and each["rows"][0]["tokens_per_s"]]
    if not timed:
        raise ValueError("a report of vLLM has no arm that was timed: nothing to show on vLLM's page")
    lines = []
    for compiled in sorted({_is_compiled(each) for each in timed}):
        arms = [each for each in timed if _is_compiled(each) is compiled]
        lines += [
            f"{_ENGINES[compiled]}. A Llama of the 8B shape with an EAGLE draft, random weights, acceptance as",
            f"stated, vLLM {timed[0]['vllm']} on {env['device']} ({env['date'][:10]}, commit `{env['commit'][:12]}`);",
            "output tokens a second, and in brackets the microseconds that the host takes for a draft, medians:",
        ]
        plain = [each for each in arms if not each["arm"]["draft"]]
        for steps in sorted({each["arm"]["steps"] for each in arms if each["arm"]["draft"]}):
            of_k = [each for each in arms if each["arm"]["steps"] == steps and each["arm"]["draft"]]
            lines += ["", *_table(steps, [*plain, *of_k])]
        lines.append("")
    return "\n".join([*lines, *_agreement(report["agreement"])]).rstrip()


def _is_compiled(arm: dict[str, Any]) -> bool:
    return bool(arm["arm"].get("compiled", False))


def _table(steps: int, arms: list[dict[str, Any]]) -> list[str]:
    requests = sorted({row["requests"] for each in arms for row in each["rows"]})
    kept = next(each["arm"]["kept"] for each in arms if each["arm"]["draft"])
    lines = [
        f"| {steps} draft tokens, {kept:g} kept | graphs | " + " | ".join(f"{count} req." for count in requests) + " |",
        "|---|---|" + "---:|" * len(requests),
    ]
    for each in arms:
        rows = {row["requests"]: row for row in each["rows"]}
        gpus = f", {each['arm']['num_gpus']} GPUs" if each["arm"]["num_gpus"] > 1 else ""
        name = f"`{each['arm']['draft']}`" if each["arm"]["draft"] else _NO_DRAFT
        cells = [_cell(rows[count]) if count in rows else "" for count in requests]
        lines.append(f"| {name}{gpus} | `{each['graph_mode']}` | " + " | ".join(cells) + " |")
    return lines


def _cell(row: dict[str, Any]) -> str:
    host = f" ({median(each['p50'] for each in row['host_us']):,.0f})" if row["host_us"] else ""
    return f"{median(row['tokens_per_s']):,.0f}{host}"


def _agreement(rows: list[dict[str, Any]]) -> list[str]:
    """Each draft's share of tokens that are FLASH_ATTN's, where texts are the same; nothing without a comparison."""
    if not rows:
        return []
    shares = []
    for draft in dict.fromkeys(row["draft"] for row in rows):
        of_draft = [row for row in rows if row["draft"] == draft]
        share = sum(row["equal"] for row in of_draft) / sum(row["draft_tokens"] for row in of_draft)
        shares.append(f"`{draft}` {share:.1%}")
    return [
        f"Draft tokens equal to those of vLLM's `FLASH_ATTN` over the same texts of a small model: {', '.join(shares)}."
    ]
