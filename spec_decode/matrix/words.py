"""What the words and marks of the matrix mean, for its readers."""

from __future__ import annotations

from spec_decode.matrix.cells import Word

HOW_TO_READ = (
    "What each backend claims, and what was seen when it was checked. A count such as 72/72 is checks passed of those "
    "that ran, refusals left out; 0.4x says that the worst error was 0.4 of what it may be, twice the error of an "
    "honest low-precision reference. Runs are never averaged: where runs of one version on one device disagree, the "
    "newest comes first and the others are named."
)
MEANINGS = {
    Word.VERIFIED: "claimed, and every check that covers it passed",
    Word.CLAIMED: "claimed, and no check that covers it ran",
    Word.REFUSED: "not claimed, and refused with a reason when asked",
    Word.BROKEN: "at least one check that covers it failed",
    Word.PARTIAL: "passes, beside known failures or checks that could not run",
    Word.UNCLAIMED: "passes, and is not claimed",
    Word.UNKNOWN: "not claimed and not checked, or the checks could not run",
}
GLYPHS = {
    Word.VERIFIED: "✓",
    Word.CLAIMED: "?",
    Word.REFUSED: "–",
    Word.BROKEN: "✗",
    Word.PARTIAL: "~",
    Word.UNCLAIMED: "+",
    Word.UNKNOWN: "·",
}
