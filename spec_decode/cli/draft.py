"""`attn-backends draft`: continue prompts, with or without a draft."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from rich.console import Console
from rich.text import Text

from spec_decode.cli.options import PAGE_SIZE, device_option, options_as, resolve_device, try_plug_ins_aloud
from spec_decode.cli.output import UserError, did_you_mean, printable, progress, repeat_line, say, stderr, stdout, write
from spec_decode.testing.interpreter import compute_in_silence

if TYPE_CHECKING:
    from spec_decode.llm import LLM, SamplingParams, TextChunk
    from spec_decode.llm.prompts import Prompt
    from spec_decode.trees import Tree

_DTYPE = click.Choice(("auto", "float32", "bfloat16", "float16"))
_TARGET = "Folder or name of the model; default: this library's own pair, pydoc."
_DRAFT = "Folder or name of the draft, or which draft of a pair. With --target alone, decoding is plain."
_STRATEGY = (
    "How steps 1 to K-1 run: full_loop, device_loop, per_step, piecewise or eager. auto: on a CPU eager, else the "
    "first but device_loop that the backends allow."
)
_TREE = "Draft trees, -k tokens deep: WIDTHxTOKENS such as 4x16, or a JSON file of paths such as [[0], [1], [0, 0]]."
_TOKENS = "Draft tokens per round; default: as many as the draft's block or modules predict, else 4; 0: plain decoding."
_VERIFY = (
    "How drafts are verified: rejection (default), block, or synthetic:MEAN, which accepts that many on average. "
    "Trees: only sampling."
)
_WEIGHTS = "Weights of the target's products: fp8 halves their bytes, see the guide; default: as they are stored."
_DRAFT_WEIGHTS = "The same for the draft's products; default: as they are loaded."
_KV_CACHE_DTYPE = "Dtype of the KV caches: fp8, or fp8_e4m3, takes a byte a number; auto: the models' own."
_DRAFT_KV_CACHE_DTYPE = "The same for the draft's; default: as the target's."
_INVARIANT = "Make texts independent of the other prompts, bit for bit; slower, see the guide."
_INTERPRETED = (
    "TRITON_INTERPRET=1: kernels run in Triton's interpreter, which takes minutes for a few tokens. Unset it to use "
    "their torch implementation."
)
_MARGIN = "    "
_MOST_AT_ONCE = 8
"""Maximum number of prompts at once; with fewer, fewer batch shapes are captured."""
_FEW = 0.5
"""Accepted draft tokens per round below which a draft costs more than it saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """The options of `draft`, as the user gave them."""

    prompts: Annotated[tuple[str, ...], click.argument("prompts", nargs=-1, metavar="[PROMPT...]")]
    prompts_file: Annotated[Path | None, "--prompts", "A file with one prompt per line."]
    target: Annotated[str | None, _TARGET]
    draft: Annotated[str | None, _DRAFT]
    transformers: Annotated[bool, "Run the target in transformers, even if our layers compute it."] = False
    chat: Annotated[bool, "Wrap each prompt in the model's chat template."] = False
    backend: Annotated[str | None, "Backend of target and draft; default: for each group the first that supports it."]
    draft_backend: Annotated[str | None, "Backend of the draft, if it differs."]
    page_size: Annotated[int, PAGE_SIZE, "Tokens per KV page."] = 16
    strategy: Annotated[str, _STRATEGY] = "auto"
    num_speculative_tokens: Annotated[int | None, "-k", _TOKENS]
    tree: Annotated[str | None, _TREE]
    verification: Annotated[str | None, "--verify", _VERIFY]
    weights: Annotated[str | None, click.Choice(("fp8",)), _WEIGHTS]
    draft_weights: Annotated[str | None, click.Choice(("fp8",)), _DRAFT_WEIGHTS]
    kv_cache_dtype: Annotated[str, click.Choice(("auto", "fp8", "fp8_e4m3")), _KV_CACHE_DTYPE] = "auto"
    draft_kv_cache_dtype: Annotated[str | None, click.Choice(("auto", "fp8", "fp8_e4m3")), _DRAFT_KV_CACHE_DTYPE]
    batch_invariant: Annotated[bool, _INVARIANT] = False
    temperature: Annotated[float, "0 is greedy."] = 0.0
    top_k: Annotated[int, "Sample from the k most probable tokens; 0: from all."] = 0
    top_p: Annotated[float, "Sample from the fewest tokens that hold this probability."] = 1.0
    seed: Annotated[int, "Seed of the first prompt; prompt i uses seed + i."] = 0
    max_tokens: Annotated[int, "Maximum tokens to generate per prompt."] = 64
    max_model_len: Annotated[int | None, "Maximum tokens of prompt and text; default: 4096, or the model's maximum."]
    device: Annotated[str | None, device_option]
    dtype: Annotated[str, _DTYPE, "auto: float32 on a CPU, bfloat16 on a GPU."] = "auto"
    explain: Annotated[bool, "Also say where the target runs, and why the other backends were not chosen."] = False
    as_json: Annotated[bool, "--json", "Print texts and statistics as JSON instead."] = False

    @property
    def drafts_with(self) -> str | None:
        """The draft to load: the pair's own, or for another target the named one."""
        from spec_decode.llm.load import find, is_pair

        if self.num_speculative_tokens == 0:
            return None
        has_its_own = self.target is None or is_pair(find(self.target))
        return "draft" if self.draft is None and has_its_own else self.draft

    def require_known(self) -> None:
        """Raise UserError for values that the library would report under other names."""
        from spec_decode.drafter import Strategy

        if (self.num_speculative_tokens or 0) < 0:
            raise UserError(
                f"-k is {self.num_speculative_tokens}. Pass the draft tokens of a round, 1 or more, or 0 to decode "
                "without a draft."
            )
        strategies = ("auto", *(strategy.value for strategy in Strategy))
        if self.strategy not in strategies:
            raise UserError(
                f"--strategy is {self.strategy!r}. Pass one of {', '.join(strategies)}."
                f"{did_you_mean(self.strategy, strategies)}"
            )
        about_drafts = {
            "--draft-weights": self.draft_weights,
            "--draft-backend": self.draft_backend,
            "--draft-kv-cache-dtype": self.draft_kv_cache_dtype,
            "--strategy": None if self.strategy == "auto" else self.strategy,
            "--tree": self.tree,
            "--verify": self.verification,
        }
        for option, value in about_drafts.items():
            if value is not None and self.drafts_with is None:
                raise UserError(
                    f"{option} is {value!r}, but there is no draft. Pass --draft without -k 0, or omit {option}."
                )

    def load(self, prompts: int) -> LLM:
        """Load the models, ready to run this many prompts."""
        from spec_decode.llm import LLM
        from spec_decode.models import SHIPPED_PAIR, draft_names

        if self.target is None and self.draft is not None and self.draft not in (own := draft_names(SHIPPED_PAIR)):
            raise UserError(
                f"--draft {self.draft} needs --target: the folder of the model that this draft was made for. Without "
                f"--target, --draft is one of {', '.join(own)}."
            )
        llm = LLM(
            SHIPPED_PAIR.name if self.target is None else self.target,
            draft=self.drafts_with,
            num_speculative_tokens=self.num_speculative_tokens,
            dtype=self.dtype,
            device=resolve_device(self.device),
            backend=self.backend,
            draft_backend=self.draft_backend,
            strategy=None if self.strategy == "auto" else self.strategy,
            tree=None if self.tree is None else _parse_tree(self.tree),
            verification=self.verification,
            batch_invariant=self.batch_invariant,
            target="transformers" if self.transformers else None,
            weights=self.weights,
            draft_weights=self.draft_weights,
            kv_cache_dtype=self.kv_cache_dtype,
            draft_kv_cache_dtype=self.draft_kv_cache_dtype,
            page_size=self.page_size,
            max_model_len=self.max_model_len,
            max_num_seqs=min(prompts, _MOST_AT_ONCE),
        )
        if self.chat and llm.pair.encode_chat is None:
            raise UserError(
                "--chat: the model has no chat template. Omit --chat to continue the prompt as plain text, or "
                "name a model that was trained to chat."
            )
        return llm

    def try_plug_ins(self) -> None:
        """Try the plug-ins that this run can load, before this process loads them."""
        from attn_backends.registry import plug_ins

        if self.explain or {self.backend, self.draft_backend} & {plug_in.name for plug_in in plug_ins()}:
            try_plug_ins_aloud()

    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels because of TRITON_INTERPRET."""
        from builders.kernels.triton_runtime import interpreting

        return interpreting() and resolve_device(self.device).type == "cpu"

    def params(self, count: int) -> list[SamplingParams]:
        """Return the sampling parameters for `count` texts."""
        from spec_decode.llm import SamplingParams

        return [
            SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=self.seed + index,
                max_tokens=self.max_tokens,
            )
            for index in range(count)
        ]


@dataclass(slots=True)
class _Screen:
    """Prints texts in the order of their prompts as they grow; chunks that arrive early are kept until their turn.

    shows: False: it only keeps them.
    """

    console: Console
    prompts: Sequence[str]
    shows: bool = True
    llm: LLM | None = None
    first_token: float | None = None
    _shown: int = -1
    _kept: dict[int, list[TextChunk]] = field(default_factory=dict)

    def take(self, chunk: TextChunk) -> None:
        """Print a chunk, or keep it."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self._kept.setdefault(chunk.index, []).append(chunk)
        if not self.shows:
            return
        if self._shown < 0:
            self._begin(0)
        while self._kept.get(self._shown):
            self._show(self._kept[self._shown].pop(0))

    def completions(self) -> list[dict[str, object]]:
        """Return what was kept of each prompt."""
        kept = [self._kept.get(index, []) for index in range(len(self.prompts))]
        return [
            {
                "prompt": prompt,
                "text": "".join(chunk.text for chunk in chunks),
                "token_ids": [token for chunk in chunks for token in chunk.token_ids],
                "finish_reason": chunks[-1].finish_reason if chunks else None,
            }
            for prompt, chunks in zip(self.prompts, kept, strict=True)
        ]

    def so_far(self, seconds: float) -> str:
        """Return the progress; empty once a terminal shows text."""
        if self.first_token is not None and self.shows and self.console.is_terminal:
            return ""
        stats = self.llm.engine.stats if self.llm else None
        done = f"{stats.rounds} rounds, {stats.new_tokens} tokens" if stats else "loading and capturing"
        return f"{seconds:.0f} s: {done}"

    def _begin(self, index: int) -> None:
        self._shown = index
        if index < len(self.prompts):
            say(self.console, f"prompt {index + 1}:", "bold")
            say(self.console, _MARGIN + self.prompts[index].replace("\n", f"\n{_MARGIN}"), "dim")
            say(self.console, "continued:", "bold")
            self._put(_MARGIN)

    def _show(self, chunk: TextChunk) -> None:
        self._put(printable(chunk.text).replace("\n", f"\n{_MARGIN}"))
        if chunk.finish_reason is not None:
            self._put("\n\n")
            self._begin(self._shown + 1)

    def _put(self, text: str) -> None:
        self.console.print(Text(text), end="", soft_wrap=True)


