"""Serve a trained model with its draft in vLLM, on one attention backend and with one way to read the draft: python
scripts/trained_arm.py ARM FILE, with a TrainedArm as JSON. See vllm_figures.py."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attn_backends.engines.vllm.names import DRAFT_HEAD, PLAIN, ROUNDED
from scripts import vllm_arm
from scripts.engine_arm import CHANNELS

BASE = "FLASH_ATTN"
BACKENDS = (BASE, "FLASHINFER_IN_GRAPH", "ATTN_BACKENDS_TRITON_PAGED", "ATTN_BACKENDS_FLASH_ATTN3", "TRITON_ATTN")
"""vLLM's own on Hopper, ours, and another of vLLM's: how far that one differs is the effect of rounding."""
READS = (("", ""), (PLAIN, "16"), (CHANNELS, ""), (ROUNDED, "fp8"))
"""How the draft of BASE multiplies and reads its head: vLLM's default and ours, in 16 and in 8 bits."""
EIGHT_BITS, SIXTEEN_BITS = "fp8", "bfloat16"
NARROW_BASE, NARROW = "TRITON_ATTN", "ATTN_BACKENDS_TRITON_PAGED"
"""vLLM's backend and ours over 8-bit KV caches. On CUDA, vLLM's backends round queries too, ours does not."""
STEPS, NEW_TOKENS = 4, 192
SEEDS = {0.0: 1, 1.0: 16}
"""Texts for each question by temperature. Drawn texts soon differ, so that only their mean can be compared."""
TIE = 0.25
"""Difference of two log probabilities that bf16's rounding can turn around."""
MORE_ROUNDS = 0.05
"""Share of further rounds that the same tokens may take. vLLM's own backends draft 4 % of tokens differently, which
costs rounds as often as it saves some. Of 1.5 to 1.9 drafts kept a round, this is a loss of 7 to 8 %."""
ERRORS = 3
"""Standard errors by which the drafts kept of drawn texts may differ: chance exceeds them once in 370 comparisons."""
QUESTIONS = (
    "What is the Moon?", "Explain tides to a child.", "Write a short poem about autumn.", "How do I boil an egg?",
    "List three reasons to keep a diary.", "What is the difference between a lake and a sea?",
    "Write a polite note that declines an invitation.", "Describe a market in the morning.", "Why is the sky blue?",
    "Give me a recipe for pancakes.", "What does a compiler do?", "Tell me about the history of paper.",
    "How does a refrigerator keep its contents cold?", "Write a short story about a lost umbrella.",
    "What should I pack for a week at the beach?", "Explain what a contract is in simple words.",
    "Give three tips for a first day at work.", "Who was Marie Curie?", "Describe how a candle burns, step by step.",
    "What is the capital of Canada, and what is it known for?", "Write a thank-you message to a neighbour.",
    "How can I remove a tomato stain from a shirt?", "Compare wool and cotton.", "What causes a rainbow?",
    "Write a dialogue between a baker and a customer.", "Name five animals that live in a pond.",
    "How do clocks measure time?", "Summarize what happens in Cinderella.", "What is a good hobby for a shy person?",
    "Explain the rules of hide and seek.", "Why do onions make us cry?", "Plan a birthday party for a ten-year-old.",
)  # fmt: skip
"""None is about a topic that the draft was trained on."""


@dataclass(frozen=True, kw_only=True)
class TrainedArm:
    """One engine.

    backend        the attention backend of target and draft
    linears        vLLM's name for how the draft multiplies; empty: its default
    head           how the draft reads its head, in the words of DRAFT_HEAD; empty: as vLLM does
    cache          vLLM's dtype of the KV cache; empty: the model's
    draft_cache    that of the draft's; empty: as the target's
    target, draft  folders in the project's
    """

    backend: str
    linears: str = ""
    head: str = ""
    cache: str = ""
    draft_cache: str = ""
    target: str = "build/smollm2"
    draft: str = "examples/smollm2/draft"

    num_gpus = 1
    is_timed = False
    script = "trained_arm.py"

    @property
    def name(self) -> str:
        reads = {"draft": self.linears, "head": self.head, "cache": self.cache, "draft cache": self.draft_cache}
        shown = "".join(f" {what} {how}" for what, how in reads.items() if how)
        return f"trained {Path(self.target).name} {self.backend}{shown}"


