"""Build the tables, sentences and plot of vLLM over long contexts.

All take reports of `scripts/vllm_figures.py --contexts`, newest first, of which the newest that has a model and a kind
of draft is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from scripts.context_arm import FA2, FLASH_ATTN, OURS, TRITON
from scripts.engine_arm import DRAFTS
from scripts.line_plot import Line, line_plot
from scripts.markdown_table import markdown_table
from scripts.on_gpus import card
from scripts.vllm_tables import ratio, source

FA3 = 3
"""FlashAttention's version that vLLM chooses on Hopper, where all arms ran."""
ABSENT = "–"
"""Of what was left out, or had no arm."""
_MODELS = {
    "llama3-8b": "8B Llama, heads of 128 dims",
    "qwen3-8b": "8B Qwen3, heads of 128 dims",
    "llama-1b": "1B Llama, heads of 64 dims",
    "dim-256": "a Llama of 8B's width, heads of 256 dims",
}
"""Models by size, in words."""
_SHOWN = ("eagle", "llama3-8b")
"""Kind of draft and size of the model of the sentences, the plot and the README."""
_COMPARED = ((FLASH_ATTN, FA2, False), (FLASH_ATTN, FA2, True), (TRITON, 0, True), (FLASH_ATTN, 0, True))
"""vLLM's engines that ours are divided by: target, version, and whether there is a draft."""

_KERNELS = ("triton_paged", "flash_attn3")
"""Backends whose attention alone is compared."""

_Report = Mapping[str, Any]
"""See vllm_figures.py."""
_Reports = Sequence[_Report]
_Arm = Mapping[str, Any]
"""What a report says of an arm: its settings as "arm", and its rows."""


def speeds(reports: _Reports) -> str:
    """Return tokens per second of decoding, a table for each model, kind of draft and number of requests. Raises
    ValueError if no arm has a draft."""
    blocks = []
    for report, arms in groups(reports):
        blocks.append(f"{_title(arms)}. vLLM {arms[0]['vllm']}, {source(report)}:")
        for requests in _requests(arms):
            contexts = [context for context in _contexts(arms) if any(_runs(each, context, requests) for each in arms)]
            heads = list(map(thousands, contexts))
            rows = [[*_names(each), *(_cell(_runs(each, context, requests)) for context in contexts)] for each in arms]
            blocks.append(markdown_table([f"target, {_count(requests)}", "draft", *heads], rows, heads))
        blocks += _left_out(arms)
    return "\n\n".join(blocks)


def prompts(reports: _Reports) -> str:
    """Return tokens per second of prompts by context, a table for each model and kind of draft. A cell has a number for
    each number of requests."""
    blocks = []
    for _, arms in groups(reports):
        heads, sizes = list(map(thousands, _contexts(arms))), _requests(arms)
        rows = [
            [
                *_names(each),
                *(" / ".join(_prompt(each, context, size) for size in sizes) for context in _contexts(arms)),
            ]
            for each in arms
        ]
        counts = " / ".join(map(_count, sizes))
        blocks += [f"{_title(arms)}, {counts}:", markdown_table(["target", "draft", *heads], rows, heads)]
    return "\n\n".join(blocks)


def ratios(reports: _Reports) -> str:
    """Return tokens per second with target and draft on each of ours, divided by those of vLLM's engines, run by
    run."""
    blocks = []
    for _, arms in groups(reports):
        places = [(size, context) for size in _requests(arms) for context in _contexts(arms)]
        places = [place for place in places if any(_runs(each, place[1], place[0]) for each in arms)]
        heads = [f"{size} × {thousands(context)}" for size, context in places]
        rows = []
        for theirs, name in ((_find(arms, *of), name) for of in _COMPARED for name in OURS):
            if theirs and (ours := _find(arms, name)):
                runs = [(_runs(ours, context, size), _runs(theirs, context, size)) for size, context in places]
                cells = [ratio(mine, other, paired=True) if mine and other else ABSENT for mine, other in runs]
                rows.append([f"`{name}`", *_names(theirs), *cells])
        blocks += [
            f"{_title(arms)}, requests × context:",
            markdown_table(["ours", "vLLM's", "its draft", *heads], rows, heads),
        ]
    return "\n\n".join(blocks)


