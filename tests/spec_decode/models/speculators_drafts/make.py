"""Make the folders next to this file: drafts written by the library `speculators`, each with one recorded round.

    python tests/spec_decode/models/speculators_drafts/make.py [name ...]

Needs speculators 0.9.0, which nothing else here needs. Each folder holds the output of `save_pretrained` for a tiny
random model, and `round.safetensors` with the greedy drafts of that model's own forward after a text:

token_ids             int64 [n], the input tokens; the last one comes after the states
target_hidden_states  fp32 [n, F]
tokens                int64 [K], the draft tokens, as target ids
logits                fp32 [K, draft vocabulary]; for drafts that choose among candidates, -inf for all other tokens
unary_logits          fp32 [K, V], for drafts that choose among candidates: before the previous token shifts them
confidences           fp32 [K], for drafts that predict their confidence
embed, lm_head        fp32 [V, H], the target's
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import speculators.models.dspark.core as dspark_core
import speculators.models.peagle.core as peagle_core
import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3NextConfig

VOCAB, HIDDEN, K, LENGTH, MASK = 24, 16, 4, 9, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
MIXED = {
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    # Wider than the texts: this library counts a window from the block's first token, engines from each token.
    "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1,
}  # fmt: skip


def llama(**changes: Any) -> LlamaConfig:
    return eager(LlamaConfig(**SIZES | changes))


def qwen3(**changes: Any) -> Qwen3Config:
    return eager(Qwen3Config(**SIZES | changes))


def eager(config: Any) -> Any:
    config._attn_implementation = "eager"
    return config


def common(algorithm: str, **changes: Any) -> dict[str, Any]:
    return {
        "speculators_config": SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=K)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
        **changes,
    }


def eagle3(**changes: Any) -> SpeculatorModel:
    return Eagle3DraftModel(Eagle3SpeculatorConfig(**common("eagle3", **changes)))


def peagle(**changes: Any) -> SpeculatorModel:
    return PEagleDraftModel(PEagleSpeculatorConfig(**common("peagle", mask_token_id=MASK, **changes)))


def blocks(model: type[SpeculatorModel], config: type[Any], algorithm: str, **changes: Any) -> SpeculatorModel:
    fields = {"mask_token_id": MASK, "draft_vocab_size": VOCAB, "aux_hidden_state_layer_ids": [1, 4], **changes}
    return model(config(**common(algorithm, **fields)))


def dflash(**changes: Any) -> SpeculatorModel:
    return blocks(DFlashDraftModel, DFlashSpeculatorConfig, "dflash", **{"block_size": K + 1, **changes})


def dspark(**changes: Any) -> SpeculatorModel:
    fields = {"block_size": K, "markov_rank": 6, "transformer_layer_config": qwen3(), **changes}
    return blocks(DSparkDraftModel, DSparkSpeculatorConfig, "dspark", **fields)


def dflash2(**changes: Any) -> SpeculatorModel:
    sizes = {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5, "block_size": K + 1}
    fields = {"transformer_layer_config": qwen3(**MIXED), **sizes, **changes}
    return blocks(DFlash2DraftModel, DFlash2SpeculatorConfig, "dflash2", **fields)


def xpress() -> SpeculatorModel:
    sizes = {"xpress_rank": 6, "block_size": K + 1}
    return blocks(XPressDraftModel, XPressSpeculatorConfig, "xpress", transformer_layer_config=qwen3(), **sizes)


def mtp(layers: Any) -> SpeculatorModel:
    model = MTPDraftModel(MTPSpeculatorConfig(**common("mtp", transformer_layer_config=layers)))
    del model.verifier_lm_head  # as the library does when it loads a target's
    return model


def qwen3_5(kind: Any, **changes: Any) -> Any:
    """Gated heads with partial rotation, norms around 1, and an embedding for each of a text's three positions."""
    rope = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5,
            "mrope_interleaved": True, "mrope_section": [1, 1, 0]}  # fmt: skip
    sizes = {name: value for name, value in SIZES.items() if name not in ("num_hidden_layers", "head_dim")}
    kinds = ["linear_attention", "full_attention"]
    return eager(kind(**sizes, head_dim=8, num_hidden_layers=2, layer_types=kinds, rope_parameters=rope, **changes))


MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}


