"""The times on the strategies page, from the report that holds them."""

from __future__ import annotations

from typing import Any

_CASE, _BACKEND, _K = "llama3-8b-eagle/round", "triton_paged", 7
_SIZES = (1, 32)


def table(report: dict[str, Any]) -> str:
    """Greedy rounds of one draft: GPU and host time by strategy. Raises ValueError for rows without such a round."""
    found = {(row["strategy"], row["num_reqs"]): row for row in report["rows"] if _wanted(row)}
    strategies = [name for name in dict.fromkeys(name for name, _ in found) if all((name, n) in found for n in _SIZES)]
    if not strategies:
        raise ValueError(f"the report has no rounds of {_CASE} with K = {_K}: nothing to show on the strategies page")
    env, context = report["env"], found[strategies[0], _SIZES[0]]["context"]
    lines = [
        f"The table shows how long a draft of {_K} tokens takes, without verification: Llama-3-8B's EAGLE draft on "
        f"`{_BACKEND}`, {context:,} tokens of context, greedy, {env['device']}, {env['date'][:10]}, commit "
        f"`{env['commit'][:12]}`. Times are medians in microseconds, for {_SIZES[0]} request and for {_SIZES[1]}.",
        "",
        "| strategy | " + " | ".join(f"GPU, {n} req. | host, {n} req." for n in _SIZES) + " | graphs, MiB |",
        "|---|" + "---:|" * (2 * len(_SIZES) + 1),
    ]
    for name in strategies:
        each = [found[name, n] for n in _SIZES]
        times = [f"{row[kind][1]:,.0f}" for row in each for kind in ("gpu_us", "host_us")]
        lines.append(f"| `{name}` | " + " | ".join(times) + f" | {each[-1]['graph_bytes'] / 2**20:.0f} |")
    return "\n".join(lines)


def _wanted(row: dict[str, Any]) -> bool:
    case = (row["case"], row["backend"], row.get("num_speculative_tokens"), row.get("temperature"))
    return case == (_CASE, _BACKEND, _K, 0.0)
