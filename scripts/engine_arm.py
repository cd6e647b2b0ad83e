"""Measure one whole engine, vLLM's or this library's LLM: python scripts/engine_arm.py ARM FILE, with an EngineArm as
JSON. See vllm_figures.py.

Engines run the same Llama of random weights on the same prompts. Ours is made as a user makes it: LLM of a folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from attn_backends.engines.vllm.names import DRAFT_HEAD, PLAIN, ROUNDED
from benchmarks.measure import largest_kernels
from benchmarks.random_model import save_random
from scripts import vllm_arm
from scripts.engine_runs import Engine, decoding_run, speeds, whole_runs
from scripts.vllm_worker import weight_shapes

VLLM, OURS, PLUGGED = "vLLM", "our engine, LLM", "vLLM with our linear layers"
OWN_HEADS = frozenset({"eagle3", "dflash"})
"""Kinds of drafts of which vLLM rounds no head: those with a vocabulary of their own, and blocks."""
CHANNELS = "fp8_per_channel"
"""vLLM's name for 8-bit weights with a scale for each output: what `weights="fp8"` is here."""
DRAFTS = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "dflash": "DFlash", "mtp": "MTP", "qwen3.5-mtp": "MTP"}
"""Kinds of drafts, in words."""
PREFILL_REQUESTS, PREFILL_TOKENS = 16, 1000
MANY = 256
"""Requests for which vLLM without a draft makes as many graphs as by its default: for up to 512 tokens."""
MOST_KERNELS = 16
"""Kernels that a profile names: of the prompts, and of whole requests, the fewest and the most."""


@dataclass(frozen=True, kw_only=True)
class EngineArm:
    """One engine and its settings.

    engine         VLLM, OURS or PLUGGED
    steps, kept    draft tokens per round, and the mean number of them that is kept; 0: no draft
    weights        whether the target's matrix products read 8-bit weights
    draft_weights  likewise the draft's, with its copy of the target's output projection
    local_argmax   vLLM's use_local_argmax_reduction: the draft's tokens are maxima, and its logits are not kept
    size, kind     of target and draft, keys of vllm_arm.SIZES and KINDS
    models         of PLUGGED: those with our linear layers, "draft", "target" or both in this order
    head           of PLUGGED: how the draft reads its head, in the words of DRAFT_HEAD; empty: as vLLM does
    """

    engine: str
    steps: int = 0
    kept: float = 0.0
    weights: bool = False
    draft_weights: bool = False
    local_argmax: bool = False
    size: str = "llama3-8b"
    kind: str = "eagle"
    requests: tuple[int, ...] = vllm_arm.REQUESTS
    models: str = ""
    head: str = ""

    num_gpus = 1
    is_timed = True
    script = "engine_arm.py"

    @property
    def name(self) -> str:
        draft = f"{DRAFTS[self.kind]} K={self.steps} keeps {self.kept:g}" if self.steps else "no draft"
        more = {"fp8 target": self.weights, "fp8 draft": self.draft_weights, "local argmax": self.local_argmax}
        more |= {f"ours in {self.models}": bool(self.models), f"head in {self.head}": bool(self.head)}
        return " ".join((self.engine, self.size, draft, *(name for name, on in more.items() if on)))

    def quantization(self, model: str) -> str | None:
        """Return vLLM's name for how a model, "draft" or "target", multiplies; None for its default."""
        rounded = self.draft_weights if model == "draft" else self.weights
        if model == "draft" and self.kind == "mtp":
            # vLLM builds this draft with the target's name.
            return None
        if model in self.models.split():
            return ROUNDED if rounded else PLAIN
        return CHANNELS if rounded else None

    @property
    def vllm_rounds_head(self) -> bool:
        """Whether vLLM gives the draft an 8-bit copy of its head."""
        return self.draft_weights and not self.head and self.kind not in OWN_HEADS


def token_prompts(requests: int, vocab: int) -> list[list[int]]:
    """Return the token ids of vllm_arm's prompts."""
    return [prompt["prompt_token_ids"] for prompt in vllm_arm.prompts(requests, vocab)]


