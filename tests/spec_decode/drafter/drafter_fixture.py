"""A drafter over two KV groups with a context in their caches, and consecutive rounds of it."""

import torch
from torch import nn

from attn_backends import get
from builders import RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, VerifiedTokens
from spec_decode.model_api import AttentionInputs, DraftModel
from spec_decode.paged.kv_groups import make_group
from tests.factories import CPU, make_config, make_spec, owned_pages
from tests.foreseen import Foreseen
from tests.spec_decode.drafter.third_party_backends import Advancing, DecodeOnly, Rebuilt, Uncapturable

K, MAX_SEQ_LEN = 4, 48
CONFIG = make_config(hidden_size=64, head_dim=64)
CONTEXTS = [0, 7, 15]
GREEDY_AND_HOT = [0.0, 1.0, 0.0]
"""Temperatures of three requests."""
STRATEGIES = [strategy for strategy in Strategy if strategy is not Strategy.PIECEWISE]
CAPTURING = [strategy for strategy in STRATEGIES if strategy is not Strategy.EAGER]


class Layer(nn.Module):
    """Attention and a residual: the minimum that depends on every earlier token."""

    def __init__(self, config):
        super().__init__()
        self.heads = [config.num_q_heads, config.num_kv_heads, config.num_kv_heads]
        self.qkv = nn.Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.num_q_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, layer, x, attend):
        packed = self.qkv(x).unflatten(1, (sum(self.heads), -1))
        return x + self.out(attend(AttentionInputs(layer, *packed.split(self.heads, 1))).flatten(1))


class TwoLayerDraft(DraftModel):
    """A draft model whose layers can be in different KV groups."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.hidden_size = self.target_states_size = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.place = nn.Embedding(config.max_positions, config.hidden_size)
        self.fuse = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(2))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def layer_groups(self, page_size):
        return self.config.layer_groups(page_size, torch.float32)

    def forward(self, inputs):
        x = self.fuse(torch.cat([self.embed(inputs.token_ids), inputs.hidden], -1)) + self.place(inputs.positions)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, inputs.attention)
        return inputs.kept(x.tanh() * 2)

    def logits(self, hidden):
        return self.head(hidden)


class DrafterFixture:
    """The two-layer model on two groups with different page sizes, and a context of noise in both caches."""

    def __init__(
        self, backends, *, limits=(MAX_SEQ_LEN,) * 3, max_reqs=4, steps=K, make_model=TwoLayerDraft, device=CPU,
        capture_sizes=(4,), **options,
    ):  # fmt: skip
        torch.manual_seed(0)
        self.model = make_model(CONFIG).requires_grad_(False).to(device)
        # A window covers a whole tree.
        both = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 64, "tree": "tree" in options}
        specs = [
            make_spec(**both, page_size=8),
            make_spec(**both, page_size=4, sliding_window=64 if "tree" in options else 6),
        ]
        each = [MAX_SEQ_LEN // spec.page_size for spec in specs]
        self.tables = RequestTables(
            page_sizes=[8, 4], num_pages=[max_reqs * n for n in each], max_reqs=max_reqs, max_seq_len=MAX_SEQ_LEN,
            device=device,
        )  # fmt: skip
        self.pages = [owned_pages(max_reqs, n, max_reqs * n, seed) for seed, n in enumerate(each)]
        self.groups = [
            make_group(f"group{i}", backend, spec, [i], num_pages=max_reqs * n, device=device)
            for i, (backend, spec, n) in enumerate(zip(backends, specs, each, strict=True))
        ]
        for tensor in self.caches():
            tensor.copy_(torch.randn(tensor.shape))
        self.limits = list(limits)
        self.load(range(len(limits)))
        self.steps = steps
        config = DrafterConfig(num_speculative_tokens=steps, capture_sizes=capture_sizes, **options)
        self.drafter = Drafter(self.model, self.groups, self.tables, config)

    def caches(self):
        return [
            tensor for group in self.groups for cache in group.caches.values() for tensor in (cache.key, cache.value)
        ]

    def load(self, requests):
        self.tables.load([[rows[r] for r in requests] for rows in self.pages], [self.limits[r] for r in requests])

    def verified(self, *, round_=0, temperature=0.0, rows=slice(None), contexts=CONTEXTS):
        generator = torch.Generator().manual_seed(round_)
        n, width = len(contexts), self.steps + 1
        whole = VerifiedTokens(
            token_ids=torch.randint(0, CONFIG.vocab_size, (n, width), generator=generator),
            target_hidden_states=torch.randn(n, width, CONFIG.hidden_size, generator=generator),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            accepted=torch.randint(0, width, (n,), generator=generator, dtype=torch.int32),
            next_tokens=torch.randint(0, CONFIG.vocab_size, (n,), generator=generator),
            temperature=torch.tensor(temperature).expand(n).clone(),
            seeds=torch.arange(n) * 31,
        )
        device = self.tables.device
        return VerifiedTokens(*(None if tensor is None else tensor[rows].to(device) for tensor in whole))

    def rounds(self, count=3, temperature=0.0, after_round=lambda: None):
        """Run consecutive rounds, each starting after the last one's accepted tokens: tokens, and logits or parents."""
        contexts, found = list(CONTEXTS), []
        for round_ in range(count):
            verified = self.verified(round_=round_, temperature=temperature, contexts=contexts)
            drafts = self.drafter.propose(verified)
            scores = drafts.logits if drafts.parents is None else drafts.parents
            found.append((drafts.tokens.clone(), scores.clone()))
            after_round()
            contexts = [c + int(a) + 1 for c, a in zip(contexts, verified.accepted, strict=True)]
        return found


def mixed(**options):
    return DrafterFixture([Advancing(), Rebuilt()], **options)


def preplanned(**options):
    return DrafterFixture([Advancing(), Foreseen()], **options)


def advancing(**options):
    return DrafterFixture([get("triton_paged"), get("torch_reference")], **options)


def decode_only(**options):
    return DrafterFixture([get("triton_paged"), DecodeOnly()], **options)


def piecewise(**options):
    return DrafterFixture([get("triton_paged"), Uncapturable()], **options)


def assert_same(found, expected):
    for round_, ((tokens, logits), (wanted, wanted_logits)) in enumerate(zip(found, expected, strict=True)):
        assert tokens.tolist() == wanted.tolist(), f"round {round_}"
        assert torch.equal(logits, wanted_logits), f"round {round_}"
