"""`attn-backends draft`: continue prompts with the drafter."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

import click
from rich.console import Console

from spec_decode.cli.common import UserError, device_option, resolve_device, say, stdout

if TYPE_CHECKING:
    import torch

    from builders import AttentionSpec
    from spec_decode.cli.drafting import Backends, BytesPair, Outcome, Pair
    from spec_decode.cli.real_pair import RealPair

_DTYPES = ("float32", "bfloat16", "float16")


@click.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPT...]")
@click.option("--prompts", "prompts_file", type=click.Path(path_type=Path), help="A file of prompts, one a line.")
@click.option(
    "--pair", type=click.Path(path_type=Path), help="Folder of a byte-level pair; the shipped one if left out."
)
@click.option(
    "--target",
    type=click.Path(path_type=Path),
    help="Folder of a published causal language model, run through the transformers library; --draft is a folder then.",
)
@click.option(
    "--draft", "draft_name", default="draft", show_default=True, help="Which of the pair's drafts, or a folder."
)
@click.option("--chat", is_flag=True, help="With --target: prompts open conversations, by the model's chat template.")
@click.option("--backend", help="Backend of target and draft; for each the first that serves it if left out.")
@click.option("--draft-backend", help="Backend of the draft, where it is another.")
@click.option("--page-size", default=16, show_default=True, help="Tokens of a page of the KV caches.")
@click.option(
    "--strategy",
    type=click.Choice(["auto", "device_loop", "full_loop", "per_step", "piecewise", "eager"]),
    default="auto",
    show_default=True,
    help="How steps 1 to K-1 are run; auto takes the fastest that the backend allows, on a GPU as measured there.",
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
@click.option("--top-k", default=0, show_default=True, help="Sample from the k most probable tokens; 0 from all.")
@click.option("--top-p", default=1.0, show_default=True, help="Of those, from the fewest that hold this probability.")
@click.option("--seed", default=0, show_default=True, help="Prompt i draws with seed + i.")
@click.option("--max-new-tokens", default=64, show_default=True)
@device_option
@click.option("--dtype", type=click.Choice(_DTYPES), help="float32 on the CPU, else bfloat16, if left out.")
@click.option("--explain", is_flag=True, help="Also say why other backends were not chosen.")
def draft(
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    pair: Path | None,
    target: Path | None,
    draft_name: str,
    chat: bool,
    backend: str | None,
    draft_backend: str | None,
    page_size: int,
    strategy: str,
    count: int,
    verification: str,
    temperature: float,
    top_k: int,
    top_p: float,
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
    dtype = dtype or ("float32" if where.type == "cpu" else "bfloat16")
    from spec_decode.cli.drafting import choose_backends, generate
    from spec_decode.drafter.plan import Strategy
    from spec_decode.engine import Request

    models = _load(pair, target, draft_name, chat, dtype, where)
    backends = choose_backends(models, backend, draft_backend, page_size=page_size)
    requests = [
        Request(
            prompt=models.encode(text),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed + index,
            stop_ids=models.stop_ids,
        )
        for index, text in enumerate(texts)
    ]
    forced = None if strategy == "auto" else Strategy(strategy)
    outcome = generate(models, backends, requests, count, forced, verification, page_size)
    console = stdout()
    _print_texts(console, texts, [models.decode(generation.token_ids) for generation in outcome.generations])
    names = [backends.names(chosen) for chosen in (backends.target, backends.draft)]
    other = "" if names[0] == names[1] else f", {names[1]} for the draft"
    say(console, f"backend {names[0]}{other} on {where}, {dtype}")
    if explain:
        _explain_backends(console, backends, models, page_size)
    _print_stats(console, outcome, count, where)


def _load(
    pair: Path | None, target: Path | None, draft: str, chat: bool, dtype: str, device: torch.device
) -> BytesPair | RealPair:
    import torch

    from spec_decode.models import SHIPPED_PAIR

    if target is None:
        if chat:
            raise UserError(
                "--chat follows a published model's chat template, no --target was given; nothing was run. Name the "
                "model's folder, or leave --chat out."
            )
        from spec_decode.cli.drafting import load_bytes_pair

        return load_bytes_pair(pair or SHIPPED_PAIR, getattr(torch, dtype), device, draft=draft)
    if pair is not None:
        raise UserError(
            f"--pair and --target each name a target, got {pair} and {target}; nothing was run. Leave one of them out."
        )
    from spec_decode.cli.real_pair import load_real_pair

    return load_real_pair(target, Path(draft), dtype=getattr(torch, dtype), device=device, chat=chat)


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts must be a readable utf-8 file, {path} is not: {error}; nothing was run. Check the path."
        ) from error
    return [line for line in lines if line.strip()]


def _print_texts(console: Console, prompts: list[str], continued: list[str]) -> None:
    from spec_decode.cli.drafting import printable

    for index, (prompt, text) in enumerate(zip(prompts, continued, strict=True)):
        say(console, f"prompt {index + 1}:", "bold")
        say(console, indent(printable(prompt), "    "), "dim")
        say(console, "continued:", "bold")
        say(console, indent(printable(text), "    "))
        say(console, "")


def _explain_backends(console: Console, backends: Backends, pair: Pair, page_size: int) -> None:
    from spec_decode.cli.drafting import device_of

    for name, model, chosen in (("target", pair.target, backends.target), ("draft", pair.draft, backends.draft)):
        for group in model.layer_groups(page_size):
            say(console, f"{name} [{group.spec.describe()}]: {chosen[group.name].name}")
            _explain_others(console, chosen[group.name].name, group.spec, device_of(pair))


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
