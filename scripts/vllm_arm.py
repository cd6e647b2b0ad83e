"""Measure one vLLM engine: python scripts/vllm_arm.py ARM FILE, with an Arm as JSON. See vllm_figures.py."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attn_backends.engines.vllm import VALIDATE
from scripts.gpu_turns import GpuTurn
from spec_decode.files import write_whole

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "llama3-8b": (4096, 14336, 32, 8, 128, 128256, 32),
    "small": (1024, 2816, 8, 2, 128, 32000, 4),
    "llama-1b": (2048, 8192, 32, 8, 64, 128256, 16),
    "dim-256": (4096, 12288, 16, 4, 256, 151936, 32),
    "qwen3-8b": (4096, 12288, 32, 8, 128, 151936, 36),
    "qwen3-small": (1024, 2816, 8, 2, 128, 32000, 8),
    "qwen3.5": (4096, 12288, 16, 4, 256, 248320, 4),
    "qwen3.5-small": (1024, 2816, 4, 2, 256, 32000, 4),
    "deepseek-v3": (7168, 18432, 128, 128, 64, 129280, 4),
    "deepseek-v3-shard": (7168, 2304, 16, 16, 64, 16160, 4),
    "deepseek-small": (1024, 2816, 16, 16, 64, 32000, 4),
}
"""hidden_size, intermediate_size, heads, KV heads, head_dim, vocab_size, layers.

llama-1b has the shape of Llama-3.2-1B, and dim-256 the heads of Qwen3.5's attention layers. qwen3.5 is four layers of
the published width, three with recurrent states and one with attention, plus the published MTP layer. vLLM computes its
prompts' states by Triton's kernels.

deepseek-v3 is the first four of the 61 published layers, three dense and one with experts, plus the published MTP
layer, also with experts: 53 GB in bfloat16, which fits an H100. -shard is one GPU's part of it under tensor parallelism
over eight, 8 GB. deepseek-small is dense: an expert chosen by a narrow margin would change more than attention does.
For DeepSeek, head_dim is the rotary part.
"""
EXPERT_WIDTH = {"deepseek-v3": 2048, "deepseek-v3-shard": 256}
"""intermediate_size of one expert, for models that have experts."""
DENSE_LAYERS = 3
"""Leading dense layers of a model with experts."""
LATENTS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}  # fmt: skip
"""As published."""
STATES = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"], "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
"""As published."""
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
    "qwen3_5_text": {"architectures": ["Qwen3_5ForCausalLM"], "rms_norm_eps": 1e-6, **STATES},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 10000.0, **LATENTS},
}
"""Configuration of each family of models."""
KINDS = {
    "eagle": "EagleLlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel", "mtp": "", "qwen3.5-mtp": "",
}  # fmt: skip
"""Kinds of drafts and their architectures. DFlash and DFlash2 propose a block; an MTP layer is part of its target."""
DRAFT_VOCAB = 32000
"""Tokens that an EAGLE-3 draft can propose, as published; in a model with fewer, an eighth of its own."""
BLOCK_LAYERS = 5
"""Layers of a block draft, and target layers whose states it reads."""
DFLASH2 = {
    "block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
    "causal": False,
}  # fmt: skip
"""As published."""
REQUESTS = (1, 4, 16, 32)
Run: TypeAlias = tuple[float, list[list[int]]]
"""A batch: its seconds, and each request's new tokens."""
PROMPT, NEW_TOKENS, REPEATS = 512, 256, 3
WATCHED_REPEATS, WATCHED_MOST = 8, 64
"""Runs with comparisons, alternating with as many without, since a cost of 2 % is less than engines differ by. And the
maximum, if those compared nothing: the first comparison compiles kernels, and the next comes long after it."""
SEED = 20
SHARE = 0.15
"""Of a GPU's memory that must be free when vLLM starts. Beside other engines, more is not, and every arm states how
large its cache is."""
# Keep NVLink multicast off: where it does not work, vLLM's collectives hang.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_PLUGINS": "attn_backends",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One engine.

    draft          the draft's attention backend; empty: no draft
    steps          draft tokens per round
    size           key of SIZES
    kept           mean drafts kept per round, whichever they are; 0: the target decides
    num_gpus       tensor parallelism
    requests       numbers of concurrent requests to time
    kind           kind of the draft, a key of KINDS
    compiled       vLLM's default: layers compiled by torch, piecewise graphs where full ones are impossible;
                   otherwise uncompiled layers, with full graphs for decodes or none
    watched        whether the plug-in validates the draft's metadata: runs with and without comparisons alternate
    """

    draft: str
    steps: int
    size: str = "llama3-8b"
    kept: float = 0.0
    num_gpus: int = 1
    requests: tuple[int, ...] = REQUESTS
    compiled: bool = False
    kind: str = "eagle"
    watched: bool = False

    script = "vllm_arm.py"

    @property
    def target(self) -> str:
        """vLLM's own choice for the target on Hopper."""
        return "FLASH_ATTN_MLA" if self.size.startswith("deepseek") else "FLASH_ATTN"

    @property
    def is_timed(self) -> bool:
        """If not, its drafts are compared, next to other arms on the same GPU."""
        return bool(self.kept) or not self.draft

    @property
    def name(self) -> str:
        kept = f"keeps {self.kept:g}" if self.kept else "exact"
        more = f"{'' if self.kind == 'eagle' else f' {self.kind}'}{' compiled' if self.compiled else ''}"
        more += " watched" if self.watched else ""
        return f"{self.draft or 'no draft'} K={self.steps} {self.size} {kept} TP={self.num_gpus}{more}"


