"""The table of drafters: a draft model on a backend, in each strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from spec_decode.matrix.cells import Runs, Status
from spec_decode.matrix.sources import Agreement, AgreementRow, Quantiles, Timing


class Parity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drafting at one temperature compared with eager drafting, with plain decoding if greedy, and, batched with other
    prompts, with running alone. Prompts are counted over all graph modes."""

    num_speculative_tokens: int
    temperature: float
    graph_modes: tuple[str, ...]
    prompts: int
    unlike_eager: int
    unlike_plain: int | None
    unlike_alone: int | None
    accepted: float | None


class HostTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host time of a round in this strategy, timed with the bench's own random draft."""

    case: str
    num_reqs: int
    num_speculative_tokens: int
    us: Quantiles
    run: int


class DraftCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One strategy. run: the run behind the parity. changed: the modules behind it that have changed since."""

    strategy: str
    status: Status
    parity: tuple[Parity, ...]
    refusal: str
    host: tuple[HostTime, ...]
    run: int
    changed: tuple[str, ...] = ()

    @property
    def longest(self) -> tuple[Parity, ...]:
        """The parities with the most draft tokens."""
        most = max((found.num_speculative_tokens for found in self.parity), default=0)
        return tuple(found for found in self.parity if found.num_speculative_tokens == most)


class DraftRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A draft model on a backend, on one device in one run."""

    draft: str
    backend: str
    dtype: str
    device: str
    cells: tuple[DraftCell, ...]

    def in_order(self, strategies: Iterable[str]) -> list[DraftCell | None]:
        """Return the cells of these strategies; None for a strategy that was not run."""
        return [next((cell for cell in self.cells if cell.strategy == strategy), None) for strategy in strategies]


def draft_rows(agreements: Sequence[Agreement], timings: Sequence[Timing], runs: Runs) -> tuple[DraftRow, ...]:
    """Return a row for each draft, backend and run, newest first; nothing is merged."""
    rows = []
    for agreement in sorted(agreements, key=lambda agreement: agreement.env.date, reverse=True):
        run = runs.number("draft pairs", agreement.env, agreement.command)
        changed = agreement.sources.changed()
        device = agreement.env.device
        groups: dict[tuple[str, str, str], dict[str, list[AgreementRow]]] = {}
        for row in agreement.rows:
            by_strategy = groups.setdefault((row.draft, row.backend, _numbers(row)), {})
            by_strategy.setdefault(row.strategy, []).append(row)
        for (draft, backend, dtype), by_strategy in groups.items():
            cells = [
                _cell(found, run, changed, _host_times(timings, device, backend, strategy, runs))
                for strategy, found in by_strategy.items()
            ]
            rows.append(DraftRow(draft=draft, backend=backend, dtype=dtype, device=device, cells=tuple(cells)))
    return tuple(rows)


def _numbers(row: AgreementRow) -> str:
    return f"{row.dtype}, batch invariant" if row.batch_invariant else row.dtype


def _cell(rows: Sequence[AgreementRow], run: int, changed: tuple[str, ...], host: tuple[HostTime, ...]) -> DraftCell:
    by_shape: dict[tuple[int, float], list[AgreementRow]] = {}
    for row in rows:
        if not row.refusal:
            by_shape.setdefault((row.num_speculative_tokens, row.temperature), []).append(row)
    parity = tuple(_parity(by_shape[shape]) for shape in sorted(by_shape))
    return DraftCell(
        strategy=rows[0].strategy,
        status=_status(rows, parity),
        parity=parity,
        refusal=next((row.refusal for row in rows if row.refusal), ""),
        host=host,
        run=run,
        changed=changed,
    )


def _parity(rows: Sequence[AgreementRow]) -> Parity:
    plain = [row.unlike_plain * len(row.graph_modes) for row in rows if row.unlike_plain is not None]
    alone = [row.unlike_alone * len(row.graph_modes) for row in rows if row.unlike_alone is not None]
    return Parity(
        num_speculative_tokens=rows[0].num_speculative_tokens,
        temperature=rows[0].temperature,
        graph_modes=tuple(dict.fromkeys(mode for row in rows for mode in row.graph_modes)),
        prompts=sum(row.prompts * len(row.graph_modes) for row in rows),
        unlike_eager=sum((row.unlike_eager or 0) * len(row.graph_modes) for row in rows),
        unlike_plain=sum(plain) if plain else None,
        unlike_alone=sum(alone) if alone else None,
        accepted=rows[0].accepted,
    )


def _status(rows: Sequence[AgreementRow], parity: Sequence[Parity]) -> Status:
    if any(row.broken for row in rows):
        return Status.BROKEN
    if not parity:
        return Status.REFUSED
    return Status.VERIFIED if any(found.prompts for found in parity) else Status.UNKNOWN


def _host_times(
    timings: Iterable[Timing], device: str, backend: str, strategy: str, runs: Runs
) -> tuple[HostTime, ...]:
    """Return host times of whole rounds: newest first, then by number of tokens and batch size."""
    found = [
        HostTime(
            case=timing.case,
            num_reqs=timing.num_reqs,
            num_speculative_tokens=timing.num_speculative_tokens,
            us=timing.host_us,
            run=runs.number("bench", timing.env.plain, timing.command),
        )
        for timing in sorted(timings, key=lambda timing: timing.env.date, reverse=True)
        if (timing.env.device, timing.backend, timing.strategy) == (device, backend, strategy)
        and timing.host_us is not None
        and timing.num_speculative_tokens is not None
        and (timing.case == "round" or timing.case.endswith("/round"))
    ]
    return tuple(sorted(found, key=lambda host: (host.run, host.num_speculative_tokens, host.num_reqs)))
