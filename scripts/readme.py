"""Write the tables and the plot of the README and docs/ from the reports: python scripts/readme.py.

The figures are medians; each row names the device, date and command of its report.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import context_tables, engine_tables, others_tables, strategy_times, trained_tables, vllm_tables
from scripts.engine_arm import DRAFTS
from scripts.engine_arm import OURS as LLM_ENGINE
from scripts.engine_tables import SIZES
from scripts.line_plot import Line, line_plot
from scripts.markdown_table import markdown_table
from scripts.on_gpus import card
from scripts.vllm_figures import BASE, GROUPED, LATENT, REBUILT
from spec_decode.conformance.report import FAILURES, Report
from spec_decode.files import read_json, write_whole
from spec_decode.matrix import Sources
from spec_decode.testing.outcome import Outcome

ROOT = Path(__file__).resolve().parent.parent
CPU = "CPU"
"""The column for reports without a GPU, for any processor."""
README, PLOT = Path("README.md"), Path("docs/drawings/tokens-per-second.svg")
CONTEXT_PAGE, CONTEXT_PLOT = (
    Path("docs/engines/long-contexts.md"),
    Path("docs/drawings/tokens-per-second-over-context.svg"),
)
STATE_PAGE = Path("docs/reference/recurrent-state.md")
STRATEGIES, LLM_PAGE, ENGINE = (Path(f"docs/guide/{page}.md") for page in ("strategies", "llm", "engine"))
VLLM_PAGE, VLLM_FIGURES = Path("docs/engines/vllm.md"), Path("docs/engines/vllm-figures.md")
VLLM, LATENTS, PAIR = "h100/vllm.json", "h100/vllm-latents.json", "h100/vllm-pair.json"
HYBRID, HYBRID_EXACT = "h200/vllm-hybrid.json", "h200/vllm-hybrid-exact.json"
"""Reports of vLLM: of all drafts on one GPU but those over 128 heads of latents, of these, on two GPUs, and with a
hybrid target, timed and compared."""
CONTEXTS = "h200/contexts*.json"
"""Reports of vLLM over long contexts. The newest one that has a model and a kind of draft is shown."""
VERIFY = "h200/bench-paged-verify.json"
"""Report of attention of a few tokens over long contexts, beside FlashAttention-3 and FlashInfer."""
TRAINED, NARROW_CACHES = "h200/trained.json", "h200/trained-8-bit-caches.json"
"""Reports of a trained model in vLLM, the second over 8-bit caches."""
SUITES_PAGE = Path("docs/engines/others-suites.md")
SUITES = ("cpu/others-vllm.json", "h200/others-vllm.json", "cpu/others-sglang.json", "h200/others-sglang.json")
"""Reports of engines' own tests."""
ENGINES = "h200/engines*.json"
"""Reports of vLLM beside `LLM`. The newest one that has both engines with some settings is shown."""
ON_CPU = "cpu/bench-cpu.json"
"""Report of SmolLM2 on a CPU."""
ROUNDS, TREES, STATES = "h100/bench-drafter.json", "h200/bench-trees.json", "h200/bench-recurrent-state.json"
"""Reports of draft rounds, of trees of a block, and of steps of recurrent states."""
COMPILED = tuple(
    f"h100/bench-{draft}-compiled.json"
    for draft in (
        *("llama3-8b-eagle", "qwen3-8b-eagle3", "gpt-oss-20b-eagle3", "kimi-k2-eagle3", "glm-4.7-flash-mtp"),
        "eagle-1024",
    )
)
"""Reports that compare draft steps with torch.compile's."""
PART_OF_KIT = frozenset({"--family", "--only", "--quick"})
"""Options of `check` that skip checks: such a report says nothing about the rest."""
DRAFT_TOKENS = 7
"""Draft tokens per round in the figures of GPU and host time."""
OWN_TOKENS = ("graph.planned_steps_have_their_tokens", "base-round")
"""The check and case that show whether a draft step attends to the tokens drafted earlier in its round."""
NO_DRAFT, THEIRS, OURS, IN_PLACE = "", REBUILT, GROUPED.ours[0], BASE
"""vLLM's arms, named by the draft's attention backend; the last is vLLM's own backend that updates in place."""

