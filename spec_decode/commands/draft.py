"""`attn-backends draft`: continue prompts with the drafter."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

import click
from rich.console import Console

from spec_decode.commands.common import UserError, device_option, resolve_device, say, stdout

if TYPE_CHECKING:
    import torch

    from builders import AttentionSpec
    from spec_decode.commands.drafting import Backends, Outcome, Pair

_DTYPES = ("float32", "bfloat16", "float16")


@click.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPT...]")
@click.option("--prompts", "prompts_file", type=click.Path(path_type=Path), help="A file of prompts, one a line.")
@click.option("--pair", type=click.Path(path_type=Path), help="Folder of the pair; the shipped one if left out.")
@click.option("--draft", "draft_name", default="draft", show_default=True, help="Which of the pair's drafts.")
@click.option("--backend", help="Backend of target and draft; for each the first that serves it if left out.")
@click.option("--draft-backend", help="Backend of the draft, where it is another.")
@click.option(
    "--strategy",
    type=click.Choice(["auto", "full_loop", "per_step", "eager"]),
    default="auto",
    show_default=True,
    help="How steps 1 to K-1 are run; auto takes the cheapest that the backend allows.",
)
@click.option("-k", "count", default=4, show_default=True, help="Draft tokens a round; 0 decodes plainly.")
@click.option(
    "--verify",
    "verification",
    default="rejection",
    show_default=True,
    help="How drafts are judged: rejection, block, or synthetic:MEAN, which keeps that many whatever they are.",
)
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", default=0, show_default=True, help="Prompt i draws with seed + i.")
@click.option("--max-new-tokens", default=64, show_default=True)
@device_option
@click.option("--dtype", type=click.Choice(_DTYPES), help="float32 on the CPU, else bfloat16, if left out.")
@click.option("--explain", is_flag=True, help="Also say why other backends were not chosen.")
def draft(
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    pair: Path | None,
    draft_name: str,
    backend: str | None,
    draft_backend: str | None,
    strategy: str,
    count: int,
    verification: str,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    device: str | None,
    dtype: str | None,
    explain: bool,
) -> None:
    """Continue each PROMPT by drafting and verifying.

    Then say how the drafter ran, why, and how many of its tokens were kept.
    """
    texts = [*prompts, *(_read_prompts(prompts_file) if prompts_file else ())]
    if not texts:
        raise UserError("a draft needs a prompt, got none; nothing was run. Pass PROMPT or --prompts FILE.")
    where = resolve_device(device)
    import torch

    from spec_decode.commands.drafting import choose_backends, generate, load_bytes_pair
    from spec_decode.engine import Request
    from spec_decode.models import SHIPPED_PAIR
    from spec_decode.strategy import Strategy
    from spec_decode.text import BOS

    dtype = dtype or ("float32" if where.type == "cpu" else "bfloat16")
    models = load_bytes_pair(pair or SHIPPED_PAIR, getattr(torch, dtype), where, draft=draft_name)
    backends = choose_backends(models, backend, draft_backend)
    requests = [
        Request(
            prompt=_encoded(text),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed + index,
            stop_ids=frozenset({BOS}),
        )
        for index, text in enumerate(texts)
    ]
    forced = None if strategy == "auto" else Strategy(strategy)
    outcome = generate(models, backends, requests, count, forced, verification)
    console = stdout()
    _print_texts(console, texts, outcome)
    other = "" if backends.draft is backends.target else f", {backends.draft.name} for the draft"
    say(console, f"backend {backends.target.name}{other} on {where}, {dtype}")
    if explain:
        _explain_backends(console, backends, models)
    _print_stats(console, outcome, count, where)


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts must be a readable utf-8 file, {path} is not: {error}; nothing was run. Check the path."
        ) from error
    return [line for line in lines if line.strip()]


def _encoded(text: str) -> list[int]:
    from spec_decode.text import encode

    try:
        return encode(text)
    except UnicodeEncodeError as error:
        raise UserError(f"a prompt must be utf-8, got {text!a}; nothing was run. Re-encode it.") from error


def _print_texts(console: Console, prompts: list[str], outcome: Outcome) -> None:
    from spec_decode.commands.drafting import printable

    for index, prompt in enumerate(prompts):
        say(console, f"prompt {index + 1}:", "bold")
        say(console, indent(printable(prompt), "    "), "dim")
        say(console, "continued:", "bold")
        say(console, indent(printable(outcome.text(index)), "    "))
        say(console, "")


def _explain_backends(console: Console, backends: Backends, pair: Pair) -> None:
    for model, chosen, spec in (
        ("target", backends.target, pair.target_spec),
        ("draft", backends.draft, pair.draft_spec),
    ):
        say(console, f"{model} [{spec.describe()}]: {chosen.name}")
        _explain_others(console, chosen.name, spec, pair.device)


def _explain_others(console: Console, chosen: str, spec: AttentionSpec, device: torch.device) -> None:
    from attn_backends import Rejected, registry

    for name in registry.names():
        if name == chosen:
            continue
        verdict = registry.explain(name, spec, device)
        why = "; ".join(verdict.reasons) if isinstance(verdict, Rejected) else "would serve it too"
        say(console, f"  not {name}: {why}")


def _print_stats(console: Console, outcome: Outcome, count: int, device: torch.device) -> None:
    stats = outcome.stats
    if outcome.plan is None:
        say(console, f"no draft tokens were asked for: plain decoding, {stats.rounds} rounds")
        return
    for line in outcome.plan.explain():
        say(console, line)
    say(console, f"accepted {stats.mean_accepted:.2f} of {count} draft tokens a request and round")
    note = "; on the CPU that includes the arithmetic" if device.type == "cpu" else ""
    say(console, f"{stats.rounds} rounds, {stats.host_us_a_round:.0f} host us a round in the drafter{note}")
