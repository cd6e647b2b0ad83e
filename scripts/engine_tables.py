"""Build the tables of whole engines: vLLM, vLLM with this library's layers, and `LLM`.

All take reports of `scripts/vllm_figures.py --engines`, newest first where there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from scripts.engine_arm import DRAFTS, OURS, PLUGGED, VLLM
from scripts.markdown_table import markdown_table
from scripts.vllm_tables import ratio, source

_Report = Mapping[str, Any]
"""See vllm_figures.py."""
_Arm = Mapping[str, Any]
"""What a report says of an arm: its settings as "arm", its rows and its prompts."""
_Settings = Mapping[str, Any]
"""Of an arm, those that are wanted."""
_LLAMA = "llama3-8b"
SIZES = (1, 32)
"""Concurrent requests shown in the README."""
_COMMAND = "`scripts/vllm_figures.py --engines`"
_EAGLE = {"steps": 7, "weights": False, "draft_weights": False}
_NARROW_DRAFT, _NARROW = _EAGLE | {"draft_weights": True}, _EAGLE | {"draft_weights": True, "weights": True}
_ALL_NARROW = "an 8B Llama with EAGLE, layers in 8 bits"
_COMPARED = {
    "an 8B Llama without a draft": {"steps": 0, "weights": False},
    "an 8B Llama with EAGLE": _EAGLE,
    "an 8B Llama with an EAGLE draft in 8 bits": _NARROW_DRAFT,
    _ALL_NARROW: _NARROW,
    "an 8B Llama without a draft, weights in 8 bits": {"steps": 0, "weights": True},
    "four layers of Qwen3.5 without a draft": {"steps": 0, "weights": False, "size": "qwen3.5"},
    "four layers of Qwen3.5 with MTP": {"steps": 3, "weights": False, "draft_weights": False, "size": "qwen3.5"},
}
"""Settings that `LLM` and vLLM are compared with, of a Llama unless they say so, by how the README names them."""
_WITH_PROMPTS = frozenset({"an 8B Llama with EAGLE", _ALL_NARROW})
"""Those whose prompts have a row."""
_EAGLE3 = {"kind": "eagle3", "size": "qwen3-8b", "weights": False}
_DFLASH = _EAGLE3 | {"kind": "dflash"}
_IN_16, _IN_8, _BOTH = {"draft_weights": False}, {"draft_weights": True}, "draft target"
_LAYERS = {
    "EAGLE, 16 bits": (_EAGLE, _BOTH),
    "EAGLE, draft in 8 bits": (_NARROW_DRAFT, _BOTH),
    "EAGLE, all in 8 bits": (_NARROW, _BOTH),
    "EAGLE-3, 16 bits": (_EAGLE3 | _IN_16, _BOTH),
    "EAGLE-3, draft in 8 bits": (_EAGLE3 | _IN_8, _BOTH),
    "EAGLE-3, 16 bits; draft alone": (_EAGLE3 | _IN_16, "draft"),
    "EAGLE-3, 8 bits; draft alone": (_EAGLE3 | _IN_8, "draft"),
    "DFlash, 16 bits": (_DFLASH | _IN_16, _BOTH),
    "DFlash, draft in 8 bits": (_DFLASH | _IN_8, _BOTH),
    "DFlash, 16 bits; draft alone": (_DFLASH | _IN_16, "draft"),
    "DFlash, 8 bits; draft alone": (_DFLASH | _IN_8, "draft"),
}
"""Settings of a draft with which vLLM is compared, without and with our head, and which models have our layers. MTP is
left out: with the few layers that fit, the host decides."""
_KINDS = {"": "tokens_per_s", ", decoding alone": "decode_tokens_per_s"}
_KEPT = {"tokens_per_s": "kept", "decode_tokens_per_s": "decode_kept"}
"""The drafts that rounds kept in these runs. Reports before December 2026 lack them."""
_OTHER_MODELS = {
    "qwen3.5": ", four layers of Qwen3.5",
    "qwen3-8b": ", 8B Qwen3",
    "deepseek-v3-shard": ", one GPU's eighth of four layers of DeepSeek-V3",
}
"""Models that are not the 8B Llama, by size."""


def figures(name: str, report: _Report) -> str:
    """Build a table of every engine of the report with this name, by its settings. The first number of a cell is of
    whole requests, the second of decoding alone."""
    sizes = [row["requests"] for row in report["arms"][0]["rows"]]
    rows = []
    for found in sorted(report["arms"], key=_by_settings):
        arm = found["arm"]
        model = DRAFTS[arm.get("kind", "eagle")] if arm["steps"] else "no draft"
        model += _OTHER_MODELS.get(arm.get("size", ""), "")
        options = {"draft in 8 bits": "draft_weights", "target in 8 bits": "weights", "local argmax": "local_argmax"}
        settings = ", ".join([model, *(name for name, field in options.items() if arm[field])])
        runs = [_runs(found, kind) for kind in _KINDS.values()]
        each = [" / ".join(f"{median(of_kind[size]):,.0f}" for of_kind in runs) for size in sizes]
        engine = f"vLLM {found['vllm']}" if "vllm" in found else "`LLM`"
        engine += "".join(f", {part}" for part in _our_parts(arm))
        rows.append([settings, engine, *each, f"{median(found['prefill']['tokens_per_s']):,.0f}"])
    numbers = [*(f"{size} req." for size in sizes), "prompts"]
    table = markdown_table(["settings", "engine", *numbers], rows, numbers)
    return f"`{name}`, {source(report)}:\n\n{table}"


def our_layers(reports: Sequence[_Report]) -> str:
    """Return the ratios of output tokens per second, vLLM with our layers and with our head, to vLLM with the same
    settings, of whose further options the fastest counts. Raises ValueError if no report has both."""
    rows, sizes = [], list[int]()
    for label, (settings, models) in _LAYERS.items():
        if (found := _newest(reports, settings, partial(_our_layers, models=models))) is None:
            continue
        report, theirs, [ours, *_] = found
        sizes = [row["requests"] for row in ours["rows"]]
        for kind, field in _KINDS.items():
            fastest = {size: max((_runs(arm, field)[size] for arm in theirs), key=median) for size in sizes}
            cells = [ratio(_runs(ours, field)[size], fastest[size]) for size in sizes]
            rows.append([f"{label}{kind}", *cells, source(report)])
    if not rows:
        raise ValueError("no report of whole engines has vLLM with our layers: nothing to show on vLLM's page")
    numbers = [f"{size} req." for size in sizes]
    return markdown_table(["draft, weights", *numbers, "GPU, date"], rows, numbers)


def readme_rows(reports: Sequence[_Report]) -> list[list[str]]:
    """Build the README's rows: `LLM` of a folder with vLLM as its baseline, and vLLM with our layers and without."""
    sizes, rows = " / ".join(map(str, SIZES)), []
    for label, settings in _COMPARED.items():
        if (found := _newest(reports, settings, _llm)) is None:
            continue
        report, theirs, ours = found
        vllm, of = f"vLLM {theirs[0]['vllm']}", f"{source(report)}, {_COMMAND}"
        both = [f"{_fastest(theirs)} ({vllm})", f"{_fastest(ours)} (`LLM`)"]
        rows.append([f"Tokens/s of {label}, {sizes} requests", *both, of])
        if label in _WITH_PROMPTS:
            prompts = [median(each["prefill"]["tokens_per_s"]) for each in (theirs[0], ours[0])]
            name = f"Prompt tokens/s of {label}, {ours[0]['prefill']['requests']} prompts of 1,000 tokens"
            rows.append([name, f"{prompts[0]:,.0f} ({vllm})", f"{prompts[1]:,.0f} (`LLM`)", of])
    if (found := _newest(reports, _NARROW, _our_layers)) is not None:
        report, theirs, ours = found
        both = [f"{_fastest(theirs)} (its own options)", f"{_fastest(ours)} (our layers and head)"]
        rows.append([f"Tokens/s in vLLM of {_ALL_NARROW}, {sizes} requests", *both, f"{source(report)}, {_COMMAND}"])
    return rows


