"""`attn-backends demo`: the whole library in a minute, on any machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from spec_decode.cli.check import CheckRun
from spec_decode.cli.list import describe, print_backends
from spec_decode.cli.matrix import REPORTS
from spec_decode.cli.options import available_names, device_option, resolve_device, try_plug_ins_aloud, use_threads
from spec_decode.cli.output import progress, require_writable, say, stdout, write

if TYPE_CHECKING:
    import torch

    from spec_decode.cli.strategy_comparison import Comparison
    from spec_decode.llm.pair import Pair
    from spec_decode.matrix import Matrix

_QUICK_FAMILIES = ("contract", "builder")


@click.command()
@device_option
@click.option("--full", is_flag=True, help="Also show every claim, time and plan, and the whole matrix.")
@click.option("--html", "page", default="build/demo.html", metavar="PATH", help="File of the matrix page.")
@click.option("--pair", type=click.Path(path_type=Path), hidden=True)
def demo(device: str | None, full: bool, page: str, pair: Path | None) -> None:
    """Show the whole library at work, on any machine.

    Prints the backends on this machine, one drafted prompt with its plan, and a table checking that every strategy
    agrees with plain decoding. Then writes the matrix as a page, and opens it if there is a desktop. Exits with 1 on
    any mismatch.
    """
    where, console = resolve_device(device), stdout()
    use_threads(1)
    require_writable(page)
    if full:
        _list(console, where)
    pairs = _load(where, pair)
    found = {name: _compare(console, name, each) for name, each in pairs.items()}
    (_print_runs if full else _summarize)(console, where, pairs, found)
    matrix, passed = _matrix(console, where, full)
    write(page, _html(matrix))
    agree = not any(comparison.differs for several in found.values() for comparison in several)
    _conclude(console, agree, passed, page)
    if not (agree and passed):
        raise SystemExit(1)


def _list(console: Console, device: torch.device) -> None:
    from attn_backends import registry
    from spec_decode.tools.specs import GQA

    try_plug_ins_aloud()
    _heading(console, "1. The backends of this machine")
    entries = [describe(name, GQA, device) for name in registry.names()]
    print_backends(console, entries, f"{GQA.describe()} on {device}")


def _load(device: torch.device, folder: Path | None) -> dict[str, Pair]:
    """Load the target with each of its drafts, by the draft's name."""
    import torch

    from spec_decode.llm.pair import load_byte_pair
    from spec_decode.models import SHIPPED_PAIR, draft_names

    folder = folder or SHIPPED_PAIR
    return {name: load_byte_pair(folder, torch.float32, device, draft=name) for name in draft_names(folder)}


def _compare(console: Console, draft: str, pair: Pair) -> list[Comparison]:
    """Compare every backend that supports the draft; it also serves the target if it can."""
    from attn_backends import registry
    from spec_decode.cli.strategy_comparison import CONFIG, compare, demo_requests
    from spec_decode.llm.backends import backends_named

    comparisons = []
    with progress(console, f"{draft}: starting") as update:
        for name in registry.names():
            if backends := backends_named(pair, CONFIG, name):
                comparisons.append(compare(pair, backends, demo_requests(), lambda run: update(f"{draft}, {run}")))
    return comparisons


def _summarize(
    console: Console, device: torch.device, pairs: dict[str, Pair], found: dict[str, list[Comparison]]
) -> None:
    """Print the backends here, one drafted prompt with the reasons for its plan, and which strategies agree."""
    from attn_backends import registry
    from spec_decode.cli.strategy_comparison import PROMPTS, reasons, to_short_table

    here = available_names(device)
    say(console, f"backends made for {device}: {', '.join(here)}")
    say(console, f"not available here: {', '.join(name for name in registry.names() if name not in here)}")
    first = next(iter(found.values()))[0]
    _print_sample(console, first)
    say(console, f"\nhow it was drafted on {first.backend}, and why", "bold")
    for line in first.chosen.explain():
        say(console, f"  {line}")
    say(console, f"\ndoes every strategy give the same tokens? {PROMPTS} prompts, greedy, float32", "bold")
    console.print(to_short_table(found))
    for line in reasons(found):
        say(console, line)


