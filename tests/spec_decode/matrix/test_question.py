"""The words of a question, and what they make of it."""

import pytest

from builders import AttentionKind, AttentionSpec
from spec_decode.matrix.question import EXAMPLE, Question, QuestionError, specs_of
from spec_decode.tools.specs import FP8_DS_MLA, GQA, MLA, SPARSE

WORDS = [
    ("window 4096", {"window": 4096}),
    ("heads 32/4, dim 128", {"heads": 32, "kv heads": 4, "dim": 128}),
    ("32/4 heads, dim 192/128", {"heads": 32, "kv heads": 4, "dim": 192, "value dim": 128}),
    ("heads 8,kv heads 2,  GROUP 4", {"heads": 8, "kv heads": 2, "group": 4}),
    ("page 16, bf16", {"page": 16, "dtype": "bfloat16"}),
    ("float32, kv fp16", {"dtype": "float32", "kv dtype": "float16"}),
    ("bf16, kv fp8", {"dtype": "bfloat16", "kv dtype": "float8_e4m3fn"}),
    ("bf16, kv bfloat16", {"dtype": "bfloat16", "kv dtype": None}),
    ("soft cap 30, scale 0.125, sinks", {"soft cap": 30.0, "scale": 0.125, "sinks": True}),
    ("cap 2.5, no sinks, no window", {"soft cap": 2.5, "sinks": False, "window": None}),
    ("mla, batch invariant, verify", {"kind": "mla", "batch invariant": True, "mode": "verify"}),
    ("trees", {"trees": True}),
    ("not causal", {"blocks": True}),
    ("full_loop, rows 64, length 8192", {"strategy": "full loop", "rows": 64, "length": 8192}),
    ("device loop", {"strategy": "device loop"}),
]


@pytest.mark.parametrize(("text", "values"), WORDS)
def test_words_give_axes_their_values(text, values):
    question = Question.of(text)
    assert {axis: question.values[axis] for axis in question.named} == values


@pytest.mark.parametrize("spec", [GQA, MLA, SPARSE, FP8_DS_MLA])
def test_a_described_spec_is_a_question(spec):
    assert next(specs_of(Question.of(spec.describe()))) == spec


def test_unnamed_features_are_off_and_sizes_free():
    question = Question.of("window 4096, group 8")
    assert question.describe() == (
        "window 4096, group 8, mha, no soft cap, no sinks, no batch invariant, no blocks, no trees"
    )
    specs = list(specs_of(question))
    assert all(spec.sliding_window == 4096 and spec.group_size == 8 and not spec.sinks for spec in specs)
    assert {spec.page_size for spec in specs} >= {16, 64} and {spec.head_dim for spec in specs} >= {64, 128}


def test_question_about_latents_has_one_kv_head():
    specs = list(specs_of(Question.of("mla, group 16")))
    assert {(spec.kind, spec.num_kv_heads, spec.num_q_heads) for spec in specs} == {(AttentionKind.MLA, 1, 16)}
    assert isinstance(specs[0], AttentionSpec)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("windw 4096", r"'windw 4096' is no word of a spec\. Words are window 4096, heads 32/4, .*full loop"),
        ("window", "'window' is no word"),
        ("window 0", "'window 0' is no word"),
        ("page 16 bf16", "'page 16 bf16' is no word"),
        ("kv int8", "'kv int8' is no word"),
        ("x" * 200, "'x{60}' is no word"),
        ("", "a question needs words, such as 'window 4096"),
        (" , ,", "a question needs words"),
        ("bf16, fp32", "dtype is given twice, the second time as 'fp32'. Give it once"),
        ("heads 32/5", "32 query heads are no multiple of 5 KV heads"),
        ("heads 32, group 5", "32 query heads are no multiple of a group of 5"),
        ("heads 32/4, group 4", "make a group of 8, but group is 4"),
        ("mla, kv heads 4", "mla keeps one latent per token"),
        ("trees, blocks", "a spec with trees must be causal"),
        ("trees, window 8", "sliding_window must be at least 64"),
        ("scale 0", "scale must be positive"),
    ],
)
def test_invalid_words_are_rejected_with_valid_ones(text, words):
    with pytest.raises(QuestionError, match=words):
        Question.of(text)


def test_the_example_is_a_question():
    assert Question.of(EXAMPLE).named == ("window", "heads", "kv heads", "dim", "page", "dtype", "strategy")
