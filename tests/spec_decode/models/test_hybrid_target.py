"""A draft in another engine, whose target is transformers' Qwen3.5 with full and linear attention."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from attn_backends import get
from builders import RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, VerifiedTokens
from spec_decode.model_api import TargetModel
from spec_decode.models.load import load_draft
from spec_decode.paged.kv_groups import make_group
from tests.factories import CPU
from tests.spec_decode.models import oracle
from tests.spec_decode.models.generated_mtp import QWEN_CONFIG, QWEN_TEXT, make_mtp

transformers = pytest.importorskip("transformers", minversion="5.2")
K, PAGE, LENGTH = 3, 4, 40


class HybridTarget(TargetModel):
    """What a draft uses of the target, and nothing that this library runs."""

    def __init__(self, model):
        super().__init__()
        config = model.config
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.target_states_size, self.max_positions = config.hidden_size, config.max_position_embeddings
        self.embed, self.lm_head = model.get_input_embeddings(), model.lm_head
        self.run, self.known = model, {}

    def layer_groups(self, page_size):
        raise NotImplementedError

    def forward(self, token_ids, positions, attention):
        raise NotImplementedError

    def logits(self, hidden):
        return self.lm_head(hidden)

    def over(self, ids):
        """Greedy next tokens int64 [n] and hidden states [n, H] of a whole text; every strategy asks for the same."""
        if (text := tuple(ids)) not in self.known:
            out = self.run(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
            self.known[text] = out.logits[0].argmax(-1).tolist(), out.hidden_states[-1][0]
        return self.known[text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The target as it saves itself, with the layer that drafts beside it, as Qwen publishes both."""
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    sizes = {name: value for name, value in QWEN_TEXT.items() if name != "partial_rotary_factor"}
    sizes |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    config = transformers.Qwen3_5TextConfig(**sizes, linear_key_head_dim=8, linear_value_head_dim=8)
    model = transformers.Qwen3_5ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(1 if parameter.dim() == 1 else 8)
    model.save_pretrained(folder)
    whole = load_file(folder / "model.safetensors") | make_mtp(QWEN_CONFIG).tensors
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, folder / "model.safetensors")
    saved = json.loads((folder / "config.json").read_text())
    assert saved["architectures"] == ["Qwen3_5ForCausalLM"] and saved["mtp_num_hidden_layers"] == 1
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return HybridTarget(transformers.Qwen3_5ForCausalLM.from_pretrained(folder).eval())


class Rounds:
    """Greedy decoding of one request, whose target runs over whole texts."""

    def __init__(self, draft, strategy):
        [group] = draft.layer_groups(PAGE)
        pages = LENGTH // PAGE
        self.tables = RequestTables(page_sizes=[PAGE], num_pages=[pages], max_reqs=1, max_seq_len=LENGTH, device=CPU)
        self.tables.load([[list(range(pages))]], [LENGTH])
        backend = get("torch_reference")
        groups = [make_group(group.name, backend, group.spec, group.layers, num_pages=pages, device=CPU)]
        config = DrafterConfig(num_speculative_tokens=K, strategy=strategy, capture_sizes=[1])
        self.drafter = Drafter(draft, groups, self.tables, config)

    def text(self, target, prompt, length):
        """A text of so many tokens, and what each round drafted."""
        best, hidden = target.over(prompt)
        text, found = [*prompt, best[-1]], []
        count = len(prompt) - 1
        self.drafter.prefill(self.tables, [count], [count], torch.tensor(prompt[1:]), hidden[:-1])
        verified, accepted = [0, *[0] * K], 0
        states = torch.zeros(1, K + 1, target.hidden_size)
        states[0, 0] = hidden[-1]
        while len(text) < length:
            round_ = VerifiedTokens(
                token_ids=torch.tensor([verified]),
                target_hidden_states=states.clone(),
                context_lens=torch.tensor([count], dtype=torch.int32),
                accepted=torch.tensor([accepted], dtype=torch.int32),
                next_tokens=torch.tensor(text[-1:]),
                temperature=torch.zeros(1),
                seeds=torch.zeros(1, dtype=torch.int64),
            )
            drafted = self.drafter.propose(round_).tokens[0].tolist()
            found.append((list(text), drafted))
            count += accepted + 1
            best, hidden = target.over([*text, *drafted])
            start = len(text) - 1
            accepted = next((k for k in range(K) if drafted[k] != best[start + k]), K)
            verified, states[0] = [text[-1], *drafted], hidden[start : start + K + 1]
            text += [*drafted[:accepted], best[start + accepted]]
        return text[:length], found


@pytest.mark.parametrize("strategy", [Strategy.EAGER, Strategy.FULL_LOOP, Strategy.DEVICE_LOOP])
def test_mtp_layer_drafts_from_hybrid_target_states(folder, target, strategy):
    draft, prompt = load_draft(folder, target, dtype=torch.float32), [3, 17, 5, 9]
    plain = list(prompt)
    while len(plain) < 20:
        plain.append(target.over(plain)[0][-1])
    text, found = Rounds(draft, strategy).text(target, prompt, 20)
    assert text == plain and len(set(plain)) > 3
    published = oracle.Qwen(make_mtp(QWEN_CONFIG), target, [None], torch.float64)
    for before, drafted in found:
        scores, _ = published.drafts(before[1:], target.over(before[:-1])[1], K)
        assert drafted == scores.argmax(-1).tolist()
