"""Block verification: a draft's tokens are verified together, not one by one."""

from __future__ import annotations

import torch

from builders.errors import require_tensor
from spec_decode.verification.base import LosslessVerifier
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.hash_seeds import hash_seeds


class BlockVerification(LosslessVerifier):
    """Accepts at least as many tokens as rejection sampling on average; leaves the target's distribution unchanged.

    With r(i) the ratio p / q of draft token i, a draft of n tokens has the weights w(0) = 1 and
    w(i) = min(1, w(i - 1) r(i)). Prefix i < n passes with probability s / (s + 1 - w(i)), where s is the sum of
    max(w(i) p - q, 0) over the token after it, and prefix n with probability w(n). The longest prefix t that passes is
    accepted, even over shorter ones that do not; the token after it is drawn from max(w(t) p - q, 0), normalised, or
    from p if t = n (Sun et al., 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2). Temperature
    0 accepts the longest prefix of the target's argmax tokens.

    The output depends on tokens and accept uniforms after the accepted prefix. Their noise must not be used again when
    the next round reaches the same positions, or the text drifts from the target's distribution: draw drafts with
    draft_seeds().
    """

    _op = staticmethod(block_verify)

    def draft_seeds(self, seeds: torch.Tensor, draft_positions: torch.Tensor) -> torch.Tensor:
        """Other seeds int64 [R] in every round: no two rounds of a request begin at the same position.

        - seeds, draft_positions  int64 [R]

        Raises BatchError for tensors of another shape, dtype or device.
        """
        for name, tensor in {"seeds": seeds, "draft_positions": draft_positions}.items():
            require_tensor(name, tensor, shape=(len(seeds),), dtype=torch.int64, device=seeds.device)
        return hash_seeds(seeds.contiguous(), draft_positions.contiguous())
