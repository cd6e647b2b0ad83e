"""Build the tables of the vLLM pages from reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import hypot, sqrt
from statistics import fmean, median, stdev
from typing import Any

from scripts.markdown_table import markdown_table
from scripts.on_gpus import card
from scripts.vllm_figures import BASE, LATENT, OURS, REBUILT, names

_NO_DRAFT = "no speculation"
_MODES = {True: "defaults", False: "mode 0"}
"""How vLLM runs, by whether layers are compiled, in page order."""
_NAMES = {
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "mtp": "DeepSeek-V3's latents and MTP layer",
    "qwen3.5-mtp": "Qwen3.5's MTP layer",
}
_MODELS = {
    ("eagle", "llama3-8b"): ("EAGLE, 8B Llama", "An 8B Llama with an EAGLE draft"),
    ("dflash", "qwen3-8b"): ("DFlash, 8B Qwen3", "An 8B Qwen3 with a DFlash draft"),
    ("dflash2", "qwen3-8b"): ("DFlash2, 8B Qwen3", "An 8B Qwen3 with a DFlash2 draft"),
    ("qwen3.5-mtp", "qwen3.5"): (
        "MTP, four layers of Qwen3.5",
        "Four layers of Qwen3.5, three of them with recurrent states, and its MTP layer",
    ),
    ("mtp", "deepseek-v3"): (
        "MTP, four layers of DeepSeek-V3, 128 heads",
        "Four layers of DeepSeek-V3, one of them with experts, and its MTP layer, with 128 heads",
    ),
    ("mtp", "deepseek-v3-shard"): (
        "MTP, one GPU's eighth of four layers of DeepSeek-V3, 16 heads",
        "One GPU's eighth of four layers of DeepSeek-V3 and its MTP layer under tensor parallelism, with 16 heads",
    ),
}
"""The model, as a table cell and as a sentence, by kind of draft and size, in page order."""

_COMPARED = ((REBUILT, OURS[0]), (BASE, OURS[0]), *zip(LATENT.theirs, LATENT.ours, strict=True))
"""Pairs to compare, vLLM's draft backend and ours: over grouped heads, and over latents."""

_Runs = Mapping[int, list[float]]
"""The value of each run, by requests."""
_Compare = Callable[[list[float], list[float]], str]
"""A cell for the runs of ours and theirs, or of two GPUs and one."""


def ratios(reports: Sequence[dict[str, Any]], num_gpus: int = 1) -> str:
    """Return the ratios of output tokens per second, ours to vLLM's."""
    return _pairs(reports, num_gpus, _speeds, ratio)


def draft_times(reports: Sequence[dict[str, Any]]) -> str:
    """Return the GPU's median microseconds for a draft, vLLM's / ours."""
    return _pairs(reports, 1, _gpu_us, lambda ours, theirs: f"{median(theirs):,.0f} / {median(ours):,.0f}")


def _pairs(
    reports: Sequence[dict[str, Any]],
    num_gpus: int,
    measured: Callable[[dict[str, Any]], _Runs],
    compare: _Compare,
) -> str:
    """Build a table that compares our draft backends with vLLM's, by requests. A pair measured twice on a card has the
    row of the last report that measured it.

    measured: an arm's values by requests. compare: the cell for values of ours and theirs.
    """
    sizes = _requests(reports)
    rows: dict[tuple[str, ...], list[str]] = {}
    for model, compiled, report in product(_MODELS, _MODES, reports):
        alike = [
            each
            for each in _timed(report)
            if _model(each) == model and (each["arm"]["compiled"], each["arm"]["num_gpus"]) == (compiled, num_gpus)
        ]
        arms = {each["arm"]["draft"]: measured(each) for each in alike}
        for theirs, ours in _COMPARED:
            cells = _cells(sizes, arms.get(ours, {}), arms.get(theirs, {}), compare)
            if any(cells):
                labels, mode = (_draft(alike[0]), f"`{theirs}`", f"`{ours}`"), _MODES[compiled]
                same = (*labels, mode, card(report["env"]["device"]))
                rows[same] = [*labels, *cells, mode, source(report)]
    return _by_requests(["draft", "vLLM's backend", "our backend"], sizes, ["vLLM", "GPU, date"], [*rows.values()])


