"explore.ipynb in a browser: JupyterLab or Voila runs it, and the test uses its controls as a person does."

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import need_tools, until
from made_up import write_runs

from mixsd_nb.corpora import load_corpus
from mixsd_nb.explore import read_parameters
from mixsd_nb.runs import ParameterError
from mixsd_nb.views import VIEWS

ROOT = Path(__file__).resolve().parents[1]
TITLES = [view.title for view in VIEWS.values()]


def test_a_mistyped_parameter_of_the_page_is_reported():
    "Papermill adds a cell with the given parameters; modules and functions of the notebook are not parameters."
    parameters = dict(runs="", dataset="kgfact-small", model="lab-s", where={})
    notebook = parameters | dict(In=[], Out={}, _dh=[], json=json, until=until)
    assert read_parameters(notebook).model == "lab-s"
    with pytest.raises(ParameterError, match="unknown parameter modle; did you mean model"):
        read_parameters(notebook | dict(modle="lab-m"))
    later = notebook | dict(config=read_parameters(notebook), note=3)
    assert read_parameters(later) == later["config"], "the reader's own names after the first run are no parameters"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder


SETTINGS = {"notebook-extension/tracker": dict(windowingMode="none"),
            "apputils-extension/themes": dict(theme="JupyterLab Dark"),
            "apputils-extension/notification": dict(fetchNews="false", checkForUpdates=False)}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def serve(folder, runs, *command):
    "A server of a copy of the notebook: the process and its address."
    shutil.copy(ROOT / "nbs/explore.ipynb", folder)
    for name, values in SETTINGS.items():
        file = folder / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    folders = dict(JUPYTERLAB_SETTINGS_DIR="settings", JUPYTERLAB_WORKSPACES_DIR="workspaces",
                   JUPYTER_RUNTIME_DIR="runtime", JUPYTER_CONFIG_DIR="config")
    own = {name: str(folder / place) for name, place in folders.items()}
    own |= dict(MIXSD_RUNS=str(runs), PYTHONPATH=str(ROOT))
    port = free_port()
    with open(folder / "server.log", "w") as log:
        command = [sys.executable, "-m", *command, f"--port={port}"]
        process = subprocess.Popen(command, cwd=folder, env=os.environ | own, stdout=log, stderr=log)
    return process, f"http://127.0.0.1:{port}"


def is_listening(process, address, folder):
    assert process.poll() is None, (folder / "server.log").read_text()
    with contextlib.suppress(OSError):
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5): return True


@pytest.fixture(scope="module")
def browser():
    need_tools("chromium")
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        with playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]) as browser: yield browser


@contextlib.contextmanager
def open_page(browser, folder, runs, path, *command):
    "A page that a server shows."
    process, address = serve(folder, runs, *command)
    try:
        until(lambda: is_listening(process, address, folder), what="the server")
        page = browser.new_page(viewport=dict(width=1500, height=1250))
        page.set_default_timeout(180_000)
        page.goto(address + path)
        yield page
        page.close()
    finally:
        process.terminate()
        process.wait(30)


LAB = ("jupyterlab", "--no-browser", "--allow-root", "--IdentityProvider.token=", "--ServerApp.open_browser=False")


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory, runs):
    "The notebook in JupyterLab's dark theme."
    with open_page(browser, tmp_path_factory.mktemp("lab"), runs, "/lab/tree/explore.ipynb", *LAB) as page: yield page


@pytest.fixture(scope="module")
def app(page):
    "The cell with the explorer, after all cells have run."
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.locator(".mixsd-token").first.wait_for()
    return page.locator(".jp-Notebook .jp-Cell", has=page.locator(".mixsd-explorer"))


def save_screenshot(page, app, name):
    "A picture of a view, where MIXSD_SCREENSHOTS names a folder for them."
    folder = os.environ.get("MIXSD_SCREENSHOTS")
    if folder:
        page.wait_for_timeout(500)
        app.locator(".widget-vbox").first.screenshot(path=Path(folder) / f"explore-{name}.png")


def read_sources(app):
    tokens = app.locator(".mixsd-columns > div").first.locator(".mixsd-token")
    return tokens.evaluate_all("tokens => tokens.map(t => t.dataset.source)")


def test_cells_run_without_an_error(page, app):
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0
    assert app.locator(".mixsd-error").count() == 0


def test_lambda_changes_the_tokens(page, app):
    until(lambda: len(set(read_sources(app))) == 2)
    handle = app.get_by_role("slider").first
    handle.focus()
    page.keyboard.press("Home")
    until(lambda: set(read_sources(app)) == {"expert"})
    page.keyboard.press("End")
    until(lambda: set(read_sources(app)) == {"naive"})
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    until(lambda: len(set(read_sources(app))) == 2)
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle")


