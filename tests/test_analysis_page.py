"""The page of `whatwhere.scripts.analysis maps` in a real browser, headless: what it shows are the model's numbers.

Needs selenium, and Chromium with its driver on the PATH; skips without them.
"""

import json
import re
import shutil

import pytest
import torch

from tiny import tiny_model
from whatwhere.scripts.analysis import maps, page
from whatwhere.scripts.analysis.texts import encode, token_texts
from whatwhere.scripts.data.tokenize import build_tokenizer

TEXT = '<script>1</script>\n"&é\n== T ==\nend'
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    service = shutil.which("chromedriver")
    if browser is None or service is None:
        pytest.skip("no browser: install chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def found():
    """Maps of random weights on a text with markup, newlines, a section's title and half characters."""
    tokenizer = build_tokenizer("bytes")
    # Which head is the most selective depends on the weights.
    torch.manual_seed(0)
    model = tiny_model("llama", "cope", "eager", vocab_size=258, position_encoding_parameters={"num_positions": 9})
    return maps.measure(model, encode(tokenizer, TEXT, "cpu"), token_texts(tokenizer, TEXT))


@pytest.fixture
def browser(driver, found, tmp_path):
    """The page, opened as a file, wide; at the end, nothing was fetched and nothing went wrong."""
    path = tmp_path / "maps.html"
    path.write_text(page.page(found, name="tiny <model>", text="some <text>"), encoding="utf-8")
    size(driver, 1280)
    # Not over a token, wherever the test before left it.
    driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 0, "y": 0})
    # What the browser did before is not the page's doing.
    driver.get("about:blank")
    for log in ("browser", "performance"):
        driver.get_log(log)
    driver.get(path.as_uri())
    yield driver
    assert driver.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    fetched = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert all(url == path.as_uri() or url.startswith("data:") for url in fetched), fetched


def first(found, kind):
    """The map of the head that the page opens at."""
    entry = found.most_selective()
    return getattr(found, kind)[found.layers.index(entry["layer"]), found.heads.index(entry["head"])]


def size(driver, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def hover(driver, index):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).move_to_element(tokens(driver)[index]).perform()