def kernels(report: _Report) -> str:
    """Return the time of attention alone by context, of `triton_paged` and FlashAttention-3, and their ratio, from the
    bench's report. Raises ValueError if it has neither."""
    times = {
        (row["spec"].partition(", page")[0], row["num_reqs"], row["context"], row["backend"]): row["gpu_us"][1]
        for row in report["rows"]
    }
    contexts = sorted({context for _, _, context, _ in times})
    rows = []
    for spec, requests in dict.fromkeys((spec, requests) for spec, requests, _, _ in times):
        cells = [_of_kernels(*(times.get((spec, requests, each, name)) for name in _KERNELS)) for each in contexts]
        if {*cells} != {ABSENT}:
            rows.append([spec, str(requests), *cells])
    if not rows:
        raise ValueError(f"the bench's report has no times of {' and '.join(_KERNELS)}: nothing to show on the page")
    heads = list(map(thousands, contexts))
    title = f"{source(report)}, `{report['command'].partition(' --device')[0]}`:"
    return f"{title}\n\n{markdown_table(['query / KV heads', 'req.', *heads], rows, ['req.', *heads])}"


def _of_kernels(ours: float | None, theirs: float | None) -> str:
    return ABSENT if ours is None or theirs is None else f"{ours:,.0f} / {theirs:,.0f} ({ours / theirs:.2f})"


def cost(reports: _Reports) -> str:
    """Say from which context on a draft makes FlashAttention-2 slower, by number of requests, and what one request gets
    on it and on ours after the longest."""
    _, arms = _shown_arms(reports)
    drafted, plain = (_need(arms, FLASH_ATTN, FA2, with_draft) for with_draft in (True, False))
    found = []
    for requests in _requests(arms):
        timed = [context for context in _contexts(arms) if _runs(drafted, context, requests)]
        pairs = {at: (_speed(drafted, at, requests), _speed(plain, at, requests)) for at in timed}
        # The draft must also cost at every longer context.
        slower = [at for at in timed if all(pairs[later][0] < pairs[later][1] for later in timed if later >= at)]
        shown = slower[0] if slower else timed[-1]
        with_it, without = pairs[shown]
        verb, where = (
            ("made", "slower from {} of context on") if slower else ("left", "faster at {}, the longest timed")
        )
        effect = f"{verb} {_count(requests)} {where.format(thousands(shown))}"
        found.append(f"{effect} ({with_it:,.0f} tokens/s, {without:,.0f} without)")
    longest = _contexts(arms)[-1]
    ours = [f"{_speed(_need(arms, name), longest):,.0f} on our `{name}`" for name in OURS]
    return (
        f"On FlashAttention-2, a draft {' and '.join(found)}. After {thousands(longest)} "
        f"tokens, one request got {_speed(drafted, longest):,.0f} tokens/s on it with the draft and "
        f"{_speed(plain, longest):,.0f} without; with target and draft, {' and '.join(ours)}."
    )


def behind(reports: _Reports) -> str:
    """Return, as a list, how far each of ours is behind FlashAttention-3 at most, and its prompts beside vLLM's."""
    _, arms = _shown_arms(reports)
    newest, longest = _need(arms, FLASH_ATTN), _contexts(arms)[-1]
    items = []
    for name in OURS:
        ours, worst = _need(arms, name), []
        for requests in _requests(arms):
            timed = [context for context in _contexts(arms) if _runs(newest, context, requests)]
            by = {at: 100 - 100 * _speed(ours, at, requests) / _speed(newest, at, requests) for at in timed}
            most = max(by, key=by.__getitem__)
            worst.append(f"{max(by[most], 0):.0f} % with {_count(requests)} ({thousands(most)} of context)")
        vllms = ((FLASH_ATTN, 0, "FlashAttention-3"), (FLASH_ATTN, FA2, "FlashAttention-2"), (TRITON, 0, f"`{TRITON}`"))
        prompts_of = [
            f"{_prompt_speed(ours, longest) / _prompt_speed(_need(arms, target, version), longest):.2f} times {words}'s"
            for target, version, words in vllms
        ]
        items.append(
            f"- `{name}` decodes slower than FlashAttention-3 by at most {' and '.join(worst)}. A prompt of "
            f"{thousands(longest)} has {', '.join(prompts_of[:-1])} and {prompts_of[-1]} tokens/s."
        )
    return "\n".join(items)