def measure(arm: EngineArm, alone: Callable[[], None]) -> dict[str, Any]:
    """Return a row for each number of requests, the speed of prompts, and how the engine ran. alone: see
    vllm_arm.run_arm."""
    began = time.monotonic()
    # vLLM rounds weights as it loads them, so 8-bit ones stay those of its loader of random weights.
    fills = not (arm.weights or arm.draft_weights)
    engine = Ours(arm) if arm.engine == OURS else Theirs(vllm_options(arm), fills=fills, head=arm.head)
    up_s = round(time.monotonic() - began, 1)
    alone()
    vocab, new_tokens, rows = vllm_arm.SIZES[arm.size][5], vllm_arm.NEW_TOKENS, []
    for requests in arm.requests:
        prompts = token_prompts(requests, vocab)
        whole = whole_runs(engine, prompts, new_tokens)
        decoding = [decoding_run(engine, prompts, new_tokens) for _ in range(vllm_arm.REPEATS)]
        row = {"requests": requests, "tokens_per_s": speeds(whole), "decode_tokens_per_s": speeds(decoding)}
        if arm.steps:
            # The first token of each request comes from its prompt.
            row |= {
                "kept": [round(run.kept(requests), 3) for run in whole],
                "decode_kept": [round(run.kept(0), 3) for run in decoding],
            }
        rows.append(row)
    prompts = prefill_prompts(vocab)
    tokens = sum(map(len, prompts))
    prefill: dict[str, Any] = {
        "requests": len(prompts),
        "prompt_tokens": tokens,
        "tokens_per_s": [round(tokens / run.seconds, 1) for run in whole_runs(engine, prompts, 1)],
    }
    if torch.cuda.is_available():
        prefill |= largest_kernels(lambda: engine.generate(prompts, 1), MOST_KERNELS)
        for at in (0, -1):
            rows[at] |= profile_of_requests(engine, arm.requests[at], vocab)
    return {**engine.about, "up_s": up_s, "rows": rows, "prefill": prefill}


def profile_of_requests(engine: Engine, requests: int, vocab: int) -> dict[str, object]:
    """Return where the device's time goes while it serves so many whole requests."""
    prompts = token_prompts(requests, vocab)
    return largest_kernels(lambda: engine.generate(prompts, vllm_arm.NEW_TOKENS), MOST_KERNELS)


def prefill_prompts(vocab: int) -> list[list[int]]:
    """Return prompts of one length."""
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab, (PREFILL_REQUESTS, PREFILL_TOKENS), generator=numbers).tolist()


class Ours:
    """`LLM` of a folder, with the defaults of a user."""

    def __init__(self, arm: EngineArm) -> None:
        from spec_decode.llm import LLM

        self._arm = arm
        with TemporaryDirectory() as folder:
            self._llm = LLM(**llm_options(arm, Path(folder)))
        self.about = {"explain": self._llm.explain().splitlines()}
        self._handles: list[Any] = []
        self._rounds_before = 0

    @property
    def rounds(self) -> int:
        return self._rounds_before + self._llm.engine.stats.drafted_for

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self._rounds_before = self.rounds  # generate starts to count anew
        self._llm.generate(prompts, self._params(prompts, new_tokens), progress=False)

    def submit(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        from spec_decode.engine import Request

        params = self._params(prompts, new_tokens)
        requests = [Request(prompt=prompt, sampling=each) for prompt, each in zip(prompts, params, strict=True)]
        self._handles = [self._llm.engine.submit(request) for request in requests]

    def step(self) -> list[int]:
        self._llm.engine.step()
        return [len(handle.generation.token_ids) for handle in self._handles]

    def _params(self, prompts: Sequence[list[int]], new_tokens: int) -> list[Any]:
        """Return greedy parameters with a seed each: the seed also draws how many drafts are kept."""
        from spec_decode.sampling import SamplingParams

        return [SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=seed) for seed in range(len(prompts))]


def llm_options(arm: EngineArm, folder: Path) -> dict[str, Any]:
    """Write the models to the folder, and return the arguments of LLM."""
    own = bool(arm.steps and not vllm_arm.KINDS[arm.kind])
    target = write_model(folder / "target", arm.size, with_draft=own)
    options: dict[str, Any] = {"model": target, "max_num_seqs": max(arm.requests)}
    if arm.steps:
        options |= {
            "draft": target if own else write_model(folder / "draft", arm.size, kind=arm.kind),
            "num_speculative_tokens": arm.steps, "verification": f"synthetic:{arm.kept:g}",
        }  # fmt: skip
    chosen = {"weights": arm.weights, "draft_weights": arm.draft_weights}
    return options | {name: "fp8" for name, on in chosen.items() if on}


