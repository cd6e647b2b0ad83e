"""One backend drafting in every strategy, held against eager drafting and against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from spec_decode.cli.drafting import PAGE_SIZE, Backends, Outcome, Pair, device_of, generate
from spec_decode.drafter.kv_groups import make_groups
from spec_decode.drafter.plan import DraftPlan, GraphMode, Strategy, StrategyError, choose
from spec_decode.engine import Generation, Request
from spec_decode.graphs import loop_unsupported_reason
from spec_decode.models.byte_tokenizer import encode
from spec_decode.models.held_out_text import held_out_prompts

PROMPTS, PROMPT_BYTES, NEW_TOKENS, DRAFT_TOKENS = 6, 64, 96, 4


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy: its run, or why there is none, and the number of prompts that came out differently."""

    strategy: Strategy
    outcome: Outcome | None
    refusal: str = ""
    unlike_eager: int = 0
    unlike_plain: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """A draft's backend and its rows, from least host work to most. chosen: the plan it gets when none is forced."""

    backend: str
    plain: Outcome
    chosen: DraftPlan
    rows: list[Row]

    @property
    def differs(self) -> bool:
        return any(row.unlike_eager or row.unlike_plain for row in self.rows)


def demo_requests() -> list[Request]:
    """Greedy requests from text that the shipped pair was not trained on."""
    prompts = held_out_prompts(PROMPTS, PROMPT_BYTES)
    return [Request(prompt=encode(prompt), max_new_tokens=NEW_TOKENS) for prompt in prompts]


def compare(pair: Pair, backends: Backends, requests: Sequence[Request], on_run: Callable[[str], None]) -> Comparison:
    """Run the backends plainly and in every strategy. A strategy they cannot run is a row with the reason."""
    name = backends.names(backends.draft)
    on_run(f"{name}: plain decoding")
    plain = generate(pair, backends, requests, 0)
    outcomes: dict[Strategy, Outcome | str] = {}
    for strategy in Strategy:
        on_run(f"{name}: {strategy.value}")
        try:
            outcomes[strategy] = generate(pair, backends, requests, DRAFT_TOKENS, strategy)
        except StrategyError as error:
            outcomes[strategy] = str(error)
    eager = outcomes[Strategy.EAGER]
    assert isinstance(eager, Outcome)
    rows = [_row(strategy, outcome, eager, plain) for strategy, outcome in outcomes.items()]
    return Comparison(name, plain, _chosen_plan(pair, backends), rows)


def _row(strategy: Strategy, outcome: Outcome | str, eager: Outcome, plain: Outcome) -> Row:
    if isinstance(outcome, str):
        return Row(strategy, None, outcome)
    return Row(
        strategy,
        outcome,
        unlike_eager=_differing(outcome, eager, lambda g: (g.token_ids, g.accepted)),
        unlike_plain=_differing(outcome, plain, lambda g: g.token_ids),
    )


def _differing(ours: Outcome, theirs: Outcome, what: Callable[[Generation], object]) -> int:
    pairs = zip(ours.generations, theirs.generations, strict=True)
    return sum(what(one) != what(other) for one, other in pairs)


def _chosen_plan(pair: Pair, backends: Backends) -> DraftPlan:
    device = device_of(pair)
    groups = make_groups("draft", pair.draft, backends.draft, PAGE_SIZE, 1, device)
    facts = [group.facts(device) for group in groups]
    return choose(facts, DRAFT_TOKENS, GraphMode.FULL, loop_unsupported_reason=loop_unsupported_reason(device))


def to_table(comparisons: Sequence[Comparison], prompts: int) -> Table:
    """A row for every backend and strategy."""
    table = Table()
    for column in ("backend", "strategy", f"accepted of {DRAFT_TOKENS}", "rounds", "host us a round"):
        table.add_column(column)
    table.add_column("same tokens as eager")
    table.add_column("same text as plain decoding")
    for comparison in comparisons:
        for row in comparison.rows:
            table.add_row(comparison.backend, row.strategy.value, *_cells(row, prompts))
    return table


def _cells(row: Row, prompts: int) -> list[str]:
    if row.outcome is None:
        return ["-", "-", "-", "cannot run", "see part 3"]
    stats = row.outcome.stats
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
