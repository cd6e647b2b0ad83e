"""Which draft tokens the target accepts, and the token it adds. All on the device, without a host read."""

from spec_decode.verification.base import Verifier, VerifyOutput
from spec_decode.verification.block_verification import BlockVerification
from spec_decode.verification.registry import verifier
from spec_decode.verification.rejection_sampling import RejectionSampling
from spec_decode.verification.synthetic_acceptance import SyntheticAcceptance

__all__ = ["BlockVerification", "RejectionSampling", "SyntheticAcceptance", "Verifier", "VerifyOutput", "verifier"]