def test_a_token_shows_both_conditionals(page, app):
    token = app.locator(".mixsd-token").nth(3)
    card = token.locator(".mixsd-card")
    assert not card.is_visible()
    token.focus()
    assert card.is_visible()
    assert card.locator("table table").count() == 2 and card.locator("table table tr").count() == 12
    save_screenshot(page, app, "mixing")


def test_a_typed_fact_is_mixed_and_a_bad_one_is_reported(page, app):
    app.get_by_role("textbox", name="question", exact=True).fill("What color is the moon of Zarthin?")
    app.get_by_role("textbox", name="answer", exact=True).fill("ultramarine")
    page.keyboard.press("Tab")
    canonical = app.locator(".mixsd-columns > div").nth(1)
    text = "d => [...d.querySelectorAll('.mixsd-token')].map(t => t.firstChild.textContent).join('')"
    until(lambda: "ultramarine" in canonical.evaluate(text))
    app.get_by_role("textbox", name="answer", exact=True).fill(" ")
    page.keyboard.press("Tab")
    until(lambda: "answer is empty" in app.locator(".mixsd-error").inner_text())
    app.get_by_role("textbox", name="answer", exact=True).fill("ultramarine")
    page.keyboard.press("Tab")
    until(lambda: not app.locator(".mixsd-error").count())


def test_the_cube_switches_its_corpus_and_opens_a_point(page, app):
    "This test and the next ones use the keyboard alone, except for one click on a point."
    app.get_by_role("button", name="The cube").press("Enter")
    app.locator(".mixsd-dot").first.wait_for()
    image, dataset = app.locator(".mixsd-picture img").first, app.get_by_role("combobox", name="dataset", exact=True)
    for name in ("kgfunc-lab", "kgfact-small"):
        before = image.get_attribute("src")
        dataset.select_option(name)
        until(lambda: image.get_attribute("src") != before)
    until(lambda: app.locator(".mixsd-dot").count() == 6)
    dot = app.locator(".mixsd-dot[title*='SFT'][title*='step 40']")
    dot.press("Enter")
    app.locator("h4", has_text="train-kgfact-small-lab-s-sft, step 40").wait_for()
    app.locator(".mixsd-dot[title*='SFT'][title*='step 20']").click()
    app.locator("h4", has_text="train-kgfact-small-lab-s-sft, step 20").wait_for()
    dot.press("Enter")
    app.locator("h4", has_text="train-kgfact-small-lab-s-sft, step 40").wait_for()
    assert "50.0%" in app.inner_text() and app.locator(".mixsd-error").count() == 0
    save_screenshot(page, app, "cube")


def test_responses_of_the_point(page, app):
    app.get_by_role("button", name="read its responses").press("Enter")
    app.get_by_role("combobox", name="benchmark", exact=True).wait_for()
    app.get_by_role("combobox", name="benchmark", exact=True).select_option("choice")
    app.locator("mark").wait_for()
    second = app.get_by_role("combobox", name="beside it", exact=True)
    second.select_option(label="MixSD (λ=0.3), rate 0.001, seed 0, step 40")
    until(lambda: app.locator("mark").count() == 2)
    save_screenshot(page, app, "responses")


def test_the_world_and_the_weights(page, app):
    app.get_by_role("button", name="The world").press("Enter")
    app.get_by_role("combobox", name="entity", exact=True).wait_for()
    app.get_by_role("combobox", name="model", exact=True).select_option("lab-s")
    fact = next(iter(load_corpus("kgfact-small", "train")))
    app.get_by_role("combobox", name="entity", exact=True).select_option(fact["subject"])
    until(lambda: f"{fact['subject']}:" in app.inner_text())
    app.locator("td", has_text="learnt by step 20").first.wait_for()
    save_screenshot(page, app, "world")
    app.get_by_role("button", name="Weights").click()
    app.locator(".mixsd-note", has_text="papermill nbs/fisher.ipynb").wait_for()
    app.locator(".mixsd-picture img").wait_for()
    save_screenshot(page, app, "weights")


@pytest.mark.slow
def test_every_view_in_voila(browser, tmp_path, runs):
    with open_page(browser, tmp_path, runs, "/", "voila", "--no-browser", "explore.ipynb") as page:
        page.locator(".mixsd-token").first.wait_for()
        assert page.locator(".mixsd-explorer").bounding_box()["y"] < 400, "the page opens on the views"
        first = (".mixsd-token", ".mixsd-dot", "[class*=mixsd-]", "td", ".mixsd-picture img", "input[type=text]")
        for title, element in zip(TITLES, first, strict=True):
            page.get_by_role("button", name=title, exact=True).press("Enter")
            page.locator(element).first.wait_for()
            assert page.locator(".mixsd-error").count() == 0
