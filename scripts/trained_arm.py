"""Serve a trained model with its draft in vLLM, on one attention backend and with one way to read the draft: python
scripts/trained_arm.py ARM FILE, with a TrainedArm as JSON. See vllm_figures.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attn_backends.engines.vllm.names import DRAFT_HEAD, PLAIN, ROUNDED
from scripts import vllm_arm
from scripts.engine_arm import CHANNELS

BASE = "FLASH_ATTN"
BACKENDS = (BASE, "FLASHINFER_IN_GRAPH", "ATTN_BACKENDS_TRITON_PAGED", "ATTN_BACKENDS_FLASH_ATTN3", "TRITON_ATTN")
"""vLLM's own on Hopper, ours, and another of vLLM's: how far that one differs is the effect of rounding."""
READS = (("", ""), (PLAIN, "16"), (CHANNELS, ""), (ROUNDED, "fp8"))
"""How the draft of BASE multiplies and reads its head: vLLM's default and ours, in 16 and in 8 bits."""
STEPS, NEW_TOKENS = 4, 192
TEMPERATURES = (0.0, 1.0)
TIE = 0.25
"""Difference of two log probabilities that bf16's rounding can turn around."""
NOISE = 0.08
"""Relative difference of the drafts kept in a round that about 1,000 rounds can have by chance."""
QUESTIONS = (
    "What is the Moon?", "Explain photosynthesis to a child.", "Write a short poem about rain.",
    "How do I boil an egg?", "List three reasons to learn to swim.", "What is the difference between a lake and a sea?",
    "Write a polite email that declines an invitation.", "Describe a market in the morning.",
    "Why is the sky blue?", "Give me a recipe for pancakes.", "What does a compiler do?",
    "Tell me about the history of bread.",
)  # fmt: skip
"""The draft was not trained on these."""


@dataclass(frozen=True, kw_only=True)
class TrainedArm:
    """One engine.

    backend        the attention backend of target and draft
    linears        vLLM's name for how the draft multiplies; empty: its default
    head           how the draft reads its head, in the words of DRAFT_HEAD; empty: as vLLM does
    target, draft  folders in the project's
    """

    backend: str
    linears: str = ""
    head: str = ""
    target: str = "build/smollm2"
    draft: str = "examples/smollm2/draft"

    num_gpus = 1
    is_timed = True
    script = "trained_arm.py"

    @property
    def name(self) -> str:
        reads = f" draft {self.linears}" * bool(self.linears) + f" head {self.head}" * bool(self.head)
        return f"trained {Path(self.target).name} {self.backend}{reads}"


def measure(arm: TrainedArm) -> dict[str, Any]:
    """Return a row for each temperature: the texts, how sure the target is of each token, and the drafts kept."""
    os.environ.update({**vllm_arm.ENVIRONMENT, vllm_arm.VALIDATE: "1", DRAFT_HEAD: arm.head})
    import vllm

    llm = vllm.LLM(**engine_options(arm))
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    rows, before = [], _counts(llm)
    for temperature in TEMPERATURES:
        params = [
            vllm.SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, seed=seed, logprobs=2)
            for seed in range(len(chats))
        ]
        answers = [answer.outputs[0] for answer in llm.chat(chats, params, use_tqdm=False)]
        after = _counts(llm)
        rounds, kept = (now - then for now, then in zip(after, before, strict=True))
        before = after
        rows.append({
            "temperature": temperature, "requests": len(chats), "rounds": rounds, "kept": round(kept / rounds, 3),
            "texts": [list(answer.token_ids) for answer in answers],
            "margins": [[_margin(token) for token in answer.logprobs] for answer in answers],
        })  # fmt: skip
    return {"vllm": vllm.__version__, "rows": rows}


def engine_options(arm: TrainedArm) -> dict[str, Any]:
    """Return the arguments of vllm.LLM."""
    root = vllm_arm.ROOT
    return {
        "model": str(root / arm.target), "dtype": "bfloat16", "seed": 0, "max_model_len": 1024, "max_num_seqs": 16,
        "gpu_memory_utilization": 0.3, "enable_prefix_caching": False, "disable_log_stats": False,
        "enable_flashinfer_autotune": False, "attention_backend": arm.backend,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "speculative_config": {
            "method": "eagle3", "model": str(root / arm.draft), "num_speculative_tokens": STEPS,
            "attention_backend": arm.backend, "use_local_argmax_reduction": bool(arm.head),
            "quantization": arm.linears or None,
        },
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
    read the draft."""
    backends = [TrainedArm(backend=backend) for backend in BACKENDS]
    return [*backends, *(TrainedArm(backend=BASE, linears=linears, head=head) for linears, head in READS[1:])]


def trained_agreement(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare each arm's rows with BASE's: the ratio of drafts kept, and of greedy texts how many are equal and the
    margin of BASE's token where each other text leaves it."""
    bases = [each for each in found if each["rows"] and _is_base(each["arm"])]
    compared = []
    for each in found if bases else ():
        for base, row in zip(bases[0]["rows"], each["rows"], strict=False):
            cell = {"arm": each["arm"]["name"], "temperature": row["temperature"], "kept": row["kept"]}
            cell["kept_ratio"] = round(row["kept"] / base["kept"], 3) if base["kept"] else 0.0
            if not row["temperature"]:
                texts = zip(base["texts"], row["texts"], base["margins"], strict=True)
                left = [margins[_first_difference(a, b)] for a, b, margins in texts if a != b]
                cell |= {"texts": len(base["texts"]), "equal_texts": len(base["texts"]) - len(left), "margins": left}
            compared.append(cell)
    return compared


def _is_base(arm: Mapping[str, Any]) -> bool:
    return bool(arm["backend"] == BASE and not arm["linears"] and not arm["head"])


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the first place at which two texts differ; the last of `one` if it ends where the other goes on."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)) - 1)


def trained_problems(found: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return every claim that does not hold: an arm that failed, other drafts kept, a greedy text that leaves BASE's
    where its token was no near tie."""
    messages = vllm_arm.failures(found)
    for row in compared:
        where = f"{row['arm']}, temperature {row['temperature']:g}"
        if abs(row["kept_ratio"] - 1) > NOISE:
            messages.append(f"{where}: keeps {row['kept_ratio']:g} of the drafts that {BASE} keeps")
        wide = [margin for margin in row.get("margins", ()) if margin > TIE]
        messages += [f"{where}: a text differs at a margin of {margin:g}" for margin in wide]
    return messages


if __name__ == "__main__":
    vllm_arm.run_arm(TrainedArm, measure)