def write_model(folder: Path, size: str, *, kind: str = "", with_draft: bool = False) -> Path:
    """Write a model in the published layout: config.json, a tokenizer with a word for each token, and random weights.
    kind: as in vllm_arm.model_folder; with_draft: whether a target has its own draft's weights too."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    config = json.loads(Path(vllm_arm.model_folder(size, kind=kind), "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"word{token}": token for token in range(config["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    weights = weight_shapes(SimpleNamespace(**config), is_draft=bool(kind))
    if with_draft:
        weights |= weight_shapes(SimpleNamespace(**config), is_draft=True)
    save_random(folder, {name: shape for name, (shape, _) in weights.items()})
    return folder


class Theirs:
    """vLLM with these arguments of vllm.LLM. fills: whether its weights become those of vllm_worker.random_weights;
    head: see EngineArm."""

    def __init__(self, options: Mapping[str, Any], *, fills: bool, head: str = "") -> None:
        os.environ.update({**vllm_arm.ENVIRONMENT, vllm_arm.VALIDATE: "0", DRAFT_HEAD: head})
        os.environ["PYTHONPATH"] = os.pathsep.join([str(vllm_arm.ROOT), os.environ.get("PYTHONPATH", "")])
        import vllm

        if options.get("speculative_config", {}).get("method") == "eagle3":
            keep_own_head()
        self._new_params, self._llm = vllm.SamplingParams, vllm.LLM(**options)
        if fills:
            self._llm.collective_rpc("fill_weights", args=(vllm_arm.SEED,))
        config = self._llm.llm_engine.vllm_config
        self.about = {"vllm": vllm.__version__, "graph_mode": str(config.compilation_config.cudagraph_mode)}
        self._waiting, self._counts, self._ids = 0, dict[str, int](), count()
        self.rounds = 0
        self._count_rounds(self._llm.llm_engine.engine_core.engine_core.scheduler)

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self._llm.generate([_tokens(prompt) for prompt in prompts], self._params(new_tokens), use_tqdm=False)

    def submit(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self._waiting, self._counts = len(prompts), {}
        for prompt in prompts:
            self._llm.llm_engine.add_request(f"{next(self._ids)}", _tokens(prompt), self._params(new_tokens))

    @property
    def cached_tokens(self) -> int:
        """Tokens that its KV cache has room for."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    def step(self) -> list[int]:
        for output in self._llm.llm_engine.step():
            self._counts[output.request_id] = len(output.outputs[0].token_ids)
        return [*self._counts.values(), *[0] * (self._waiting - len(self._counts))]

    def _count_rounds(self, scheduler: Any) -> None:
        """Count what vLLM's scheduler takes in. Outputs do not show it: `vllm.LLM.generate` asks for the last ones."""
        take_in = scheduler.update_from_output

        def counted(scheduled: Any, found: Any) -> Any:
            # A step that was launched ahead may verify drafts of a request that has ended since.
            requests = map(scheduler.requests.get, scheduled.scheduled_spec_decode_tokens)
            self.rounds += sum(request is not None and not request.is_finished() for request in requests)
            return take_in(scheduled, found)

        scheduler.update_from_output = counted

    def _params(self, new_tokens: int) -> Any:
        return self._new_params(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)