EAGLE = ("eagle", "llama3-8b", True)
"""Kind of draft, size of the model, and whether vLLM is compiled, of the plot and of vLLM without a draft."""
IN_VLLM = (
    ("EAGLE, {} draft tokens", EAGLE, BASE, [THEIRS], [OURS]),
    ("DFlash, a block of {}", ("dflash", "qwen3-8b", True), BASE, [THEIRS], [OURS]),
    ("DFlash2, a block of {}", ("dflash2", "qwen3-8b", True), BASE, [THEIRS], [OURS]),
    (
        "MTP over latents, {} draft tokens",
        ("mtp", "deepseek-v3-shard", False),
        LATENT.base,
        LATENT.others,
        LATENT.ours,
    ),
)
"""Rows of vLLM: the draft, the engine as above, vLLM's default on Hopper, and which of its other backends and of ours
are compared."""
ABSENT = "–"
"""Of what no report has measured."""


def contents(root: Path) -> dict[Path, str]:
    """Return the pages and the plot made from the reports under root. Raises SystemExit for a page without its
    markers."""
    in_vllm = {name: _load(root, name) for name in (VLLM, LATENTS, PAIR, HYBRID)}
    vllm, latents, pair, hybrid = in_vllm.values()
    on_one_gpu, engines, contexts = [latents, vllm], newest_first(root, ENGINES), context_reports(root)
    tables = {
        README: {
            "findings": findings(root),
            "vllm speeds": vllm_speeds(vllm, contexts),
            "speeds": speeds(root),
            "matrix": summary(Sources.read([root / "reports"]).reports),
        },
        STRATEGIES: {
            "strategy times": strategy_times.table(_load(root, ROUNDS)),
            "compiled times": strategy_times.compiled_table([_load(root, name) for name in COMPILED]),
        },
        LLM_PAGE: {
            "fp8 times": strategy_times.fp8_table(_load(root, ROUNDS)),
            "cpu times": strategy_times.cpu_table(_load(root, ON_CPU)),
        },
        ENGINE: {"block trees": strategy_times.tree_table(_load(root, TREES))},
        STATE_PAGE: {"state times": strategy_times.state_table(_load(root, STATES))},
        VLLM_PAGE: {
            "cost of a draft": context_tables.cost(contexts),
            "vllm ratios": vllm_tables.ratios(on_one_gpu),
            "our layers": engine_tables.our_layers([*engines.values()]),
            "vllm draft times": vllm_tables.draft_times(on_one_gpu),
            "vllm on two GPUs": vllm_tables.scaling(pair),
            "vllm validated": vllm_tables.validated([vllm, hybrid]),
            "vllm ratios on two GPUs": vllm_tables.ratios([pair], num_gpus=2),
        },
        CONTEXT_PAGE: {
            "cost of a draft": context_tables.cost(contexts),
            "behind on Hopper": context_tables.behind(contexts),
            "context speeds": context_tables.speeds(contexts),
            "context ratios": context_tables.ratios(contexts),
            "context prompts": context_tables.prompts(contexts),
            "attention alone": context_tables.kernels(_load(root, VERIFY)),
        },
        SUITES_PAGE: {"others' suites": others_tables.table([_load(root, name) for name in SUITES])},
        VLLM_FIGURES: {
            "work of the readme": work(vllm, engines.values()),
            "whole engines": "\n\n".join(engine_tables.figures(*each) for each in engines.items()),
            "trained": trained_tables.table(_load(root, TRAINED)),
            "trained over 8-bit caches": trained_tables.table(_load(root, NARROW_CACHES)),
            "vllm figures": "\n\n".join(
                [
                    *(vllm_tables.figures(report, name) for name, report in in_vllm.items()),
                    *vllm_tables.agreements(_load(root, HYBRID_EXACT)),
                ]
            ),
        },
    }
    made = {PLOT: plot(vllm), CONTEXT_PLOT: context_tables.plot(contexts)}
    for path, of_page in tables.items():
        made[path] = (root / path).read_text(encoding="utf-8")
        for name, table in of_page.items():
            made[path] = between(made[path], name, table)
    return made


