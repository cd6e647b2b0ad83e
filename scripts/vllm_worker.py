"""What the vLLM measurements add to its workers: random weights, and a record of what a draft did."""

from __future__ import annotations

import math
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch

Weight: TypeAlias = tuple[tuple[int, ...], float]
"""Shape, and the standard deviation of its products."""
SHARPNESS = 2.0
"""Standard deviation of query and key elements: attention must be sharp enough that wrong metadata shows."""


def random_weights(
    config: Any, *, is_draft: bool, seed: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole checkpoint of a Llama, Qwen3, Qwen3.5 or DeepSeek-V3, or of its EAGLE, EAGLE-3, DFlash, DFlash2
    or MTP draft, which shares embedding and, but for EAGLE-3, head: identical on every rank. An EAGLE-3 draft proposes
    the first tokens of the vocabulary.

    config: in transformers' form, with hidden_size, intermediate_size, vocab_size, num_hidden_layers, head_dim and the
    numbers of heads.
    """
    weights = weight_shapes(config, is_draft=is_draft)
    for name, (shape, spread) in weights.items():
        # Seed by the name without .weight.
        yield name, _random(f"{seed} {name.removesuffix('.weight')}", shape, spread, device)


def weight_shapes(config: Any, *, is_draft: bool) -> dict[str, Weight]:
    """Return the weights that random_weights draws, by checkpoint name."""
    if not is_draft:
        return _target_weights(config)
    if _has_states(config):
        return _state_mtp_weights(config)
    return _mtp_weights(config) if _has_latents(config) else _draft_weights(config)


def _has_states(config: Any) -> bool:
    """Detects a Qwen3.5, in the same way."""
    return getattr(config, "linear_num_key_heads", None) is not None


def _has_latents(config: Any) -> bool:
    """Detects a DeepSeek-V3; vLLM gives its MTP layer a different model_type."""
    return getattr(config, "kv_lora_rank", None) is not None


def _target_weights(config: Any) -> dict[str, Weight]:
    hidden = config.hidden_size
    # An embedding row is a token's state: elements of scale 1 for any vocabulary size.
    weights: dict[str, Weight] = {
        "model.embed_tokens.weight": ((config.vocab_size, hidden), math.sqrt(hidden)),
        "model.norm.weight": ((hidden,), 0.0 if _has_states(config) else 1.0),
        "lm_head.weight": ((config.vocab_size, hidden), 1.0),
    }
    for at in range(config.num_hidden_layers):
        if _has_latents(config):
            layer = _latent_layer_weights(config, at)
        elif _has_states(config):
            layer = _state_layer_weights(config, config.layer_types[at])
        else:
            layer = _layer_weights(config, has_head_norms=config.model_type == "qwen3")
        weights |= {f"model.layers.{at}.{name}": weight for name, weight in layer.items()}
    return weights


def _mtp_weights(config: Any) -> dict[str, Weight]:
    """Return the weights of the layer after the target's last one."""
    hidden, at = config.hidden_size, config.num_hidden_layers
    layer = {
        "enorm.weight": ((hidden,), 1.0),
        "hnorm.weight": ((hidden,), 1.0),
        "eh_proj.weight": ((hidden, 2 * hidden), 1.0),
        "shared_head.norm.weight": ((hidden,), 1.0),
        **_latent_layer_weights(config, at),
    }
    return {f"model.layers.{at}.{name}": weight for name, weight in layer.items()}


def _latent_layer_weights(config: Any, at: int) -> dict[str, Weight]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_rank, rank, rope = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    weights: dict[str, Weight] = {
        "self_attn.q_a_proj": ((q_rank, hidden), 1.0),
        "self_attn.q_a_layernorm": ((q_rank,), 1.0),
        "self_attn.q_b_proj": ((heads * (nope + rope), q_rank), SHARPNESS),
        # The latent has a norm, the rotary part has none.
        "self_attn.kv_a_proj_with_mqa": ((rank + rope, hidden), SHARPNESS),
        "self_attn.kv_a_layernorm": ((rank,), 1.0),
        # Keys and values.
        "self_attn.kv_b_proj": ((heads * (nope + value), rank), SHARPNESS),
        "self_attn.o_proj": ((hidden, heads * value), 1 / SHARPNESS),
        "input_layernorm": ((hidden,), 1.0),
        "post_attention_layernorm": ((hidden,), 1.0),
    }
    if at < config.first_k_dense_replace:
        weights |= _mlp_weights("mlp", hidden, config.intermediate_size)
    else:
        width = config.moe_intermediate_size
        weights |= {"mlp.gate": ((config.n_routed_experts, hidden), 1.0)}
        weights |= _mlp_weights("mlp.shared_experts", hidden, width * config.n_shared_experts)
        for expert in range(config.n_routed_experts):
            weights |= _mlp_weights(f"mlp.experts.{expert}", hidden, width)
    named = {f"{name}.weight": weight for name, weight in weights.items()}
    if "mlp.gate" in weights:
        # No bias: experts are chosen by score only.
        named["mlp.gate.e_score_correction_bias"] = ((config.n_routed_experts,), 0.0)
    return named


def _state_layer_weights(config: Any, kind: str) -> dict[str, Weight]:
    """Return the weights of a layer of Qwen3.5, whose norms scale by 1 plus their weights."""
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    weights: dict[str, Weight] = {
        **_mlp_weights("mlp", hidden, config.intermediate_size),
        "input_layernorm": ((hidden,), 0.0),
        "post_attention_layernorm": ((hidden,), 0.0),
    }
    if kind == "full_attention":
        kv_heads = config.num_key_value_heads * config.head_dim
        weights |= {
            # Queries, and a gate for each output.
            "self_attn.q_proj": ((2 * heads, hidden), 1.0),
            "self_attn.k_proj": ((kv_heads, hidden), 1.0),
            "self_attn.v_proj": ((kv_heads, hidden), 1.0),
            "self_attn.o_proj": ((hidden, heads), 1.0),
            **{f"self_attn.{name}": ((config.head_dim,), SHARPNESS - 1) for name in ("q_norm", "k_norm")},
        }
        return {f"{name}.weight": weight for name, weight in weights.items()}
    count, values = config.linear_num_value_heads, config.linear_num_value_heads * config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    weights |= {
        "linear_attn.in_proj_qkv": ((channels, hidden), SHARPNESS),
        "linear_attn.in_proj_z": ((values, hidden), 1.0),
        "linear_attn.in_proj_b": ((count, hidden), 1.0),
        "linear_attn.in_proj_a": ((count, hidden), 1.0),
        "linear_attn.conv1d": ((channels, 1, config.linear_conv_kernel_dim), 0.5),
        "linear_attn.norm": ((config.linear_value_head_dim,), 1.0),
        "linear_attn.out_proj": ((hidden, values), 1.0),
    }
    named = {f"{name}.weight": weight for name, weight in weights.items()}
    # A state that forgets over about ten tokens: exp(-exp(-2) softplus(a)) each.
    return named | {"linear_attn.A_log": ((count,), -2.0), "linear_attn.dt_bias": ((count,), 0.0)}


def _state_mtp_weights(config: Any) -> dict[str, Weight]:
    """Return the weights of Qwen3.5's own draft."""
    hidden = config.hidden_size
    layer = _state_layer_weights(config, "full_attention")
    norms = ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")
    return {
        "mtp.fc.weight": ((hidden, 2 * hidden), 1.0),
        **{f"mtp.{name}.weight": ((hidden,), 0.0) for name in norms},
        **{f"mtp.layers.0.{name}": weight for name, weight in layer.items()},
    }


def _mlp_weights(name: str, hidden: int, wide: int) -> dict[str, Weight]:
    return {
        f"{name}.gate_proj": ((wide, hidden), 1.0),
        f"{name}.up_proj": ((wide, hidden), 1.0),
        f"{name}.down_proj": ((hidden, wide), 1.0),
    }


def _draft_weights(config: Any) -> dict[str, Weight]:
    hidden, block = config.hidden_size, getattr(config, "dflash_config", None)
    # By name: vLLM gives every draft a draft_vocab_size.
    if any("Eagle3" in name for name in config.architectures):
        return _eagle3_weights(config, config.draft_vocab_size)
    states = len(block["target_layer_ids"]) if block else 2
    weights: dict[str, Weight] = {"fc.weight": ((hidden, states * hidden), 1.0)}
    if block:
        weights |= {f"{name}.weight": ((hidden,), 1.0) for name in ("hidden_norm", "norm")}
    if block and "selector_rank" in block:
        weights |= _selector_weights(config, block["selector_rank"])
    for at in range(config.num_hidden_layers):
        layer = _layer_weights(config, has_head_norms=bool(block))
        if block and "conv_kernel_size" in block:
            layer |= _convolution_weights(hidden, block["conv_kernel_size"], block["conv_group_size"])
        if not block and at == 0:
            del layer["input_layernorm.weight"]
        weights |= {f"layers.{at}.{name}": weight for name, weight in layer.items()}
    return weights


def _eagle3_weights(config: Any, own_vocab: int) -> dict[str, Weight]:
    """Return the weights of a layer that reads a token's embedding beside a sum of three of the target's states."""
    hidden, layer = config.hidden_size, _layer_weights(config, has_head_norms=False)
    for name in ("q_proj", "k_proj", "v_proj"):
        (rows, _), spread = layer[f"self_attn.{name}.weight"]
        layer[f"self_attn.{name}.weight"] = ((rows, 2 * hidden), spread)
    return {
        "fc.weight": ((hidden, 3 * hidden), 1.0),
        "norm.weight": ((hidden,), 1.0),
        "lm_head.weight": ((own_vocab, hidden), 1.0),
        "midlayer.hidden_norm.weight": ((hidden,), 1.0),
        **{f"midlayer.{name}": weight for name, weight in layer.items()},
    }


def _layer_weights(config: Any, *, has_head_norms: bool) -> dict[str, Weight]:
    hidden, wide = config.hidden_size, config.intermediate_size
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    weights: dict[str, Weight] = {
        "self_attn.q_proj": ((heads, hidden), SHARPNESS),
        "self_attn.k_proj": ((kv_heads, hidden), SHARPNESS),
        "self_attn.v_proj": ((kv_heads, hidden), 1.0),
        "self_attn.o_proj": ((hidden, heads), 1.0),
        **_mlp_weights("mlp", hidden, wide),
        "input_layernorm": ((hidden,), 1.0),
        "post_attention_layernorm": ((hidden,), 1.0),
    }
    if has_head_norms:
        weights |= {f"self_attn.{name}": ((config.head_dim,), SHARPNESS) for name in ("q_norm", "k_norm")}
    return {f"{name}.weight": weight for name, weight in weights.items()}


def _convolution_weights(hidden: int, taps: int, group: int) -> dict[str, Weight]:
    """Return the weights of DFlash2's convolutions: on average, the mean of the taps."""
    return {
        f"{name}_conv.{part}": weight
        for name in ("attention", "mlp")
        for part, weight in {
            "base_kernel": ((2, taps, hidden), 1 / taps),
            "kernel_projection.weight": ((2 * taps * hidden // group, hidden), 0.25),
        }.items()
    }


def _selector_weights(config: Any, rank: int) -> dict[str, Weight]:
    """Return the weights of DFlash2's candidate selector: token pairs weigh as much as a token's own logit."""
    table = ((config.vocab_size, rank), rank**0.25)
    return {
        "candidate_selector.predecessor_codebook": table,
        "candidate_selector.successor_codebook": table,
        "candidate_selector.hidden_projection.weight": ((rank, config.hidden_size), 1.0),
    }


def _random(name: str, shape: tuple[int, ...], spread: float, device: torch.device) -> torch.Tensor:
    """Draw a matrix whose products have standard deviation `spread`; fill any other shape with `spread`."""
    if len(shape) != 2:
        return torch.full(shape, spread, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    found = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
    return found.mul_(spread / math.sqrt(shape[1]))


class MeasuredWorker:
    """Mixed into vLLM's worker by `worker_extension_cls`; each method is called through `collective_rpc`."""

    model_runner: Any

    def fill_weights(self, seed: int) -> None:
        """Give target and draft their weights, in place: graphs hold the addresses."""
        runner = self.model_runner
        models = {False: runner.model}
        if runner.speculator is not None:
            models[True] = runner.speculator.model
        # As vLLM does: tensors that a block draft derives from its weights on first use are inference tensors.
        with torch.inference_mode():
            for is_draft, model in models.items():
                device = next(model.parameters()).device
                weights = random_weights(model.config, is_draft=is_draft, seed=seed, device=device)
                _load_in_place(model, weights)

    def watch_drafts(self, count_waits: bool) -> None:
        """Record, from now on, each draft's tokens and its host and device time, and count host-side plans;
        count_waits: also count the host's waits for the device, which takes time."""
        speculator = self.model_runner.speculator
        if not hasattr(self, "_seen"):
            self._propose, self._plans = speculator.propose, _count_plans()
            speculator.propose = self._watched
        self._count_waits = count_waits
        self._seen: dict[str, Any] = {"host_s": [], "drafts": [], "waits": {}, "plans": 0, "prefill_plans": 0}
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._plans.clear()

    def _watched(self, batch: Any, *args: Any, **options: Any) -> Any:
        if options.get("dummy_run"):
            return self._propose(batch, *args, **options)
        with _waits_in(self._seen["waits"]) if self._count_waits else nullcontext():
            first, began = _mark(), time.perf_counter()
            found = self._propose(batch, *args, **options)
            self._seen["host_s"].append(time.perf_counter() - began)
            self._marks.append((first, _mark()))
        self._seen["drafts"].append(found.clone())
        # vLLM plans a batch before drafting for it: plans since the last draft belong to this one.
        decodes = 1 + self.model_runner.speculator.num_speculative_steps
        has_prefill = max(batch.num_scheduled_tokens) > decodes
        self._seen["prefill_plans" if has_prefill else "plans"] += len(self._plans)
        self._plans.clear()
        return found

    def compare_drafts(self, on: bool) -> dict[str, Any]:
        """Switch metadata comparison on or off (needs ATTN_BACKENDS_VALIDATE=1), and return the rounds compared, the
        seconds that took, and any difference found. Of a hybrid target, its states are compared too, and the rounds are
        the fewer of both."""
        from attn_backends.engines.vllm.validator import recorder_of

        runner = self.model_runner
        recorders: list[Any] = [recorder_of(runner.speculator)]
        if (states := getattr(runner.model_state, "attn_backends_recorder", None)) is not None:
            recorders.append(states)
        for recorder in recorders:
            recorder.paused = not on
        return {
            "rounds": min(recorder.rounds for recorder in recorders),
            "seconds": sum(recorder.pace.seconds for recorder in recorders),
            "found": next((recorder.found for recorder in recorders if recorder.found), None),
        }

    def drafts_seen(self) -> dict[str, Any]:
        """Return what was recorded since watch_drafts, and whether the draft loop is fused."""
        drafts = [found.tolist() for found in self._seen["drafts"]]
        fused = self.model_runner.speculator.supports_decode_metadata_update
        return {
            **self._seen,
            "gpu_s": [a.elapsed_time(b) / 1e3 for a, b in self._marks],
            "drafts": drafts,
            "fused": fused,
        }


def _load_in_place(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load weights into vLLM's model. Tensors that a block draft derives from its weights also keep their addresses.

    Latent attention's matrices need nothing: unquantised, they are views of weights.
    """
    inner = vars(model.model)
    held = {name: value for name, value in inner.items() if isinstance(value, torch.Tensor)}
    model.load_weights(weights)
    for name, tensor in held.items():
        if inner[name] is not tensor:
            tensor.copy_(inner[name])
            inner[name] = tensor


def _mark() -> torch.cuda.Event:
    """Record an event on the device's stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextmanager
def _waits_in(seen: dict[str, int]) -> Iterator[None]:
    """Count how often the host waits for the device, by the warning's text."""
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
    """Return a list that grows by one with each plan that vLLM's FlashInfer backend makes on the host: for decodes, for
    prefills, and for a block of drafts, which is planned as a prefill."""
    plans: list[None] = []
    try:
        import vllm.v1.attention.backends.flashinfer as backend
    except ImportError:
        return plans

    def counted(plan: Any) -> Any:
        def count(*args: Any, **options: Any) -> Any:
            plans.append(None)
            return plan(*args, **options)

        return count

    backend.fast_plan_decode = counted(backend.fast_plan_decode)
    prefill: Any = backend.BatchPrefillWithPagedKVCacheWrapper
    prefill.plan = counted(prefill.plan)
    return plans