def keep_own_head() -> None:
    """Let EAGLE-3 drafts of random weights keep the head of their own vocabulary. vLLM would give them the target's: it
    learns from a checkpoint's names whether a draft has one."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True


def vllm_options(arm: EngineArm) -> dict[str, Any]:
    """Return the arguments of vllm.LLM: its defaults, compiled, on its own attention backends."""
    same = vllm_arm.Arm(
        "", arm.steps, arm.size, arm.kept, compiled="deepseek" not in arm.size, requests=arm.requests, kind=arm.kind
    )
    # The draft's attention is the target's.
    options = vllm_arm.engine_options(replace(same, draft=same.target if arm.steps else ""))
    if not arm.steps:
        options["max_num_seqs"] = MANY
    options |= _given(quantization=arm.quantization("target"))
    if arm.steps:
        options["speculative_config"] |= _given(
            quantization=arm.quantization("draft"),
            draft_lm_head_quantization="fp8" if arm.vllm_rounds_head else None,
            use_local_argmax_reduction=arm.local_argmax or bool(arm.head) or None,
        )
    return options


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _tokens(prompt: list[int]) -> Any:
    return {"prompt_token_ids": prompt}


def engine_arms() -> list[EngineArm]:
    """Return the arms, the most telling first: each of ours after vLLM's of the same settings, vLLM's further option
    for its best drafts, both engines over a hybrid target, vLLM with our linear layers, then drafts of other kinds."""
    drafted, bits = {"steps": 7, "kept": 3.2}, {"weights": True, "draft_weights": True}
    settings: list[dict[str, Any]] = [
        {}, drafted, drafted | {"draft_weights": True}, drafted | bits, {"weights": True}, drafted | {"weights": True},
    ]  # fmt: skip
    arms = [EngineArm(engine=engine, **each) for each in settings for engine in (VLLM, OURS)]
    best = [each for each in arms if each.engine == VLLM and each.steps and (each.draft_weights or not each.weights)]
    hybrid = [replace(each, size="qwen3.5", kind="qwen3.5-mtp") for each in arms[:4]]
    hybrid = [replace(each, steps=3, kept=1.8) if each.steps else each for each in hybrid]
    further = (replace(each, local_argmax=True) for each in best)
    return [*arms, *further, *hybrid, *_plugged_arms(drafted, bits), *_other_drafts()]


def _plugged_arms(drafted: dict[str, Any], bits: dict[str, Any]) -> Iterator[EngineArm]:
    """Yield the arms of vLLM with our linear layers: draft, target and both, in 16 bits and in 8, with vLLM's head and
    with ours."""
    narrow = drafted | {"draft_weights": True}
    both: dict[str, Any] = {"models": "draft target"}
    for settings in (
        drafted | both | {"head": "16"}, narrow | both | {"head": "fp8"}, drafted | bits | both | {"head": "fp8"},
        drafted | {"models": "draft"}, drafted | {"models": "target"}, drafted | both, drafted | {"head": "16"},
        narrow | {"models": "draft"}, narrow | {"head": "fp8"}, drafted | {"weights": True, "models": "target"},
        drafted | bits | both, {"models": "target"}, {"weights": True, "models": "target"},
    ):  # fmt: skip
        yield EngineArm(engine=PLUGGED, **settings)


def _other_drafts() -> Iterator[EngineArm]:
    """Yield vLLM's defaults, its best own options, and our layers and heads for drafts other than EAGLE."""
    bits, fewer = {"draft_weights": True}, {"local_argmax": True}
    eagle3 = EngineArm(engine=VLLM, kind="eagle3", size="qwen3-8b", steps=7, kept=3.2)
    dflash = replace(eagle3, kind="dflash", steps=15, kept=5.0)
    mtp = EngineArm(engine=VLLM, kind="mtp", size="deepseek-v3-shard", steps=3, kept=1.8)
    for arm in (eagle3, dflash):
        yield from (arm, replace(arm, **fewer), replace(arm, **bits, **fewer))
        for models in ("draft", "draft target"):
            ours = replace(arm, engine=PLUGGED, models=models)
            yield from (replace(ours, head="16"), replace(ours, head="fp8", **bits))
    yield from (mtp, replace(mtp, **bits))
    ours = replace(mtp, engine=PLUGGED)
    yield from (replace(ours, head="16"), replace(ours, head="fp8", **bits))


def engine_problems(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each arm that failed, and each of ours whose target runs elsewhere than on this library's layers."""
    ours = [each for each in found if each["arm"]["engine"] == OURS and each["rows"]]
    elsewhere = [each for each in ours if "target runs on this library's layers" not in each["explain"]]
    return [*vllm_arm.failures(found), *(f"{each['arm']['name']}: {each['explain'][0]}" for each in elsewhere)]


if __name__ == "__main__":
    vllm_arm.run_arm(EngineArm, measure)
