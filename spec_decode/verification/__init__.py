"""Which draft tokens of a chain or a tree the target accepts, and the token it adds, without a host read."""

from spec_decode.verification.base import Verifier, VerifyOutput
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
    "verifier",
]