def measure(arm: TrainedArm, alone: Callable[[], None]) -> dict[str, Any]:
    """Return a row for each temperature: how many tokens each round of each text brought, the drafts kept, and of
    greedy texts their tokens and how sure the target is of each. Nothing is timed, so other arms may run beside it."""
    os.environ.update({**vllm_arm.ENVIRONMENT, vllm_arm.VALIDATE: "1", DRAFT_HEAD: arm.head})
    import vllm

    llm = vllm.LLM(**engine_options(arm))
    prompts = _prompts(llm.get_tokenizer())
    rows, before = [], _counts(llm)
    for temperature, seeds in SEEDS.items():
        params = [
            vllm.SamplingParams(
                temperature=temperature, max_tokens=NEW_TOKENS, seed=seed, logprobs=None if temperature else 2
            )
            for seed in range(seeds * len(prompts))
        ]
        texts = serve(llm.llm_engine, prompts * seeds, params, name=f"{temperature:g}")
        after = _counts(llm)
        counted, kept = (now - then for now, then in zip(after, before, strict=True))
        before = after
        row: dict[str, Any] = {
            "temperature": temperature, "requests": len(texts), "kept": round(kept / counted, 3) if counted else 0.0,
            "rounds": sum(len(text.round_tokens) - 1 for text in texts), "counted_rounds": counted,
            "round_tokens": [text.round_tokens for text in texts],
        }  # fmt: skip
        if not temperature:
            row["texts"] = [list(text.last.token_ids) for text in texts]
            row["margins"] = [[_margin(token) for token in text.last.logprobs] for text in texts]
        rows.append(row)
    return {"vllm": vllm.__version__, "rows": rows}


