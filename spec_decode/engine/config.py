"""The settings of an engine, and the checks of models and requests against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from builders import BatchError
from builders.errors import did_you_mean, require, require_type, require_types
from spec_decode.drafter import DrafterConfig, check_draft
from spec_decode.engine.page_pool import PagePool
from spec_decode.engine.request import Request
from spec_decode.model_api import DraftModel, TargetModel
from spec_decode.paged import GraphMode
from spec_decode.paged.kv_groups import KV_CACHE_DTYPES, GroupOptions
from spec_decode.sampling import SamplingParams
from spec_decode.sampling.logit_edits import MAX_BIASES
from spec_decode.trees import Tree

TREE_VERIFICATION = "sampling"
"""How trees are verified: by TreeSampling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine serves requests.

    Raises BatchError for values of the wrong type, and for sizes with which no request could run.
    """

    drafter: DrafterConfig | None = None
    """How tokens are drafted; None decodes without a draft. With a tree, the target and a draft that goes step by step
    need backends with the feature tree; the target verifies each request's whole tree in one step."""
    max_num_seqs: int = 8
    """The most requests that run at once."""
    max_model_len: int = 512
    """The most tokens of a request, prompt and new tokens together."""
    page_size: int = 16
    """Tokens per page, in every KV group."""
    num_pages: int | None = None
    """Pages of every KV group; None allocates enough for max_num_seqs of the longest requests."""
    kv_cache_dtype: str = "auto"
    """Dtype of the KV caches: auto, the models' own, or fp8, also called fp8_e4m3: float8_e4m3fn, with the scales that
    the target's checkpoint was calibrated with, else 1."""
    draft_kv_cache_dtype: str | None = None
    """The same for the draft's; None is kv_cache_dtype."""
    max_prefill_tokens: int = 8192
    """The most prompt tokens that one step prefills. Other requests wait that long for their next tokens, but fewer
    prompt tokens a step make more steps of few requests."""
    verification: str | None = None
    """A name for `spec_decode.verification.verifier`: rejection, block or synthetic:MEAN. None is rejection, or with a
    tree the only choice, sampling, which follows the tokens that plain decoding would draw."""
    max_logprobs: int = 0
    """The most logprobs that a request can ask for. The target step computes this many for every row; 0 is none."""
    graph_mode: GraphMode = GraphMode.FULL
    """The target's graph mode; the drafter's is in its own config."""
    one_graph: bool | None = None
    """Whether one graph holds a whole decode round, draft and target step; the texts are the same. None: yes, if
    nothing in a round needs the host. `Engine.round_plan` has the reason."""
    batch_invariant: bool = False
    """Give every request exactly the tokens that it gets when it runs alone, in any dtype: no reduction order depends
    on the batch. Greedy text then also equals that of plain decoding. It needs backends with the feature
    batch_invariant and models made of this library's layers, and costs time: see the guide."""

    def __post_init__(self) -> None:
        require_types(self)
        require(
            self.tree is None or self.verification in (None, TREE_VERIFICATION),
            f"a tree needs verification {TREE_VERIFICATION!r}, got {self.verification!r}. Pass "
            f"{TREE_VERIFICATION!r}, or no tree.",
        )
        require(
            self.one_graph is None or self.drafter is not None,
            f"one_graph is {self.one_graph}, but there is no draft: a round is only the target step. Leave it out.",
        )
        for name in ("max_num_seqs", "page_size", "max_prefill_tokens", "num_pages"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} is {value}. Pass 1 or more.")
        for name in ("kv_cache_dtype", "draft_kv_cache_dtype"):
            require(
                (value := getattr(self, name)) in KV_CACHE_DTYPES or (name.startswith("draft") and value is None),
                f"{name} is {value!r}.{did_you_mean(str(value), KV_CACHE_DTYPES)} Pass one of "
                f"{', '.join(KV_CACHE_DTYPES)}.",
            )
        require(self.max_logprobs >= 0, f"max_logprobs is {self.max_logprobs}. Pass 0 or more.")
        require(
            self.max_model_len >= 2,
            f"max_model_len is {self.max_model_len}. Pass 2 or more, for a prompt token and a new token.",
        )

    @property
    def num_speculative_tokens(self) -> int:
        """K: the most draft tokens per request and round; 0 without a drafter."""
        return 0 if self.drafter is None else self.drafter.num_speculative_tokens

    @property
    def query_len(self) -> int:
        """Tokens of every row in a target step: 1 + K, or a tree's and its root."""
        return 1 + (self.tree.num_tokens if self.tree else self.num_speculative_tokens)

    @property
    def tree(self) -> Tree | None:
        """The drafter's tree; None for chains."""
        return None if self.drafter is None else self.drafter.tree