def readme_row(reports: _Reports) -> list[str]:
    """Return the README's row of the longest context: draft, vLLM's default on most cards, its other backend, ours."""
    _, arms = _shown_arms(reports)
    longest, of = _contexts(arms)[-1], arms[-1]["arm"]
    drafted, plain, other = (
        _speed(_need(arms, *of), longest)
        for of in ((FLASH_ATTN, FA2, True), (FLASH_ATTN, FA2, False), (TRITON, 0, True))
    )
    best = max(OURS, key=lambda name: _speed(_need(arms, name), longest))
    return [
        f"{DRAFTS[of['kind']]}, {of['steps']} draft tokens, {thousands(longest)} of context, FlashAttention-2",
        f"{drafted:,.0f}, without a draft {plain:,.0f} (`{FLASH_ATTN}`)",
        f"{other:,.0f} (`{TRITON}`)",
        f"{_speed(_need(arms, best), longest):,.0f} (`{best}`)",
    ]


def plot(reports: _Reports) -> str:
    """Plot one request's tokens per second over context, as an SVG for light and dark pages."""
    report, arms = _shown_arms(reports)
    of = {
        "FlashAttention-3 (vLLM's)": (FLASH_ATTN, 0, True),
        "FLASHINFER_IN_GRAPH (ours)": (OURS[0], 0, True),
        "TRITON_PAGED (ours)": (OURS[1], 0, True),
        "TRITON_ATTN (vLLM's)": (TRITON, 0, True),
        "FlashAttention-2, no draft": (FLASH_ATTN, FA2, False),
        "FlashAttention-2, draft": (FLASH_ATTN, FA2, True),
    }
    dashes = {"FlashAttention-3 (vLLM's)": "2 5", "FlashAttention-2, no draft": "7 5", "TRITON_PAGED (ours)": "7 5"}
    lines = [
        Line(
            label,
            {context: _speed(_need(arms, *engine), context) for context in _contexts(arms)},
            strong=engine[0] in OURS,
            dash=dashes.get(label, ""),
        )
        for label, engine in of.items()
    ]
    return line_plot(
        lines,
        title="Output tokens per second of one request in vLLM, by context",
        subtitle=f"{_title(arms)}, {card(report['env']['device'])}",
        x="tokens of context",
        x_name=thousands,
    )


def shown(reports: _Reports) -> _Report:
    """Return the report of the sentences, the plot and the README."""
    report, _ = _shown_arms(reports)
    return report


def thousands(context: int) -> str:
    """Return a number of tokens as a page shows it, 98304 as 96k."""
    return f"{context // 1024}k"


def groups(reports: _Reports) -> Iterator[tuple[_Report, list[_Arm]]]:
    """Yield each model and kind of draft, in the order of _MODELS, with its report and its arms: first the model's
    without a draft, then those with one."""
    newest: dict[tuple[str, str], _Report] = {}
    for report in reports:
        for each in report["arms"]:
            if each["rows"] and each["arm"]["draft"]:
                newest.setdefault(_kind(each), report)
    if not newest:
        raise ValueError("a report of long contexts must have an arm with a draft; nothing to show on their page")
    for (kind, size), report in sorted(newest.items(), key=lambda item: [*_MODELS].index(item[0][1])):
        ran = [each for each in report["arms"] if each["rows"] and each["arm"]["size"] == size]
        drafted = [each for each in ran if each["arm"]["draft"] and each["arm"]["kind"] == kind]
        yield report, [*(each for each in ran if not each["arm"]["draft"]), *drafted]