@click.command()
@options_as(_Options)
def draft(options: _Options) -> None:
    """Continue each PROMPT by speculative decoding, or by plain decoding if there is no draft.

    Then print on stderr the speed, how the drafter ran and why, and how many of its tokens were accepted.
    """
    texts = [*options.prompts, *(_read_prompts(options.prompts_file) if options.prompts_file else ())]
    if not texts:
        raise UserError("there is no prompt. Pass PROMPT or --prompts FILE.")
    if empty := [index for index, text in enumerate(texts, 1) if not text]:
        raise UserError(f"prompt {empty[0]} is empty. Write something.")
    options.require_known()
    console, statistics = stdout(), stderr()
    params = options.params(len(texts))
    screen = _Screen(console, texts, shows=not options.as_json)
    prompts: list[Prompt] = [[{"role": "user", "content": text}] if options.chat else text for text in texts]
    options.try_plug_ins()
    with _interpretation(screen) if options.is_interpreted() else nullcontext():
        with progress(statistics, f"loading {options.target}" if statistics.is_terminal and options.target else ""):
            llm = screen.llm = options.load(len(texts))
        started = time.perf_counter()
        for chunk in llm.stream(prompts, params):
            screen.take(chunk)
    took = time.perf_counter() - started
    first = (screen.first_token or started) - started
    if options.as_json:
        write(
            "-", json.dumps({"completions": screen.completions(), "statistics": _statistics(llm, took, first)}) + "\n"
        )
    else:
        for line in _summary(options, llm, took, first):
            say(statistics, line)


