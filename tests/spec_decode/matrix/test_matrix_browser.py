"""The page in a real Chromium, from disk: filters, evidence, themes, phone width, no scripts, and axe's rules."""

import re
import shutil

import pytest

from spec_decode.matrix import build_matrix, to_html
from tests.spec_decode.matrix.evidence import agreement, limit, report, result, timing

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
axe_core = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt-get install chromium"),
]

_AXE = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]},
    # Of what passes one node a rule: to describe every node takes longer than to look at it.
    "resultTypes": ["violations"],
}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    outcomes = ("pass", "fail", "unsupported", "xfail", "not_run")
    reports = [
        report(
            *(result(outcome, f"page:{n}", reason="for the test", evidence={"error_over_budget": 0.4})
              for n, outcome in enumerate(outcomes, 1)),
            result("pass", "page:4"), result("pass", "graph:advance"), backend=backend, device=device, date=date,
            version=version, claims={f"page:{n}": n != 3 for n in range(1, 8)},
        )
        for backend, device, version, date in [
            ("alpha", "GPU one", "1", "2026-01-01"), ("alpha", "GPU one", "2", "2026-01-02"),
            ("beta", "GPU one", "1", "2026-01-01"), ("beta", "CPU two", "1", "2026-01-01"),
        ]
    ]  # fmt: skip
    absent = result("unavailable", "*", check="contract.loads", reason="needs a package that is not installed")
    reports += [report(absent, backend=name, device="CPU two", version="unknown") for name in ("gone", "lost")]
    missed = {"limits": [limit("gpu_us", 8, False)]}
    timings = [timing(), timing(backend="p", peer=True, **missed), timing(num_reqs=32, **missed)]
    path = tmp_path_factory.mktemp("page") / "compatibility.html"
    path.write_text(to_html(build_matrix(reports, [agreement()], timings)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        # Inside a container there is no sandbox to be had; the page is ours.
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def usual(browser):
    """The context of every visit without options of its own; nothing but a chosen theme would outlive a page there."""
    context = browser.new_context(offline=True)
    yield context
    context.close()


@pytest.fixture
def visit(browser, usual, page_file):
    opened = []

    def open_page(*, address=None, **options):
        context = browser.new_context(offline=True, **options) if options else usual
        page = context.new_page()
        opened.append(context if options else page)
        page.set_default_timeout(0)
        page.complaints = []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.requests = []
        page.on("request", lambda request: page.requests.append(request.url))
        page.goto(address or page_file.as_uri())
        return page

    yield open_page
    for page_or_context in opened:
        page_or_context.close()


@pytest.fixture(scope="module")
def opened_up(usual, page_file):
    """A page with a cell and every list open, for one look after another."""
    page = usual.new_page()
    page.set_default_timeout(0)
    page.goto(page_file.as_uri())
    page.locator(".matrix summary", has_text="page 2 broken").first.click()
    for details in page.locator("details:not([name])").all():
        details.evaluate("node => { node.open = true }")
    yield page
    page.close()


def shown_rows(page) -> list[str]:
    rows = page.locator(".matrix tr[data-backend]:visible")
    return [f"{row.get_attribute('data-backend')} {row.locator('th span').inner_text()}" for row in rows.all()]


def background(page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_rows_and_absent_backends_are_filtered(visit):
    page = visit()
    assert len(shown_rows(page)) == 4
    folded = page.locator(".absent summary")
    assert folded.inner_text() == "2 backends could not be loaded here"
    folded.click()
    assert page.locator(".absent li:visible").count() == 2
    assert "needs a package that is not installed" in page.locator(".absent li").first.inner_text()
    page.locator("#f-backend").select_option("gone")
    assert [item.inner_text()[:4] for item in page.locator(".absent li:visible").all()] == ["gone"]
    page.locator("#f-backend").select_option("alpha")
    assert not page.locator(".absent:visible").count()
    assert page.locator(".matrix .device:visible").count() == 1  # no group is empty
    page.locator("#f-device").select_option("GPU one")
    assert shown_rows(page) == ["alpha 2", "alpha 1"]
    assert page.locator("#shown").inner_text() == "2 of 4 rows shown"
    assert not page.get_by_text("CPU two", exact=True).locator("visible=true").count()
    page.get_by_role("button", name="Show all").click()
    playwright.expect(page.locator("#shown")).to_have_text(re.compile("^4"))
    assert len(shown_rows(page)) == 4


def test_cell_opens_alone_and_escape_closes_it(visit):
    page = visit()
    cell = page.locator(".matrix summary", has_text="page 2 broken").first
    cell.focus()
    page.keyboard.press("Enter")
    panel = page.locator(".panel:visible")
    assert "for the test" in panel.inner_text() and "attn-backends matrix --run" in panel.inner_text()
    assert "0123456789ab" in panel.inner_text()
    page.keyboard.press("Escape")
    assert panel.count() == 0 and cell.evaluate("node => node === document.activeElement")
    for n in (0, 3):
        page.locator(".matrix summary:not(.why summary)").nth(n).click()
    assert panel.count() == 1


def test_filters_and_open_cell_are_in_address(visit):
    page = visit()
    page.locator("#f-feature").select_option(label="page 2")
    assert page.locator(".matrix tr[data-backend]").first.locator("td:visible").count() == 1
    assert page.locator(".matrix .text:visible").first.inner_text() == "broken 0/1 0.4x"
    page.locator("#f-device").select_option("GPU one")
    page.locator(".matrix summary", has_text="page 2 broken").nth(1).click()
    playwright.expect(page).to_have_url(re.compile("#.*cell="))
    again = visit(address=page.evaluate("location.href"))
    assert shown_rows(again) == shown_rows(page) and len(shown_rows(again)) == 3
    assert again.locator("#f-feature").input_value() == "page:2"
    [panel] = again.locator(".panel:visible").all()
    assert panel.inner_text() == page.locator(".panel:visible").inner_text()
    again.get_by_role("button", name="Show all").click()
    playwright.expect(again).not_to_have_url(re.compile("#.*(device|feature)"))


def test_page_loads_nothing_and_ignores_unknown_address(visit, page_file):
    page = visit(address=f"{page_file.as_uri()}#device=none&cell=none&feature=none")
    assert len(shown_rows(page)) == 4 and not page.locator(".panel:visible").count()
    assert [url.partition("#")[0] for url in page.requests] == [page_file.as_uri()] and page.complaints == []


def test_theme_follows_system_and_button(visit):
    page = visit(color_scheme="light")
    bright = background(page)
    page.emulate_media(color_scheme="dark")
    dim = background(page)
    assert bright != dim
    button = page.get_by_role("button", name="Theme")
    button.click()
    assert background(page) == bright and "light" in button.inner_text()
    button.click()
    button.click()
    assert background(page) == dim and "system" in button.inner_text()


def test_page_without_scripts_lacks_only_filters(visit):
    page = visit(java_script_enabled=False)
    assert not page.locator("#filter").is_visible() and not page.locator("#theme").is_visible()
    assert len(shown_rows(page)) == 4 and page.locator("svg[role=img]:visible").count()
    cell = page.locator(".matrix summary", has_text="page 2 broken").first
    cell.click()
    assert "for the test" in page.locator(".panel:visible").inner_text()
    cell.press("Enter")
    assert page.locator(".panel:visible").count() == 0


def test_phone_width_cuts_off_nothing(visit):
    page = visit(viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator(".matrix tr[data-backend] .name:visible").first.inner_text().strip() == "advance"
    page.locator(".matrix summary", has_text="page 2 broken").first.click()
    box = page.locator(".panel:visible").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_axe_finds_no_violations(opened_up, scheme, width):
    opened_up.emulate_media(color_scheme=scheme)
    opened_up.set_viewport_size({"width": width, "height": 800})
    assert opened_up.locator(".panel:visible").count() == 1
    found = axe_core.Axe().run(opened_up, options=_AXE)
    assert found.response["passes"] and found.violations_count == 0, found.generate_report()
