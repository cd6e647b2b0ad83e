"""Whole rounds of a real target over trees: draft, one forward by masks, verify, move what was accepted."""

from dataclasses import replace

import pytest
import torch

from attn_backends import get
from builders import BatchBuffers, RequestTables
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models import SHIPPED_PAIR, load_pair
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import build_ragged, make_group
from spec_decode.sampling import Sampling, SamplingParams, sample_target
from spec_decode.trees import DynamicTree, DynamicTreeConfig, move_accepted_kv
from spec_decode.trees.kernels.ancestor_masks import ancestor_masks
from spec_decode.verification import TreeSampling

CPU = torch.device("cpu")
STEPS, WIDTH, TOKENS, NEW = 3, 3, 8, 24
PROMPT = encode("The for statement")


class Target:
    """The shipped target over pages of its own, for one request."""

    def __init__(self, model, backend):
        self.model = model
        self.groups = [
            make_group(group.name, get(backend), replace(group.spec, tree=True), group.layers, num_pages=8, device=CPU)
            for group in model.layer_groups(16)
        ]
        sizes = {"page_sizes": [16] * len(self.groups), "num_pages": [8] * len(self.groups)}
        self.tables = RequestTables(**sizes, max_reqs=1, max_seq_len=96, device=CPU)
        # Pages in another order than positions.
        self.tables.load([[[5, 2, 7, 0, 3, 6]]] * len(self.groups), [96])

    def logits(self, token_ids, context):
        """After `context` tokens in the cache, a chain."""
        batch, metadata = build_ragged(self.groups, self.tables, [len(token_ids)], [context + len(token_ids)])
        return self._run(torch.tensor(token_ids), batch, metadata)

    def tree_logits(self, root, tree, context):
        """After `context` tokens, of the root and the tree; and the slots of all."""
        masks, depths = ancestor_masks(tree.parents)
        count = masks.shape[1]
        batch = BatchBuffers(self.tables, max_tokens=count)
        batch.load([count], [context + count])
        batch.tree_masks.copy_(masks[0])
        batch.positions.copy_(context + depths[0])
        sizes = {"num_reqs": 1, "num_tokens": count, "max_query_len": count, "max_seq_len": context + count}
        metadata = [
            group.make_builder(self.tables, count).build(batch.tree_view(batch.view(index, **sizes)))
            for index, group in enumerate(self.groups)
        ]
        token_ids = torch.cat([torch.tensor([root]), tree.draft_tokens[0].clamp(min=0)])
        return self._run(token_ids, batch, metadata)[None], batch.slot_mappings[:, None]

    def _run(self, token_ids, batch, metadata):
        with torch.no_grad():
            states = self.model(token_ids, batch.positions, PagedAttention(self.groups, metadata))
            return self.model.logits(states.hidden)

    def move(self, slots, path):
        for group, own in zip(self.groups, slots, strict=True):
            for cache in group.caches.values():
                move_accepted_kv(cache.key, cache.value, own, path)


@pytest.fixture(scope="module")
def model():
    return load_pair(SHIPPED_PAIR, device=CPU)[0].float()


def plain_text(target, sampling):
    """What plain decoding says after the prompt."""
    text, context, asked = [], 0, PROMPT
    while len(text) < NEW:
        logits = target.logits(asked, context)[-1:]
        context += len(asked)
        asked = sample_target(logits, sampling=sampling, positions=torch.tensor([context])).tolist()
        text += asked
    return text


def drafted(model, text, seed):
    """The tree of a draft that is the target itself, blurred with noise."""
    step, generator = torch.zeros(1, dtype=torch.int64), torch.Generator().manual_seed(seed)
    config = DynamicTreeConfig(width=WIDTH, num_tokens=TOKENS)
    tree = DynamicTree(1, step, config, num_speculative_tokens=STEPS)
    paths = [()]
    for at in range(STEPS):
        step.fill_(at)
        rows = torch.cat([Target(model, "torch_reference").logits([*text, *path], 0)[-1:] for path in paths])
        tree.grow((rows + 2 * torch.randn(rows.shape, generator=generator))[None])
        frontier = zip(tree.frontier_places[0].tolist(), tree.frontier_tokens[0].tolist(), strict=True)
        paths = [(*paths[place], token) for place, token in frontier]
    return tree.kept()


@pytest.mark.parametrize("backend", ["torch_reference", "triton_paged"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_from_trees_is_plain_decodings(model, backend, temperature):
    sampling = Sampling.of([SamplingParams(temperature=temperature, seed=5)], CPU)
    target, expected = Target(model, backend), plain_text(Target(model, backend), sampling)
    first = target.logits(PROMPT, 0)[-1:]
    context, kept = len(PROMPT), []
    text = sample_target(first, sampling=sampling, positions=torch.tensor([context])).tolist()
    while len(text) < NEW:
        tree = drafted(model, [*PROMPT, *text], len(text))
        logits, slots = target.tree_logits(text[-1], tree, context)
        place = {"sampling": sampling, "draft_positions": torch.tensor([context + 1])}
        output = TreeSampling(STEPS).verify(logits, tree, **place)
        target.move(slots, output.path)
        accepted = int(output.accepted)
        text += [int(tree.draft_tokens[0, token - 1]) for token in output.path[0, :accepted]]
        text += output.next_tokens.tolist()
        kept.append(output.path[0, :accepted].tolist())
        context += 1 + accepted
    assert text[:NEW] == expected
    assert any(path != list(range(1, 1 + len(path))) for path in kept) and max(map(len, kept)) > 1
