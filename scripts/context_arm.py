"""Measure one vLLM engine over long contexts: python scripts/context_arm.py ARM FILE, with a ContextArm as JSON. See
vllm_figures.py."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from scripts import vllm_arm
from scripts.engine_arm import Theirs
from scripts.engine_runs import WARM_UP, decoding_run, speeds

FA2 = 2
"""FlashAttention's version on cards of compute capability 8 and 12."""
CONTEXTS = (1024, 8192, 32768, 98304)
REQUESTS = (1, 8)
MOST_TOKENS = 1 << 18
"""Contexts of all requests together: 8 of the longest fit no H100, and their prompts take minutes."""
NEW_TOKENS, REPEATS = 256, 2
SPARE = 128
"""Tokens for each request that fill no page."""
FLASH_ATTN, TRITON, FLASHINFER = "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"
OURS = ("FLASHINFER_IN_GRAPH", "ATTN_BACKENDS_TRITON_PAGED")


@dataclass(frozen=True, kw_only=True)
class ContextArm:
    """One engine, timed over contexts that its cache holds already.

    target    the target's attention backend
    draft     the draft's; empty: no draft
    version   FlashAttention's version for FLASH_ATTN; 0: vLLM's choice
    steps     draft tokens per round
    kept      mean number of them that is kept
    size      key of vllm_arm.SIZES
    kind      kind of the draft, a key of vllm_arm.KINDS
    compiled  as in vllm_arm.Arm. A backend without full graphs has piecewise ones if compiled, and none otherwise
    contexts  tokens in the cache before decoding
    requests  numbers of concurrent requests, each with a context of its own
    """

    target: str
    draft: str = ""
    version: int = 0
    steps: int = 0
    kept: float = 0.0
    size: str = "llama3-8b"
    kind: str = "eagle"
    compiled: bool = False
    contexts: tuple[int, ...] = CONTEXTS
    requests: tuple[int, ...] = REQUESTS

    num_gpus = 1
    is_timed = True
    script = "context_arm.py"

    @property
    def name(self) -> str:
        draft = f"{self.kind} K={self.steps} keeps {self.kept:g} on {self.draft}" if self.draft else "no draft"
        version = f" {self.version}" * bool(self.version)
        return f"contexts {self.size} {self.target}{version}, {draft}{' compiled' * self.compiled}"


def measure(arm: ContextArm, alone: Callable[[], None]) -> dict[str, Any]:
    """Return a row for each context and number of requests, and how the engine ran. alone: see vllm_arm.run_arm."""
    began = time.monotonic()
    engine = Theirs(engine_options(arm), fills=True)
    found: dict[str, Any] = {**engine.about, "up_s": round(time.monotonic() - began, 1), "rows": []}
    alone()
    engine.generate(contexts(arm, min(arm.contexts), max(arm.requests), seed=-1), WARM_UP)
    for context in arm.contexts:
        for requests in arm.requests:
            row: dict[str, Any] = {"context": context, "requests": requests}
            needed = requests * (context + NEW_TOKENS + arm.steps)
            if requests * context > MOST_TOKENS:
                row |= {"left_out": f"{requests * context} tokens of context; at most {MOST_TOKENS} are timed"}
            elif needed > engine.cached_tokens:
                row |= {"left_out": f"{needed} tokens, and the cache has room for {engine.cached_tokens}"}
            else:
                row |= _speeds(engine, contexts(arm, context, requests, seed=context + requests))
            found["rows"].append(row)
    return found


def _speeds(engine: Theirs, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Return tokens a second of the prompts, then of the tokens after them, with the prompts in the prefix cache."""
    start = time.perf_counter()
    engine.generate(prompts, 1)
    prompt_s = time.perf_counter() - start
    # The first run with these prompts compiles what depends on their length.
    runs = [decoding_run(engine, prompts, NEW_TOKENS) for _ in range(1 + REPEATS)][1:]
    return {
        "prompt_tokens_per_s": round(sum(map(len, prompts)) / prompt_s, 1),
        "tokens_per_s": speeds(runs),
    }


def contexts(arm: ContextArm, length: int, count: int, *, seed: int) -> list[list[int]]:
    """Return prompts of this length, the same in every arm of a size."""
    chance, vocab = random.Random(seed), vllm_arm.SIZES[arm.size][5]
    return [[chance.randrange(3, vocab) for _ in range(length)] for _ in range(count)]


def engine_options(arm: ContextArm) -> dict[str, Any]:
    """Return the arguments of vllm.LLM."""
    same = vllm_arm.Arm(
        arm.draft, arm.steps, arm.size, arm.kept, requests=arm.requests, compiled=arm.compiled, kind=arm.kind
    )
    positions = max(arm.contexts) + NEW_TOKENS + 2 * (1 + arm.steps)
    options = vllm_arm.engine_options(same, positions)
    # vLLM reads attention_config before it loads plug-ins, and attention_backend after.
    attention = {"flash_attn_version": arm.version} if arm.version else {}
    options |= {
        "max_model_len": positions, "max_num_seqs": max(arm.requests), "kv_cache_memory_bytes": cache_bytes(arm),
        "enable_prefix_caching": True, "attention_backend": arm.target, "attention_config": attention,
    }  # fmt: skip
    return options


def cache_bytes(arm: ContextArm) -> int:
    """Return the bytes of a cache for the largest batch that is timed, and for a prefix that another one leaves."""
    _, _, _, kv_heads, head_dim, _, layers = vllm_arm.SIZES[arm.size]
    if arm.draft:
        layers += vllm_arm.BLOCK_LAYERS if arm.kind.startswith("dflash") else 1
    contexts = [size for each in arm.contexts for many in arm.requests if (size := each * many) <= MOST_TOKENS]
    tokens = max(contexts) + max(arm.requests) * (NEW_TOKENS + 2 * (1 + arm.steps) + SPARE)
    return tokens * layers * kv_heads * head_dim * 2 * torch.bfloat16.itemsize


def context_arms() -> list[ContextArm]:
    """Return the arms, the most telling first. Every target also runs without a draft, and FlashAttention's draft alone
    moves to each of our names. DFlash and other head dims are timed with one request."""
    eagle: dict[str, Any] = {"steps": 7, "kept": 3.2}
    dflash: dict[str, Any] = {"steps": 15, "kept": 5.0, "kind": "dflash", "size": "qwen3-8b"}
    old, new = ContextArm(target=FLASH_ATTN, version=FA2), ContextArm(target=FLASH_ATTN)
    triton, flashinfer = ContextArm(target=TRITON), ContextArm(target=FLASHINFER, compiled=True)
    ours = [ContextArm(target=name) for name in OURS]
    plain = [old, new, triton, flashinfer, *ours]

    def drafted(arm: ContextArm, on: str = "", **changes: Any) -> ContextArm:
        return replace(arm, draft=on or arm.target, **changes)

    arms = [drafted(old, **eagle), old, *(drafted(arm, **eagle) for arm in (*ours, triton, new, flashinfer))]
    arms += [drafted(arm, name, **eagle) for arm in (old, new) for name in OURS]
    one: dict[str, Any] = {"requests": (1,)}
    arms += [drafted(arm, **dflash, **one) for arm in (old, *ours, triton, new)]
    sizes = ("llama-1b", "dim-256")
    arms += [drafted(arm, **eagle, **one, size=size) for size in sizes for arm in (old, *ours, triton, new)]
    return [*arms, *plain[1:]]


def context_problems(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each arm that failed."""
    return vllm_arm.failures(found)


if __name__ == "__main__":
    vllm_arm.run_arm(ContextArm, measure)