def between(page: str, name: str, table: str) -> str:
    """Return the page with the table between the named markers. Raises SystemExit unless each occurs once."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended) or begin in after or end in after:
        raise SystemExit(f"a page must contain the lines {begin} and {end}, once each. Fix its markers.")
    return f"{before}{begin}\n{table}\n{end}{after}"


def summary(reports: Sequence[Report]) -> str:
    """Build the check table: a row per backend, a column per GPU plus one for CPUs; checks passed of those run, and
    date.

    Refusals are not counted; of several reports of the whole kit the newest is used.
    """
    newest: dict[tuple[str, str], Report] = {}
    for report in sorted(reports, key=lambda report: report.env.date):
        if not report.engine and PART_OF_KIT.isdisjoint(shlex.split(report.command)):
            newest[report.backend, card(report.env.device) if report.env.cuda else CPU] = report
    devices = sorted({device for _, device in newest}, key=lambda device: (device == CPU, device))
    rows = [
        [f"`{backend}`", *(_passed(newest.get((backend, device))) for device in devices)]
        for backend in sorted({backend for backend, _ in newest})
    ]
    return markdown_table(["backend", *devices], rows)


def findings(root: Path) -> str:
    """List what the kit found in the metadata builders of vLLM and in the draft backends of SGLang."""
    claims = in_place_claims(root)
    every = _engine_reports(root, "sglang")
    plans = [report for report in every if OWN_TOKENS in {(found.check, found.case) for found in report.results}]
    refuted = [report for report in claims if any(report.counts[bad] for bad in (*FAILURES, Outcome.XFAIL))]
    names = " and ".join(f"`{report.backend}`" for report in refuted)
    missing = [
        report
        for report in plans
        for result in report.results
        if (result.check, result.case) == OWN_TOKENS and result.outcome in (*FAILURES, Outcome.XFAIL)
    ]
    return (
        f"- **vLLM {claims[0].version}**: {len(claims)} of the metadata builders that we checked claim to update in "
        f"place. The kit refuted {len(refuted)} of these claims{f': {names}' * bool(refuted)} "
        "([details](docs/engines/vllm-builders.md)).\n"
        f"- **SGLang {plans[0].version}** plans the metadata of all draft steps before it replays their graph. In "
        f"{len(missing)} of {len(plans)} draft backends, it omits the tokens drafted earlier in the round, so the "
        "draft does not attend to them ([details](docs/engines/sglang.md#sglangs-own-draft-backends)).\n\n"
        f"Both were found on a CPU: `attn-backends check --engine vllm` ({_newest(claims)}) and `--engine sglang` "
        f"({_newest(plans)})."
    )


def vllm_speeds(report: Mapping[str, Any], contexts: Sequence[Mapping[str, Any]]) -> str:
    """Build the table of tokens per second in vLLM: on its default, on its other backends and on ours, and after a long
    context."""
    rows = []
    for draft, of, default, others, ours in IN_VLLM:
        arms, (steps, _) = vllm_arms(report, *of), _round(report, *of)
        rows.append([draft.format(steps), *(_best(arms, names) for names in ([default], others, ours))])
    rows.append(context_tables.readme_row(contexts))
    sizes = " / ".join(map(str, SIZES))
    return (
        f"Output tokens/s in vLLM {report['arms'][0]['vllm']} with {sizes} concurrent requests, by the draft's "
        f"attention backend ({_source(report, 'scripts/vllm_figures.py')}). In the last row, one request has a long "
        "context, and target and draft have the same backend. vLLM's default there is that of A100, L4, RTX 40 and the "
        "other cards of compute capability 8 and 12; a Hopper card ran it in their place "
        f"([why]({CONTEXT_PAGE}#what-stands-in-for-what); "
        f"{_source(context_tables.shown(contexts), 'scripts/vllm_figures.py --contexts')})."
        "\n\n"
        f"{markdown_table(['draft', 'vLLM, its default', 'vLLM, another backend', 'vLLM, ours'], rows)}"
    )


def _best(arms: Mapping[str, Mapping[int, float]], names: Sequence[str]) -> str:
    """Return the speeds of the one backend that has been measured, or the best of several."""
    measured = [name for name in names if name in arms]
    if not measured:
        return ABSENT
    best = {size: max(arms[name][size] for name in measured) for size in SIZES}
    return f"{_pair(best)} ({f'`{measured[0]}`' if len(measured) == 1 else f'best of {len(measured)}'})"


def speeds(root: Path) -> str:
    """Build the table of our engine's and drafter's speeds, with baselines and sources."""
    rounds, compiled = (_load(root, name) for name in (ROUNDS, COMPILED[0]))
    torchs, ours = zip(*strategy_times.compiled_times(compiled).values(), strict=True)
    timed = strategy_times.rounds_of(rounds)
    eager, graph = (timed[strategy, 1]["host_us"][1] / 1e3 for strategy in ("eager", "full_loop"))
    sizes = " / ".join(map(str, SIZES))
    rows = [
        *engine_tables.readme_rows([*newest_first(root, ENGINES).values()]),
        [
            f"GPU time to draft tokens 2 to {DRAFT_TOKENS}, {sizes} requests",
            f"{_ms(torchs)} ms (`torch.compile`, max-autotune)",
            f"{_ms(ours)} ms",
            _source(compiled, "attn-backends bench llama3-8b-eagle-compiled"),
        ],
        [
            f"Host time to draft {DRAFT_TOKENS} tokens, 1 request",
            f"{eager:.1f} ms (eager)",
            f"{graph:.2f} ms (one graph replay)",
            _source(rounds, "attn-backends bench llama3-8b-eagle"),
        ],
    ]
    return markdown_table(["measured", "baseline", "this library", "device, date, command"], rows)


def newest_first(root: Path, pattern: str) -> dict[str, dict[str, Any]]:
    """Return the reports whose path in reports/ matches, by file name, newest first."""
    found = {path.name: read_json(path) for path in (root / "reports").glob(pattern)}
    return dict(sorted(found.items(), key=lambda each: str(each[1]["env"]["date"]), reverse=True))


def context_reports(root: Path) -> list[dict[str, Any]]:
    """Return the reports of long contexts, newest first."""
    return [*newest_first(root, CONTEXTS).values()]


def work(vllm: Mapping[str, Any], engines: Iterable[Mapping[str, Any]]) -> str:
    """Describe what the README's speeds were measured on. engines: the reports of whole engines."""
    kept = [f"{kept:g} of {steps}" for steps, kept in (_round(vllm, *of) for _, of, *_ in IN_VLLM)]
    plain, size = vllm_arms(vllm, *EAGLE)[NO_DRAFT], SIZES[-1]
    arms = [each["arm"] for report in engines for each in report["arms"]]
    drafted = [arm for arm in arms if arm["engine"] == LLM_ENGINE and arm["steps"]]
    rounds = {(arm.get("kind", "eagle"), arm["kept"], arm["steps"]) for arm in drafted}
    ordered = sorted(rounds, key=lambda each: [*DRAFTS].index(each[0]))
    compared = " and ".join(f"{each_kept:g} of {steps} with {DRAFTS[kind]}" for kind, each_kept, steps in ordered)
    compared += " where vLLM and `LLM` are compared"
    return (
        "The README's table of vLLM has an 8B Llama with EAGLE, an 8B Qwen3 with DFlash and DFlash2, and, for MTP, "
        "four layers of DeepSeek-V3 as one of eight GPUs holds them (16 of 128 heads), not compiled. All weights are "
        "random, so a target would reject almost every draft token. We therefore made the verifier accept a fixed "
        f"mean number of draft tokens per round: {', '.join(kept)} in vLLM, {compared}. `LLM` loads the Llama from a "
        "folder, and both engines have their defaults but for [a few options](#whole-engines): whole requests of about "
        "512 tokens of prompt and 256 new ones. Of vLLM's options for drafts in 8 bits the fastest that was measured "
        f"is shown. Without a draft, vLLM generates {_pair(plain)} tokens/s with the Llama and "
        f"{' / '.join(map(str, SIZES))} concurrent requests on the {card(vllm['env']['device'])}. MTP with one request "
        f"is host-bound; read the number for {size} requests "
        "([why](vllm.md#how-much-faster))."
    )


