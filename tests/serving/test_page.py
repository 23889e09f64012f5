"""The page at / in headless Chromium."""

import re
import shutil
import time

import pytest

from tests.serving.helpers import server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
KEY = "s3cret"
ENDED = "document.querySelector('#state').textContent === 'Ended: max tokens reached.'"
LOST = "document.querySelector('#error').textContent === 'the server cannot be reached'"


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium; skipped without one."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def process(run_folder):
    with server(run_folder, "--api_key", KEY, "--max_requests", "2") as process:
        yield process


@pytest.fixture
def page(browser, process):
    """The page as it is first seen; nothing may be asked of another host, and no script may fail."""
    page = browser.new_page()
    page.set_default_timeout(20_000)
    asked, wrong = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    home = f"http://127.0.0.1:{process.port}/"
    page.goto(home)
    yield page
    page.close()
    assert wrong == []
    assert all(url.startswith((home, "data:")) for url in asked)


def words(page, selector):
    return page.locator(selector).inner_text()


def wait_for(page, condition, seconds=20.0):
    """Wait until a JavaScript expression is true; the page's own policy forbids `wait_for_function`'s eval."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(10)


def test_a_prompt_streams_text_and_figures_and_stop_stops(page):
    page.fill("#key", KEY)
    page.locator("#key").blur()
    wait_for(page, "document.querySelector('#model').textContent.includes('llp')")
    page.fill("#prompt", "def main(")
    page.fill("#tokens", "2000")
    assert words(page, "#bytes") == words(page, "#speed") == "–"
    page.click("#go")
    wait_for(page, "document.querySelector('#output').textContent.length > 40")
    assert page.locator("#stop").is_enabled()
    assert page.locator("#go").is_disabled()
    assert re.fullmatch(r"[\d.]+ (B|KiB|MiB)", words(page, "#bytes"))
    length, speed = len(words(page, "#output")), words(page, "#speed")
    assert float(speed) > 0
    wait_for(page, f"document.querySelector('#output').textContent.length > {length + 20}")
    wait_for(page, f"document.querySelector('#speed').textContent !== '{speed}'")
    assert words(page, "#output").startswith("def main(")
    assert re.fullmatch(r"[\d,]+ ms", words(page, "#first"))
    page.click("#stop")
    wait_for(page, "document.querySelector('#state').textContent === 'Stopped.'")
    count = int(words(page, "#count").replace(",", ""))
    assert 20 < count < 2000
    page.wait_for_timeout(500)
    assert int(words(page, "#count").replace(",", "")) == count
    assert page.locator("#go").is_enabled()
    assert page.locator("#error").is_hidden()


def test_the_keyboard_is_enough_and_a_text_ends_by_itself(page):
    page.keyboard.type("hello")  # the prompt has the focus
    for field, value in (("tokens", "30"), ("temperature", "0"), ("top_p", "1"), ("seed", "4")):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == field
        page.keyboard.press("Control+A")
        page.keyboard.type(value)
    page.keyboard.press("Tab")
    page.keyboard.type(KEY)
    page.keyboard.press("Control+Enter")
    wait_for(page, ENDED)
    assert words(page, "#count") == "30"
    first = words(page, "#output")
    page.keyboard.press("Control+Enter")
    wait_for(page, ENDED)
    assert words(page, "#output") == first
    page.fill("#tokens", "2000")
    page.keyboard.press("Control+Enter")
    wait_for(page, "Number(document.querySelector('#count').textContent) > 5")
    page.keyboard.press("Escape")
    wait_for(page, "document.querySelector('#state').textContent === 'Stopped.'")


def test_errors_are_shown_and_go_away(page):
    wait_for(page, "document.querySelector('#model').textContent === 'API key required'")
    page.fill("#prompt", "x")
    page.click("#go")
    page.locator("#error").wait_for(state="visible")
    assert words(page, "#error") == "a valid API key is required, sent as Authorization: Bearer KEY"
    page.fill("#key", KEY)
    page.fill("#prompt", "x" * 9000)
    page.click("#go")
    wait_for(page, "document.querySelector('#error').textContent.includes('may have 8192 tokens')")
    page.fill("#prompt", "x")
    page.fill("#tokens", "5")
    page.click("#go")
    wait_for(page, ENDED)
    assert page.locator("#error").is_hidden()


def test_a_lost_connection_is_an_error(browser, run_folder):
    with server(run_folder) as process:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{process.port}/")
        page.fill("#prompt", "x")
        page.fill("#tokens", "2000")
        page.click("#go")
        wait_for(page, "document.querySelector('#output').textContent.length > 10")
        process.popen.kill()
        wait_for(page, "document.querySelector('#error').textContent === 'the connection ended before the text did'")
        assert page.locator("#go").is_enabled()
        page.click("#go")
        wait_for(page, LOST)
        # another browser words it differently
        page.evaluate("void (window.fetch = () => Promise.reject(new TypeError('Load failed')))")
        page.evaluate("document.querySelector('#error').textContent = ''")
        page.click("#go")
        wait_for(page, LOST)
        page.close()