def _newest(
    reports: Sequence[_Report], settings: _Settings, ours_of: Callable[[_Report, _Settings], list[_Arm]]
) -> tuple[_Report, list[_Arm], list[_Arm]] | None:
    """Return the newest report that has arms of vLLM's with these settings and of ours, and these arms."""
    found = ((report, _alike(report, settings, VLLM), ours_of(report, settings)) for report in reports)
    return next((each for each in found if each[1] and each[2]), None)


def _alike(report: _Report, settings: _Settings, engine: str) -> list[_Arm]:
    """Return an engine's arms with these settings, of a Llama by default."""
    wanted = ({"size": _LLAMA, "engine": engine} | dict(settings)).items()
    return [each for each in report["arms"] if each["rows"] and wanted <= ({"size": _LLAMA} | each["arm"]).items()]


def _llm(report: _Report, settings: _Settings) -> list[_Arm]:
    """Return the arms of `LLM` with these settings."""
    return _alike(report, settings, OURS)


def _our_layers(report: _Report, settings: _Settings, models: str = _BOTH) -> list[_Arm]:
    """Return the arms of vLLM with these settings, our layers in these models, and our head."""
    ours = _alike(report, {**settings, "models": models}, PLUGGED)
    return [each for each in ours if each["arm"].get("head")]


def _runs(found: _Arm, kind: str) -> dict[int, list[float]]:
    """Return tokens per second of each run by requests, as if its rounds had kept the mean number of drafts that the
    arm states: how many each keeps is drawn, and one request has few rounds. kind: a field of a row."""
    wanted, of_kind = found["arm"].get("kept", 0.0), _KEPT[kind]
    return {
        row["requests"]: [
            speed * ((1 + wanted) / (1 + kept))
            for speed, kept in zip(row[kind], row.get(of_kind, [wanted] * len(row[kind])), strict=True)
        ]
        for row in found["rows"]
    }


def _fastest(arms: Sequence[_Arm]) -> str:
    """Return the speeds of the fastest of several arms: vLLM's further options help at some sizes only."""
    runs = [_runs(arm, "tokens_per_s") for arm in arms]
    return " / ".join(f"{max(median(each[size]) for each in runs):,.0f}" for size in SIZES)


def _our_parts(arm: Mapping[str, Any]) -> Iterator[str]:
    """Say what vLLM runs of ours in an arm."""
    if models := arm.get("models", "").split():
        yield f"our layers in {' and '.join(models)}"
    if head := arm.get("head"):
        yield f"our head in {'8' if head == 'fp8' else head} bits"


def _by_settings(found: _Arm) -> tuple[Any, ...]:
    """Sort engines with the same settings together, vLLM first."""
    arm = found["arm"]
    model = (arm.get("size", ""), bool(arm["steps"]), arm.get("kind", ""), arm["weights"], arm["draft_weights"])
    return (*model, bool(arm.get("models") or arm.get("head")), "vllm" not in found, arm["local_argmax"])
