"""SGLang 0.5.23's own test of draft runners, in its wheel, over our names: pytest collects this file.

The kit compares SGLang's eager drafting with its runner for CUDA graphs, both on one backend. It lays out a request in
two ways: its context in shuffled pages, its draft tokens in adjacent slots. Here both are in one order, because a table
of pages has one. And the model has its attention layer, as a draft's model has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import TestCase, mock

import pytest
import torch

from attn_backends import registry
from attn_backends.engines.sglang import NAMES, register
from builders.kernels.triton_runtime import torch_implementations
from engine_kits.kernels import stand_in_for
from engine_kits.sglang.stand_in import do_without_kernels, enter, on_an_h200
from spec_decode.graphs import runtime_for

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
KIT = "sglang.test.kits.attention_unittest"
CASES = ("mha_decode_page_boundary", "mha_decode_bsz1_nonzero_prefix", "gqa_decode_page_boundary")
"""Every one of the kit's dense cases that decodes."""


@pytest.fixture(scope="session")
def kit() -> Iterator[tuple[Any, Any]]:
    """Load the kit's cases and its draft runner, with our names registered."""
    (do_without_kernels if CUDA else enter)()
    stand_in_for("sglang.benchmark", "sglang.test.sgl_eval_utils")  # imported beside the kit, and not called
    register()
    with device():
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"  # read for a port
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.test.kits.attention_unittest.attention_methods import dense_attention
        from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_runner

        HookRegistry.apply_hooks()
        yield dense_attention, speculative_draft_runner


@contextmanager
def device() -> Iterator[None]:
    """Run on the GPU; without one on the CPU, where CUDA's generator and streams do nothing."""
    with ExitStack() as patches:
        if not CUDA:
            nothing: dict[str, Callable[..., Any]] = {
                name: lambda *args, **options: None
                for name in ("manual_seed_all", "get_rng_state", "set_rng_state", "Stream")
            }
            nothing["Stream"] = lambda *args, **options: SimpleNamespace()
            patches.enter_context(on_an_h200())
            patches.enter_context(mock.patch.multiple(torch.cuda, **nothing))
        yield


class Emulated:
    """SGLang's backend that captures one graph per shape, over the emulator."""

    def __init__(self, runner: Any) -> None:
        self.graphs: dict[Any, tuple[Any, Any]] = {}

    def capture_session(self, stream: Any) -> Any:
        return nullcontext()

    def capture_one(self, key: Any, run: Callable[[], Any], **options: Any) -> None:
        run()
        out: list[Any] = []
        graph = runtime_for(DEVICE).capture(lambda: out.append(run()))
        self.graphs[key] = graph, out[-1]

    def replay(self, key: Any, batch: Any = None, **options: Any) -> Any:
        graph, out = self.graphs[key]
        graph.replay()
        return out


def slot_of(request: int, position: int, *, page_size: int, max_context_len: int) -> int:
    """Return a token's slot: the pages of a request are in another order than its tokens."""
    pages = max_context_len // page_size
    page = (3 * (position // page_size) + request + 1) % pages  # a permutation: no number of pages here divides by 3
    return page_size + request * max_context_len + page * page_size + position % page_size


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ours", NAMES)
def test_draft_runner(
    kit: Any, request: Any, monkeypatch: pytest.MonkeyPatch, ours: str, case: str, steps: int
) -> None:
    dense, runner = kit
    if not CUDA:
        from sglang.srt.speculative import eagle_draft_cuda_graph_runner

        monkeypatch.setattr(eagle_draft_cuda_graph_runner, "resolve_decode_backend", Emulated)
        if (name := NAMES[ours].backend) == "flash_attn3":
            from tests.engines.conftest import over_stand_in

            monkeypatch.setitem(registry._loaded, name, over_stand_in(name))
    build, configure, made = runner.build_dense_attention_fixture, runner._configure_runner_for_eagle_draft, []

    def built(*args: Any, **options: Any) -> Any:
        made.append(build(*args, **options))
        return made[-1]

    def configured(model_runner: Any, *args: Any, **options: Any) -> None:
        configure(model_runner, *args, **options)
        model_runner.model.attention = made[-1].actual_module

    def one_order(layout: str, *, page_size: int, max_context_len: int, **sizes: Any) -> Any:
        return lambda request, position: slot_of(
            request, position, page_size=page_size, max_context_len=max_context_len
        )

    monkeypatch.setattr(runner, "build_dense_attention_fixture", built)
    monkeypatch.setattr(runner, "_configure_runner_for_eagle_draft", configured)
    monkeypatch.setattr(runner, "_dense_token_loc", slot_of)
    monkeypatch.setattr(dense, "_token_loc", slot_of)
    monkeypatch.setattr(dense, "make_loc_fn", one_order)
    (chosen,) = (each for each in dense.make_dense_cases(ours) if each.name == case)
    sizes = {
        "head_dim": 64,
        "hidden_size": 256,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": steps + 1,
    }
    with device(), nullcontext() if CUDA else torch_implementations(), torch.inference_mode():
        runner.run_dense_eagle_draft_cuda_graph_runner_case(TestCase(), chosen, device=str(DEVICE), **sizes)
    request.node.user_properties.append(("reached", bool(made)))