def _kind(found: _Arm) -> tuple[str, str]:
    return found["arm"]["kind"], found["arm"]["size"]


def _shown_arms(reports: _Reports) -> tuple[_Report, list[_Arm]]:
    """Return the report and the arms of the sentences. Raises ValueError if there are none."""
    for report, arms in groups(reports):
        if _kind(arms[-1]) == _SHOWN:
            return report, arms
    raise ValueError(f"no arm has the draft and the model {_SHOWN}")


def _find(arms: Sequence[_Arm], target: str, version: int = 0, with_draft: bool = True) -> _Arm | None:
    """Return the arm with this target and the draft on it, or without a draft."""
    of = {"target": target, "version": version, "draft": target if with_draft else ""}
    return next((each for each in arms if of.items() <= each["arm"].items()), None)


def _need(arms: Sequence[_Arm], target: str, version: int = 0, with_draft: bool = True) -> _Arm:
    """As _find. Raises ValueError if there is none."""
    found = _find(arms, target, version, with_draft)
    if found is None:
        raise ValueError(f"no arm has target {target}, version {version}, {'a' if with_draft else 'no'} draft")
    return found


def _title(arms: Sequence[_Arm]) -> str:
    of = arms[-1]["arm"]
    model = _MODELS[of["size"]]
    return f"{model}, {DRAFTS[of['kind']]} with {of['steps']} draft tokens, {of['kept']:g} accepted"


def _names(found: _Arm) -> list[str]:
    """Return target and draft, as table cells."""
    arm = found["arm"]
    version = f", FlashAttention-{arm['version'] or FA3}" if arm["target"] == FLASH_ATTN else ""
    target = f"`{arm['target']}`{version}{' (ours)' * (arm['target'] in OURS)}{', compiled' * arm['compiled']}"
    return [target, {"": "none", arm["target"]: "the same"}.get(arm["draft"], f"`{arm['draft']}`")]


def _row(found: _Arm, context: int, requests: int) -> Mapping[str, Any]:
    return next((row for row in found["rows"] if (row["context"], row["requests"]) == (context, requests)), {})


def _runs(found: _Arm, context: int, requests: int) -> list[float]:
    """Return tokens per second of each run; none if they were left out."""
    return list(_row(found, context, requests).get("tokens_per_s", ()))


def _speed(found: _Arm, context: int, requests: int = 1) -> float:
    return median(_runs(found, context, requests))


def _cell(runs: Sequence[float]) -> str:
    return f"{median(runs):,.0f} [{min(runs):,.0f}-{max(runs):,.0f}]" if runs else ABSENT


def _prompt(found: _Arm, context: int, requests: int) -> str:
    return ABSENT if "left_out" in _row(found, context, requests) else f"{_prompt_speed(found, context, requests):,.0f}"


def _prompt_speed(found: _Arm, context: int, requests: int = 1) -> float:
    return float(_row(found, context, requests)["prompt_tokens_per_s"])


def _left_out(arms: Sequence[_Arm]) -> Iterator[str]:
    """Yield, for what was left out, which arms it is of and why."""
    places = [
        (row["requests"], row["context"], row["left_out"], ", draft ".join(_names(each)))
        for each in arms
        for row in each["rows"]
        if "left_out" in row
    ]
    for (requests, context, why), of in groupby(sorted(places), key=lambda place: place[:3]):
        names = [name for *_, name in of]
        which = "" if len(names) == len(arms) else f" on {'; '.join(names)}"
        yield f"Left out: {_count(requests)} of {thousands(context)}{which}: {why}."


def _contexts(arms: Sequence[_Arm]) -> list[int]:
    return sorted({row["context"] for each in arms for row in each["rows"]})


def _requests(arms: Sequence[_Arm]) -> list[int]:
    return sorted({row["requests"] for each in arms for row in each["rows"]})


def _count(requests: int) -> str:
    return "one request" if requests == 1 else f"{requests} requests"