@contextmanager
def _interpretation(screen: _Screen) -> Iterator[None]:
    """Announce that kernels are interpreted, and within this context report progress repeatedly."""
    compute_in_silence()
    click.echo(_INTERPRETED, err=True)
    started = time.perf_counter()
    with repeat_line(lambda: screen.so_far(time.perf_counter() - started)):
        yield


def _statistics(llm: LLM, seconds: float, first: float) -> dict[str, object]:
    """Return what `_summary` says, for programs."""
    stats, chosen = llm.engine.stats, llm.backends
    return {
        "backend": chosen.names(chosen.target),
        "draft_backend": chosen.names(chosen.draft) or None,
        "device": str(llm.pair.device),
        "dtype": str(next(llm.pair.target.parameters()).dtype).removeprefix("torch."),
        "strategy": llm.plan.strategy.value if llm.plan else None,
        "num_speculative_tokens": llm.config.num_speculative_tokens,
        "new_tokens": stats.new_tokens,
        "seconds": seconds,
        "seconds_to_first_token": first,
        "rounds": stats.rounds,
        "mean_accepted": stats.mean_accepted if llm.plan else None,
        "host_us_a_round": stats.host_us_a_round,
    }


def _summary(options: _Options, llm: LLM, seconds: float, first: float) -> list[str]:
    """Return the speed, the backends, and how the drafter ran."""
    stats, chosen, count = llm.engine.stats, llm.backends, llm.config.num_speculative_tokens
    names = [chosen.names(each) for each in (chosen.target, chosen.draft)]
    other = f", {names[1]} for the draft" if names[1] not in ("", names[0]) else ""
    dtype = str(next(llm.pair.target.parameters()).dtype).removeprefix("torch.")
    weights = f", weights in {options.weights}" if options.weights else ""
    weights += f", draft weights in {options.draft_weights}" if options.draft_weights else ""
    weights += "" if options.kv_cache_dtype == "auto" else f", KV cache in {options.kv_cache_dtype}"
    lines = [
        f"backend {names[0]}{other} on {llm.pair.device}, {dtype}{weights}",
        f"{stats.new_tokens} tokens in {seconds:.2f} s: {stats.new_tokens / max(seconds, 1e-9):.0f} tokens per second, "
        f"the first after {first:.2f} s",
    ]
    lines += llm.explain().splitlines() if options.explain else llm.plan.explain() if llm.plan else []
    if llm.plan is None:
        return [*lines, f"plain decoding, without a draft: {stats.rounds} rounds"]
    tree = llm.config.tree
    drafted = f"{count} draft tokens" if tree is None else f"{count} draft tokens, in a tree of {tree.num_tokens},"
    note = "; on the CPU that includes the arithmetic" if llm.pair.device.type == "cpu" else ""
    accepted = f"accepted {stats.mean_accepted:.2f} of {drafted} per request and round"
    if stats.mean_accepted < _FEW:
        accepted += "; with so few, decoding without a draft is likely faster: -k 0"
    return [
        *lines,
        accepted,
        f"{stats.rounds} rounds, {stats.host_us_a_round / 1000:.2f} ms of host time per round to launch it{note}",
    ]


def _read_prompts(path: Path) -> list[str]:
    try:
        # Not splitlines(): it also ends a line at a form feed or U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read the prompts in {path}: {why}. Pass a utf-8 file.") from error
    return [line for line in lines if line.strip()]


def _parse_tree(text: str) -> Tree:
    """Parse --tree. Raises UserError for a file without paths, BatchError for an invalid tree."""
    from spec_decode.trees import DraftTree, DynamicTreeConfig

    if sizes := re.fullmatch(r"(\d{1,9})x(\d{1,9})", text):
        return DynamicTreeConfig(width=int(sizes[1]), num_tokens=int(sizes[2]))
    try:
        paths = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--tree is {text!r}, which is neither WIDTHxTOKENS nor a readable file: {error.strerror}. Pass sizes "
            "such as 4x16, or a JSON file of paths."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--tree names {text}, not JSON: {error}. Write it like [[0], [1], [0, 0]].") from error
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
        raise UserError(
            f"--tree names {text}, which must hold a list of paths, each a list of choices. "
            "Write it like [[0], [1], [0, 0]]."
        )
    return DraftTree.from_paths(paths)