def _prompts(tokenizer: Any) -> list[list[int]]:
    """Return each question in the model's chat format, as token ids."""
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS)
    texts = (tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats)
    return [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


@dataclass
class Text:
    """A text that vLLM writes: how many tokens each step brought, the prompt's step first, and its last output."""

    round_tokens: list[int] = field(default_factory=list)
    last: Any = None


def serve(engine: Any, prompts: Sequence[list[int]], params: Sequence[Any], *, name: str) -> list[Text]:
    """Serve prompts together. name: begins their ids.

    vLLM's engine returns, for each step, one output of each request that got tokens in it, with all tokens so far; also
    with asynchronous scheduling, which only returns a step's outputs one call later.
    """
    texts = {f"{name}-{at}": Text() for at in range(len(prompts))}
    for request, prompt, param in zip(texts, prompts, params, strict=True):
        engine.add_request(request, {"prompt_token_ids": prompt}, param)
    while engine.has_unfinished_requests():
        for output in engine.step():
            text, (text_so_far, *_) = texts[output.request_id], output.outputs
            text.round_tokens.append(len(text_so_far.token_ids) - sum(text.round_tokens))
            text.last = text_so_far
    return list(texts.values())


def engine_options(arm: TrainedArm) -> dict[str, Any]:
    """Return the arguments of vllm.LLM."""
    root = vllm_arm.ROOT
    speculation = {
        "method": "eagle3", "model": str(root / arm.draft), "num_speculative_tokens": STEPS,
        "attention_backend": arm.backend, "use_local_argmax_reduction": bool(arm.head),
        "quantization": arm.linears or None,
    }  # fmt: skip
    if arm.draft_cache:
        speculation["kv_cache_dtype"] = arm.draft_cache
    return {
        "model": str(root / arm.target), "dtype": "bfloat16", "seed": 0, "max_model_len": 1024,
        "max_num_seqs": len(QUESTIONS), "enable_prefix_caching": False, "disable_log_stats": False,
        # A fixed size spares vLLM a profile of its graphs, which other arms on the GPU would disturb.
        "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 4 << 30,
        "enable_flashinfer_autotune": False, "attention_backend": arm.backend, "kv_cache_dtype": arm.cache or "auto",
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, "speculative_config": speculation,
    }  # fmt: skip


def _counts(llm: Any) -> tuple[int, int]:
    """Return the rounds so far, and the drafts kept in them."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    rounds, kept = (int(found.get(name, 0)) for name in names)
    return rounds, kept


def _margin(token: Mapping[int, Any]) -> float:
    """Return by how much the likeliest of a position's tokens exceeds the next, in log probability."""
    first, second = sorted((each.logprob for each in token.values()), reverse=True)[:2]
    return round(first - second, 4)


def trained_arms() -> list[TrainedArm]:
    """Return an arm for each backend, the one that the others are compared with first, then one for each other way to
    read the draft, and those with 8-bit caches: vLLM's, ours, and ours with the draft's in 16 bits."""
    backends = [TrainedArm(backend=backend) for backend in BACKENDS]
    reads = [TrainedArm(backend=BASE, linears=linears, head=head) for linears, head in READS[1:]]
    narrow = [TrainedArm(backend=backend, cache=EIGHT_BITS) for backend in (NARROW_BASE, NARROW, BASE)]
    return [*backends, *reads, *narrow, replace(narrow[1], draft_cache=SIXTEEN_BITS)]


def trained_agreement(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare each arm's rows with those of its peer: the texts of greedy ones and the rounds that they share, and the
    drafts kept of drawn ones. An arm without a peer that ended is left out."""
    rows = {_key(each["arm"]): each for each in found if each["rows"]}
    compared = []
    for key, each in rows.items():
        if (peer := rows.get(_peer(key))) is None or peer is each:
            continue
        for base, row in zip(peer["rows"], each["rows"], strict=True):
            cell = {"arm": each["arm"]["name"], "against": peer["arm"]["name"], "temperature": row["temperature"]}
            cell |= {"kept": row["kept"], "judged": key not in (_CHANNELS, *_NARROW)}
            # A target with another cache, or other queries, can prefer another token anywhere.
            cell |= {"parts_at_ties": not key.cache or bool(key.draft_cache)}
            compared.append(cell | (_drawn if row["temperature"] else _greedy)(base, row))
    return compared


class Key(NamedTuple):
    """What an arm is found by; see TrainedArm."""

    backend: str
    linears: str = ""
    head: str = ""
    cache: str = ""
    draft_cache: str = ""


_BASE, _CHANNELS = Key(BASE), Key(BASE, linears=CHANNELS)
_NARROW = (Key(NARROW_BASE, cache=EIGHT_BITS), Key(BASE, cache=EIGHT_BITS))
"""vLLM's own with 8-bit caches, the one that ours are compared with first."""


def _key(arm: Mapping[str, Any]) -> Key:
    return Key(*(arm[name] for name in Key._fields))


def _peer(key: Key) -> Key:
    """Return the arm to compare with: the same with one cache for target and draft, or vLLM's own with as many bits, on
    BASE unless the cache has 8. What 8 bits cost vLLM's own is reported, not judged."""
    if key.draft_cache:
        return key._replace(draft_cache="")
    if key.cache and key not in _NARROW:
        return _NARROW[0]
    return _CHANNELS if key.linears == ROUNDED else _BASE


def _greedy(base: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Compare greedy texts. Two of them soon part at a tie, and other text keeps other drafts: so rounds are compared
    over the tokens that both begin with, and a text is one observation. The ratio is None if no rounds are shared."""
    pairs = list(zip(base["texts"], row["texts"], strict=True))
    margins = [base["margins"][at][_first_difference(a, b)] for at, (a, b) in enumerate(pairs) if a != b]
    shared = [_shared(a, b) for a, b in pairs]
    theirs, ours = (list(map(_rounds_of, each["round_tokens"], shared)) for each in (base, row))
    ratio, spread = _ratio(ours, theirs) if sum(theirs) else (None, [])
    return {
        "texts": len(pairs), "equal_texts": len(pairs) - len(margins), "margins": margins, "shared_tokens": sum(shared),
        "rounds_ratio": ratio and round(ratio, 6), "error": round(_error(spread), 6) if spread else None,
    }  # fmt: skip


def _drawn(base: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the drafts kept a round of drawn texts. A text's rounds depend on each other, so a text is one
    observation; texts of the same question and seed are a pair, since questions differ too. A loss one standard error
    beyond the limit is found five times out of six."""
    (theirs, their_spread), (ours, our_spread) = (_kept(each["round_tokens"]) for each in (base, row))
    if not theirs:
        return {"kept_ratio": None, "error": None, "finds_loss": None}
    error = _error([b - a for a, b in zip(their_spread, our_spread, strict=True)]) / theirs
    return {
        "kept_ratio": round(ours / theirs, 6), "error": round(error, 6), "finds_loss": round((ERRORS + 1) * error, 3),
    }  # fmt: skip


def _kept(texts: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
    """Return the drafts kept a round, and how far each text is from that; 0 if there are no rounds."""
    rounds = [len(tokens) - 1 for tokens in texts]
    if not sum(rounds):
        return 0.0, [0.0] * len(rounds)
    return _ratio([sum(tokens[1:]) - count for tokens, count in zip(texts, rounds, strict=True)], rounds)


def _ratio(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, list[float]]:
    """Return the ratio of two sums, and how far each pair of terms is from it, so that the standard error of these
    distances' mean is the ratio's."""
    ratio, mean = sum(parts) / sum(wholes), fmean(wholes)
    return ratio, [(part - ratio * whole) / mean for part, whole in zip(parts, wholes, strict=True)]


def _error(spread: Sequence[float]) -> float:
    """Return the standard error of a mean."""
    return stdev(spread) / math.sqrt(len(spread))


def _rounds_of(round_tokens: Sequence[int], tokens: int) -> float:
    """Return the rounds that a text's first tokens took, the last in part. The prompt's step is none."""
    rounds, left = 0.0, tokens - round_tokens[0]
    for count in round_tokens[1:]:
        rounds += min(1.0, max(0.0, left / count))
        left -= count
    return rounds


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return with how many same tokens two texts begin."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the first place at which two texts differ; the last of `one` if it ends where the other goes on."""
    return min(_shared(one, other), len(one) - 1)


def trained_problems(found: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return every claim that does not hold: an arm that failed, rounds that cannot be told apart, more rounds for the
    same tokens, other drafts kept of drawn texts, a greedy text that leaves its peer's where no near tie was."""
    messages = vllm_arm.failures(found)
    for each in found:
        merged = [row for row in each["rows"] if row["rounds"] < row["counted_rounds"]]
        messages += [
            f"{each['arm']['name']}: outputs of {row['rounds']} rounds, but vLLM counts {row['counted_rounds']}"
            for row in merged
        ]
    for row in compared:
        where = f"{row['arm']}, temperature {row['temperature']:g}"
        messages += [f"{where}: {problem}" for problem in _acceptance_problems(row) if row["judged"]]
        wide = [margin for margin in row.get("margins", ()) if margin > TIE and row["parts_at_ties"]]
        messages += [f"{where}: a text differs at a margin of {margin:g}" for margin in wide]
    return messages


def _acceptance_problems(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a comparison finds, or that it cannot tell."""
    error, peer = row["error"], row["against"]
    if row["temperature"]:
        if error is None:
            yield f"{peer} keeps no drafts"
        elif abs(row["kept_ratio"] - 1) > ERRORS * error:
            yield f"keeps {row['kept_ratio']:.3g} of the drafts that {peer} keeps, with a standard error of {error:.2g}"
    elif error is None or ERRORS * error > MORE_ROUNDS:
        yield f"shares {row['shared_tokens']} tokens with {peer}, too few to compare rounds"
    elif row["rounds_ratio"] > 1 + MORE_ROUNDS:
        yield f"{row['rounds_ratio']:.3g} times the rounds of {peer} for the same tokens"


if __name__ == "__main__":
    vllm_arm.run_arm(TrainedArm, measure)
