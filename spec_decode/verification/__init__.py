"""Which draft tokens the target keeps, and the token it adds. All on the device, without a host read."""

from spec_decode.sampling.target import sample_target
from spec_decode.verification.base import Verifier, VerifyOutput
from spec_decode.verification.block import BlockVerification
from spec_decode.verification.registry import verifier
from spec_decode.verification.rejection import RejectionSampling
from spec_decode.verification.synthetic import SyntheticAcceptance

__all__ = [
    "BlockVerification",
    "RejectionSampling",
    "SyntheticAcceptance",
    "Verifier",
    "VerifyOutput",
    "sample_target",
    "verifier",
]