def _print_runs(
    console: Console, device: torch.device, pairs: dict[str, Pair], found: dict[str, list[Comparison]]
) -> None:
    from spec_decode.cli.strategy_comparison import CONFIG, DRAFT_TOKENS, PROMPTS, to_table

    _heading(console, f"2. Drafting {DRAFT_TOKENS} tokens per round for {PROMPTS} prompts, greedily, in float32")
    _print_sample(console, next(iter(found.values()))[0])
    for name, comparisons in found.items():
        draft = pairs[name].draft
        assert draft is not None
        (group, *_) = draft.layer_groups(CONFIG.page_size)
        say(console, f"{name} [{group.spec.describe()}]:")
        console.print(to_table(comparisons, PROMPTS))
    say(console, "same tokens as eager: the same text, and as many draft tokens accepted in each round.")
    if device.type == "cpu":
        say(
            console,
            "On the CPU the host's time includes the arithmetic, CUDA graphs are emulated, and Triton\n"
            "kernels are replaced by torch; `attn-backends check triton_paged` runs the kernels.",
        )
    _heading(console, "3. Why each backend drafts as it does by default")
    for name, comparisons in found.items():
        for comparison in comparisons:
            say(console, f"{comparison.backend}, {name}", "bold")
            for line in comparison.chosen.explain():
                say(console, f"  {line}")


def _print_sample(console: Console, comparison: Comparison) -> None:
    from spec_decode.cli.strategy_comparison import demo_requests
    from spec_decode.llm.byte_tokenizer import decode

    say(console, "\nprompt", "bold")
    say(console, decode(list(demo_requests()[0].prompt)), "dim")
    say(console, "continued", "bold")
    say(console, decode(comparison.plain.generations[0].token_ids))


def _matrix(console: Console, device: torch.device, full: bool) -> tuple[Matrix, bool]:
    """Build the matrix from existing reports, or from checks that run now; also return whether these passed."""
    from spec_decode.matrix import Sources, build_matrix, to_table

    if full:
        _heading(console, "4. What each backend's checks showed")
    reports = Sources.read([REPORTS] if REPORTS.exists() else []).reports
    fresh = []
    if reports:
        say(console, f"\nthe compatibility matrix shows {len(reports)} reports from {REPORTS}/")
    else:
        families = " and ".join(_QUICK_FAMILIES)
        say(
            console,
            f"\nno reports in {REPORTS}/, so the {families} checks run now; `attn-backends check` runs all checks",
        )
        run = CheckRun(console, device, _QUICK_FAMILIES)
        fresh = [run.of(name) for name in available_names(device)]
    matrix = build_matrix(reports or fresh)
    if full:
        console.print(to_table(matrix))
    return matrix, bool(reports) or all(report.ok for report in fresh)


def _html(matrix: Matrix) -> str:
    from spec_decode.matrix import to_html

    return to_html(matrix)


def _conclude(console: Console, agree: bool, passed: bool, page: str) -> None:
    if agree:
        say(console, "every run matches the tokens of eager drafting and the text of plain decoding", "bold green")
    else:
        say(console, "NOT EVERY RUN AGREES with eager drafting and plain decoding: see the table", "bold red")
    if not passed:
        say(console, "A CHECK FAILED: see above", "bold red")
    if page == "-":
        return
    say(console, f"compatibility matrix: {Path(page).resolve()}")
    command = sys.argv[0] if os.path.basename(sys.argv[0]) == "attn-backends" else "attn-backends"
    say(console, f"next: {command} demo --full, {command} list, {command} draft 'The for statement'")
    if _has_desktop(console):
        click.launch(page)


def _has_desktop(console: Console) -> bool:
    """Whether there is a desktop to open a browser on; over ssh a browser would not be seen."""
    if not console.is_terminal or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


def _heading(console: Console, text: str) -> None:
    say(console, f"\n{text}\n", "bold")