def scaling(report: dict[str, Any]) -> str:
    """Compare output tokens per second on two GPUs with those on one, by draft backend, for drafts measured on both."""
    sizes = _requests([report])

    def alike(found: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in found["arm"].items() if key not in ("name", "num_gpus")}

    timed = _timed(report)
    on = {count: [each for each in timed if each["arm"]["num_gpus"] == count] for count in (1, 2)}
    rows = []
    for two, one in ((two, one) for two in on[2] for one in on[1] if alike(one) == alike(two)):
        cells = _cells(sizes, _speeds(two), _speeds(one), ratio)
        rows.append([_draft(two), f"`{two['arm']['draft']}`", *cells, source(report)])
    return _by_requests(["draft", "its backend"], sizes, ["GPU, date"], rows)


def validated(reports: Sequence[dict[str, Any]]) -> str:
    """Return the ratios of output tokens per second with metadata validation to those without, over all runs of the
    same engine, with standard errors and the number of comparisons."""
    sizes, rows = _requests(reports), []
    for report in reports:
        for each in (each for each in report["arms"] if each["arm"]["watched"]):
            of = {row["requests"]: row for row in each["rows"]}
            cells = [_validated_cell(of[size]) if size in of else "" for size in sizes]
            mode = _MODES[each["arm"]["compiled"]]
            rows.append([_draft(each), f"`{each['arm']['draft']}`", *cells, mode, source(report)])
    return _by_requests(["draft", "our backend"], sizes, ["vLLM", "GPU, date"], rows)


def _validated_cell(row: Mapping[str, Any]) -> str:
    with_it, without = ([1 / speed for speed in row[f"{kind}tokens_per_s"]] for kind in ("", "unwatched_"))
    ratio = fmean(without) / fmean(with_it)
    error = ratio * hypot(*(stdev(times) / fmean(times) / sqrt(len(times)) for times in (with_it, without)))
    return f"{ratio:.3f} ± {error:.3f} ({row['compared']})"


def _cells(sizes: Sequence[int], ours: _Runs, theirs: _Runs, compare: _Compare) -> list[str]:
    return [compare(ours[size], theirs[size]) if size in ours and size in theirs else "" for size in sizes]


def _by_requests(before: Sequence[str], sizes: Sequence[int], after: Sequence[str], rows: list[list[str]]) -> str:
    """Build a table with one column of numbers per number of requests, between the other columns."""
    numbers = [f"{size} req." for size in sizes]
    return markdown_table([*before, *numbers, *after], rows, numbers)


