"""Terminal and HTML output: pure functions of the JSON, safe with any text, and fast with large input."""

import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from spec_decode.conformance.report import Claim
from spec_decode.matrix import build_matrix, to_html, to_table
from tests.spec_decode.matrix.evidence import agreement, limit, report, result, timing

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> \"'&`|*_\x1b[2J\u202e"
VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Elements with their attributes, and whether every end tag closes what is open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.balanced = True
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        self.balanced &= bool(self.open) and self.open.pop() == tag


def drawn(matrix, width: int = 300) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(to_table(matrix))
    return stream.getvalue()


def hostile():
    bad = result("fail", reason=HOSTILE, check=f"numerics.{HOSTILE}", case=HOSTILE)
    claims = {"mode:decode": Claim(claimed=True, level=HOSTILE, reason=HOSTILE), f"axis:{HOSTILE}": True}
    places = dict.fromkeys(("torch", "platform", "driver", "commit", "device", "triton"), HOSTILE)
    reports = [report(bad, backend=HOSTILE, version=version, claims=claims, **places) for version in (HOSTILE, "2")]
    pair = agreement(draft=HOSTILE, backend=HOSTILE, dtype=HOSTILE, strategy=HOSTILE, refusal=HOSTILE)
    speed = timing(case=HOSTILE, backend=HOSTILE, spec=HOSTILE, limits=[limit(HOSTILE, 1, None)])
    return build_matrix(reports, [pair], [speed], current={HOSTILE: HOSTILE})


def one(outcome: str = "fail", **fields):
    return build_matrix([report(result(outcome, **fields), claims={"mode:decode": True})])


def test_report_text_adds_no_page_element():
    plain = build_matrix(
        [report(result("fail"), backend="b", version=v, claims={"mode:decode": True, "axis:x": True}) for v in "12"],
        [agreement(refusal="no")], [timing(case="c")], current={"b": "2"},
    )  # fmt: skip
    kinds = [{tag for tag, _ in Page(to_html(matrix)).elements} for matrix in (plain, hostile())]
    assert kinds[1] <= kinds[0] | {"details", "summary"} and "img" not in kinds[1]


def test_page_attributes_have_no_handlers_or_external_links():
    page = Page(to_html(hostile()))
    assert page.balanced
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert all(attributes.get(name, "#").startswith("#") for name in ("href", "src")), (tag, attributes)
        assert "style" not in attributes


def test_page_has_one_script_and_its_policy():
    text = to_html(hostile())
    assert text.count("<script") == 1 and "script-src 'sha256-" in text and "default-src 'none'" in text


def test_control_characters_are_escaped_in_every_format():
    for text in (to_html(hostile()), drawn(hostile())):
        assert "\x1b" not in text and "\u202e" not in text
        assert "\\x1b[2J" in text


def test_terminal_numbers_reasons_with_their_commands():
    text = drawn(one(reason="slot 64 differs"))
    assert "broken 0/1 ^1" in text
    assert "^1 fail: numerics.right[decode]: slot 64 differs\n    attn-backends check k --device cuda " in text


def test_one_reason_in_two_rows_has_one_number():
    text = drawn(build_matrix([report(result("fail", reason="x"), backend=name) for name in "ab"]))
    assert text.count("broken 0/1 ^1") == 2 and "\n^2 fail" not in text


ALL, PAGE = (to_html, drawn), (to_html,)
IN_GRAPH = {"graph:advance": Claim(claimed=True, level="in graph")}
TWICE = [report(result("fail"), date="2026-01-01"), report(result("pass"), date="2026-02-01")]
SHOWN = {
    "provenance": (
        ALL,
        build_matrix([report(result("pass"), dirty=True)]),
        ("NVIDIA H200", "2.13.0", "3.7.1", "0123456789ab dirty", "2026-01-02T03:04:05+00:00"),
    ),
    "no provenance": (PAGE, build_matrix([report(result("pass"), dirty=None)]), ("dirty or not: unknown",)),
    "runs that disagree": (ALL, build_matrix(TWICE), ("verified 1/1; earlier broken 0/1",)),
    "stale": (
        ALL,
        build_matrix([report(result("pass"))], current={"k": "2"}),
        ("stale", "version 2 is installed now"),
    ),
    "level": (ALL, build_matrix([report(result("pass", "graph:advance"), claims=IN_GRAPH)]), ("in graph",)),
    "nothing": (ALL, build_matrix([]), ("",)),
    "one prompt": (PAGE, build_matrix([], [agreement(prompts=1, unlike_eager=1)]), ("1 of 1 prompt differ",)),
    "timings": (
        PAGE,
        build_matrix([], (), [timing(limits=[limit("gpu_us", 3, False)])]),
        ("10 [9 to 12]", "gpu_us &lt;= 3: missed"),
    ),
}