def group_options(config: EngineConfig, model: TargetModel | DraftModel) -> GroupOptions:
    """Return what the engine asks of the model's KV groups."""
    of_draft = isinstance(model, DraftModel) and config.draft_kv_cache_dtype
    return GroupOptions(
        page_size=config.page_size,
        kv_dtype=KV_CACHE_DTYPES[of_draft or config.kv_cache_dtype],
        batch_invariant=config.batch_invariant,
        tree=config.tree is not None,
    )


def draft_slots(config: EngineConfig, draft: DraftModel | None) -> int:
    """Return the most KV slots that a round writes past a text's end: the target's, for every token that it verifies,
    or the draft's. Raises BatchError for a K or a tree that the draft cannot propose."""
    steps, tree = config.num_speculative_tokens, config.tree
    verified = steps if tree is None else max(steps, tree.num_tokens)
    return verified if draft is None else max(verified, draft.round_shape(steps, tree).slots)


def make_pool(config: EngineConfig, draft: DraftModel | None) -> PagePool:
    """Make the page pool of an engine with this draft."""
    slots = draft_slots(config, draft)
    longest = -(-(config.max_model_len + slots) // config.page_size)
    num_pages = config.max_num_seqs * longest if config.num_pages is None else config.num_pages
    return PagePool(num_pages, config.page_size, slots)


def check_models(config: EngineConfig, target: TargetModel, draft: DraftModel | None) -> None:
    """Raise BatchError for models that do not fit the settings or each other, and for arguments of the wrong type."""
    require_type("config", config, EngineConfig)
    require_type("target", target, TargetModel)
    if draft is not None:
        require_type("draft", draft, DraftModel)
    steps = config.num_speculative_tokens
    _check_positions(config, "target", target.max_positions, draft)
    require(
        config.max_logprobs <= target.vocab_size,
        f"max_logprobs is {config.max_logprobs}, the target has {target.vocab_size} tokens. Pass at most that many.",
    )
    if steps == 0:
        return
    require(
        draft is not None,
        f"num_speculative_tokens is {steps}, but there is no draft model. Pass one, or leave the drafter out.",
    )
    assert draft is not None
    for what, wanted, found in (
        ("vocabulary size", target.vocab_size, draft.vocab_size),
        ("size of target hidden states", target.target_states_size, draft.target_states_size),
    ):
        require(
            wanted == found,
            f"the draft was made for another target: its {what} is {found}, this target's {wanted}. Use a draft made "
            "for this target.",
        )
    _check_positions(config, "draft", draft.max_positions, draft)
    assert config.drafter is not None
    check_draft(draft, config.drafter)


def _check_positions(config: EngineConfig, name: str, positions: int, draft: DraftModel | None) -> None:
    """Raise BatchError if a text and the draft tokens after it can exceed a model's positions."""
    slots = draft_slots(config, draft)
    most = positions - 1 - slots
    require(
        most >= 2 or not slots,
        f"num_speculative_tokens is {config.num_speculative_tokens}: a round writes {slots} draft tokens after a text, "
        f"and the {name} has {positions} positions. Pass fewer.",
    )
    ahead = f"a round writes {slots} draft tokens beyond it" if slots else "a token after it needs a position too"
    fits = f"a max_model_len of at most {most}" if most >= 2 else "a model with more positions"
    require(
        config.max_model_len <= most,
        f"max_model_len is {config.max_model_len}, and {ahead}; the {name} has {positions} positions. Pass {fits}.",
    )


def checked_request(name: str, request: Request, config: EngineConfig, pool: PagePool, vocab_size: int) -> Request:
    """Return a private copy of the request. Raises BatchError for a request that can never be served."""
    require(
        isinstance(request, Request),
        f"{name} must be a Request, got {type(request).__name__}. Make one from the prompt.",
    )
    sampling, ends = request.sampling, frozenset(request.end_token_ids)
    require(
        isinstance(sampling, SamplingParams),
        f"{name} needs SamplingParams as sampling, got {type(sampling).__name__}. Pass one, or leave it out.",
    )
    require(
        not sampling.stop_strings,
        f"{name} has stop strings, {sampling.stop_strings}, but an engine knows only tokens; its text would never stop "
        "there. Pass stop_token_ids, or use LLM.",
    )
    require(
        sampling.n == 1,
        f"{name} has n {sampling.n}, but an engine continues a request once. Submit one for each of sampling.each(), "
        "or use LLM.",
    )
    require(
        (sampling.logprobs or 0) <= config.max_logprobs,
        f"{name} requests {sampling.logprobs} logprobs, more than max_logprobs, {config.max_logprobs}. Request fewer, "
        "or raise max_logprobs of the engine or the LLM.",
    )
    # A set, because every token of the text is looked up in it.
    stops = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else ends)
    sampling = replace(sampling, stop_token_ids=stops)
    _check_stop_tokens(name, ends.union(stops), vocab_size)
    _check_biases(name, sampling, ends, vocab_size)
    token_ids, new = _checked_prompt(name, request.prompt, vocab_size), sampling.max_tokens
    prompt = len(token_ids)
    require(prompt > 0, f"{name} has an empty prompt. Pass at least one token.")
    require(
        prompt + new <= config.max_model_len,
        f"{name} has {prompt} prompt tokens and max_tokens {new}, together more than max_model_len, "
        f"{config.max_model_len}. Shorten it or raise max_model_len.",
    )
    require(
        pool.pages_for(prompt + new) <= pool.num_pages,
        f"{name} has {prompt} prompt tokens and max_tokens {new}, together more than the "
        f"{pool.num_pages * pool.page_size - pool.draft_slots} that fit {pool.num_pages} pages of {pool.page_size} "
        "with draft tokens; it would wait forever. Shorten it or raise num_pages.",
    )
    if sampling.logit_bias is not None:
        sampling = replace(sampling, logit_bias=dict(sampling.logit_bias))
    return replace(request, prompt=token_ids, sampling=sampling, end_token_ids=ends)


