"The built site in a browser: axe-core finds no serious fault, nothing scrolls sideways, and every control has its place in the order of Tab."

import shutil
from pathlib import Path

import pytest
from axe import serious_faults
from helpers import need, need_tools

SITE = Path(__file__).resolve().parents[1] / "_docs/html"
PAGES = ("index", "guides/inject", "nll", "reference/methods/mixing", "search", "browser", "frontier")
OF_THEME = ("summary-name",)  # the arrows of the theme's side bar, which a page of a room has, have no names
READY = dict(browser="#mixsd-mixing[data-state]", frontier="#mixsd-frontier[data-ready]")


@pytest.fixture(scope="module")
def browser():
    need_tools("chromium")
    if not (SITE / "index.html").exists(): need("no site in _docs/html; `make docs` builds it")
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]) as browser: yield browser


def open_page(browser, name, **options):
    page = browser.new_page(viewport=dict(width=1280, height=1000), **options)
    page.set_default_timeout(180_000)
    page.goto((SITE / f"{name}.html").as_uri())
    page.locator(READY.get(name, "h1")).first.wait_for()
    return page


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_fault(browser, name):
    "In both themes; on a phone, only code, tables and formulas scroll sideways."
    with open_page(browser, name, color_scheme="light") as page:
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            page.wait_for_function(f"document.documentElement.dataset.theme === '{theme}'")
            page.wait_for_timeout(500)  # the theme fades some colours
            assert serious_faults(page, without=OF_THEME) == []
        page.set_viewport_size(dict(width=390, height=800))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_axe_finds_what_is_wrong(browser):
    "A picture without words, text without contrast, and a field without a name."
    with browser.new_page() as page:
        page.set_content("<html lang=en><title>x</title><main><h1>x</h1><p style='color: #bbb'>pale</p><img src='data:,'><input></main>")
        assert sorted(fault.split()[0] for fault in serious_faults(page)) == ["color-contrast", "image-alt", "label"]
        assert serious_faults(page, "'h1'") == []


NAMES = """element => {
  const name = (e) => e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent;
  return [...element.querySelectorAll("a[href], button, select, input, textarea, summary, [tabindex='0']")]
    .filter((e) => e.checkVisibility() && !e.disabled && e.tabIndex >= 0).map(name); }"""
FOCUSED = """element => {
  const e = document.activeElement, style = getComputedStyle(e);
  const name = e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent;
  return element.contains(e) ? [name, e.matches(":focus-visible")] : null; }"""


def test_every_control_is_reached_by_tab(browser, name="browser"):
    "Tab visits each control once, in the order of the page, and shows where it is."
    with open_page(browser, name) as page:
        element = page.locator(READY[name])
        names = element.evaluate(NAMES)
        page.evaluate("document.querySelector('h1').tabIndex = -1; document.querySelector('h1').focus()")
        visited = []
        for _ in range(60):
            page.keyboard.press("Tab")
            found = element.evaluate(FOCUSED)
            if found: visited.append(found)
            elif visited: break
        assert [text for text, _ in visited] == names and all(shown for _, shown in visited) and len(names) > 3


def test_the_fields_of_the_mixing_page_by_keyboard_alone(browser):
    "Another corpus, another fact and other draws, each by the keys of its field, give another target."
    with open_page(browser, "browser") as page:
        shown, seen = page.locator(".mx-fact"), []
        def use(name, role, *keys):
            before = shown.inner_text()
            page.get_by_role(role, name=name, exact=True).focus()
            for key in keys: page.keyboard.press(key)
            page.wait_for_function("before => document.querySelector('.mx-fact').innerText !== before", arg=before)
            seen.append(shown.inner_text())
        use("fact", "combobox", "ArrowDown")
        use("seed of the draws", "spinbutton", "ArrowUp")
        page.get_by_role("slider", name="temperature").focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.querySelector('.mx-fact').innerText.includes('temperature 0.1')")
        use("corpus", "combobox", "ArrowDown")
        assert "seed 1" in seen[1] and len(set(seen)) == 3
