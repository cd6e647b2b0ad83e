"""Train an EAGLE-3 head for a language model of `transformers` on text that the model writes itself.

    python -m train_pair.eagle3 --target FOLDER --out FOLDER --device cuda --minutes 8 --writers 6

The head is saved in the published layout, in bfloat16 and without an embedding: it uses the target's.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from spec_decode import LLM, SamplingParams
from spec_decode.environment import environment
from spec_decode.model_api import DraftInputs
from spec_decode.models import TransformersTarget
from spec_decode.models.checkpoints.store import RandomStore
from spec_decode.models.decoder_weights import published_tensors
from spec_decode.models.eagle3 import load, published_name
from spec_decode.models.hf.folder import load_model
from spec_decode.models.recurrent_draft import RecurrentDraft
from train_pair.attention import causal_attention, positions_of, unrolled_attention
from train_pair.prompts import make_prompts

STEPS = 4
"""Draft tokens that are unrolled in training, and drafted in measurements."""
STEP_WEIGHT = 0.9
WINDOW = 256
LR, WARM_UP = 1e-3, 100
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
WAVE = 1024
"""Texts that are generated at once."""
WRITING = 0.4
"""The maximum fraction of the time for generating text; the wave in progress is finished after that."""
_PAGE = 128
"""Tokens per page during generation: texts end in succession, so few pages are wasted, and few are counted."""
_LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
_NAMES = ("fc", "norm", "lm_head", *(f"midlayer.{name}" for name in (*_LAYER, "mlp.down_proj", "hidden_norm")))
_NORMS = ("input_layernorm", "post_attention_layernorm")


def write_texts(target: Path, count: int, tokens: int, seed: int, device: torch.device, deadline: float) -> list[int]:
    """Return prompts and the target's completions, concatenated: half of them greedy, a quarter at temperature 0.7 and
    a quarter at 1.

    They are generated in waves, so no prompt is prefilled while others wait for their next token. No wave but the first
    starts after the monotonic clock reads `deadline`.
    """
    llm = LLM(target, device=device, max_num_seqs=min(count, WAVE), max_model_len=tokens + 256, page_size=_PAGE)
    prompts = make_prompts(count, held_out=False, seed=seed)
    params = [
        SamplingParams(max_tokens=tokens, temperature=TEMPERATURES[place % 4], seed=place + seed)
        for place in range(count)
    ]
    end = min(llm.pair.stop_ids)
    text: list[int] = []
    for start in range(0, count, WAVE):
        wave = slice(start, start + WAVE)
        for done in llm.generate(prompts[wave], params[wave]):
            prompt = llm.pair.encode(done.prompt) if isinstance(done.prompt, str) else llm.pair.encode_chat(done.prompt)
            text += [*prompt, *done.token_ids, end]
        print(f"{min(start + WAVE, count)} texts: {len(text)} tokens", flush=True)
        if time.monotonic() > deadline:
            break
    return text


def write_in_parallel(
    writers: int, target: Path, count: int, tokens: int, seed: int, device: torch.device, deadline: float
) -> list[int]:
    """Run `write_texts` in several processes, each with its own seed: a small model's steps wait for the host."""
    share = math.ceil(count / writers)
    with ProcessPoolExecutor(writers, get_context("spawn")) as pool:
        parts = [
            pool.submit(write_texts, target, share, tokens, seed + writer, device, deadline)
            for writer in range(writers)
        ]
        return [token for part in parts for token in part.result()]