def _check_stop_tokens(name: str, tokens: frozenset[int], vocab_size: int) -> None:
    """Raise BatchError for a stop or end token that the model cannot draw, most likely from another vocabulary."""
    unknown = sorted((token for token in tokens if not _is_token(token, vocab_size)), key=str)
    require(
        not unknown,
        f"{name} needs its stop_token_ids and end tokens from 0 to {vocab_size - 1}, the model's vocabulary, got "
        f"{unknown[:3]}; its text would never stop there. Take them from this model's tokenizer.",
    )


def _check_biases(name: str, sampling: SamplingParams, ends: frozenset[int], vocab_size: int) -> None:
    """Raise BatchError for more biases than a row has, for those of tokens that the model cannot draw, and for stop
    tokens that leave no other token to draw."""
    count = len(sampling.biases(0, ends))
    require(
        count <= MAX_BIASES,
        f"{name} has {count} tokens in logit_bias and among the stop tokens that min_tokens forbids, more than "
        f"{MAX_BIASES}. Pass fewer.",
    )
    unknown = sorted(token for token in sampling.logit_bias or () if not 0 <= token < vocab_size)
    require(
        not unknown,
        f"{name} needs tokens from 0 to {vocab_size - 1}, the model's vocabulary, in logit_bias, got {unknown[:3]}. "
        "Take them from this model's tokenizer.",
    )
    require(
        len(ends.union(sampling.stop_token_ids)) < vocab_size or not sampling.min_tokens,
        f"{name} has min_tokens {sampling.min_tokens}, and every token of the model ends its text: it has no token to "
        "draw. Pass fewer stop_token_ids, or no min_tokens.",
    )


def _is_token(token: object, vocab_size: int) -> bool:
    return type(token) is int and 0 <= token < vocab_size


def _checked_prompt(name: str, prompt: object, vocab_size: int) -> tuple[int, ...]:
    require(
        isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)),
        f"{name} needs its prompt as a list, tuple or range of token ids, got {type(prompt).__name__}. "
        "Encode a text; for an array or a tensor, pass tolist().",
    )
    assert isinstance(prompt, Sequence)
    token_ids = tuple(prompt)
    # In C: a loop over long prompts takes as long as the rest of a step's host work.
    if {*map(type, token_ids)} <= {int} and 0 <= min(token_ids, default=0) <= max(token_ids, default=0) < vocab_size:
        return token_ids
    index, token = next(each for each in enumerate(token_ids) if not _is_token(each[1], vocab_size))
    raise BatchError(
        f"{name} must hold token ids, integers 0 to {vocab_size - 1}, got {token!r} at index {index}. "
        "Encode it with this model's vocabulary."
    )
