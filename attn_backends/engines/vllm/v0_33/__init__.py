"""Adapters for vLLM 0.33. Importing any of them with another vLLM raises `UnsupportedVllm`."""

from attn_backends.engines.vllm.version import require_supported

require_supported()
