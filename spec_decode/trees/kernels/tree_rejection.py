"""Rejection sampling of a tree: each token's children are tried in turn, against what the target has left."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import dependent_launch, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.draw_tokens import DrawTokens, store_draw_kernel
from spec_decode.sampling.kernels.vocab_blocks import vocab_block
from spec_decode.trees.kernels.ancestor_masks import AncestorMasks, trees_alone
from spec_decode.trees.kernels.follow_tree import walk
from spec_decode.trees.kernels.tree_rejection_kernels import draw_left_kernel, try_children_kernel

_BLOCK = 4096
"""Logits that a program reads at a time."""


class TreeRejection(NamedTuple):
    """Accepts a path through each of R trees of up to N draft tokens, K deep, and draws the token after it.

    V vocabulary, p a query token's distribution under the target, q the draft's, from which its children were drawn
    without replacement: the first from q, the next from q without the first, normalised. With the children x1, x2, ...
    of a token reached, p1 = p and q1 = q: x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i)); if it is not,
    p_(i+1) is max(p_i - q_i, 0) and q_(i+1) is q_i without x_i, both normalised. The token after the last accepted one
    is drawn from what its children left of p: the output has the target's distribution (recursive rejection sampling,
    Jeon et al., 2024). A child that the draft could not have drawn, where nothing is left of q, is passed over.

    Of temperature 0 the child that is p's argmax is accepted.

    - processed        fp32 [R, 1 + N, V], p's logits after temperature, top_k and top_p
    - draft_tokens     int64 [R, N]
    - parents          int64 [R, N], as DraftTree has them; the first -1 ends a row's tree
    - draft_logits     fp32 [R, C, V] of any strides, q's processed logits of the query tokens that have children
    - draft_columns    int64 [R, 1 + N], the column of draft_logits that is a query token's, read where it has children
    - temperature      fp32 [R]; 0 is greedy
    - seeds            int64 [R], of the target's draws and of the uniforms that decide what is accepted
    - draft_positions  int64 [R], absolute position of the root's children
    - max_depth        K
    - max_children     the most that a query token has

    Returns accepted, path and next_tokens as FollowTree does.
    """

    processed: torch.Tensor
    draft_tokens: torch.Tensor
    parents: torch.Tensor
    draft_logits: torch.Tensor
    draft_columns: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_positions: torch.Tensor
    max_depth: int
    max_children: int

    def checked(self) -> TreeRejection:
        """These, contiguous as kernels read them, except draft_logits, which are large and stay where they are.

        Raises BatchError for tensors of another shape, dtype or device.
        """
        (rows, tokens), device, vocab = self.draft_tokens.shape, self.processed.device, self.processed.shape[-1]
        expected: tuple[tuple[tuple[int | None, ...], torch.dtype], ...] = (
            ((rows, 1 + tokens, vocab), torch.float32),
            ((rows, tokens), torch.int64),
            ((rows, tokens), torch.int64),
            ((rows, None, vocab), torch.float32),
            ((rows, 1 + tokens), torch.int64),
            ((rows,), torch.float32),
            *[((rows,), torch.int64)] * 2,
        )
        tensors = dict(zip(self._fields, self[:8], strict=False))
        for (name, tensor), (shape, dtype) in zip(tensors.items(), expected, strict=True):
            require_tensor(name, tensor, shape=shape, dtype=dtype, device=device)
        return TreeRejection(
            self.processed.contiguous(), self.draft_tokens.contiguous(), self.parents.contiguous(), self.draft_logits,
            self.draft_columns.contiguous(), self.temperature.contiguous(), self.seeds.contiguous(),
            self.draft_positions.contiguous(), self.max_depth, self.max_children,
        )  # fmt: skip

    def reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parents = trees_alone(self.parents)
        passes, left, was_tried = _try_children(self, parents)
        accepted, path, last = walk(parents, passes, self.max_depth)
        row = torch.arange(len(parents))
        from_rest = (self.temperature > 0) & was_tried[row, last]
        scores = torch.where(from_rest[:, None], left[row, last].log(), self.processed[row, last])
        positions = self.draft_positions + accepted
        return accepted, path, DrawTokens(scores, self.temperature, self.seeds, positions).reference()

    def launch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        accepted, path, next_tokens = self.fake()
        (rows, tokens, vocab), device = self.processed.shape, self.processed.device
        nodes, children = triton.next_power_of_2(tokens), triton.next_power_of_2(self.max_children)
        passes = torch.empty(rows, tokens, dtype=torch.int32, device=device)
        norms = torch.empty(4, rows * tokens, dtype=torch.float32, device=device)
        # Of each child that was tried: what p and q are divided by before they are subtracted; then the child.
        scales = torch.empty(2, rows * tokens, children, dtype=torch.float32, device=device)
        tried = torch.empty(rows * tokens, children, dtype=torch.int32, device=device)
        block = min(_BLOCK, triton.next_power_of_2(vocab))
        try_children_kernel[(rows, tokens)](
            *self[:8], passes, norms, scales, tried,
            tokens, vocab, *self.draft_logits.stride(),
            BLOCK=block, NODES=nodes, CHILDREN=children, num_warps=max(1, min(16, block // 256)),
            **dependent_launch(device),
        )  # fmt: skip
        block = vocab_block(vocab)
        blocks = triton.cdiv(vocab, block)
        best = torch.empty(rows, blocks, dtype=torch.float32, device=device)
        best_token = torch.empty(rows, blocks, dtype=torch.int32, device=device)
        draw_left_kernel[(rows, blocks)](
            self.processed, self.parents, self.draft_logits, self.draft_columns, self.temperature, self.seeds,
            self.draft_positions, passes, norms, scales, tried, best, best_token, accepted, path,
            tokens, vocab, self.max_depth, *self.draft_logits.stride(),
            BLOCK=block, NODES=nodes, CHILDREN=children, num_warps=max(1, min(8, block // 128)),
            **dependent_launch(device),
        )  # fmt: skip
        store_draw_kernel[(rows,)](
            best, best_token, next_tokens, vocab, blocks,
            RESIDUAL=False, BLOCK=triton.next_power_of_2(blocks), num_warps=1, **dependent_launch(device),
        )  # fmt: skip
        return accepted, path, next_tokens

    def fake(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, new = len(self.parents), self.parents.new_empty
        return new(rows), new(rows, self.max_depth), new(rows)


def _try_children(arguments: TreeRejection, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which draft tokens pass after their parent, were it reached, bool [R, N]; what each query token's children leave
    of p if none does, fp32 [R, 1 + N, V]; and whether one was tried, bool [R, 1 + N]."""
    row, is_random = torch.arange(len(parents)), arguments.temperature > 0
    columns = arguments.draft_columns.clamp(0, arguments.draft_logits.shape[1] - 1)
    p, q = arguments.processed.softmax(-1), arguments.draft_logits.softmax(-1)[row[:, None], columns]
    depths = AncestorMasks(parents).reference()[1]
    ranks, was_tried = torch.zeros_like(depths), torch.zeros_like(depths, dtype=torch.bool)
    passes = torch.zeros_like(parents, dtype=torch.bool)
    for child, (token, parent) in enumerate(zip(arguments.draft_tokens.unbind(1), parents.unbind(1), strict=True)):
        exists, parent = parent >= 0, parent.clamp(min=0)
        of_p, of_q = (_normalised(each[row, parent], was_tried[row, parent]) for each in (p, q))
        p_token, q_token = of_p[row, token], of_q[row, token]
        keys = noise.key(arguments.seeds, arguments.draft_positions + depths[row, parent], noise.ACCEPT)
        # Strictly less: a product that underflows to 0 must not accept a token that the target cannot produce.
        is_accepted = (noise.uniform(keys, ranks[row, parent]) * q_token < p_token) & (q_token > 0)
        is_argmax = token == arguments.processed[row, parent].argmax(-1)
        passes[:, child] = torch.where(is_random, is_accepted, is_argmax) & exists
        rest = (of_p - of_q).clamp(min=0)
        # Rounding can empty a rest that is zero in theory only if p == q: then p itself is right.
        taken = exists & (q_token > 0) & (rest.sum(-1) > 0)
        p[row, parent] = torch.where(taken[:, None], rest, p[row, parent])
        q[row[taken], parent[taken], token[taken]] = 0
        was_tried[row, parent] |= taken
        ranks[row, parent] += exists
    return passes, p, was_tried


def _normalised(weights: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """Weights [R, V] over their sum, where something was taken from them."""
    total = weights.sum(-1)
    return weights * torch.where(changed & (total > 0), total, 1.0).reciprocal()[:, None]


tree_rejection = define_op("spec_decode::tree_rejection", TreeRejection)