def press(driver, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def choose(driver, name, label):
    from selenium.webdriver.support.select import Select

    Select(driver.find_element("id", name)).select_by_visible_text(label)


def tokens(driver):
    return driver.find_elements("css selector", ".token")


def query(driver):
    """The index of the query token, and whether it is pinned."""
    (one,) = driver.find_elements("css selector", ".token.query")
    return int(one.get_attribute("data-index")), one.get_attribute("aria-pressed") == "true"


def numbers(driver):
    """The number under every token, "" where there is none."""
    return driver.execute_script("return [...document.querySelectorAll('.number')].map((one) => one.textContent)")


def shades(driver):
    """How much every token is shaded, from 0 to 1; 0 where nothing is."""
    script = """return [...document.querySelectorAll('.token')].map((one) => {
        const parts = one.style.background.match(/[\\d.]+\\)$/);
        return parts ? parseFloat(parts[0]) : 0;
    });"""
    return driver.execute_script(script)


def rows(driver):
    """The table of keys: the index of each, and its four numbers."""
    script = """return [...document.querySelectorAll('#keys tr')].map(
        (row) => [Number(row.dataset.key), ...[...row.cells].slice(1).map((one) => Number(one.textContent))]);"""
    return driver.execute_script(script)


def expected_numbers(values, i, digits):
    """What is under the tokens when token i is the query, to half a unit of the last digit and of the stored steps."""
    return [pytest.approx(x.item(), abs=0.51 * 10**-digits + 1e-3) for x in values[i, : i + 1]]


def check(driver, values, i, digits):
    shown = numbers(driver)
    assert [float(one) for one in shown[: i + 1]] == expected_numbers(values, i, digits)
    assert shown[i + 1 :] == [""] * (len(shown) - i - 1)


def test_hovering_a_token_shows_what_it_counts(browser, found):
    length = len(found.tokens)
    # Before anything happens, the last token is the query.
    assert query(browser) == (length - 1, False)
    check(browser, first(found, "gates"), length - 1, 2)
    for i in (30, 4, 0):
        hover(browser, i)
        assert query(browser) == (i, False)
        check(browser, first(found, "gates"), i, 2)
        gates = first(found, "gates")[i]
        assert shades(browser)[: i + 1] == [pytest.approx(x.item(), abs=2e-3) for x in gates[: i + 1]]
        count, total = re.match(
            r"It counts ([\d.]+) of (\d+) tokens?\.", browser.find_element("id", "count").text
        ).groups()
        assert float(count) == pytest.approx(gates.sum().item(), abs=0.006)
        assert total == str(i + 1)


def test_the_page_opens_at_the_most_selective_head_and_says_so(browser, found):
    from selenium.webdriver.support.select import Select

    entry = found.most_selective()
    # The first head would not show that it is chosen.
    assert (entry["layer"], entry["head"]) != (0, 0)
    for name in ("layer", "head"):
        assert Select(browser.find_element("id", name)).first_selected_option.text == str(entry[name])
    explained = dict(
        browser.execute_script(
            "return [...document.querySelectorAll('#terms dt')].map((one) => "
            "[one.innerText, one.nextElementSibling.innerText])"
        )
    )
    assert list(explained) == ["CoPE", "Gate", "Position", "Head"]
    assert explained["CoPE"].startswith("Contextual position encoding: ")
    assert "from 0 (not at all) to 1 (fully)" in explained["Gate"]
    assert "the sum of the gates from it to the query" in explained["Position"]
    assert f"opens at layer {entry['layer']}, head {entry['head']}" in explained["Head"]
    assert f"{entry['gate_deviation']:.2f}" in explained["Head"]
    assert "text: some <text>" in browser.find_element("id", "about").text


def test_layer_head_and_kind_are_chosen(browser, found):
    choose(browser, "layer", "1")
    choose(browser, "head", "3")
    hover(browser, 33)
    titles = ("gates", "positions", "position attention", "total attention")
    labels = browser.find_elements("css selector", "#kinds label")
    assert [label.text for label in labels] == list(titles)
    for kind, label in zip(maps.KINDS, labels):
        label.click()
        hover(browser, 33)
        values = getattr(found, kind)[1, 3]
        check(browser, values, 33, 1 if kind == "positions" else 2)
        best = values[33, :34].max().item()
        key, *four = rows(browser)[0]
        assert values[33, key].item() == pytest.approx(best, abs=1e-3)
        everything = [getattr(found, one)[1, 3, 33, key].item() for one in maps.KINDS]
        assert four == [pytest.approx(x, abs=1.1e-3) for x in everything]


def test_a_pinned_token_is_compared_with_another(browser, found):
    tokens(browser)[25].click()
    assert query(browser) == (25, True)
    hover(browser, 7)
    assert query(browser) == (25, True)
    assert "pinned" in browser.find_element("id", "count").text
    expected = [first(found, kind)[25, 7].item() for kind in maps.KINDS]
    assert rows(browser)[0] == [7, *(pytest.approx(x, abs=1.1e-3) for x in expected)]
    # A token that the query does not see has no numbers.
    hover(browser, 30)
    assert 30 not in [row[0] for row in rows(browser)]
    tokens(browser)[25].click()
    assert query(browser) == (25, False)


def test_the_keyboard_is_enough(browser, found):
    from selenium.webdriver.common.keys import Keys

    # One stop of the tab key for the text, after two lists, the kinds and the box.
    for _ in range(5):
        press(browser, Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("data-index") == str(len(found.tokens) - 1)
    press(browser, Keys.HOME)
    assert query(browser) == (0, False)
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert query(browser) == (2, False)
    check(browser, first(found, "gates"), 2, 2)
    press(browser, Keys.ARROW_DOWN)
    below, _ = query(browser)
    assert below > TEXT.index("\n")
    press(browser, Keys.ARROW_UP)
    assert query(browser)[0] == pytest.approx(2, abs=1)
    press(browser, Keys.END, Keys.ENTER)
    assert query(browser) == (len(found.tokens) - 1, True)
    press(browser, Keys.ARROW_LEFT)
    # The focus moves; the pinned query stays.
    assert browser.switch_to.active_element.get_attribute("data-index") == str(len(found.tokens) - 2)
    assert query(browser) == (len(found.tokens) - 1, True)
    assert rows(browser)[0][0] == len(found.tokens) - 2
    press(browser, Keys.ESCAPE)
    assert not query(browser)[1]


def test_tokens_are_text_and_lines_are_lines(browser, found):
    words = browser.execute_script("return [...document.querySelectorAll('.word')].map((one) => one.textContent)")
    assert "".join(words[:19]) == "<script>1</script>⏎"
    assert words[19:24] == ['"', "&", "é", "∅", "⏎"]
    assert browser.title == "tiny <model>: what it counts"
    assert browser.execute_script("return document.querySelectorAll('script').length") == 2
    bold = browser.execute_script(
        "return [...document.querySelectorAll('.token.boundary')].map((one) => Number(one.dataset.index))"
    )
    assert bold == [index for index, mark in enumerate(found.boundaries) if mark]
    assert {found.boundaries[index] for index in bold} == {"newline", "heading"}
    tops = browser.execute_script(
        "return [...document.querySelectorAll('.token')].map((one) => Math.round(one.getBoundingClientRect().top))"
    )
    assert len(set(tops)) == 4


def test_nothing_moves_when_another_token_is_the_query(browser):
    places = "return [...document.querySelectorAll('.token')].map((one) => one.getBoundingClientRect().left)"
    before = browser.execute_script(places)
    hover(browser, 3)
    assert browser.execute_script(places) == before


def test_the_map_is_drawn_and_its_rows_are_queries(browser, found):
    alpha = """const canvas = document.getElementById('map');
        const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return Array.from(image.filter((_, index) => index % 4 === 3));"""
    drawn = browser.execute_script(alpha)
    expected = (first(found, "gates") * 255).flatten().tolist()
    assert drawn == [pytest.approx(x, abs=1) for x in expected]
    from selenium.webdriver.common.action_chains import ActionChains

    canvas = browser.find_element("id", "map")
    # The offset is from the middle of what is in view.
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    ActionChains(browser).move_to_element_with_offset(canvas, 0, 1).click().perform()
    assert query(browser) == (pytest.approx(len(found.tokens) / 2, abs=2), True)


@pytest.mark.parametrize("width", [360, 1280])
def test_light_and_dark_at_every_width(browser, width):
    """No sideways scrolling, and enough contrast (WCAG AA, 4.5) of every text on its ground, the shaded ones too."""
    size(browser, width)
    tokens(browser)[-1].click()
    contrast = """
        const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
        const over = (front, back) => {
          const alpha = front.length > 3 ? front[3] : 1;
          return [0, 1, 2].map((channel) => alpha * front[channel] + (1 - alpha) * back[channel]);
        };
        const luminance = (rgb) => {
          const linear = (x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
          const [r, g, b] = rgb.map((x) => linear(x / 255));
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        let worst = 99;
        const texts = '.word, .number, p, dt, dd, label, th, td, h1, h2, summary, legend';
        for (const one of document.querySelectorAll(texts)) {
          if (!one.textContent.trim() || !one.offsetParent) continue;
          const chain = [];
          for (let at = one; at; at = at.parentElement) chain.unshift(parse(getComputedStyle(at).backgroundColor));
          const ground = chain.reduce((back, front) => over(front, back), [255, 255, 255]);
          const [a, b] = [luminance(parse(getComputedStyle(one).color).slice(0, 3)), luminance(ground)];
          worst = Math.min(worst, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
        }
        return worst;"""
    grounds = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        assert browser.execute_script(contrast) >= 4.5, scheme
        grounds.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