def randomise(model: SpeculatorModel, seed: int) -> None:
    """Draw weights that have an effect, including norms and biases."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("norm.weight",)) or "fc_norm" in name:
            parameter.data = 1 + drawn / 3
        elif name.endswith(".bias"):
            parameter.data = drawn / 3
        elif "embed" in name or "markov_w1" in name or "codebook" in name or name == "mask_hidden":
            parameter.data = drawn
        else:
            parameter.data = drawn * 1.5 * parameter.shape[-1] ** -0.5
    if getattr(model, "use_draft_vocab", False):
        ids = torch.randperm(VOCAB, generator=generator)[: model.draft_vocab_size].sort().values
        reached = torch.zeros(VOCAB, dtype=torch.bool)
        reached[ids] = True
        model.load_vocab_mappings(reached, ids - torch.arange(len(ids)))


def by_target(model: SpeculatorModel, own: torch.Tensor) -> torch.Tensor:
    d2t = getattr(model, "d2t", None)
    return own if d2t is None else own + d2t[own]


Round = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor] | None]


def run_in_steps(model: SpeculatorModel, ids: torch.Tensor, states: torch.Tensor) -> Round:
    """Force each drafted token into the text after ids [n], as training forces the true one."""
    text, padded = torch.cat([ids, ids.new_zeros(K)]), torch.cat([states, states.new_zeros(K, states.shape[1])])
    logits: list[torch.Tensor] = []
    for step in range(K):
        calls: list[torch.Tensor] = []
        handle = model.lm_head.register_forward_hook(lambda _m, _i, out, calls=calls: calls.append(out[0]))
        model(
            hidden_states=padded[None], input_ids=text[None], document_ids=torch.zeros_like(text)[None],
            position_ids=torch.arange(len(text))[None], ttt_steps=K,
        )  # fmt: skip
        handle.remove()
        logits.append(calls[step][LENGTH - 1])
        text[LENGTH + step] = by_target(model, logits[-1].argmax())
    return torch.stack(logits), text[LENGTH:], None


def run_layer(model: SpeculatorModel, ids: torch.Tensor, states: torch.Tensor) -> Round:
    """Run the layer over the whole text and its own drafts so far, continuing from its states. Its own forward, which
    does not continue, gives the same first token."""
    logits: list[torch.Tensor] = []
    first, *_ = model(input_ids=torch.cat([ids[:1], ids, ids.new_zeros(K)])[None],
                      hidden_states=torch.cat([states, states.new_zeros(K + 1, HIDDEN)])[None])  # fmt: skip
    for _ in range(K):
        count = len(ids)
        places = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        of_sections = model.config.transformer_layer_config.model_type.startswith("qwen3_5")
        sections = places.expand(3, 1, -1) if of_sections else places
        out = model.mtp_layers[0](
            hidden_states=states[None], token_embeddings=model.embed_tokens(ids)[None], attention_mask=mask,
            position_ids=places, position_embeddings=model.rotary_emb(states[None], sections),
        )  # fmt: skip
        logits.append(model.lm_head(out[0, -1]))
        ids, states = torch.cat([ids, logits[-1].argmax()[None]]), torch.cat([states, out[0, -1:]])
    torch.testing.assert_close(first[0][0, LENGTH - 1], logits[0], rtol=1e-5, atol=1e-5)
    return torch.stack(logits), ids[LENGTH:], None


def run_masks(model: SpeculatorModel, ids: torch.Tensor, states: torch.Tensor) -> Round:
    """Draft all tokens from masks after the last input token."""
    text, padded = torch.cat([ids, ids.new_zeros(K)]), torch.cat([states, states.new_zeros(K, states.shape[1])])
    last = LENGTH - 1
    anchors = torch.cat([torch.arange(LENGTH), torch.full((K - 1,), last)])
    depths = torch.cat([torch.zeros(LENGTH, dtype=torch.int64), torch.arange(1, K)])
    calls: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _m, _i, out: calls.append(out[0]))
    with (
        mock.patch.object(peagle_core, "generate_cod_sample_indices", lambda **_: (anchors, depths)),
        mock.patch.object(peagle_core, "compute_metrics", lambda **_: (None, {})),
    ):
        model(
            hidden_states=padded[None], input_ids=text[None], document_ids=torch.zeros_like(text)[None],
            verifier_last_hidden_states=torch.zeros(1, len(text), HIDDEN), num_depths=K,
        )  # fmt: skip
    handle.remove()
    logits = calls[0][last : last + K]
    return logits, by_target(model, logits.argmax(-1)), None


def run_block(model: SpeculatorModel, ids: torch.Tensor, states: torch.Tensor) -> Round:
    """Draft a block whose first token is the last input token, at the position after the states."""
    block = model.block_size
    first = 0 if model.config.sample_from_anchor else 1
    text = torch.cat([ids[:1], ids, ids.new_zeros(2 * block)])
    padded = torch.cat([states, states.new_zeros(len(text) - LENGTH, states.shape[1])])
    anchor = torch.zeros(1, len(text))
    anchor[0, LENGTH] = 1
    fields = {
        "hidden_states": padded[None],
        "loss_mask": anchor,
        "document_ids": torch.zeros_like(text)[None],
        "verifier_last_hidden_states": torch.zeros(1, len(text), HIDDEN),
        "max_anchors": 1,
    }
    if isinstance(model, DSparkDraftModel):
        kept: list[torch.Tensor] = []

        def keep(logits: torch.Tensor, _targets: torch.Tensor, confidence: torch.Tensor, *_: Any, **__: Any) -> Any:
            kept[:] = [logits[0], confidence[0]]
            return torch.zeros(()), {}

        with mock.patch.object(dspark_core, "compute_metrics", keep):
            for place in range(first, block):
                model(input_ids=text[None], **fields)
                drafted = by_target(model, kept[0][place].argmax())
                text[LENGTH + place + 1 - first] = drafted
        return (
            kept[0][first:],
            text[LENGTH + 1 : LENGTH + 1 + block - first],
            {"confidences": kept[1][first:].sigmoid()},
        )
    hidden, logits, *_ = model._backbone_forward(input_ids=text[None], **fields)
    if isinstance(model, DFlash2DraftModel):
        return walk(model, logits[0, first:], hidden[0, first:], ids[-1])
    return logits[0, first:], by_target(model, logits[0, first:].argmax(-1)), None


def walk(model: SpeculatorModel, unary: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor) -> Round:
    """Take the best candidate at each position in turn, given the previous one."""
    logits, tokens = torch.full_like(unary, -torch.inf), []
    for place in range(len(unary)):
        candidates, scores = model.candidate_selector.select(unary[place], hidden[place], previous)
        logits[place, candidates] = scores
        previous = candidates[scores.argmax()]
        tokens.append(previous)
    return logits, torch.stack(tokens), {"unary_logits": unary}


Run = Callable[[SpeculatorModel, torch.Tensor, torch.Tensor], Round]
DRAFTS: dict[str, tuple[Callable[[], SpeculatorModel], Run | None]] = {
    "eagle3": (
        lambda: eagle3(
            transformer_layer_config=llama(),
            draft_vocab_size=15,
            norm_before_residual=True,
            eagle_aux_hidden_state_layer_ids=[1, 3, 5],
        ),
        run_in_steps,
    ),
    "eagle3_1": (
        lambda: eagle3(
            transformer_layer_config=qwen3(num_hidden_layers=2),
            draft_vocab_size=VOCAB,
            fc_norm=True,
            norm_output=True,
            eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5],
        ),
        run_in_steps,
    ),
    "peagle": (
        lambda: peagle(
            transformer_layer_config=llama(),
            draft_vocab_size=15,
            norm_before_fc=True,
            eagle_aux_hidden_state_layer_ids=[1, 3, 5],
        ),
        run_masks,
    ),
    "dflash": (
        lambda: dflash(transformer_layer_config=qwen3(num_hidden_layers=2), draft_vocab_size=15),
        run_block,
    ),
    "dflash_mixed": (lambda: dflash(transformer_layer_config=qwen3(**MIXED)), run_block),
    "dflash_mixed_non_causal": (
        lambda: dflash(transformer_layer_config=qwen3(**MIXED), sliding_window_non_causal=True),
        run_block,
    ),
    "dflash_from_anchor": (
        lambda: dflash(transformer_layer_config=qwen3(), sample_from_anchor=True, block_size=K),
        run_block,
    ),
    "dspark": (lambda: dspark(draft_vocab_size=15), run_block),
    "dspark_after_anchor": (
        lambda: dspark(sample_from_anchor=False, block_size=K + 1, confidence_head_with_markov=False),
        run_block,
    ),
    "dspark_gated": (lambda: dspark(markov_head_type="gated"), None),
    "dflash2": (dflash2, run_block),
    "dflash2_from_anchor": (
        lambda: dflash2(
            transformer_layer_config=qwen3(),
            sample_from_anchor=True,
            block_size=K,
            conv_kernel_size=3,
            conv_group_size=16,
            selector_rank=3,
            selector_top_k=1 + K,
        ),
        run_block,
    ),
    "dflash2_causal": (lambda: dflash2(sliding_window_non_causal=False, conv_kernel_size=1), run_block),
    "xpress": (xpress, None),
    "mtp": (lambda: mtp(qwen3()), run_layer),
    "mtp_qwen3_5": (lambda: mtp(qwen3_5(Qwen3_5TextConfig)), run_layer),
    "mtp_qwen3_5_moe": (lambda: mtp(qwen3_5(Qwen3_5MoeTextConfig, **MIXTURE)), run_layer),
    "mtp_qwen3_next": (
        lambda: mtp(qwen3_5(Qwen3NextConfig, **MIXTURE, decoder_sparse_step=1, mlp_only_layers=[])),
        run_layer,
    ),
}
"""Each with the function that drafts a round; None: this library refuses it."""


def main() -> None:
    here = Path(__file__).parent
    for name in sys.argv[1:] or DRAFTS:
        make, run = DRAFTS[name]
        seed = sum(map(ord, name))
        model = make().eval()
        randomise(model, seed)
        folder = here / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        for copied in folder.glob("*.py"):  # the library's own source
            copied.unlink()
        if run is None:
            continue
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        states = torch.randn(LENGTH, HIDDEN * len(model.target_layer_ids), generator=generator)
        with torch.no_grad():
            logits, tokens, more = run(model, ids, states)
        recorded = {"token_ids": ids, "target_hidden_states": states, "logits": logits, "tokens": tokens}
        recorded |= {"embed": model.embed_tokens.weight}
        if model.lm_head.weight.shape[0] == VOCAB:
            recorded["lm_head"] = model.lm_head.weight
        recorded |= more or {}
        save_file({key: value.detach().clone() for key, value in recorded.items()}, folder / "round.safetensors")
        print(name, tokens.tolist(), sum(path.stat().st_size for path in folder.iterdir()), "bytes")


if __name__ == "__main__":
    main()