def vllm_arms(report: Mapping[str, Any], kind: str, size: str, compiled: bool) -> dict[str, dict[int, float]]:
    """Return output tokens per second of a model by draft backend and requests, without a draft and with drafts of a
    kind, on one GPU and without metadata validation."""
    return {
        arm["arm"]["draft"]: {row["requests"]: median(row["tokens_per_s"]) for row in arm["rows"]}
        for arm in _timed_arms(report, kind, size, compiled)
    }


def _timed_arms(report: Mapping[str, Any], kind: str, size: str, compiled: bool) -> list[dict[str, Any]]:
    return [
        arm
        for arm in vllm_tables.unvalidated(report)
        if (arm["arm"]["size"], arm["arm"]["compiled"], arm["arm"]["num_gpus"]) == (size, compiled, 1)
        and (not arm["arm"]["draft"] or arm["arm"]["kind"] == kind)
        and arm["rows"]
        and arm["rows"][0]["tokens_per_s"]
    ]


def in_place_claims(root: Path) -> list[Report]:
    """Load the reports on vLLM metadata builders that claim in-place updates."""
    # Copies do not have the names of vLLM's classes.
    own = [report for report in _engine_reports(root, "vllm") if report.backend.endswith("MetadataBuilder")]
    return [report for report in own if report.claims["graph:advance"].claimed]


