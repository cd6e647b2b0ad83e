"""`attn-backends demo`: the whole library in a minute, on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from spec_decode.cli.check import CheckRun
from spec_decode.cli.list import describe, print_backends
from spec_decode.cli.matrix import REPORTS
from spec_decode.cli.options import available_names, device_option, resolve_device
from spec_decode.cli.output import say, stdout

if TYPE_CHECKING:
    import torch

    from spec_decode.cli.byte_pair import Pair
    from spec_decode.cli.strategy_comparison import Comparison

_QUICK_FAMILIES = ("contract", "builder")


@click.command()
@device_option
@click.option("--pair", type=click.Path(path_type=Path), hidden=True)
def demo(device: str | None, pair: Path | None) -> None:
    """See all of it at once, on any machine.

    Lists the backends, drafts with each in every strategy, compares the results, and shows the matrix. The
    exit status is 1 if two runs that must agree do not.
    """
    where, console = resolve_device(device), stdout()
    _list(console, where)
    comparisons = _draft(console, where, pair)
    _explain(console, comparisons)
    checked = _matrix(console, where)
    if not checked or any(comparison.differs for found in comparisons.values() for comparison in found):
        raise SystemExit(1)


def _list(console: Console, device: torch.device) -> None:
    from attn_backends import registry
    from spec_decode.tools.plug_ins import try_plug_ins
    from spec_decode.tools.specs import GQA

    try_plug_ins()
    _heading(console, "1. The backends of this machine")
    entries = [describe(name, GQA, device) for name in registry.names()]
    print_backends(console, entries, f"{GQA.describe()} on {device}")


def _draft(console: Console, device: torch.device, folder: Path | None) -> dict[str, list[Comparison]]:
    """Compare what serves each of the pair's drafts; comparisons by draft."""
    import torch

    from spec_decode.cli.byte_pair import PAGE_SIZE, load_byte_pair
    from spec_decode.cli.strategy_comparison import DRAFT_TOKENS, PROMPTS, to_table
    from spec_decode.models import SHIPPED_PAIR, draft_names

    folder, found = folder or SHIPPED_PAIR, {}
    _heading(console, f"2. Drafting {DRAFT_TOKENS} tokens a round for {PROMPTS} prompts, greedily, in float32")
    for name in draft_names(folder):
        pair = load_byte_pair(folder, torch.float32, device, draft=name)
        found[name] = _compare(console, pair)
        if name == "draft":
            _show_a_text(console, found[name])
        say(console, f"{name} [{pair.draft.layer_groups(PAGE_SIZE)[0].spec.describe()}]:")
        console.print(to_table(found[name], PROMPTS))
    say(console, "same tokens as eager: the same text, and in each round as many draft tokens kept.")
    if device.type == "cpu":
        say(
            console,
            "On the CPU the host's time includes the arithmetic, CUDA graphs are emulated, and Triton\n"
            "kernels are replaced by torch; `attn-backends check triton_paged` runs the kernels.",
        )
    return found


def _compare(console: Console, pair: Pair) -> list[Comparison]:
    """Every backend that serves the draft; it serves the target too where it can."""
    from attn_backends import registry
    from spec_decode.cli.generate import backends_named
    from spec_decode.cli.strategy_comparison import compare, demo_requests

    comparisons = []
    for name in registry.names():
        if backends := backends_named(pair, name):
            with console.status(name) as status:
                comparisons.append(compare(pair, backends, demo_requests(), status.update))
    return comparisons


def _show_a_text(console: Console, comparisons: list[Comparison]) -> None:
    from spec_decode.cli.output import printable
    from spec_decode.cli.strategy_comparison import demo_requests
    from spec_decode.models.byte_tokenizer import decode

    for comparison in comparisons[:1]:
        say(console, "prompt:", "bold")
        say(console, printable(decode(list(demo_requests()[0].prompt))), "dim")
        say(console, "continued:", "bold")
        say(console, printable(decode(comparison.plain.generations[0].token_ids)))


def _explain(console: Console, comparisons: dict[str, list[Comparison]]) -> None:
    _heading(console, "3. Why each backend drafts as it does when nothing is asked for")
    for draft, found in comparisons.items():
        for comparison in found:
            say(console, f"{comparison.backend}, {draft}", "bold")
            for line in comparison.chosen.explain():
                say(console, f"  {line}")


def _matrix(console: Console, device: torch.device) -> bool:
    """Print the matrix; whether the checks that ran for it passed."""
    from spec_decode.matrix import Sources, build_matrix, to_table

    _heading(console, "4. What each backend was seen to do")
    if reports := Sources.read([REPORTS] if REPORTS.exists() else []).reports:
        say(console, f"from {len(reports)} reports below {REPORTS}/")
        console.print(to_table(build_matrix(reports)))
        return True
    families = " and ".join(_QUICK_FAMILIES)
    say(console, f"no reports below {REPORTS}/: running the {families} checks; `attn-backends check` runs all")
    run = CheckRun(console, device, _QUICK_FAMILIES)
    fresh = [run.of(name) for name in available_names(device)]
    console.print(to_table(build_matrix(fresh)))
    return all(report.ok for report in fresh)


def _heading(console: Console, text: str) -> None:
    say(console, f"\n{text}\n", "bold")
