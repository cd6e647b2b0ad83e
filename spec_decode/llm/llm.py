"""The front door: load a model from its folder; text in, text out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NoReturn

import torch
from typing_extensions import TypedDict, Unpack

from attn_backends.torch_settings import one_thread
from builders import BatchError
from builders.errors import did_you_mean, require
from spec_decode.drafter import DrafterConfig, Strategy
from spec_decode.drafter.plan import DraftPlan
from spec_decode.engine import Engine, EngineConfig, EngineStats, Request
from spec_decode.engine.config import draft_slots
from spec_decode.llm.backends import choose_backends, explain_backends
from spec_decode.llm.capture import capture
from spec_decode.llm.load import Name, load
from spec_decode.llm.outputs import Completion, Reply, TextChunk, together
from spec_decode.llm.pair import Tokenizer
from spec_decode.llm.progress import progress_bar
from spec_decode.llm.prompts import Message, Prompt, as_list, contents, is_conversation, text_turns
from spec_decode.llm.stop_strings import GrowingText
from spec_decode.model_api import ContextBlockDraft, DraftModel, TargetModel
from spec_decode.models import CheckpointError
from spec_decode.models.quantise import check_format, quantise_draft
from spec_decode.paged import GraphMode
from spec_decode.paged.kv_groups import KV_CACHE_DTYPES, CachesTooLarge
from spec_decode.sampling import SamplingParams
from spec_decode.trees import Tree

Params = SamplingParams | Sequence[SamplingParams] | None
_DRAFT_TOKENS, _MAX_MODEL_LEN = 4, 4096
_SMALL = 20_000_000
"""Models with fewer weights run on one CPU thread: their tensors are too small for several, which wait for each other
if the CPU is busy (24 tokens a second dropped to 2 on two busy cores)."""


class Settings(TypedDict, total=False):
    """Further settings. EngineConfig explains verification, batch_invariant, page_size, kv_cache_dtype and
    draft_kv_cache_dtype, DrafterConfig tree.

    - target         "transformers": run a published target there; None: on our layers if they compute it, else there
    - weights        "fp8": the target's matrix products read 8-bit weights, see the guide; None: as stored
    - draft_weights  the same for the draft
    - strategy       how the later steps of a round run; None: on a CPU eager, else by the rule in the guide
    - max_model_len  the most tokens of a prompt and its text; 4,096, or fewer if a model has fewer positions
    - max_num_seqs   the most prompts that run at once; 8. The others wait
    - max_logprobs   the most logprobs that a prompt can request; 0
    - progress       show a bar on stderr while a model of more than a gigabyte is read, if that is a terminal; True
    """

    target: str | None
    weights: str | None
    draft_weights: str | None
    strategy: str | Strategy | None
    tree: Tree | None
    verification: str | None
    batch_invariant: bool
    max_model_len: int | None
    max_num_seqs: int
    max_logprobs: int
    page_size: int
    kv_cache_dtype: str
    draft_kv_cache_dtype: str | None
    progress: bool


class LLM:
    """A model on one device, with or without a draft. It batches prompts, drafts and verifies, and streams texts.

        llm = LLM("folder/of/target", draft="folder/of/draft")
        print(llm.generate("A list is", SamplingParams(max_tokens=32))[0].text)

    Use it from one thread at a time.
    """

    def __init__(
        self,
        model: Name,
        *,
        draft: Name | None = None,
        num_speculative_tokens: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        backend: str | None = None,
        draft_backend: str | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        """Load the models, allocate their caches, and on a GPU capture their graphs.

        - model, draft            a folder, `pydoc` (this library's own pair), or the name of a model in
                                  this machine's Hugging Face cache; without a draft there is no speculation
        - num_speculative_tokens  draft tokens per round; None: as many as the draft's block_size or modules predict,
                                  4 for a draft without such a number; 0: no draft is loaded
        - dtype                   "auto": float32 on a CPU, bfloat16 on a GPU
        - device                  None: the first GPU, or the CPU without a GPU
        - backend, draft_backend  names of attention backends; None: each layer group gets the first that supports it
        - settings                see Settings

        Raises CheckpointError for a model that cannot be loaded or captured, NoBackend if no backend supports it,
        BatchError for settings that do not fit the models, StrategyError for a strategy that the backend cannot run,
        and TypeError for an unknown setting.
        """
        _require_known(settings)
        _require_names(backend=backend, draft_backend=draft_backend)
        require(
            (runs_in := settings.get("target")) in (None, "transformers"),
            f"target is {runs_in!r:.200}. Pass transformers, or leave it out: our layers run the targets they compute.",
        )
        # Before the models are loaded, which can take minutes.
        torch_device, strategy = _device(device), _strategy(settings.get("strategy"))
        torch_dtype, draft_weights = _dtype(dtype, torch_device), settings.get("draft_weights")
        if num_speculative_tokens == 0:
            draft = None
        if draft is None:
            _require_no_draft_settings(draft_backend=draft_backend, **settings)
        _check_formats(torch_dtype, torch_device, **settings)
        pair = load(
            model,
            draft,
            dtype=torch_dtype,
            device=torch_device,
            runs_in=runs_in,
            quantises=settings.get("weights") is not None,
            invariant=settings.get("batch_invariant", False) is True,
            progress=settings.get("progress", True),
        )
        if pair.draft is not None and draft_weights is not None:
            quantise_draft(pair.draft, draft_weights)
        self._draft_weights, self._names = draft_weights, (os.fspath(model), draft and os.fspath(draft))
        steps = num_speculative_tokens
        if steps is None:
            steps = (pair.draft.trained_num_tokens or _DRAFT_TOKENS) if pair.draft else 0
        require(
            pair.draft is not None or steps == 0,
            f"num_speculative_tokens is {steps!r} and there is no draft. Pass draft=, or leave it out.",
        )
        config = _engine_config(settings, torch_device, strategy, steps)
        # A step writes drafts past the text, and these must stay within the model's positions too.
        most = min(model.max_positions for model in (pair.target, pair.draft) if model is not None)
        self._positions, self._room = most, most - 1 - draft_slots(config, pair.draft)
        max_model_len = settings.get("max_model_len")
        if max_model_len is None:
            max_model_len = max(2, min(self._room, _MAX_MODEL_LEN))
        self.config = replace(config, max_model_len=max_model_len)
        self.pair = pair
        self.backends = choose_backends(pair, self.config, backend, draft_backend)
        small = sum(weight.numel() for weight in pair.target.state_dict().values()) < _SMALL
        self._one_thread = pair.device.type == "cpu" and small
        with _memory_errors(self.config), self._threads():
            self.engine = Engine(
                pair.target, pair.draft, self.backends.target, self.config, draft_backend=self.backends.draft
            )
            capture(self.engine, pair.target)

    def _threads(self) -> AbstractContextManager[None]:
        """Limit torch to one thread for a small model on a CPU."""
        return one_thread() if self._one_thread else nullcontext()

    def __repr__(self) -> str:
        model, draft = self._names
        drafted = f"draft={draft!r}, num_speculative_tokens={self.config.num_speculative_tokens}, " if draft else ""
        weight = next(self.pair.target.parameters())
        dtype = str(weight.dtype).removeprefix("torch.")
        return (
            f"LLM({model!r}, {drafted}dtype={dtype!r}, device={str(weight.device)!r}, "
            f"max_model_len={self.config.max_model_len}, max_num_seqs={self.config.max_num_seqs})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be pickled or copied: it owns device memory and graphs. Make one in each process, from the "
            "same arguments."
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer: `transformers`' for a published model. It has `encode` and `decode`."""
        return self.pair.tokenizer

    @property
    def plan(self) -> DraftPlan | None:
        """How the drafter runs, and why; None without a draft."""
        return self.engine.plan

    def explain(self) -> str:
        """Return a report: where the target runs and why not on our layers, which backend serves each layer group and
        why not the others, which target states the draft reads, the block that it was trained on, 8-bit weights,
        how the drafter runs and why, and whether one graph holds a round."""
        plan, round_plan = self.plan, self.engine.round_plan
        how = [*plan.explain(), str(round_plan)] if plan else ["no draft: plain decoding"]
        target = self.pair.target
        layers = ", ".join(map(str, target.aux_hidden_state_layers or ()))
        reads = [f"draft reads the states that enter layers {layers} of the target's {target.num_layers}"]
        target_weights, draft_weights = self.pair.target_weights, self._draft_weights
        weights = [f"target's matrix products {target_weights}"] if target_weights else []
        weights += [f"draft's matrix products read {draft_weights} weights"] if draft_weights else []
        weights += _scales(target, self.config)
        reads = [*(reads if layers else ()), *_block(self.pair.draft, self.config.num_speculative_tokens), *weights]
        if self.config.graph_mode is GraphMode.NONE:
            reads.append(
                "no graphs: a CPU has no launches to save. A strategy that you name, such as full_loop, emulates them"
            )
        runs = f"target runs {self.pair.target_runs}"
        return "\n".join([runs, *explain_backends(self.pair, self.backends, self.config), *reads, *how])

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, progress: bool = True
    ) -> list[Completion]:
        """Continue one prompt or several. Returns a completion for each, in the order of the prompts.

        prompts: in any form that the guide lists. sampling_params: one for all prompts, or a list with one for each.
        progress: show a bar on stderr for several prompts, if that is a terminal. An interrupt ends all prompts; you
        can call again afterwards. Raises BatchError or CheckpointError, before anything runs, for a prompt that is
        empty or too long and for parameters that are not SamplingParams.
        """
        return self._finish(self._prepare(as_list(prompts), sampling_params), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer one conversation or several, formatted by the model's chat template. Returns completions, like
        `generate`.

        messages: [{"role": "user", "content": "Hello"}], or a list of such lists. Raises BatchError and CheckpointError
        as `generate` does.
        """
        for turns in (conversations := as_list(messages) or [[]]):
            if not (isinstance(turns, Sequence) and turns and all(isinstance(turn, Mapping) for turn in turns)):
                raise BatchError(
                    f'a conversation is {turns!r:.200}. Pass a list of turns: [{{"role": "user", "content": "Hello"}}].'
                )
        return self._finish(self._prepare(conversations, sampling_params), progress)

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> Iterator[TextChunk]:
        """Stream the texts of `generate` in pieces. Close the iterator to stop generating.

        Raises as `generate` does, at the call.
        """
        return self._run(self._prepare(as_list(prompts), sampling_params), in_pieces=True)

    def _prepare(self, prompts: Sequence[object], sampling_params: Params) -> list[Reply]:
        require(len(prompts) > 0, "there is no prompt. Pass a text, a list of token ids, or a list of either.")
        params = _params_per_prompt(sampling_params, len(prompts))
        return [
            reply
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
            for reply in self._make_replies(index, prompt, each)
        ]

    def _make_replies(self, index: int, prompt: object, params: SamplingParams) -> Iterator[Reply]:
        """Yield a reply for each of the prompt's n completions."""
        name, stop = f"prompts[{index}]", params.stop_strings
        token_ids = self._encode(name, prompt)
        ends, stop_ids = self.pair.stop_ids, self.pair.stop_tokens(name, stop).union(params.stop_token_ids)
        self._require_room(name, len(token_ids), params.max_tokens)
        for choice, one in enumerate(replace(params, stop=(), stop_token_ids=stop_ids).each()):
            request = self.engine.checked(name, Request(prompt=token_ids, sampling=one, end_token_ids=ends))
            text = GrowingText(self.pair.decode, stop, prompt=request.prompt, min_tokens=params.min_tokens)
            yield Reply(index, choice, prompt, request, text)

    def _require_room(self, name: str, prompt: int, new: int) -> None:
        """Raise BatchError for a prompt that is too long, with the remedies that apply."""
        longest = self.config.max_model_len
        remedies = ["shorten the prompt"]
        if prompt < longest:
            remedies.append(f"lower max_tokens to {longest - prompt} or less")
        if prompt + new <= self._room:
            remedies.append(f"raise max_model_len to {prompt + new} or more")
        limit = "max_model_len"
        if longest == self._room:
            ahead = self._positions - longest
            limit = f"the model's {self._positions} positions minus {ahead} that a round writes ahead"
        require(
            prompt + new <= longest,
            f"{name} has {prompt} tokens and max_tokens is {new}: together more than {longest}, {limit}. "
            f"{', or '.join(remedies).capitalize()}.",
        )

    def _encode(self, name: str, prompt: object) -> Sequence[int]:
        found = contents(name, prompt)
        try:
            if isinstance(found, str):
                return self.pair.encode(found)
            if not is_conversation(found):
                return found
            turns = text_turns(found)
            require(
                self.pair.encode_chat is not None,
                "the model has no chat template. Pass plain text to generate, or load a chat model.",
            )
            assert self.pair.encode_chat is not None
            return self.pair.encode_chat(turns)
        except (BatchError, CheckpointError) as error:
            raise type(error)(f"{name}: {error}") from error

    def _finish(self, running: list[Reply], progress: bool) -> list[Completion]:
        try:
            with progress_bar(len(running), shown=progress) as show:
                for _ in self._run(running, in_pieces=False, show=show):
                    pass
        finally:
            self.engine.cancel_all([reply.handle for reply in running if reply.handle is not None])
        return [together(replies) for _, replies in groupby(running, lambda reply: reply.index)]

    def _run(
        self, running: list[Reply], *, in_pieces: bool, show: Callable[[int, int], None] | None = None
    ) -> Iterator[TextChunk]:
        """Submit, step until all have ended, and yield each piece as it is read.

        in_pieces: each step adds a piece; False: a text is one piece, at its end. show: told after each step how many
        texts have ended and how many tokens are new. Texts are decoded token by token only
        if a stop string can end them early, because that takes longer than all other host work of a step.
        """
        self.engine.stats = EngineStats()
        try:
            for reply in running:
                on_token = partial(self._take, reply) if reply.growing.may_stop else None
                reply.handle = self.engine.submit(reply.request, on_token=on_token)
            left = running
            while left:
                for reply in left:
                    reply.read(whole=not in_pieces)
                    while reply.chunks:
                        yield reply.chunks.popleft()
                left = [reply for reply in left if not reply.ended]
                if show is not None:
                    show(len(running) - len(left), self.engine.stats.new_tokens)
                if left:
                    with self._threads():
                        self.engine.step()
        finally:
            # The next step frees the pages: an iterator can be closed in the middle of a step.
            for reply in running:
                if reply.handle is not None:
                    self.engine.cancel(reply.handle)

    def _take(self, reply: Reply, token: int) -> None:
        if reply.take([token]):
            self.engine.cancel(reply.submitted)


@contextmanager
def _memory_errors(config: EngineConfig) -> Iterator[None]:
    """Name the settings of LLM that decide how much memory the caches and graphs take."""
    try:
        yield
    except (CachesTooLarge, torch.OutOfMemoryError) as error:
        why = error.problem if isinstance(error, CachesTooLarge) else str(error).split("\n")[0][:300].rstrip(". ")
        raise BatchError(
            f"{config.max_num_seqs} prompts at once (max_num_seqs) of up to {config.max_model_len} tokens "
            f"(max_model_len) take more memory than there is: {why}. Lower one of the two."
        ) from error


def _engine_config(settings: Settings, device: torch.device, strategy: Strategy | None, steps: int) -> EngineConfig:
    """Return the engine's settings, with the default max_model_len. steps: draft tokens per round."""
    # A CPU has no launches to save: graphs would only be emulated, unless you ask for them by name.
    graphs = GraphMode.NONE if device.type == "cpu" and strategy is None else GraphMode.FULL
    drafter, tree = None, settings.get("tree")
    if steps or tree is not None:
        drafter = DrafterConfig(num_speculative_tokens=steps, strategy=strategy, tree=tree, graph_mode=graphs)
    return EngineConfig(
        drafter=drafter,
        graph_mode=graphs,
        max_num_seqs=settings.get("max_num_seqs", 8),
        max_logprobs=settings.get("max_logprobs", 0),
        page_size=settings.get("page_size", 16),
        kv_cache_dtype=settings.get("kv_cache_dtype", "auto"),
        draft_kv_cache_dtype=settings.get("draft_kv_cache_dtype"),
        verification=settings.get("verification"),
        batch_invariant=settings.get("batch_invariant", False),
    )


def _params_per_prompt(params: Params, count: int) -> list[SamplingParams]:
    one = SamplingParams() if params is None else params
    given = [one] * count if isinstance(one, SamplingParams) else one
    is_list = isinstance(given, Sequence) and all(isinstance(each, SamplingParams) for each in given)
    what = f"has {len(given)} SamplingParams" if is_list else f"is {params!r:.200}"
    require(
        is_list and len(given) == count,
        f"sampling_params {what} for {count} prompts. Pass one SamplingParams, or a list with one for each prompt.",
    )
    return list(given)


def _block(draft: DraftModel | None, num_tokens: int) -> list[str]:
    """Compare the block that a round drafts with the one that the draft was trained on, if its config.json says."""
    if not isinstance(draft, ContextBlockDraft) or draft.block_size is None or num_tokens == 0:
        return []
    trained = draft.trained_num_tokens
    rest = f": expect the target to reject those after the first {trained}" if num_tokens > (trained or 0) else ""
    return [
        f"draft was trained on blocks of block_size {draft.block_size}, {trained} tokens a round; a round drafts "
        f"{num_tokens}{rest}"
    ]


def _scales(target: TargetModel, config: EngineConfig) -> list[str]:
    """Say where the scales of an 8-bit cache come from, and of scales that a wider cache does not use."""
    if KV_CACHE_DTYPES[config.kv_cache_dtype] is not None:
        found = "its checkpoint's scales" if target.kv_scales else "scales of 1: its checkpoint has none"
        return [f"target's 8-bit KV cache has {found}"]
    unused = "target's checkpoint has scales of an 8-bit KV cache, which kv_cache_dtype fp8 uses"
    return [unused] if target.kv_scales else []


def _require_known(settings: Mapping[str, object]) -> None:
    if unknown := sorted(settings.keys() - Settings.__annotations__.keys()):
        known = [name for name in inspect.signature(LLM.__init__).parameters if name not in ("self", "settings")]
        known += Settings.__annotations__
        raise TypeError(
            f"LLM has no setting {unknown[0]!r}.{did_you_mean(unknown[0], known)} Settings are {', '.join(known)}."
        )


def _require_names(**backends: object) -> None:
    for name, value in backends.items():
        require(
            value is None or isinstance(value, str),
            f"{name} is {value!r:.200}. Pass the name of one backend, or None for the first that fits.",
        )


def _require_no_draft_settings(**settings: object) -> None:
    """Raise BatchError for a setting that has no effect without a draft."""
    for name in ("draft_weights", "draft_backend", "draft_kv_cache_dtype", "strategy", "tree", "verification"):
        require(
            (value := settings.get(name)) is None,
            f"{name} is {value!r} and there is no draft. Pass draft= and speculative tokens, or leave {name} out.",
        )


def _check_formats(dtype: torch.dtype, device: torch.device, **settings: object) -> None:
    """Raise BatchError for weights or draft_weights that models of this dtype cannot have on this device."""
    for name in ("weights", "draft_weights"):
        if (weights := settings.get(name)) is not None:
            check_format(name, weights, dtype, device)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BatchError(f"device is {device!r}. Pass cpu, cuda or cuda:N.") from error
    require(
        (found.index or 0) < {"cpu": 1, "cuda": torch.cuda.device_count()}.get(found.type, 0),
        f"device is {device!r}; this machine has {torch.cuda.device_count()} CUDA devices. Pass cpu, or one of them.",
    )
    return found


def _dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    require(
        found in (torch.float32, torch.bfloat16, torch.float16),
        f"dtype is {dtype!r}. Pass auto, float32, bfloat16 or float16.",
    )
    assert isinstance(found, torch.dtype)
    return found


def _strategy(strategy: str | Strategy | None) -> Strategy | None:
    try:
        return None if strategy is None else Strategy(strategy)
    except ValueError as error:
        names = [each.value for each in Strategy]
        raise BatchError(
            f"strategy is {strategy!r}. Pass one of {', '.join(names)}, or None for the default."
            f"{did_you_mean(str(strategy), names)}"
        ) from error
