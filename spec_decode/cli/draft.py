"""`attn-backends draft`: continue prompts with the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import click
from rich.console import Console

from spec_decode.cli.options import PAGE_SIZE, StrategyChoice, device_option, options_as, resolve_device, use_threads
from spec_decode.cli.output import UserError, printable, say, stdout
from spec_decode.cli.tree_option import TREE_HELP, parse_tree

if TYPE_CHECKING:
    import torch

    from spec_decode.cli.byte_pair import Pair
    from spec_decode.cli.generate import Backends, GenerateResult
    from spec_decode.engine import EngineConfig, Request

_DTYPE = click.Choice(("float32", "bfloat16", "float16"))
_TARGET = "Folder of a published causal language model, run through the transformers library; --draft is a folder then."
_STRATEGY = "How steps 1 to K-1 are run; auto takes the fastest that the backend allows, on a GPU as timed there."
_VERIFY = (
    "How drafts are verified: rejection, if left out, block, or synthetic:MEAN, which keeps that many whatever they "
    "are. Trees: sampling alone."
)

_INVARIANT = "No bit of a text depends on the prompts beside it, nor greedily on drafting; slower, see the guide."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """The options of `draft`, as the user gave them."""

    prompts: Annotated[tuple[str, ...], click.argument("prompts", nargs=-1, metavar="[PROMPT...]")]
    prompts_file: Annotated[Path | None, "--prompts", "A file of prompts, one a line."]
    pair: Annotated[Path | None, "Folder of a byte-level pair; the shipped one if left out."]
    target: Annotated[Path | None, _TARGET]
    draft: Annotated[str, "Which of the pair's drafts, or a folder."] = "draft"
    chat: Annotated[bool, "With --target: prompts open conversations, by the model's chat template."] = False
    backend: Annotated[str | None, "Backend of target and draft; for each the first that serves it if left out."]
    draft_backend: Annotated[str | None, "Backend of the draft, where it is another."]
    page_size: Annotated[int, PAGE_SIZE, "Tokens of a page of the KV caches."] = 16
    strategy: Annotated[str, StrategyChoice(), _STRATEGY] = "auto"
    num_speculative_tokens: Annotated[int, "-k", "Draft tokens a round; 0: plain decoding."] = 4
    tree: Annotated[str | None, TREE_HELP]
    verification: Annotated[str | None, "--verify", _VERIFY]
    batch_invariant: Annotated[bool, _INVARIANT] = False
    temperature: Annotated[float, "0 is greedy."] = 0.0
    top_k: Annotated[int, "Sample from the k most probable tokens; 0 from all."] = 0
    top_p: Annotated[float, "Of those, from the fewest that hold this probability."] = 1.0
    seed: Annotated[int, "Prompt i draws with seed + i."] = 0
    max_new_tokens: Annotated[int, "Longest continuation of a prompt."] = 64
    device: Annotated[str | None, device_option]
    dtype: Annotated[str | None, _DTYPE, "float32 on the CPU, else bfloat16, if left out."]
    explain: Annotated[bool, "Also say why other backends were not chosen."] = False

    def config(self) -> EngineConfig:
        """The engine's, for requests of any number and length."""
        from spec_decode.drafter import Strategy
        from spec_decode.engine import EngineConfig

        return EngineConfig(
            num_speculative_tokens=self.num_speculative_tokens,
            page_size=self.page_size,
            strategy=None if self.strategy == "auto" else Strategy(self.strategy),
            verification=self.verification,
            batch_invariant=self.batch_invariant,
            tree=None if self.tree is None else parse_tree(self.tree),
        )

    def request(self, models: Pair, text: str, index: int) -> Request:
        """The request that continues the index-th prompt."""
        from spec_decode.engine import Request

        return Request(
            prompt=models.encode(text),
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed + index,
            stop_ids=models.stop_ids,
        )


