"""One backend drafting in every strategy, compared with eager drafting and with plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from spec_decode.drafter import DrafterConfig, DraftPlan, Strategy, StrategyError, plan_draft
from spec_decode.engine import Engine, EngineConfig, EngineStats, Generation, Request
from spec_decode.engine.config import group_options
from spec_decode.llm.backends import Backends
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.llm.pair import Pair
from spec_decode.paged.kv_groups import make_groups
from spec_decode.sampling import SamplingParams
from spec_decode.testing.held_out_text import held_out_prompts

PROMPTS, PROMPT_BYTES, NEW_TOKENS, DRAFT_TOKENS = 6, 64, 64, 4
DRAFTER = DrafterConfig(num_speculative_tokens=DRAFT_TOKENS)
CONFIG = EngineConfig(drafter=DRAFTER)


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What a run produced."""

    generations: list[Generation]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class StrategyResult:
    """One strategy: its run, None if the backend cannot run it, and how many prompts came out differently."""

    strategy: Strategy
    run: GenerateResult | None
    unlike_eager: int
    unlike_plain: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A draft's backend and a row for each strategy. chosen: the plan it gets when no strategy is forced."""

    backend: str
    plain: GenerateResult
    chosen: DraftPlan
    rows: list[StrategyResult]

    @property
    def differs(self) -> bool:
        return any(row.unlike_eager or row.unlike_plain for row in self.rows)


def demo_requests() -> list[Request]:
    """Return greedy requests from text that the shipped pair was not trained on."""
    prompts = held_out_prompts(PROMPTS, PROMPT_BYTES)
    return [Request(prompt=encode(prompt), sampling=SamplingParams(max_tokens=NEW_TOKENS)) for prompt in prompts]


def compare(pair: Pair, backends: Backends, requests: Sequence[Request], on_run: Callable[[str], None]) -> Comparison:
    """Run the backends with plain decoding and in every strategy they support."""
    name = backends.names(backends.draft)
    on_run(f"{name}: plain decoding")
    plain = generate(pair, backends, requests, EngineConfig())
    chosen = _chosen_plan(pair, backends)
    runs: dict[Strategy, GenerateResult | None] = {}
    for strategy in Strategy:
        if strategy in chosen.unsupported:
            runs[strategy] = None
            continue
        on_run(f"{name}: {strategy.value}")
        try:
            config = replace(CONFIG, drafter=replace(DRAFTER, strategy=strategy))
            runs[strategy] = generate(pair, backends, requests, config)
        except StrategyError:
            runs[strategy] = None
    eager = runs[Strategy.EAGER]
    assert eager is not None
    rows = [
        StrategyResult(
            strategy,
            run,
            unlike_eager=_differing(run, eager, lambda g: (g.token_ids, g.accepted)),
            unlike_plain=_differing(run, plain, lambda g: g.token_ids),
        )
        for strategy, run in runs.items()
    ]
    return Comparison(name, plain, chosen, rows)


def generate(pair: Pair, backends: Backends, requests: Sequence[Request], config: EngineConfig) -> GenerateResult:
    """Continue the requests. Graphs are captured and kernels compiled first, so the stats include neither."""
    longest = max(request.max_len for request in requests)
    config = replace(config, max_num_seqs=len(requests), max_model_len=longest)
    engine = Engine(pair.target, pair.draft, backends.target, config, draft_backend=backends.draft)
    engine.capture()
    engine.generate([Request(prompt=requests[0].prompt[:1], sampling=SamplingParams(max_tokens=2))])
    return GenerateResult(engine.generate(requests), engine.stats)


def _differing(run: GenerateResult | None, reference: GenerateResult, what: Callable[[Generation], object]) -> int:
    pairs = zip(run.generations, reference.generations, strict=True) if run else ()
    return sum(what(one) != what(other) for one, other in pairs)


def _chosen_plan(pair: Pair, backends: Backends) -> DraftPlan:
    assert pair.draft is not None
    options = group_options(CONFIG, pair.draft)
    groups = make_groups("draft", pair.draft, backends.draft, options, 1, pair.device)
    return plan_draft(pair.draft, groups, pair.device, DRAFTER)


def to_table(comparisons: Sequence[Comparison], prompts: int) -> Table:
    """Return a row for every backend and strategy."""
    run = ("backend", "strategy", f"accepted of {DRAFT_TOKENS}", "rounds", "host us per round")
    table = Table(*run, "same tokens as eager", "same text as plain decoding")
    for comparison in comparisons:
        for row in comparison.rows:
            table.add_row(comparison.backend, row.strategy.value, *_cells(row, prompts))
    return table


def to_short_table(found: Mapping[str, Sequence[Comparison]]) -> Table:
    """Return a row for every draft and backend: whether each strategy agrees with eager drafting and plain decoding."""
    table = Table("draft", "backend", *(strategy.value for strategy in Strategy), f"accepted of {DRAFT_TOKENS}")
    for draft, comparisons in found.items():
        for each in comparisons:
            accepted = max(row.run.stats.mean_accepted for row in each.rows if row.run)
            table.add_row(draft, each.backend, *map(_short_cell, each.rows), f"{accepted:.2f}")
    return table


def reasons(found: Mapping[str, Sequence[Comparison]]) -> list[str]:
    """Return why strategies cannot run, a line for each strategy and reason."""
    plans = [(draft, each.chosen) for draft, several in found.items() for each in several]
    drafts: dict[tuple[Strategy, str], list[str]] = {}
    for draft, plan in plans:
        for strategy, reason in plan.unsupported.items():
            drafts.setdefault((strategy, reason), []).append(draft)
    lines = []
    for (strategy, reason), names in drafts.items():
        where = "" if len(names) == len(plans) else f" for {', '.join(dict.fromkeys(names))}"
        lines.append(f"{strategy.value} cannot run{where}: {reason}")
    return lines


def _short_cell(row: StrategyResult) -> str:
    if row.run is None:
        return "[dim]cannot run[/]"
    return "[bold red]NO[/]" if row.unlike_eager or row.unlike_plain else "[green]yes[/]"


def _cells(row: StrategyResult, prompts: int) -> list[str]:
    if row.run is None:
        return ["-", "-", "-", "cannot run", "see part 3"]
    stats = row.run.stats
    return [
        f"{stats.mean_accepted:.2f}",
        str(stats.rounds),
        f"{stats.host_us_a_round:.0f}",
        _agreement(row.unlike_eager, prompts),
        _agreement(row.unlike_plain, prompts),
    ]


def _agreement(differing: int, prompts: int) -> str:
    if differing:
        return f"[bold red]NO: {differing} of {prompts} differ[/]"
    return f"[green]yes, {prompts} of {prompts}[/]"