def load_target(folder: Path) -> TransformersTarget:
    """Load the model in a folder, on the CPU, with the states that EAGLE-3 reads. Raises SystemExit for a model that
    `causal_attention` or a plain product with its head would compute incorrectly."""
    model = load_model(folder, dtype=torch.float32)
    layers = model.config.get_text_config().num_hidden_layers
    if layers < 3:
        raise SystemExit(f"the model in {folder} has {layers} layers, but EAGLE-3 needs at least 3.")
    target = TransformersTarget(model, aux_hidden_state_layers=(2, layers // 2, layers - 3))
    for group in target.layer_groups(page_size=1):
        window = group.spec.sliding_window or 0
        plain = replace(group.spec, scale=None, soft_cap=None, sliding_window=window if window > WINDOW else None)
        if group.spec != plain or target.output_projection is None:
            raise SystemExit(
                f"a target must have plain attention and logits, but the model in {folder} has its own scale, a cap "
                f"or a window below {WINDOW + 1} tokens. Use another model."
            )
    return target


def make_head(
    target: TransformersTarget, vocab: torch.Tensor, device: torch.device
) -> tuple[RecurrentDraft, dict[str, Any]]:
    """Create a head for these ascending target ids as its vocabulary, and its config.json.

    States are normed, as in EAGLE-3.1, because those of a target's deep layers are large. The projection to the
    vocabulary starts as the target's, everything else is random.
    """
    target_config, layers = target.config, target.aux_hidden_state_layers or ()
    heads = target.layer_groups(page_size=1)[0].spec
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target_config.hidden_size,
        "intermediate_size": 2 * target_config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads.num_q_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "rms_norm_eps": target_config.rms_norm_eps,
        "rope_theta": target_config.rope_parameters.get("rope_theta", 10000.0),
        "max_position_embeddings": target_config.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(vocab),
        "fc_norm": True,
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
        "torch_dtype": "bfloat16",
    }
    norms = (*(f"midlayer.{norm}" for norm in _NORMS), *(f"fc_norm.{state}" for state in range(len(layers))))
    names = [f"{name}.weight" for name in (*_NAMES, *norms)]
    head = load(RandomStore(config, [*names, "d2t"], device), target, dtype=torch.float32, device=device)
    head.token_map = vocab
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name == "head.weight":
                parameter.copy_(target.lm_head.weight[vocab])
            elif name.startswith("aux.fc_norm."):
                nn.init.ones_(parameter)
    return head.train().requires_grad_(True), config


def unrolled_loss(
    head: RecurrentDraft, target: TransformersTarget, tokens: torch.Tensor, vocab: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy to the target's distribution over the head's vocabulary, fp32 [], and how often the
    head's top token is the target's, [STEPS]. tokens: int64 [B, L + 1].

    The steps feed the head its own states, as drafting does.
    """
    batch = len(tokens)
    with torch.no_grad():
        states = target(tokens.flatten(), positions_of(tokens), causal_attention(batch))
        weight = target.lm_head.weight[vocab]
        target_logits = F.linear(states.hidden, weight).float().view(*tokens.shape, -1)
        best = target.logits(states.hidden).argmax(-1).view(tokens.shape)
    inputs = tokens[:, 1:]
    attention, positions = unrolled_attention(inputs), positions_of(inputs)
    aux = states.target_hidden_states.view(*tokens.shape, -1)[:, :-1]
    state, loss, hits = (
        head.combine(aux.flatten(0, 1)).view(*inputs.shape, -1),
        torch.zeros((), device=tokens.device),
        [],
    )
    for step in range(STEPS):
        out = head(DraftInputs(inputs.flatten(), state.flatten(0, 1), positions, attention)).view(*inputs.shape, -1)
        # The first `step` positions have no state from the head before them.
        logits = head.logits(out[:, step:].flatten(0, 1)).float()
        target_probs = target_logits[:, 1 + step :].flatten(0, 1).softmax(-1)
        loss = loss + STEP_WEIGHT**step * F.cross_entropy(logits, target_probs)
        hits.append((vocab[logits.argmax(-1)] == best[:, 1 + step :].flatten()).float().mean())
        state = F.pad(out[:, :-1], (0, 0, 1, 0))
    return loss, torch.stack(hits)


def train(
    head: RecurrentDraft,
    target: TransformersTarget,
    text: torch.Tensor,
    vocab: torch.Tensor,
    deadline: float,
    batch: int,
) -> int:
    """Train until the monotonic clock reads `deadline`, at least one step; returns the number of steps."""
    weights = list(head.parameters())
    groups = [
        {"params": [w for w in weights if (w.dim() > 1) is wide], "weight_decay": 0.05 * wide} for wide in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    start, step = time.monotonic(), 0
    while (now := time.monotonic()) < deadline or not step:
        progress = min((now - start) / (deadline - start), 1.0) if deadline > start else 1.0
        starts = torch.randint(len(text) - WINDOW - 1, (batch, 1), device=text.device)
        tokens = text[starts + torch.arange(WINDOW + 1, device=text.device)]
        for group in optimizer.param_groups:
            group["lr"] = LR * min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * progress))
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            loss, hits = unrolled_loss(head, target, tokens, vocab)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if step % 100 == 0:
            accuracy = " ".join(f"{hit:.3f}" for hit in hits.tolist())
            print(f"step {step}, {100 * progress:.0f} %: loss {loss.item():.3f}, accuracy {accuracy}", flush=True)
        step += 1
    return step


def save(
    head: RecurrentDraft, vocab: torch.Tensor, config: dict[str, Any], training: dict[str, Any], out: Path
) -> None:
    """Write config.json, model.safetensors and training.json."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        published_name(name).replace("layers.0.", "midlayer."): tensor.to(torch.bfloat16).contiguous().cpu()
        for name, tensor in published_tensors(head).items()
    }
    ids = vocab.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    save_file(tensors, out / "model.safetensors")
    for name, value in (("config", config), ("training", training)):
        (out / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")


def accepted(target: Path, out: Path, count: int, tokens: int, device: torch.device) -> dict[str, float]:
    """Return the mean accepted draft tokens per round, of STEPS, on held-out prompts, by temperature."""
    llm = LLM(target, draft=out, num_speculative_tokens=STEPS, device=device, max_num_seqs=min(count, 32))
    results, prompts = {}, make_prompts(count, held_out=True)
    for temperature in (0.0, 1.0):
        llm.generate(
            prompts, [SamplingParams(max_tokens=tokens, temperature=temperature, seed=i) for i in range(count)]
        )
        results[f"temperature {temperature:g}"] = round(llm.engine.stats.mean_accepted, 3)
    return results


def run(flags: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Generate text, train, save and measure; returns the content of training.json."""
    start = time.monotonic()
    torch.manual_seed(flags.seed)
    target = load_target(flags.target)
    deadline = start + 60 * flags.minutes * WRITING
    text = torch.tensor(
        write_in_parallel(flags.writers, flags.target, flags.texts, flags.tokens, flags.seed, flags.device, deadline)
    )
    counts = torch.bincount(text)
    vocab = counts.argsort(descending=True)[: flags.vocab].sort().values
    covered = counts[vocab].sum().item() / len(text)
    if len(text) <= WINDOW + 1:
        raise SystemExit(f"the target generated {len(text)} tokens, but a window has {WINDOW + 1}. Increase --texts.")
    print(f"{len(text)} tokens generated in {time.monotonic() - start:.0f} s, {covered:.1%} of them in the vocabulary")
    vocab = vocab.to(flags.device)
    head, config = make_head(target.to(flags.device), vocab, flags.device)
    training_start = time.monotonic()
    steps = train(head, target, text.to(flags.device), vocab, start + 60 * flags.minutes, flags.batch)
    record = {
        "command": shlex.join(["python", "-m", "train_pair.eagle3", *command]),
        "commit": environment(flags.device).commit,
        "device": torch.cuda.get_device_name(flags.device) if flags.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tokens_written": len(text),
        "covered_by_vocabulary": round(covered, 4),
        "training_steps": steps,
        "training_seconds": round(time.monotonic() - training_start, 1),
        "seed": flags.seed,
        "tokens_a_step": flags.batch * WINDOW,
    }
    save(head, vocab, config, record, flags.out)
    record["accepted_of_4"] = accepted(flags.target, flags.out, flags.prompts, flags.tokens, flags.device)
    record["wall_seconds"] = round(time.monotonic() - start)
    save(head, vocab, config, record, flags.out)
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the flags, train, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m train_pair.eagle3", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--minutes", type=float, default=5.0, help="of generating text and training")
    for name, value in {
        "texts": 65536,
        "tokens": 256,
        "vocab": 12288,
        "batch": 64,
        "prompts": 96,
        "writers": 1,
        "seed": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only-measure", action="store_true", help="measure accepted tokens of the head in --out")
    command = sys.argv[1:] if arguments is None else list(arguments)
    flags = parser.parse_args(command)
    if flags.only_measure:
        print(accepted(flags.target, flags.out, flags.prompts, flags.tokens, flags.device))
    else:
        print(json.dumps(run(flags, command), indent=2))


if __name__ == "__main__":
    main()