def _engine_reports(root: Path, engine: str) -> list[Report]:
    return [Report.load(path) for path in sorted((root / "reports/cpu").glob(f"check-{engine}-*.json"))]


def _newest(reports: Sequence[Report]) -> str:
    return max(report.env.date for report in reports)[:10]


def plot(report: Mapping[str, Any]) -> str:
    """Plot vLLM's output tokens per second against requests, as an SVG for light and dark pages."""
    arms, device = vllm_arms(report, *EAGLE), card(report["env"]["device"])
    steps, kept = _round(report, *EAGLE)
    names = {
        OURS: "FLASHINFER_IN_GRAPH (ours)",
        IN_PLACE: "FLASH_ATTN (vLLM's)",
        THEIRS: "FLASHINFER (vLLM's)",
        NO_DRAFT: "no draft",
    }
    dashes = {IN_PLACE: "2 5", NO_DRAFT: "7 5"}
    lines = [Line(label, arms[name], strong=name == OURS, dash=dashes.get(name, "")) for name, label in names.items()]
    return line_plot(
        lines,
        title="Output tokens per second in vLLM, by the draft's attention backend",
        subtitle=f"8B Llama with EAGLE, {steps} draft tokens per round, {kept:g} accepted, {device}",
        x="concurrent requests",
    )


def main() -> None:
    """Write each file that differs from what the reports produce."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in contents(ROOT).items():
        written = ROOT / path
        if not written.exists() or written.read_text(encoding="utf-8") != text:
            write_whole(written, text.encode())
            print(f"wrote {path}")


def _load(root: Path, name: str) -> dict[str, Any]:
    report: dict[str, Any] = read_json(root / "reports" / name)
    return report


def _pair(values: Mapping[int, float]) -> str:
    return " / ".join(f"{values[size]:,.0f}" for size in SIZES)


def _ms(times_us: Sequence[float]) -> str:
    return " / ".join(f"{us / 1e3:.2f}" for us in times_us)


def _source(report: Mapping[str, Any], command: str) -> str:
    return f"{vllm_tables.source(report)}, `{command}`"


def _round(report: Mapping[str, Any], kind: str, size: str, compiled: bool) -> tuple[int, float]:
    """Return the draft tokens of a round of vLLM's timed drafts, and the mean number of them that is kept."""
    arms = (found["arm"] for found in _timed_arms(report, kind, size, compiled))
    [of_round] = {(arm["steps"], arm["kept"]) for arm in arms if arm["draft"]}
    return of_round


def _passed(report: Report | None) -> str:
    if report is None:
        return "not run"
    counts = report.counts
    ran = counts[Outcome.PASS] + sum(counts[bad] for bad in (*FAILURES, Outcome.XFAIL))
    return f"{counts[Outcome.PASS]} of {ran} ({report.env.date[:10]})" if ran else "not run"


if __name__ == "__main__":
    main()
