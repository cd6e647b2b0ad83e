"""vLLM accepts the options of the arms that compare whole engines, of those over long contexts, and of a trained model,
whose rounds its outputs tell apart."""

import inspect
import sys
from dataclasses import fields, replace

import pytest
import torch

from engine_kits.kernels import stand_in_for
from scripts import context_arm, engine_arm, trained_arm, vllm_arm
from tests.engines.vllm_runner import DIM, HEADS, KV_HEADS, NEEDS_VLLM, default_dtype, weights_left

pytestmark = NEEDS_VLLM
THEIRS = [arm for arm in engine_arm.engine_arms() if arm.kind == "eagle" and arm.engine != engine_arm.OURS]


@pytest.fixture
def tiny(one_process, monkeypatch):
    monkeypatch.setitem(vllm_arm.SIZES, "llama3-8b", (64, 96, HEADS, KV_HEADS, DIM, 128, 2))
    # vLLM imports it to learn the names of formats, and these arms read no such checkpoint.
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    stand_in_for("compressed_tensors")


@pytest.mark.parametrize("arm", THEIRS, ids=lambda arm: arm.name)
def test_vllm_takes_options_of_arm(arm, tiny):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import llama, llama_eagle
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("LlamaForCausalLM", llama.LlamaForCausalLM)
    ModelRegistry.register_model("EagleLlamaForCausalLM", llama_eagle.EagleLlamaForCausalLM)
    config = EngineArgs(**engine_arm.vllm_options(arm)).create_engine_config()
    assert config.model_config.quantization == arm.quantization("target")
    if not arm.steps:
        assert config.speculative_config is None
        return
    draft = config.speculative_config
    assert draft.draft_model_config.quantization == arm.quantization("draft")
    assert (draft.draft_lm_head_quantization == "fp8") is (arm.draft_weights and not arm.head)
    assert draft.use_local_argmax_reduction is (arm.local_argmax or bool(arm.head))
    assert draft.draft_sample_method == "greedy"
    assert hasattr(llama_eagle.EagleLlamaForCausalLM, "get_top_tokens"), "local argmax needs it"


