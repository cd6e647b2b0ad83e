"""The conformance kit's whole rounds that every test run includes; the others are slow."""

from __future__ import annotations

from spec_decode.conformance import Check

STRATEGIES_AGREE = "drafter.strategies_agree"
STOP_ON_THEIR_OWN = "drafter.requests_stop_on_their_own"
RESUME_AFTER_A_PAUSE = "drafter.drafts_resume_after_a_pause"

OFTEN = {
    STRATEGIES_AGREE: ("k1-n32", "k2-n2", "k3-n3", "k4-n7", "k5-n1", "k6-n2", "k7-n1", "k8-n1", "k16-n1"),
    STOP_ON_THEIR_OWN: ("k2-n3", "k4-n7"),
    RESUME_AFTER_A_PAUSE: ("k1-n2", "k4-n3"),
}
"""Cases by check. `strategies_agree` combines every number of draft tokens with every number of requests; each occurs
here at least once. The requests of k4-n7 stop at every length from 0 to 4."""


def is_drawn(check: Check) -> bool:
    """Return whether its case is drawn from the claims."""
    return check.module.endswith(".drawn_checks")


def runs_often(check: Check) -> bool:
    """Return whether every test run tries it on the reference: of the drawn cases, one in ten."""
    return check.case.endswith("0") if is_drawn(check) else check.case in OFTEN.get(check.name, (check.case,))
