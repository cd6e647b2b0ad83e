"""`attn-backends soak`: thousands of rounds while requests come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from spec_decode.cli.options import StrategyChoice, chosen_names, device_option, resolve_device
from spec_decode.cli.output import progress, require_writable, say, stdout, write

if TYPE_CHECKING:
    from spec_decode.tools.soak import SoakResult


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--rounds", default=20_000, show_default=True)
@click.option("--max-reqs", default=8, show_default=True, help="Requests in a round at most.")
@click.option("-k", "num_speculative_tokens", default=4, show_default=True, help="Draft tokens a round.")
@click.option("--seed", default=0, show_default=True, help="Of everything that is random.")
@click.option("--compare-every", metavar="N", default=10, show_default=True, help="Of N rounds, one is compared.")
@click.option("--strategy", "strategies", multiple=True, type=StrategyChoice(), help="Only this; repeatable.")
@device_option
@click.option("--json", "target", metavar="FILE", help="Write the report to a file, or - for standard output.")
def soak(
    names: tuple[str, ...], device: str | None, target: str | None, strategies: tuple[str, ...], **numbers: int
) -> None:
    """Draft for a long time while requests join, leave and run into their limits.

    NAME is a registered backend, `available` (each made for the device) or `all`. A small random draft model runs
    in every strategy that the backend allows, each in its turn; of every ten rounds, eager drafting repeats one, and
    every bit must be the same. Memory may not grow. Exit status 1 if a backend fails.
    """
    where = resolve_device(device)
    from spec_decode.drafter import Strategy
    from spec_decode.testing.outcome import Outcome
    from spec_decode.tools.soak import Options
    from spec_decode.tools.soak import soak as run

    options = Options(strategies=tuple(Strategy(name) for name in strategies if name != "auto"), **numbers)
    chosen = chosen_names(names, where)
    require_writable(target)
    console = stdout()

    def on_progress(result: SoakResult) -> None:
        rounds = f"{result.rounds} of {options.rounds} rounds"
        update(f"{result.backend}: {rounds}, {result.compared} compared with eager")

    def on_result(result: SoakResult) -> None:
        if target != "-":
            passed = result.outcome is Outcome.PASS
            say(console, result.summary(), "green" if passed else "bold red")
            if not passed:
                say(console, f"    {result.repro}")

    try:
        with progress(console) as update:
            report = run(
                chosen,
                device=where,
                options=options,
                on_progress=on_progress,
                on_result=on_result,
            )
    except KeyboardInterrupt:
        click.echo("interrupted: no report was written", err=True)
        raise SystemExit(130) from None
    if target is not None:
        write(target, report.to_json())
    if not report.ok:
        raise SystemExit(1)