def test_vllm_captures_the_prompt_of_one_request(tiny):
    """On a GPU: piecewise, for the target and for the draft's first step. And every timed round."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import llama, llama_eagle
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("LlamaForCausalLM", llama.LlamaForCausalLM)
    ModelRegistry.register_model("EagleLlamaForCausalLM", llama_eagle.EagleLlamaForCausalLM)
    arm = next(arm for arm in THEIRS if arm.steps)
    options = engine_arm.vllm_options(arm)
    # On a CPU, vLLM has no graphs, nor a default of their mode.
    options["compilation_config"] |= {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    config = EngineArgs(**options).create_engine_config()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config._set_cudagraph_sizes()
    captured = config.compilation_config.cudagraph_capture_sizes
    [prompt] = engine_arm.token_prompts(1, 128)
    assert len(prompt) <= max(captured) == 512
    assert {requests * (1 + arm.steps) for requests in arm.requests} <= set(captured)


def test_weights_of_eagle3_arm_fill_vllm_draft(tiny, monkeypatch):
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import llama_eagle3, qwen3
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import _should_share

    ModelRegistry.register_model("Qwen3ForCausalLM", qwen3.Qwen3ForCausalLM)
    ModelRegistry.register_model("LlamaForCausalLMEagle3", llama_eagle3.Eagle3LlamaForCausalLM)
    monkeypatch.setitem(vllm_arm.SIZES, "qwen3-8b", (64, 96, HEADS, KV_HEADS, DIM, 1024, 8))
    [plain, _, fastest, *_] = [arm for arm in engine_arm.engine_arms() if arm.kind == "eagle3"]
    for arm in (fastest, plain):
        config = EngineArgs(**engine_arm.vllm_options(arm)).create_engine_config()
        assert config.speculative_config.draft_model_config.quantization == arm.quantization("draft")
    with set_current_vllm_config(config), default_dtype(torch.bfloat16):
        model = initialize_model(config, model_config=config.speculative_config.draft_model_config, prefix="draft")
    assert model.lm_head.weight.shape == (128, 64), "it has a vocabulary of its own"
    heads = "has_own_lm_head", model.lm_head, ParallelLMHead(1024, 64)
    assert _should_share(model, *heads), "vLLM would give it the target's"
    monkeypatch.setattr(llama_eagle3.Eagle3LlamaForCausalLM, "has_own_lm_head", False)
    engine_arm.keep_own_head()
    assert not _should_share(model, *heads)
    assert weights_left(model, is_draft=True) == {"model.embed_tokens.weight", "draft_id_to_target_id"}


CONTEXTS = [arm for arm in context_arm.context_arms() if arm.size == "llama3-8b" and arm.target.startswith("FLASH_A")]


@pytest.mark.parametrize("arm", CONTEXTS, ids=lambda arm: arm.name)
def test_vllm_takes_options_of_long_contexts(arm, tiny):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import llama, llama_eagle
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("LlamaForCausalLM", llama.LlamaForCausalLM)
    ModelRegistry.register_model("EagleLlamaForCausalLM", llama_eagle.EagleLlamaForCausalLM)
    config = EngineArgs(**context_arm.engine_options(arm)).create_engine_config()
    needed = max(arm.contexts) + context_arm.NEW_TOKENS
    assert config.attention_config.flash_attn_version == (arm.version or None)
    assert config.cache_config.enable_prefix_caching and config.model_config.max_model_len > needed
    draft = config.speculative_config
    assert (draft is None) is not bool(arm.draft)
    assert draft is None or draft.draft_model_config.max_model_len > needed


def test_vllm_has_what_timed_runs_call():
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.request import Request

    inspect.signature(LLMEngine.add_request).bind(None, "0", {"prompt_token_ids": [1]}, None)
    inspect.signature(LLMEngine.step).bind(None)
    # The scheduler's rounds are counted in this process.
    assert vllm_arm.ENVIRONMENT["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "self.engine_core = EngineCore(" in inspect.getsource(InprocClient)
    inspect.signature(Scheduler.update_from_output).bind(None, None, None)
    inspect.signature(Request.is_finished).bind(None)
    assert "scheduled_spec_decode_tokens" in {field.name for field in fields(SchedulerOutput)}


@pytest.mark.parametrize("arm", trained_arm.trained_arms(), ids=lambda arm: arm.name)
def test_vllm_takes_options_of_trained_model(arm, tiny, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import llama, llama_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("LlamaForCausalLM", llama.LlamaForCausalLM)
    ModelRegistry.register_model("LlamaForCausalLMEagle3", llama_eagle3.Eagle3LlamaForCausalLM)
    monkeypatch.setitem(vllm_arm.SIZES, "smollm2", (576, 1536, 9, 3, 64, 49152, 30))
    arm = replace(arm, target=vllm_arm.model_folder("smollm2"))
    config = EngineArgs(**trained_arm.engine_options(arm)).create_engine_config()
    draft = config.speculative_config
    assert draft.draft_sample_method == "greedy", "drafts are compared with their layers' and heads' own"
    assert draft.draft_model_config.quantization == (arm.linears or None)
    assert draft.use_local_argmax_reduction is bool(arm.head)
    assert config.scheduler_config.stream_interval == 1, "every step of a text is an output"
    tokens_of_all = config.scheduler_config.max_num_seqs * config.model_config.max_model_len
    assert config.cache_config.kv_cache_memory_bytes > tokens_of_all * 31 * 2 * 3 * 64 * 2, "no text waits for room"


class CoreOutputs:
    """vLLM's engine whose core returns these tokens of one request, step by step."""

    def __init__(self, steps):
        from vllm.v1.engine.output_processor import OutputProcessor

        self.steps = list(steps)
        self.processor = OutputProcessor(None, log_stats=False)

    def add_request(self, name, prompt, params):
        from vllm.v1.engine import EngineCoreRequest

        required = len(EngineCoreRequest.__struct_fields__) - len(EngineCoreRequest.__struct_defaults__)
        fields = dict.fromkeys(EngineCoreRequest.__struct_fields__[:required])
        fields |= {"request_id": name, "external_req_id": name, "sampling_params": params, "arrival_time": 0.0}
        self.processor.add_request(EngineCoreRequest(**fields | prompt), None)

    def has_unfinished_requests(self):
        return self.processor.has_unfinished_requests()

    def step(self):
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        tokens, *self.steps = self.steps
        ends = None if self.steps else FinishReason.LENGTH
        # With asynchronous scheduling, a call can return no step.
        outputs = [EngineCoreOutput(request_id="0-0", new_token_ids=tokens, finish_reason=ends)] if tokens else []
        return self.processor.process_outputs(outputs).request_outputs


def test_each_round_of_a_text_is_an_output_of_vllm(tiny):
    from vllm import SamplingParams

    engine = CoreOutputs([[], [5], [6, 7, 8], [], [9], [10, 11]])
    [text] = trained_arm.serve(engine, [[1, 2]], [SamplingParams(max_tokens=7)], name="0")
    assert text.round_tokens == [1, 3, 1, 2] and list(text.last.token_ids) == [5, 6, 7, 8, 9, 10, 11]
