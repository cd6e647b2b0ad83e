"""What the measurements of vLLM ask of its workers: random weights, and what a draft did."""

from __future__ import annotations

import math
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

SHARPNESS = 2.0
"""Standard deviation of a query's and a key's elements: attention must matter, so that wrong metadata shows."""


def random_weights(
    config: Any, *, is_draft: bool, seed: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole checkpoint of a Llama, or of its EAGLE draft, which shares embedding and head: the same on every rank.

    config: as transformers has it, with hidden_size, intermediate_size, vocab_size, num_hidden_layers, head_dim and
    the numbers of heads.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    layer = {
        "self_attn.q_proj": (heads, hidden, SHARPNESS),
        "self_attn.k_proj": (kv_heads, hidden, SHARPNESS),
        "self_attn.v_proj": (kv_heads, hidden, 1.0),
        "self_attn.o_proj": (hidden, heads, 1.0),
        "mlp.gate_proj": (wide, hidden, 1.0),
        "mlp.up_proj": (wide, hidden, 1.0),
        "mlp.down_proj": (hidden, wide, 1.0),
    }
    shapes = {} if is_draft else {f"model.{name}": size for name, size in _outside_of_layers(config).items()}
    shapes |= {"fc": (hidden, 2 * hidden, 1.0)} if is_draft else {"lm_head": (config.vocab_size, hidden, 1.0)}
    prefix = "" if is_draft else "model."
    for at in range(config.num_hidden_layers):
        shapes |= {f"{prefix}layers.{at}.{name}": size for name, size in layer.items()}
        norms = (
            ["post_attention_layernorm"] if is_draft and at == 0 else ["input_layernorm", "post_attention_layernorm"]
        )
        shapes |= {f"{prefix}layers.{at}.{name}": (hidden, 0, 1.0) for name in norms}
    for name, (rows, columns, spread) in shapes.items():
        yield f"{name}.weight", _random(f"{seed} {name}", rows, columns, spread, device)


def _outside_of_layers(config: Any) -> dict[str, tuple[int, int, float]]:
    # An embedding's row is a token's state: elements of 1, whatever the number of tokens.
    embedding = (config.vocab_size, config.hidden_size, math.sqrt(config.hidden_size))
    return {"embed_tokens": embedding, "norm": (config.hidden_size, 0, 1.0)}


def _random(name: str, rows: int, columns: int, spread: float, device: torch.device) -> torch.Tensor:
    if columns == 0:
        return torch.ones(rows, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    found = torch.randn(rows, columns, dtype=torch.bfloat16, device=device, generator=generator)
    return found.mul_(spread / math.sqrt(columns))


class MeasuredWorker:
    """Mixed into vLLM's worker by `worker_extension_cls`; each method is called through `collective_rpc`."""

    model_runner: Any

    def fill_weights(self, seed: int) -> None:
        """Give target and draft their weights, in place: graphs hold the addresses."""
        runner = self.model_runner
        models = {False: runner.model}
        if runner.speculator is not None:
            models[True] = runner.speculator.model
        with torch.no_grad():
            for is_draft, model in models.items():
                weights = random_weights(model.config, is_draft=is_draft, seed=seed, device=torch.device("cuda"))
                model.load_weights(weights)

    def watch_drafts(self, count_waits: bool) -> None:
        """From now on keep what each draft proposes and the host's time for it, and count the plans that the host makes
        for its batches; count_waits: and whether the host waited for the device, which takes time itself."""
        speculator = self.model_runner.speculator
        if not hasattr(self, "_seen"):
            self._propose, self._plans = speculator.propose, _count_plans()
            speculator.propose = self._watched
        self._count_waits = count_waits
        self._seen: dict[str, Any] = {"host_s": [], "drafts": [], "waits": {}, "plans": 0, "prefill_plans": 0}
        self._plans.clear()

    def _watched(self, batch: Any, *args: Any, **options: Any) -> Any:
        if options.get("dummy_run"):
            return self._propose(batch, *args, **options)
        with _waits_in(self._seen["waits"]) if self._count_waits else nullcontext():
            began = time.perf_counter()
            found = self._propose(batch, *args, **options)
            self._seen["host_s"].append(time.perf_counter() - began)
        self._seen["drafts"].append(found.clone())
        # vLLM plans a batch before it is drafted for: those since the last draft are of this one.
        decodes = 1 + self.model_runner.speculator.num_speculative_steps
        has_prefill = max(batch.num_scheduled_tokens) > decodes
        self._seen["prefill_plans" if has_prefill else "plans"] += len(self._plans)
        self._plans.clear()
        return found

    def drafts_seen(self) -> dict[str, Any]:
        """What was kept since watch_drafts, and how the draft loop runs."""
        drafts = [found.tolist() for found in self._seen["drafts"]]
        fused = self.model_runner.speculator.supports_decode_metadata_update
        return {**self._seen, "drafts": drafts, "fused": fused}


@contextmanager
def _waits_in(seen: dict[str, int]) -> Iterator[None]:
    """Counts, by what says so, how often the host waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            yield
        for each in waits:
            what = str(each.message)[:200]
            seen[what] = seen.get(what, 0) + 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _count_plans() -> list[None]:
    """A list that grows by one with each plan that vLLM's FlashInfer backend makes on the host for a decode."""
    plans: list[None] = []
    try:
        import vllm.v1.attention.backends.flashinfer as backend
    except ImportError:
        return plans
    plan = backend.fast_plan_decode

    def counted(*args: Any, **options: Any) -> Any:
        plans.append(None)
        return plan(*args, **options)

    backend.fast_plan_decode = counted
    return plans
