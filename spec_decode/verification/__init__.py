"""Which draft tokens the target keeps, and the token it adds. All on the device, without a host read."""

from spec_decode.verification.base import Verdict, Verifier
from spec_decode.verification.block import BlockVerification
from spec_decode.verification.registry import verifier
from spec_decode.verification.rejection import RejectionSampling
from spec_decode.verification.sampling import sample_target
from spec_decode.verification.synthetic import SyntheticAcceptance

__all__ = [
    "BlockVerification",
    "RejectionSampling",
    "SyntheticAcceptance",
    "Verdict",
    "Verifier",
    "sample_target",
    "verifier",
]
