"""Verification of chains and trees: the accepted draft tokens and the target's next token, without a host sync."""

from spec_decode.verification.base import Verifier, VerifyOutput
from spec_decode.verification.kernels.move_accepted_kv import move_accepted_kv
from spec_decode.verification.tree_sampling import TreeSampling, TreeVerifyOutput
from spec_decode.verification.verifiers import BlockVerification, RejectionSampling, SyntheticAcceptance, verifier

__all__ = [
    "BlockVerification",
    "RejectionSampling",
    "SyntheticAcceptance",
    "TreeSampling",
    "TreeVerifyOutput",
    "Verifier",
    "VerifyOutput",
    "move_accepted_kv",
    "verifier",
]
