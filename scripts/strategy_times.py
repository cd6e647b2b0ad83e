"""Build tables of times for the pages: strategies, fp8 weights, trees, recurrent states, and SmolLM2 on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts.markdown_table import markdown_table

_CASE, _BACKEND, _K = "llama3-8b-eagle/round", "triton_paged", 7
_STATES = "triton_state"
_SIZES, _FP8_SIZES = (1, 32), (1, 4, 16, 32)


def rounds_of(report: Mapping[str, Any], case: str = _CASE) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Return the rows of greedy rounds of one draft, keyed by (strategy, number of requests)."""
    kind = {"case": case, "backend": _BACKEND, "num_speculative_tokens": _K, "temperature": 0.0}
    rows = [row for row in report["rows"] if all(row.get(name) == value for name, value in kind.items())]
    return {(row["strategy"], row["num_reqs"]): row for row in rows}


def table(report: dict[str, Any]) -> str:
    """Build the table of GPU and host time by strategy for greedy rounds. Raises ValueError if the report has none."""
    found = rounds_of(report)
    strategies = [name for name in dict.fromkeys(name for name, _ in found) if all((name, n) in found for n in _SIZES)]
    if not strategies:
        raise ValueError(f"the report has no rounds of {_CASE} with K = {_K}: nothing to show on the strategies page")
    env, context = report["env"], found[strategies[0], _SIZES[0]]["context"]
    rows = []
    for name in strategies:
        each = [found[name, n] for n in _SIZES]
        times = [f"{row[kind][1]:,.0f}" for row in each for kind in ("gpu_us", "host_us")]
        rows.append([f"`{name}`", *times, f"{each[-1]['graph_bytes'] / 2**20:.0f}"])
    numbers = [*(f"{side}, {n} req." for n in _SIZES for side in ("GPU", "host")), "graphs, MiB"]
    return (
        f"Time to draft {_K} tokens, without verification: Llama-3-8B's EAGLE draft on `{_BACKEND}`, {context:,} "
        f"tokens of context, greedy, {env['device']}, {env['date'][:10]}, commit `{env['commit'][:12]}`. Times are "
        f"medians in microseconds, for {_SIZES[0]} and {_SIZES[1]} requests.\n\n"
        f"{markdown_table(['strategy', *numbers], rows, numbers)}"
    )


def fp8_table(report: dict[str, Any]) -> str:
    """Build the table of GPU times of rounds with 16-bit and with fp8 draft weights, for drafts timed with both.

    Raises ValueError if there are none.
    """
    timed = dict.fromkeys(row["case"] for row in report["rows"] if row["case"].endswith("/fp8-round"))
    if not timed:
        raise ValueError("the report has no rounds with fp8 weights: nothing to show on the page on LLM")
    rows = []
    for case in timed:
        draft = case.partition("/")[0]
        for weights, found in (("bf16", rounds_of(report, f"{draft}/round")), ("fp8", rounds_of(report, case))):
            times = [f"{found['full_loop', size]['gpu_us'][1]:,.0f}" for size in _FP8_SIZES]
            rows.append([f"`{draft}`", weights, *times])
    env, numbers = report["env"], [f"{size} req." for size in _FP8_SIZES]
    return (
        f"GPU time of a greedy round with {_K} draft tokens on `{_BACKEND}`, {env['device']}, {env['date'][:10]}. "
        f"Times are medians in microseconds.\n\n{markdown_table(['draft', 'weights', *numbers], rows, numbers)}"
    )


def cpu_table(report: dict[str, Any]) -> str:
    """Build the table of SmolLM2 on a CPU: `LLM` beside `transformers`. Raises KeyError if the report lacks a row."""
    found = {
        (row["case"].rpartition("/")[2], row["backend"], row["num_speculative_tokens"]): row for row in report["rows"]
    }
    columns = {"`LLM`": (_BACKEND, 0), "`LLM`, with its draft": (_BACKEND, 4), "`transformers`": ("transformers", 0)}

    def cells(part: str, show: Callable[[Mapping[str, Any]], str]) -> list[str]:
        keys = [(part, *of) for of in columns.values()]
        return [show(found[key]) if key in found else "–" for key in keys]

    def seconds(row: Mapping[str, Any]) -> float:
        return float(row["wall_us"][1]) / 1e6

    context, new = (found[part, _BACKEND, 0][size] for part, size in (("prompt", "context"), ("decode", "new_tokens")))
    rows = [
        ["loading, s", *cells("load", lambda row: f"{seconds(row):.1f}")],
        [f"prompt of {context:,} tokens, tokens/s", *cells("prompt", lambda row: f"{context / seconds(row):,.0f}")],
        [f"{new} new tokens, tokens/s", *cells("decode", lambda row: f"{new / seconds(row):.1f}")],
        ["memory, GB", *cells("memory", lambda row: f"{row['resident_bytes'] / 1e9:.2f}")],
    ]
    env = report["env"]
    return (
        f"SmolLM2-135M in fp32, {env['device']}, {env['date'][:10]}, `attn-backends bench cpu`. Times are medians.\n\n"
        f"{markdown_table(['', *columns], rows, list(columns))}"
    )