def _requests(reports: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({row["requests"] for report in reports for each in report["arms"] for row in each["rows"]})


def _speeds(found: dict[str, Any]) -> dict[int, list[float]]:
    """Return tokens per second of each run of an arm, by requests."""
    return {row["requests"]: row["tokens_per_s"] for row in found["rows"]}


def _gpu_us(found: dict[str, Any]) -> dict[int, list[float]]:
    """Return the GPU's median time for a draft in each run of an arm, by requests."""
    return {row["requests"]: [each["p50"] for each in row["gpu_us"]] for row in found["rows"]}


def source(report: Mapping[str, Any]) -> str:
    """Return the card and the date of a report."""
    return f"{card(report['env']['device'])}, {report['env']['date'][:10]}"


def ratio(ours: Sequence[float], theirs: Sequence[float], *, paired: bool = False) -> str:
    """Return the ratio of medians, with a leading ~ if the ranges of the runs overlap. paired: if neither was faster in
    every run, for runs that each draw what their drafts keep, the same on both sides."""
    overlap = max(min(ours), min(theirs)) <= min(max(ours), max(theirs))
    if paired:
        pairs = [mine / other for mine, other in zip(ours, theirs, strict=False)]
        overlap = min(pairs) <= 1 <= max(pairs)
    return f"{'~' if overlap else ''}{median(ours) / median(theirs):.2f}"


def figures(report: dict[str, Any], name: str) -> str:
    """Return tables of output tokens per second by draft backend, and the agreement of draft tokens.

    Raises ValueError, naming the report, if it has no timed arm.
    """
    env = report["env"]
    timed = [each for each in unvalidated(report) if each["rows"] and each["rows"][0]["tokens_per_s"]]
    if not timed:
        raise ValueError(f"{name} has no timed arm: nothing to show on vLLM's page")
    blocks = []
    for compiled, mode in _MODES.items():
        alike = [each for each in timed if each["arm"]["compiled"] is compiled]
        drafted = [each for each in alike if each["arm"]["draft"]]
        for (kind, size), (_, models) in _MODELS.items():
            arms = [each for each in drafted if _model(each) == (kind, size)]
            if not arms:
                continue
            blocks.append(
                f"{models}. vLLM {arms[0]['vllm']}, {mode}, on {env['device']} ({env['date'][:10]}, commit "
                f"`{env['commit'][:12]}`):"
            )
            plain = [each for each in alike if not each["arm"]["draft"] and _model(each)[1] == size]
            blocks.append(_table([*plain, *arms]))
    return "\n\n".join([*blocks, *agreements(report)])


def agreements(report: Mapping[str, Any]) -> list[str]:
    """Say for each kind of draft that was compared how often draft tokens agree."""
    rows = report.get("agreement", [])
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return [_agreement([row for row in rows if row["kind"] == kind], kind) for kind in kinds]


def _model(found: dict[str, Any]) -> tuple[str, str]:
    """Return kind of draft and size."""
    return found["arm"]["kind"], found["arm"]["size"]


def _draft(found: dict[str, Any]) -> str:
    """Return the draft, as a table cell."""
    return f"{_MODELS[_model(found)][0]}, {found['arm']['steps']} tokens"


def unvalidated(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the arms that compare no metadata while they are timed."""
    return [each for each in report["arms"] if not each["arm"]["watched"]]


def _timed(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arms whose speeds are compared."""
    return [each for each in unvalidated(report) if each["arm"]["kept"]]


def _table(arms: list[dict[str, Any]]) -> str:
    requests = sorted({row["requests"] for each in arms for row in each["rows"]})
    steps, kept = next((each["arm"]["steps"], each["arm"]["kept"]) for each in arms if each["arm"]["draft"])
    rows = []
    for each in arms:
        of = {row["requests"]: row for row in each["rows"]}
        gpus = f", {each['arm']['num_gpus']} GPUs" if each["arm"]["num_gpus"] > 1 else ""
        name = f"`{each['arm']['draft']}`" if each["arm"]["draft"] else _NO_DRAFT
        cells = [_cell(of[count]) if count in of else "" for count in requests]
        rows.append([f"{name}{gpus}", f"`{each['graph_mode']}`", *cells])
    return _by_requests([f"{steps} draft tokens, {kept:g} accepted", "graphs"], requests, [], rows)


def _cell(row: dict[str, Any]) -> str:
    times = [median(each["p50"] for each in row[name]) for name in ("host_us", "gpu_us") if row[name]]
    of_draft = f" ({' / '.join(f'{time:,.0f}' for time in times)})" if times else ""
    runs = row["tokens_per_s"]
    return f"{median(runs):,.0f} [{min(runs):,.0f}-{max(runs):,.0f}]{of_draft}"


def _agreement(rows: list[dict[str, Any]], kind: str) -> str:
    """Return each draft's share of tokens equal to those of the target's backend, while the texts are the same."""
    alike: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault((row["draft"], row["num_gpus"]), []).append(row)
    shares = []
    for (draft, num_gpus), of_draft in alike.items():
        share = sum(row["equal"] for row in of_draft) / sum(row["draft_tokens"] for row in of_draft)
        shares.append(f"`{draft}`{f' on {num_gpus} GPUs' if num_gpus > 1 else ''} {share:.1%}")
    of_kind = "" if kind == "eagle" else f" with {_NAMES[kind]}"
    return (
        f"A small model{of_kind} drafted from the same texts on each backend. Share of draft tokens equal to those on "
        f"vLLM's `{names(kind).base}`: {', '.join(shares)}."
    )