@pytest.mark.parametrize(("renders", "matrix", "words"), SHOWN.values(), ids=SHOWN)
def test_every_page_shows_expected_text(renders, matrix, words):
    for render in renders:
        text = render(matrix)
        assert text and all(part in text for part in words), render


@pytest.mark.parametrize("render", ALL)
def test_current_evidence_is_not_called_stale(render):
    assert "(stale)" not in render(one("pass")) and "Stale" not in render(one("pass"))


def test_terminal_table_is_readable_ascii():
    text = drawn(build_matrix([report(result("pass"), result("xfail", reason="[red]#12[/red]"))]))
    assert "partial 1/2 ^1" in text and "^1 xfail: numerics.right[decode-2]: [red]#12[/red]" in text
    assert text.isascii()


def test_plot_has_text_alternative():
    page = Page(to_html(build_matrix([], (), [timing(), timing(backend="p", peer=True)])))
    (label,) = [attributes["aria-label"] for tag, attributes in page.elements if attributes.get("role") == "img"]
    assert label == (
        "1 request, 1,024 tokens each, GPU time, µs: k 10 [9 to 12], floor 5; p (peer) 10 [9 to 12], floor 5"
    )


def test_page_does_not_depend_on_report_order():
    reports = [report(result("pass"), backend=name, date=f"2026-01-0{n}") for n, name in enumerate("abc", 1)]
    assert to_html(build_matrix(reports)) == to_html(build_matrix(reports[::-1]))


def test_page_needs_under_a_kilobyte_per_cell():
    reports = [
        report(
            *(result(("pass", "fail", "unsupported")[n % 3], f"page:{n}", reason="r" * 80) for n in range(40)),
            backend=f"backend_{row}",
            claims={f"page:{n}": True for n in range(40)},
        )
        for row in range(40)
    ]
    text = to_html(build_matrix(reports))
    assert len(text.encode()) < 1_600_000 and text.count('<td role="cell" class="w-') == 1600


def panel_of(text: str) -> str:
    return re.sub(r"<[^>]+>", "", text.partition('<div class="panel">')[2].partition("</details>")[0])


@pytest.mark.parametrize("count, words", [(1, "1 of 1 check passed"), (2, "2 of 2 checks passed")])
def test_single_item_is_in_the_singular(count, words):
    text = to_html(build_matrix([report(*[result("pass")] * count)]))
    assert words in panel_of(text) and "1 backend version on 1 device,\n1 column, 1 run." in text


def test_page_without_draft_pairs_names_their_test():
    text = to_html(build_matrix([report(result("pass"))]))
    assert "without a report of draft pairs" in text and "tests/gpu/test_pair_agreement.py" in text
    assert "without a report of draft pairs" not in to_html(build_matrix([], [agreement()]))


@pytest.mark.parametrize("seen, why", [((), "no case run"), (("unsupported",), "requires more than is")])
def test_untested_claim_shows_reason_and_command(seen, why):
    results = [result(outcome, "dim:64") for outcome in seen]
    text = panel_of(to_html(build_matrix([report(*results, claims={"dim:64": True})])))
    assert "Not tested:" in text and why in text
    assert "attn-backends matrix --run k --device cuda --tag dim:64" in text


def test_plug_in_backend_has_badge_with_package():
    text = to_html(
        build_matrix([report(result("pass"), package="their-kernels 2.1"), report(result("pass"), backend="o")])
    )
    assert text.count('class="badge"') == 1 and "their-kernels 2.1</em>" in text


def test_unloadable_backend_has_no_row():
    gone = report(result("unavailable", "*", reason="needs a package"), backend="gone")
    text = to_html(build_matrix([gone, report(result("pass"))]))
    assert text.count('<td role="cell" class="w-') == 1
    assert "1 backend could not be loaded here" in text and "needs a package" in text
