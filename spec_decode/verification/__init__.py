"""Which draft tokens of a chain or a tree the target accepts, and the token it adds, without a host read."""

from spec_decode.verification.base import Verifier, VerifyOutput
from spec_decode.verification.block_verification import BlockVerification
from spec_decode.verification.registry import verifier
from spec_decode.verification.rejection_sampling import RejectionSampling
from spec_decode.verification.synthetic_acceptance import SyntheticAcceptance
from spec_decode.verification.tree_sampling import TreeSampling, TreeVerifyOutput

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