@click.command()
@options_as(_Options)
def draft(options: _Options) -> None:
    """Continue each PROMPT by drafting and verifying.

    Then say how the drafter ran, why, and how many of its tokens were kept.
    """
    texts = [*options.prompts, *(_read_prompts(options.prompts_file) if options.prompts_file else ())]
    if not texts:
        raise UserError("a draft needs a prompt, got none; nothing was run. Pass PROMPT or --prompts FILE.")
    device = resolve_device(options.device)
    dtype = options.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if options.target is None:
        use_threads(1)
    from spec_decode.cli.generate import choose_backends, generate

    models, config = _load(options, dtype, device), options.config()
    backends = choose_backends(models, config, options.backend, options.draft_backend)
    requests = [options.request(models, text, index) for index, text in enumerate(texts)]
    result = generate(models, backends, requests, config)
    console = stdout()
    _print_texts(console, texts, [models.decode(generation.token_ids) for generation in result.generations])
    names = [backends.names(chosen) for chosen in (backends.target, backends.draft)]
    other = "" if names[0] == names[1] else f", {names[1]} for the draft"
    say(console, f"backend {names[0]}{other} on {device}, {dtype}")
    if options.explain:
        _explain_backends(console, backends, models, config)
    _print_stats(console, result, config, device)


def _load(options: _Options, dtype_name: str, device: torch.device) -> Pair:
    import torch

    from spec_decode.models import SHIPPED_PAIR

    dtype = getattr(torch, dtype_name)
    if options.target is None:
        if options.chat:
            raise UserError(
                "--chat follows a published model's chat template, no --target was given; nothing was run. Name the "
                "model's folder, or leave --chat out."
            )
        from spec_decode.cli.byte_pair import load_byte_pair

        return load_byte_pair(options.pair or SHIPPED_PAIR, dtype, device, draft=options.draft)
    if options.pair is not None:
        raise UserError(
            f"--pair and --target each name a target, got {options.pair} and {options.target}; nothing was run. Leave "
            "one of them out."
        )
    from spec_decode.cli.published_pair import load_published_pair

    return load_published_pair(options.target, Path(options.draft), dtype=dtype, device=device, chat=options.chat)


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts must be a readable utf-8 file, {path} is not: {error}; nothing was run. Check the path."
        ) from error
    return [line for line in lines if line.strip()]


def _print_texts(console: Console, prompts: list[str], continued: list[str]) -> None:
    for index, (prompt, text) in enumerate(zip(prompts, continued, strict=True)):
        say(console, f"prompt {index + 1}:", "bold")
        say(console, indent(printable(prompt), "    "), "dim")
        say(console, "continued:", "bold")
        say(console, indent(printable(text), "    "))
        say(console, "")


def _explain_backends(console: Console, backends: Backends, pair: Pair, config: EngineConfig) -> None:
    from attn_backends import Rejected, registry
    from spec_decode.cli.generate import groups_asked

    for name, model, chosen in (("target", pair.target, backends.target), ("draft", pair.draft, backends.draft)):
        for group in groups_asked(model, config):
            own = chosen[group.name].name
            say(console, f"{name} [{group.spec.describe()}]: {own}")
            for other in (other for other in registry.names() if other != own):
                verdict = registry.explain(other, group.spec, pair.device)
                why = "; ".join(verdict.reasons) if isinstance(verdict, Rejected) else "would serve it too"
                say(console, f"  not {other}: {why}")


def _print_stats(console: Console, result: GenerateResult, config: EngineConfig, device: torch.device) -> None:
    stats, count = result.stats, config.num_speculative_tokens
    if result.plan is None:
        say(console, f"no draft tokens were asked for: plain decoding, {stats.rounds} rounds")
        return
    for line in result.plan.explain():
        say(console, line)
    drafted = (
        f"{count} draft tokens" if config.tree is None else f"{count}, the depth of a tree of {config.tree.num_tokens}"
    )
    say(console, f"accepted {stats.mean_accepted:.2f} of {drafted} a request and round")
    note = "; on the CPU that includes the arithmetic" if device.type == "cpu" else ""
    say(console, f"{stats.rounds} rounds, {stats.host_us_a_round:.0f} host us a round in the drafter{note}")