def model_folder(size: str, *, kind: str = "", positions: int = 8192) -> str:
    """Make a folder that holds only a config.json: weights come later. kind: of a draft, in KINDS; empty: the
    target."""
    hidden, wide, heads, kv_heads, head_dim, vocab, layers = SIZES[size]
    families = {"qwen3": "qwen3", "qwen3.5": "qwen3_5_text", "deepseek": "deepseek_v3"}
    family = families.get(size.partition("-")[0], "llama")
    config = {
        "model_type": family, "hidden_size": hidden, "intermediate_size": wide, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab, "num_hidden_layers": layers,
        "max_position_embeddings": positions, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **FAMILIES[family],
    }  # fmt: skip
    if family == "deepseek_v3":
        has_experts = size in EXPERT_WIDTH
        config |= {
            "moe_intermediate_size": EXPERT_WIDTH.get(size, wide),
            # The MTP layer follows the last one.
            "first_k_dense_replace": DENSE_LAYERS if has_experts else layers + 1,
        }
    if kind:
        config |= _draft_config(kind, vocab, layers)
    # One folder for each config: vLLM finds what it compiled by the model's path.
    text = json.dumps(config)
    folder = Path(tempfile.gettempdir(), f"vllm-arm-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    write_whole(folder / "config.json", text.encode())
    return str(folder)


def _draft_config(kind: str, vocab: int, layers: int) -> dict[str, Any]:
    """Return the entries in which a draft's configuration differs from its target's."""
    if kind == "eagle":
        return {"architectures": [KINDS[kind]], "num_hidden_layers": 1}
    if kind == "eagle3":
        own = DRAFT_VOCAB if vocab > DRAFT_VOCAB else vocab // 8
        return {"architectures": [KINDS[kind]], "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": own}
    read = [1 + at * (layers - 4) // (BLOCK_LAYERS - 1) for at in range(BLOCK_LAYERS)]
    config = {
        "architectures": [KINDS[kind]], "num_hidden_layers": BLOCK_LAYERS, "block_size": 16,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": read},
    }  # fmt: skip
    if kind == "dflash2":
        config["dflash_config"] |= DFLASH2
        config |= {
            "block_size": DFLASH2["block_size"], "layer_types": ["sliding_attention"] * BLOCK_LAYERS,
            "sliding_window": 2048, "use_sliding_window": True, "max_window_layers": 0,
        }  # fmt: skip
    return config


def engine_options(arm: Arm, positions: int = 8192) -> dict[str, Any]:
    """Return the arguments of vllm.LLM. positions: of the models.

    vLLM chooses the sizes of its graphs: compiled, with a draft, it has piecewise ones for prompts of up to 512 tokens.
    """
    options = {
        "model": model_folder(arm.size, positions=positions), "load_format": "dummy", "skip_tokenizer_init": True,
        "max_model_len": 4096, "max_num_seqs": max(REQUESTS), "max_num_batched_tokens": 8192, "dtype": "bfloat16",
        "seed": 0, "gpu_memory_utilization": SHARE, "kv_cache_memory_bytes": 8 << 30, "enable_prefix_caching": False,
        "tensor_parallel_size": arm.num_gpus, "disable_custom_all_reduce": True, "enable_flashinfer_autotune": False,
        "worker_extension_cls": "scripts.vllm_worker.MeasuredWorker",
        "attention_config": {"backend": arm.target},
        "compilation_config": {} if arm.compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }  # fmt: skip
    if "qwen3.5" in arm.size:
        # FlashInfer's kernels for prompts, which vLLM takes on Hopper, need a CUDA compiler on the machine.
        options["gdn_prefill_backend"] = "triton"
    if arm.draft:
        speculation: dict[str, Any] = {
            "method": "dflash" if arm.kind.startswith("dflash") else arm.kind.rpartition("-")[2],
            "num_speculative_tokens": arm.steps, "attention_backend": arm.draft,
        }  # fmt: skip
        if KINDS[arm.kind]:
            speculation["model"] = model_folder(arm.size, kind=arm.kind, positions=positions)
        if arm.kept:
            # vLLM also counts the target's own token.
            speculation |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1 + arm.kept}
        options["speculative_config"] = speculation
    return options


def prompts(count: int, vocab: int) -> list[dict[str, list[int]]]:
    """Return the prompts, identical in every arm, of varying lengths."""
    chance = random.Random(count)
    lengths = [PROMPT + chance.randrange(-64, 64) for _ in range(count)]
    return [{"prompt_token_ids": [chance.randrange(3, vocab) for _ in range(length)]} for length in lengths]


def measure(arm: Arm, alone: Callable[[], None]) -> dict[str, Any]:
    """Return a row for each number of requests, and how the engine ran. alone: see run_arm."""
    os.environ.update(ENVIRONMENT | {VALIDATE: str(int(arm.watched))})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    import torch
    import vllm

    began = time.monotonic()
    llm = vllm.LLM(**engine_options(arm))
    llm.collective_rpc("fill_weights", args=(SEED,))
    config = llm.llm_engine.vllm_config
    found: dict[str, Any] = {
        "vllm": vllm.__version__, "up_s": round(time.monotonic() - began, 1),
        "graph_mode": str(config.compilation_config.cudagraph_mode), "rows": [],
    }  # fmt: skip
    if arm.is_timed:
        alone()
    greedy = vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)

    def generate(count: int, *, count_waits: bool = False) -> Run:
        if arm.draft:
            llm.collective_rpc("watch_drafts", args=(count_waits,))
        start = time.perf_counter()
        answers = llm.generate(prompts(count, SIZES[arm.size][5]), greedy, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - start, [list(answer.outputs[0].token_ids) for answer in answers]

    for count in arm.requests:
        # Anything compiled on first use is compiled here.
        _, texts = generate(count, count_waits=True)
        counted = llm.collective_rpc("drafts_seen") if arm.draft else []
        row: dict[str, Any] = {"requests": count, "tokens_per_s": [], "host_us": [], "gpu_us": []}
        if not arm.is_timed:
            row |= {"texts": texts, "drafts": counted[0]["drafts"]}
        if counted:
            row |= {name: counted[0][name] for name in ("plans", "prefill_plans", "waits")}
            found["fused"] = [rank["fused"] for rank in counted]
        for _ in range(REPEATS if arm.is_timed and not arm.watched else 0):
            row["tokens_per_s"].append(_speed(*generate(count)))
            if arm.draft:
                seen = llm.collective_rpc("drafts_seen")[0]
                row["host_us"].append(_quantiles_us(seen["host_s"]))
                row["gpu_us"].append(_quantiles_us(seen["gpu_s"]))
        if arm.watched:
            row |= watched_runs(
                partial(generate, count), lambda on: llm.collective_rpc("compare_drafts", args=(on,))[0]
            )
        found["rows"].append(row)
    return found


def watched_runs(generate: Callable[[], Run], compare: Callable[[bool], dict[str, Any]]) -> dict[str, Any]:
    """Alternate runs with comparisons and without, and return a row's fields. compare: switches comparisons on or off,
    and returns their totals so far."""
    runs: dict[bool, list[Run]] = {True: [], False: []}
    before = compare(True)
    for turn in range(2 * WATCHED_MOST):
        # Over two of each, both come first equally often.
        if turn >= 2 * WATCHED_REPEATS and turn % 4 == 0:
            so_far = compare(True)
            # A difference ends the comparisons.
            if so_far["found"] or so_far["rounds"] > before["rounds"]:
                break
        watches = turn % 4 in (0, 3)
        compare(watches)
        runs[watches].append(generate())
    after = compare(True)
    return {
        "tokens_per_s": [_speed(*run) for run in runs[True]],
        "unwatched_tokens_per_s": [_speed(*run) for run in runs[False]],
        "watched_s": round(sum(seconds for seconds, _ in runs[True]), 3),
        "compared": after["rounds"] - before["rounds"],
        "compared_s": round(after["seconds"] - before["seconds"], 5),
        "difference": after["found"],
    }


def _speed(seconds: float, texts: list[list[int]]) -> float:
    return round(sum(map(len, texts)) / seconds, 1)


def _quantiles_us(seconds: list[float]) -> Any:
    """Return quantiles of the steps after the prompts', in microseconds."""
    from benchmarks.measure import quantiles

    return quantiles([1e6 * each for each in seconds[len(seconds) // 4 :]])


def run_arm(kind: Callable[..., T], measure: Callable[[T, Callable[[], None]], dict[str, Any]]) -> None:
    """Measure the arm of the command line, and write what was found to its file; then end the process. `measure` gets
    the arm, and what waits until it has its GPUs alone."""
    turn = GpuTurn.of_process()
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(sys.argv[1]).items()}
    Path(sys.argv[2]).write_text(json.dumps(measure(kind(**given), turn.alone)))
    # Do not wait for the engine's threads.
    sys.stdout.flush()
    os._exit(0)


def failures(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a message for each arm without a result."""
    return [f"{each['arm']['name']}: ended with {each['exit_status']}" for each in found if not each["rows"]]


if __name__ == "__main__":
    run_arm(Arm, measure)
