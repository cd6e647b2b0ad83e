"""Tiny random checkpoints in the layouts of DeepSeek-V3, GLM-4.7-Flash and DeepSeek-V4, and a fixture to draft in.

The tensors come back with the folder, so that a test can compute with them by itself.
"""

import json
from functools import partial

import torch
from safetensors.torch import save_file

from attn_backends import get
from builders import RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, VerifiedTokens
from spec_decode.models import TargetStates
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import build_ragged, make_group
from tests.factories import CPU, owned_pages
from tests.spec_decode.models import generated

VOCAB, HIDDEN, LAYER, K = 24, 32, 2, 3

V3_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": LAYER,
    "num_nextn_predict_layers": 1,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 10,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 12,
        "beta_fast": 4,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}

GLM_CONFIG = {
    **{name: value for name, value in V3_CONFIG.items() if name not in ("rope_scaling", "rope_theta", "scoring_func")},
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 1.0},
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}

V4_CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": LAYER,
    "num_nextn_predict_layers": 1,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "hidden_act": "silu",
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 20,
    "o_lora_rank": 10,
    "o_groups": 2,
    "sliding_window": 6,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 8},
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 4, 0],
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 0.6,
}


class _Random:
    """Matrices that keep sizes, norms that are not 1 everywhere, and biases that change what is chosen."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows, columns):
        return torch.randn(rows, columns, generator=self.generator) / columns**0.5 * 1.5

    def norm(self, size):
        return 1 + torch.randn(size, generator=self.generator) / 4

    def bias(self, size):
        return torch.randn(size, generator=self.generator)


def v3_modules(config, *, shared=False):
    """The tensors of as many layers that draft as the config says."""
    modules = range(config["num_nextn_predict_layers"])
    return {name: t for module in modules for name, t in v3_tensors(config, shared=shared, module=module).items()}


def v3_tensors(config, *, shared=False, module=0):
    """A layer's tensors by name. shared: whether embedding and head are left to the target. module: which of those
    that draft."""
    make, prefix = _Random(module), f"model.layers.{config['num_hidden_layers'] + module}."
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, rope = config["num_attention_heads"], config["qk_rope_head_dim"]
    query, rank = config["qk_nope_head_dim"] + rope, config["kv_lora_rank"]
    values = config["v_head_dim"]
    tensors = {
        "enorm.weight": make.norm(hidden),
        "hnorm.weight": make.norm(hidden),
        "eh_proj.weight": make.matrix(hidden, 2 * hidden),
        "shared_head.norm.weight": make.norm(hidden),
        "input_layernorm.weight": make.norm(hidden),
        "post_attention_layernorm.weight": make.norm(hidden),
        "self_attn.kv_a_proj_with_mqa.weight": make.matrix(rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": make.norm(rank),
        "self_attn.kv_b_proj.weight": make.matrix(heads * (config["qk_nope_head_dim"] + values), rank),
        "self_attn.o_proj.weight": make.matrix(hidden, heads * values),
    }
    if not shared:
        tensors["embed_tokens.weight"] = make.matrix(vocab, hidden)
        tensors["shared_head.head.weight"] = make.matrix(vocab, hidden)
    if config.get("q_lora_rank") is None:
        tensors["self_attn.q_proj.weight"] = make.matrix(heads * query, hidden)
    else:
        tensors["self_attn.q_a_proj.weight"] = make.matrix(config["q_lora_rank"], hidden)
        tensors["self_attn.q_a_layernorm.weight"] = make.norm(config["q_lora_rank"])
        tensors["self_attn.q_b_proj.weight"] = make.matrix(heads * query, config["q_lora_rank"])
    if config.get("n_routed_experts") is None:
        tensors |= _gated(make, "mlp.", ("gate_proj", "up_proj", "down_proj"), config["intermediate_size"], hidden)
    else:
        tensors |= _mixture(make, config, "mlp.", ("gate_proj", "up_proj", "down_proj"), "gate.e_score_correction_bias")
    return {prefix + name: tensor for name, tensor in tensors.items()}


def v4_tensors(config):
    make = _Random()
    heads, dim, groups = config["num_attention_heads"], config["head_dim"], config["o_groups"]
    streams = config["hc_mult"]
    tensors = {
        "enorm.weight": make.norm(HIDDEN),
        "hnorm.weight": make.norm(HIDDEN),
        "norm.weight": make.norm(HIDDEN),
        "e_proj.weight": make.matrix(HIDDEN, HIDDEN),
        "h_proj.weight": make.matrix(HIDDEN, HIDDEN),
        "attn_norm.weight": make.norm(HIDDEN),
        "ffn_norm.weight": make.norm(HIDDEN),
        "attn.wq_a.weight": make.matrix(config["q_lora_rank"], HIDDEN),
        "attn.q_norm.weight": make.norm(config["q_lora_rank"]),
        "attn.wq_b.weight": make.matrix(heads * dim, config["q_lora_rank"]),
        "attn.wkv.weight": make.matrix(dim, HIDDEN),
        "attn.kv_norm.weight": make.norm(dim),
        "attn.attn_sink": make.bias(heads),
        "attn.wo_a.weight": make.matrix(groups * config["o_lora_rank"], heads * dim // groups),
        "attn.wo_b.weight": make.matrix(HIDDEN, groups * config["o_lora_rank"]),
        **_mixture(make, config, "ffn.", ("w1", "w3", "w2"), "gate.bias"),
    }
    for name, mixes, scales in (("attn", streams * (2 + streams), 3), ("ffn", streams * (2 + streams), 3),
                                ("head", streams, 1)):  # fmt: skip
        tensors[f"hc_{name}_fn"] = make.matrix(mixes, streams * HIDDEN)
        tensors[f"hc_{name}_scale"] = 0.7 + torch.arange(scales) / 4
        tensors[f"hc_{name}_base"] = make.bias(mixes)
    return {f"mtp.0.{name}": tensor for name, tensor in tensors.items()}


def _gated(make, prefix, names, inner, hidden):
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: make.matrix(inner, hidden), up: make.matrix(inner, hidden), down: make.matrix(hidden, inner)}


def _mixture(make, config, prefix, names, bias):
    count, inner, hidden = config["n_routed_experts"], config["moe_intermediate_size"], config["hidden_size"]
    tensors = {f"{prefix}gate.weight": make.matrix(count, hidden), f"{prefix}{bias}": make.bias(count) / 2}
    for index in range(count):
        tensors |= _gated(make, f"{prefix}experts.{index}.", names, inner, hidden)
    return tensors | _gated(make, f"{prefix}shared_experts.", names, inner * config["n_shared_experts"], hidden)


def write(folder, config, tensors):
    """A checkpoint, with a tensor of the target's beside the draft's."""
    (folder / "config.json").write_text(json.dumps(config))
    others = {"model.norm.weight": torch.ones(HIDDEN)}
    save_file({name: tensor.contiguous() for name, tensor in (others | tensors).items()}, folder / "model.safetensors")
    return folder


class StubTarget(generated.StubTarget):
    """With this vocabulary, and run for nothing but its embedding."""

    def __init__(self, **sizes):
        super().__init__(**{"vocab_size": VOCAB, **sizes})

    def layer_groups(self, page_size):
        return []

    def forward(self, token_ids, positions, attention):
        return TargetStates(self.embed(token_ids), self.embed(token_ids))


class DraftFixture:
    """A draft over a paged cache that starts as NaN, with two requests on shuffled pages."""

    CONTEXTS = (5, 9)
    ACCEPTED = ((1, 3), (0, 2))
    """Of each round, by request."""
    STEPS = K

    def __init__(self, model, backend="torch_reference"):
        self.model = model
        self.tables = RequestTables(page_sizes=[4], num_pages=[24], max_reqs=2, max_seq_len=48, device=CPU)
        self.tables.load([owned_pages(2, 12, 24)], [48, 48])
        [group] = model.layer_groups(4)
        self.groups = [make_group(group.name, get(backend), group.spec, group.layers, num_pages=24, device=CPU)]
        for cache in self.groups[0].caches.values():
            cache.key.fill_(float("nan"))
            cache.value.fill_(float("nan"))

    def run(self, query_lens, seq_lens, ids, hidden):
        """States of the last query_lens[r] of seq_lens[r] tokens of each request."""
        batch, metadata = build_ragged(self.groups, self.tables, query_lens, seq_lens)
        with torch.no_grad():
            return self.model(ids, hidden, batch.positions, PagedAttention(self.groups, metadata))

    def drafts(self, strategy, temperature=0.0):
        """A prefill and rounds; tokens and logits of each."""
        config = DrafterConfig(num_speculative_tokens=self.STEPS, strategy=strategy)
        self.drafter = Drafter(self.model, self.groups, self.tables, config)
        generator = torch.Generator().manual_seed(1)
        width, size, contexts = self.STEPS + 1, self.model.target_states_size, list(self.CONTEXTS)
        self.committed = [random_text(generator, n, size) for n in contexts]
        self.prefill()
        found, self.rounds = [], []
        for accepted in self.ACCEPTED:
            verified = VerifiedTokens(
                token_ids=torch.randint(0, VOCAB, (2, width), generator=generator),
                target_hidden_states=torch.randn(2, width, size, generator=generator).to(self.groups[0].spec.dtype),
                context_lens=torch.tensor(contexts, dtype=torch.int32),
                accepted=torch.tensor(accepted, dtype=torch.int32),
                next_tokens=torch.randint(0, VOCAB, (2,), generator=generator),
                temperature=torch.full((2,), temperature),
                seeds=torch.arange(2),
            )
            self.rounds.append(verified)
            drafts = self.drafter.propose(verified)
            found.append((drafts.tokens.clone(), drafts.logits.clone()))
            contexts = [n + int(a) + 1 for n, a in zip(contexts, verified.accepted, strict=True)]
        return found

    def prefill(self):
        lens, texts = list(self.CONTEXTS), zip(*self.committed, strict=True)
        self.drafter.prefill(self.tables, lens, lens, *(torch.cat(part) for part in texts))

    def dense_drafts(self, draft_after):
        """The same rounds by a draft without a cache: draft_after(ids, hidden) gives the tokens and logits that come
        after one whole text."""
        committed, found = list(self.committed), []
        for verified in self.rounds:
            tokens, logits = [], []
            for row, (ids, hidden) in enumerate(committed):
                kept = int(verified.accepted[row])
                new = torch.cat([verified.token_ids[row, 1 : kept + 1], verified.next_tokens[row : row + 1]])
                ids, hidden = torch.cat([ids, new]), torch.cat([hidden, verified.target_hidden_states[row, : kept + 1]])
                committed[row] = (ids, hidden)
                drafted = draft_after(ids, hidden)
                tokens.append(drafted[0])
                logits.append(torch.stack(drafted[1]))
            found.append((tokens, torch.stack(logits)))
        return found


def one_layer_drafts(oracle, ids, hidden):
    """K greedy tokens and their logits by one layer, which goes on from its own state."""
    tokens, logits = [], []
    for _ in range(K):
        state = oracle.states(ids, hidden)[-1:]
        logits.append(oracle.logits(state)[0])
        tokens.append(int(logits[-1].argmax()))
        ids, hidden = torch.cat([ids, torch.tensor(tokens[-1:])]), torch.cat([hidden, state])
    return tokens, logits


def random_text(generator, length, size):
    ids = torch.randint(0, VOCAB, (length,), generator=generator)
    return ids, torch.randn(length, size, generator=generator)


def close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, rtol=2e-4, atol=2e-5)


def assert_pieces_say_what_whole_texts_say(model, oracle, lengths, firsts):
    """Two texts of these lengths, their first tokens and then the others, against the oracle over each whole text."""
    fixture, generator = DraftFixture(model), torch.Generator().manual_seed(0)
    texts = [random_text(generator, length, model.hidden_size) for length in lengths]
    whole = [oracle.states(*text) for text in texts]
    rests = [length - first for length, first in zip(lengths, firsts, strict=True)]
    for query_lens, seq_lens in ((firsts, firsts), (rests, lengths)):
        parts = [slice(end - count, end) for count, end in zip(query_lens, seq_lens, strict=True)]
        ids, hidden = (
            torch.cat([text[which][part] for text, part in zip(texts, parts, strict=True)]) for which in (0, 1)
        )
        wanted = torch.cat([states[part] for states, part in zip(whole, parts, strict=True)])
        found = fixture.run(query_lens, seq_lens, ids, hidden)
        close(found, wanted)
        close(model.logits(found), oracle.logits(wanted))


def assert_drafts_are_those_without_a_cache(model, oracle):
    fixture = DraftFixture(model)
    found = fixture.drafts(Strategy.EAGER)
    wanted = fixture.dense_drafts(partial(one_layer_drafts, oracle))
    for (tokens, logits), (wanted_tokens, wanted_logits) in zip(found, wanted, strict=True):
        assert tokens.tolist() == wanted_tokens
        close(logits, wanted_logits)


def assert_drafts_are_those_of_eager(model, strategy, temperature):
    expected = DraftFixture(model).drafts(Strategy.EAGER, temperature)
    found = DraftFixture(model).drafts(strategy, temperature)
    for (tokens, logits), (wanted, wanted_logits) in zip(found, expected, strict=True):
        assert tokens.tolist() == wanted.tolist() and torch.equal(logits, wanted_logits)