def state_table(report: dict[str, Any]) -> str:
    """Build the table of a step of recurrent states beside kernels that write 1 + K states, in microseconds. Raises
    ValueError if the report has no such step."""
    timed: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in report["rows"]:
        key = (row["spec"].partition(",")[0], row["num_speculative_tokens"], row["num_reqs"])
        timed.setdefault(key, {})[row["backend"]] = row["gpu_us"][1]
    rows = []
    for (recurrence, drafted, requests), found in sorted(timed.items()):
        columns = [us for name, us in found.items() if name.startswith("columns")]
        if _STATES in found and columns:
            ours, peers = found[_STATES], [min(columns), found.get("vllm", math.inf)]
            cells = [f"{us:,.1f}" if us < math.inf else "–" for us in (ours, *peers)]
            rows.append([f"`{recurrence}`", str(drafted), str(requests), *cells, f"{min(peers) / ours:.2f}"])
    if not rows:
        raise ValueError("the report has no step of states with its peers: nothing to show on their page")
    env, numbers = report["env"], ["K", "requests", f"`{_STATES}`", "1 + K states", "vLLM's kernel", "times as fast"]
    return (
        f"Microseconds of a layer's step, {env['device']}, {env['date'][:10]}, `attn-backends bench recurrent-state`. "
        "The last column divides the faster of the two others by ours.\n\n"
        f"{markdown_table(['recurrence', *numbers], rows, numbers)}"
    )


def tree_table(report: dict[str, Any]) -> str:
    """Build the table of trees of a block: how many tokens are accepted, and how long a round takes beside the chain's.

    Raises ValueError if the report has no such rows.
    """
    accepted: dict[str, dict[float, float]] = {}
    costs: dict[str, dict[int, float]] = {}
    for row in report["rows"]:
        tree = row["draft"].rpartition(", ")[2] if row.get("tree") else ""
        if row["case"] == "block-trees":
            accepted.setdefault(tree, {})[row["temperature"]] = row["accepted"]
        elif row["case"] == "block-tree-rounds":
            # There, every round yields one token, so rounds take as much longer as there are fewer tokens a second.
            costs.setdefault(tree, {})[row["num_reqs"]] = 1 / row.get("chain_ratio", 1.0)
    if not accepted or accepted.keys() != costs.keys():
        raise ValueError("the report must have the same trees in both of its benches. Run `attn-backends bench trees`.")
    env, steps = report["env"], report["rows"][0]["num_speculative_tokens"]
    rows = []
    for tree, kept in accepted.items():
        width, _, tokens = tree.partition("x")
        name = f"tree of {tokens} tokens, `width` {width}" if tree else f"{steps} tokens in a row"
        rows.append(
            [name, *(f"{kept[at]:.2f}" for at in (0.0, 1.0)), *(f"{cost:.2f}" for cost in costs[tree].values())]
        )
    numbers = ["accepted, greedy", "accepted, temperature 1", *(f"time, {size} req." for size in costs[""])]
    return (
        f"{env['device']}, {env['date'][:10]}, `attn-backends bench trees`.\n\n"
        f"{markdown_table(['draft', *numbers], rows, numbers)}"
    )


def compiled_table(reports: Sequence[dict[str, Any]]) -> str:
    """Build a table that compares later draft steps with the same steps under torch.compile, one row per report.

    Raises ValueError if the reports differ in device, torch release or sizes: one sentence describes all rows.
    """
    kinds = {
        (env["device"], env["torch"], row["num_speculative_tokens"] - 1, row["context"])
        for env, row in ((report["env"], report["rows"][0]) for report in reports)
    }
    if len(kinds) > 1:
        raise ValueError(
            f"reports of compiled steps must share a device, torch, K and context, got {sorted(kinds)}. Renew some."
        )
    [(device, release, steps, context)] = kinds
    dates = sorted({report["env"]["date"][:10] for report in reports})
    rows = []
    for report in reports:
        rows.append([f"`{report['rows'][0]['case'].removesuffix('-compiled')}`"])
        for size in _SIZES:
            theirs, ours = compiled_times(report)[size]
            rows[-1] += [f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.2f}"]
    numbers = [text for n in _SIZES for text in (f"torch.compile, {n} req.", f"this library, {n} req.", "ratio")]
    return (
        f"GPU time of the {steps} later steps of a round with {steps + 1} draft tokens, {context:,} tokens of context, "
        f"greedy, {device}, {' and '.join(dates)}, torch {release}. Times are medians in microseconds.\n\n"
        f"{markdown_table(['draft', *numbers], rows, numbers)}"
    )


def compiled_times(report: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Return, by number of requests, the microseconds of the compiled steps and of this library's."""
    found: dict[tuple[int, bool], float] = {
        (row["num_reqs"], bool(row.get("peer"))): row["gpu_us"][1] for row in report["rows"]
    }
    return {size: (found[size, True], found[size, False]) for size in _SIZES}
