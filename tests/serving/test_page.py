"""The page at / in headless Chromium."""

import re
import shutil

import pytest

from tests.serving.helpers import server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
KEY = "s3cret"


@pytest.fixture(scope="module")
def api():
    """Playwright, whose expectations wait; skipped without it or Chromium."""
    return pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def browser(api):
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def expect(api, browser, page):
    """Expect an element to have a text, within 20 s."""
    return lambda place, text: api.expect(page.locator(place)).to_have_text(text, timeout=20_000)


@pytest.fixture(scope="module")
def process(run_folder):
    with server(run_folder, "--api_key", KEY, "--max_requests", "2") as process:
        yield process


@pytest.fixture
def page(browser, process):
    """The page as it is first seen; nothing may be asked of another host, and no script may fail."""
    page, asked, wrong = browser.new_page(), [], []
    page.set_default_timeout(20_000)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{process.url}/")
    yield page
    page.close()
    assert wrong == []
    assert all(url.startswith((f"{process.url}/", "data:")) for url in asked)


def ask(page, **fields):
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.click("#go")


def test_a_prompt_streams_text_and_figures_and_stop_stops(page, expect):
    page.fill("#key", KEY)
    page.locator("#key").blur()
    expect("#model", re.compile("llp"))
    expect("#speed", "–")
    ask(page, prompt="def main(", tokens="2000")
    expect("#output", re.compile(r"def main\(.{40}", re.DOTALL))
    assert (page.locator("#stop").is_enabled(), page.locator("#go").is_enabled()) == (True, False)
    expect("#bytes", re.compile(r"^[\d.]+ (B|KiB|MiB)$"))
    expect("#first", re.compile(r"^[\d,]+ ms$"))
    speed = page.locator("#speed").inner_text()
    assert float(speed) > 0
    expect("#speed", re.compile(rf"^(?!{re.escape(speed)}$)"))
    page.click("#stop")
    expect("#state", "Stopped.")
    count = page.locator("#count").inner_text()
    assert 20 < int(count.replace(",", "")) < 2000
    page.wait_for_timeout(500)
    expect("#count", count)
    assert page.locator("#go").is_enabled()
    assert page.locator("#error").is_hidden()


def test_the_keyboard_is_enough_and_a_text_ends_by_itself(page, expect):
    page.keyboard.type("hello")  # the prompt has the focus
    for field, value in (("tokens", "30"), ("temperature", "0"), ("top_p", "1"), ("seed", "4"), ("key", KEY)):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == field
        page.keyboard.press("Control+A")
        page.keyboard.type(value)
    shown = []
    for _ in range(2):
        page.keyboard.press("Control+Enter")
        expect("#state", "Ended: max tokens reached.")
        expect("#count", "30")
        shown.append(page.locator("#output").inner_text())
    assert shown[0] == shown[1]
    page.fill("#tokens", "2000")
    page.keyboard.press("Control+Enter")
    expect("#state", "Writing…")
    page.keyboard.press("Escape")
    expect("#state", "Stopped.")


def test_errors_are_shown_and_go_away(page, expect):
    expect("#model", "API key required")
    ask(page, prompt="x")
    expect("#error", "a valid API key is required, sent as Authorization: Bearer KEY")
    ask(page, key=KEY, prompt="x" * 9000)
    expect("#error", re.compile("may have 8192 tokens"))
    ask(page, prompt="x", tokens="5")
    expect("#state", "Ended: max tokens reached.")
    assert page.locator("#error").is_hidden()


def test_a_lost_connection_is_an_error(api, browser, run_folder):
    with server(run_folder) as process:
        page = browser.new_page()
        page.goto(f"{process.url}/")
        error = api.expect(page.locator("#error"))
        ask(page, prompt="x", tokens="2000")
        api.expect(page.locator("#output")).to_have_text(re.compile(".{10}", re.DOTALL), timeout=20_000)
        process.popen.kill()
        error.to_have_text("the connection ended before the text did")
        ask(page)
        error.to_have_text("the server cannot be reached")
        # another browser words it differently
        page.evaluate("void (window.fetch = () => Promise.reject(new TypeError('Load failed')))")
        page.evaluate("document.querySelector('#error').textContent = ''")
        ask(page)
        error.to_have_text("the server cannot be reached")
        page.close()
