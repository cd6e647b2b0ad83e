"""Adapters for vLLM 0.33. Importing any of them with another vLLM raises `UnsupportedVllm`."""

from engines.vllm.version import require_supported

require_supported()
