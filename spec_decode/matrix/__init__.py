"""The compatibility matrix: each backend's claims and observations, as pure functions of the reports' JSON."""

from spec_decode.conformance.report import Claim
from spec_decode.matrix.answer import Answer, answer_question
from spec_decode.matrix.cells import Cell, Note, Run, RunEvidence, Status, evidence_of
from spec_decode.matrix.columns import Column
from spec_decode.matrix.model import SCHEMA, Matrix, MatrixRow, build_matrix, to_json
from spec_decode.matrix.page import to_html
from spec_decode.matrix.question import Question
from spec_decode.matrix.sources import Sources
from spec_decode.matrix.terminal import to_table

__all__ = [
    "SCHEMA",
    "Answer",
    "Cell",
    "Claim",
    "Column",
    "Matrix",
    "MatrixRow",
    "Note",
    "Question",
    "Run",
    "RunEvidence",
    "Sources",
    "Status",
    "answer_question",
    "build_matrix",
    "evidence_of",
    "to_html",
    "to_json",
    "to_table",
]
