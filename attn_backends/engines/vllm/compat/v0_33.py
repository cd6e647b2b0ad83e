"""vLLM 0.33: where its names live, and what the adapters need of its classes."""

from __future__ import annotations

_ATTENTION = "vllm.v1.attention"
_FLASHINFER = f"{_ATTENTION}.backends.flashinfer"
_FLASHMLA_SPARSE = f"{_ATTENTION}.backends.mla.flashmla_sparse"
_MLA = "vllm.model_executor.layers.attention.mla_attention"
_LAYERS = "vllm.model_executor.layers"
_MODELS = "vllm.model_executor.models"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"

PLACES = {
    # The interface of backends, and their registry.
    "AttentionBackend": f"{_ATTENTION}.backend:AttentionBackend",
    "AttentionBackendEnum": f"{_ATTENTION}.backends.registry:AttentionBackendEnum",
    "AttentionCGSupport": f"{_ATTENTION}.backend:AttentionCGSupport",
    "AttentionImpl": f"{_ATTENTION}.backend:AttentionImpl",
    "AttentionMetadataBuilder": f"{_ATTENTION}.backend:AttentionMetadataBuilder",
    "AttentionType": f"{_ATTENTION}.backend:AttentionType",
    "CommonAttentionMetadata": f"{_ATTENTION}.backend:CommonAttentionMetadata",
    "MultipleOf": f"{_ATTENTION}.backend:MultipleOf",
    "register_backend": f"{_ATTENTION}.backends.registry:register_backend",
    "split_decodes_and_prefills": f"{_ATTENTION}.backends.utils:split_decodes_and_prefills",
    # Configuration, caches and logging.
    "ChunkedLocalAttentionSpec": "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec",
    "CUDAGraphMode": "vllm.config.compilation:CUDAGraphMode",
    "SinkFullAttentionSpec": "vllm.v1.kv_cache_interface:SinkFullAttentionSpec",
    "envs": "vllm.envs",
    "get_current_vllm_config": "vllm.config:get_current_vllm_config",
    "init_logger": "vllm.logger:init_logger",
    "is_quantized_kv_cache": "vllm.v1.kv_cache_interface:is_quantized_kv_cache",
    "set_current_vllm_config": "vllm.config:set_current_vllm_config",
    "EngineArgs": "vllm.engine.arg_utils:EngineArgs",
    # Its backend over FlashInfer, which imports FlashInfer.
    "FIDecode": f"{_FLASHINFER}:FIDecode",
    "FIPrefill": f"{_FLASHINFER}:FIPrefill",
    "FlashInferBackend": f"{_FLASHINFER}:FlashInferBackend",
    "FlashInferImpl": f"{_FLASHINFER}:FlashInferImpl",
    "FlashInferMetadata": f"{_FLASHINFER}:FlashInferMetadata",
    "FlashInferMetadataBuilder": f"{_FLASHINFER}:FlashInferMetadataBuilder",
    "get_flashinfer_layout_string": f"{_FLASHINFER}:get_flashinfer_layout_string",
    # Its backends over latents, dense and sparse.
    "FlashMLASparseBackend": f"{_FLASHMLA_SPARSE}:FlashMLASparseBackend",
    "FlashMLASparseMetadata": f"{_FLASHMLA_SPARSE}:FlashMLASparseMetadata",
    "FlashMLASparseMetadataBuilder": f"{_FLASHMLA_SPARSE}:FlashMLASparseMetadataBuilder",
    "MLACommonBackend": f"{_MLA}:MLACommonBackend",
    "MLACommonImpl": f"{_MLA}:MLACommonImpl",
    "MLACommonMetadata": f"{_MLA}:MLACommonMetadata",
    "MLACommonMetadataBuilder": f"{_MLA}:MLACommonMetadataBuilder",
    "QueryLenSupport": f"{_MLA}:QueryLenSupport",
    "compute_token_to_req_indices": f"{_ATTENTION}.ops.metadata:compute_token_to_req_indices",
    "flashmla": f"{_ATTENTION}.ops.flashmla",
    # Linear layers, and what chooses how they multiply.
    "LinearBase": f"{_LAYERS}.linear:LinearBase",
    "OnlineLinearBase": f"{_LAYERS}.quantization.online.fp8:OnlineLinearBase",
    "ParallelLMHead": f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead",
    "QuantizationConfig": f"{_LAYERS}.quantization.base_config:QuantizationConfig",
    "RoutedExperts": f"{_LAYERS}.fused_moe:RoutedExperts",
    "UnquantizedEmbeddingMethod": f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod": f"{_LAYERS}.linear:UnquantizedLinearMethod",
    "current_platform": "vllm.platforms:current_platform",
    "register_quantization_config": f"{_LAYERS}.quantization:register_quantization_config",
    "replace_parameter": "vllm.model_executor.utils:replace_parameter",
    # Drafts that score their next tokens with a head, where vLLM keeps them, and its copies of heads.
    "LM_HEAD_METHODS": f"{_LAYERS}.quantization.online.lm_head:_LM_HEAD_METHODS",
    "quantized_lm_head_copy": f"{_LAYERS}.quantization.online.lm_head:quantized_lm_head_copy",
    "ModelRegistry": f"{_MODELS}.registry:ModelRegistry",
    "tensor_model_parallel_all_gather": "vllm.distributed:tensor_model_parallel_all_gather",
    "DFlashQwen3ForCausalLM": f"{_MODELS}.qwen3_dflash:DFlashQwen3ForCausalLM",
    "DeepSeekMTP": f"{_MODELS}.deepseek_mtp:DeepSeekMTP",
    "Eagle3LlamaForCausalLM": f"{_MODELS}.llama_eagle3:Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM": f"{_MODELS}.qwen3_eagle3:Eagle3Qwen3ForCausalLM",
    "EagleLlamaForCausalLM": f"{_MODELS}.llama_eagle:EagleLlamaForCausalLM",
    # The speculators that the validator watches, and the states of hybrid targets.
    "AttentionGroup": "vllm.v1.worker.utils:AttentionGroup",
    "DFlashSpeculator": f"{_SPECULATORS}.dflash.speculator:DFlashSpeculator",
    "MambaHybridModelState": "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState",
    "MambaSpec": "vllm.v1.kv_cache_interface:MambaSpec",
    "DraftModelSpeculator": f"{_SPECULATORS}.speculator:DraftModelSpeculator",
    "TargetDependentARSpeculator": f"{_SPECULATORS}.target_dependent_ar.speculator:TargetDependentARSpeculator",
}
"""Where each name of vLLM's that an adapter uses lives."""

HOOKS = {
    f"{_ATTENTION}.backend:AttentionMetadataBuilder.update_draft_decode_metadata": "in-graph updates",
    f"{_ATTENTION}.backend:AttentionBackend.validate_configuration": "a backend's rejection reasons",
    f"{_ATTENTION}.backend:CommonAttentionMetadata.__dataclass_fields__": "the batch for builders",
    f"{_ATTENTION}.backends.registry:AttentionBackendEnum.register": "free backend names",
    "vllm.v1.kv_cache_interface:create_kv_cache_views": "the packed KV cache",
}
"""What every adapter depends on, and what it provides."""
