"""The built site in headless Chromium: what a reader gets, in both themes, on a desktop and on a phone."""
import gzip
import http.server
import json
import os
import re
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.site
REPO = Path(__file__).parents[2]
SITE = Path(os.environ.get("TRUEUP_SITE", REPO / "site"))
AXE = REPO / ".venv/axe.min.js"
BINARIES = {"chromium": shutil.which("chromium") or shutil.which("google-chrome"),
            "chromedriver": shutil.which("chromedriver")}
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--lang=en"]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
# One of each kind of page.
KINDS = ["", "chapters/ch03_cache/", "how-to/check-your-call/", "api/core/", "bugs/", "messages/", "operators/",
         "operators/npu_kv_rmsnorm_rope_cache/"]
ALL = sorted(path.relative_to(SITE / "en").as_posix().removesuffix("index.html")
             for path in (SITE / "en").rglob("index.html"))
CHAPTERS = [page for page in ALL if page.startswith("chapters/ch")]
PAGE_BYTES = 200_000


@pytest.fixture(scope="module")
def address():
    if not (SITE / "index.html").is_file():
        pytest.fail("there is no site/; run: make docs")
    handler = partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not all(BINARIES.values()):
        pytest.skip(f"not installed: {', '.join(name for name, path in BINARIES.items() if not path)}")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BINARIES["chromium"]
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(BINARIES["chromedriver"]))
    yield driver
    driver.quit()


@contextmanager
def seen_as(browser, size, theme):
    """The browser as a reader's: window size and preferred colours."""
    width, height = SIZES[size]
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": theme}]})
    for log in ("performance", "browser"):
        browser.get_log(log)  # what came before
    yield browser


def requests(browser) -> list[str]:
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    return [message["params"]["request"]["url"] for message in messages
            if message["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_fit_say_nothing_and_stay_at_home(browser, address, language, size, theme):
    """No sideways scrolling, no message on the console, no request to another machine, the reader's own theme.

    Contract sheets come from one template: all of them are looked at where room is scarcest, one of them everywhere.
    """
    every = (size, theme) == ("phone", "light")
    for page in (page for page in ALL if every or page in KINDS or not page.startswith("operators/")):
        with seen_as(browser, size, theme):
            browser.get(f"{address}/{language}/{page}")
            wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
            scheme = browser.execute_script("return document.body.getAttribute('data-md-color-scheme')")
            assert wide <= 0, f"{page} is {wide} pixels too wide"
            assert scheme == {"light": "default", "dark": "slate"}[theme], page
            assert [entry["message"] for entry in browser.get_log("browser")] == [], page
            away = [url for url in requests(browser) if not url.startswith((address, "data:", "blob:"))]
            assert away == [], page


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_violation(browser, address, language, size, theme):
    if not AXE.is_file():
        pytest.skip("axe-core is not here; make docs-test fetches it where npm is")
    source = AXE.read_text(encoding="utf-8")
    for page in KINDS:
        with seen_as(browser, size, theme):
            browser.get(f"{address}/{language}/{page}")
            browser.execute_script(source)
            found = browser.execute_async_script("axe.run().then(result => arguments[0](result.violations))")
        serious = [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in found
                   if rule["impact"] in ("serious", "critical")]
        assert serious == [], page


@pytest.mark.parametrize(("language", "query"), [("en", "paged cache"), ("zh", "分页缓存")])
def test_search_finds_the_chapter(browser, address, language, query):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    with seen_as(browser, "desktop", "light"):
        browser.get(f"{address}/{language}/")
        field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
        field.click()
        field.send_keys(query)

        def first(driver):
            links = driver.find_elements(By.CSS_SELECTOR, ".md-search-result__item a.md-search-result__link")
            return links and links[0].get_attribute("href")

        assert f"/{language}/chapters/ch03_cache/" in WebDriverWait(browser, 20).until(first)


@pytest.mark.parametrize(("here", "there"), [("en", "zh"), ("zh", "en")])
@pytest.mark.parametrize("page", ["", "chapters/ch01_run/", "api/core/"])
def test_the_language_switch_leads_to_the_same_page(browser, address, here, there, page):
    with seen_as(browser, "desktop", "light"):
        browser.get(f"{address}/{here}/{page}")
        browser.execute_script(f"document.querySelector('.md-select__link[hreflang={there}]').click()")
        assert browser.current_url == f"{address}/{there}/{page}"
        assert browser.execute_script("return document.documentElement.lang") == there


def test_the_front_door_picks_a_language(browser, address):
    with seen_as(browser, "desktop", "light"):
        browser.get(f"{address}/")
        assert browser.current_url == f"{address}/en/"


@pytest.mark.parametrize("page", CHAPTERS)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_chapter_is_small(language, page):
    """HTML and its own images, as a server would send them."""
    folder = SITE / language / "chapters"
    html = (SITE / language / page / "index.html").read_bytes()
    images = sum(path.stat().st_size for path in folder.glob(f"{Path(page).name}*.png"))
    assert len(gzip.compress(html)) + images < PAGE_BYTES


@pytest.mark.parametrize("language", ["en", "zh"])
def test_api_pages_list_no_name_without_an_explanation(language):
    for page in (SITE / language / "api").rglob("index.html"):
        html = page.read_text(encoding="utf-8")
        objects = re.findall(r'<div class="doc doc-contents[^"]*">\s*(</div>|<)', html)
        assert objects and "</div>" not in objects, page
