"""What each kind of user runs, and how many lines of ours that may load."""

from __future__ import annotations

CHECK = """
import torch
from spec_decode.conformance import check_backend
checks = ["contract.*", "*[[]base-decode]", "drafter.*[[]k4-n3*"]
assert check_backend("torch_reference", device=torch.device("cpu"), checks=checks).results
"""
USERS = {
    "plug-in": ("from tests.engines.any_vllm import load_adapters\nload_adapters()", 10_360),
    "plug-in, linear layers": ("from tests.engines.any_vllm import load_linear_methods\nload_linear_methods()", 13_190),
    "drafter": ("import spec_decode.drafter", 11_900),
    "kit": ("import spec_decode.conformance", 20_500),
    "check": (CHECK, 20_700),
    "LLM": ("import spec_decode.llm", 30_400),
}
