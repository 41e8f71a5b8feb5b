"explore.ipynb in a browser: JupyterLab or Voila runs it, and the test uses its controls as a person does."

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from axe import serious_faults
from helpers import until
from made_up import write_runs

from mixsd_nb import explore
from mixsd_nb.console import main
from mixsd_nb.corpora import load_corpus
from mixsd_nb.explore import read_parameters
from mixsd_nb.methods.mixing import mix, mix_items
from mixsd_nb.runs import ParameterError
from mixsd_nb.views import VIEWS
from mixsd_nb.views.mixing import edit_fact, get_question
from mixsd_nb.views.trace import get_engine

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


def serve(folder, runs, *command, model="lab-m"):
    "A server of a copy of the notebook, which shows the model first: the process and its address."
    text = (ROOT / "nbs/explore.ipynb").read_text(encoding="utf-8")
    (folder / "explore.ipynb").write_text(text.replace(r'model: str = \"lab-m\"', rf'model: str = \"{model}\"'), encoding="utf-8")
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


# What JupyterLab and Voilà write themselves where there is no internet: a request for a script or a font that is not needed.
OFFLINE = ("net::ERR_NAME_NOT_RESOLVED", "net::ERR_INTERNET_DISCONNECTED")


def collect_faults(page):
    "Keep the errors of a page's console, and exceptions, in `page.faults`."
    page.faults = []

    def keep(message):
        text = f"{message.text} {message.location.get('url', '')}"
        if message.type == "error" and not any(known in text for known in OFFLINE): page.faults.append(text)
    page.on("console", keep)
    page.on("pageerror", lambda error: page.faults.append(str(error)))


@contextlib.contextmanager
def open_page(browser, folder, runs, path, *command, **options):
    "A page that a server shows."
    process, address = serve(folder, runs, *command, **options)
    try:
        until(lambda: is_listening(process, address, folder), what="the server")
        page = browser.new_page(viewport=dict(width=1500, height=1250))
        page.set_default_timeout(40_000)
        collect_faults(page)
        page.server = psutil.Process(process.pid)
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
    page.locator(".mx-token").first.wait_for()
    return page.locator(".jp-Notebook .jp-Cell", has=page.locator(".mixsd-explorer"))


def look_at(page, app, name):
    "axe-core finds no serious fault in a view; its picture is stored where MIXSD_SCREENSHOTS names a folder."
    assert serious_faults(page, "'.mixsd-explorer'") == []
    folder = os.environ.get("MIXSD_SCREENSHOTS")
    if folder:
        page.wait_for_timeout(500)
        app.locator(".widget-vbox").first.screenshot(path=Path(folder) / f"explore-{name}.png")


def read_sources(app):
    return app.locator(".mx-token").evaluate_all("tokens => tokens.map(t => t.dataset.source)")


def test_lambda_changes_the_tokens(page, app):
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0 == app.locator(".mixsd-error").count()
    until(lambda: len(set(read_sources(app))) == 2)
    handle = app.get_by_role("slider", name="λ")
    handle.focus()
    page.keyboard.press("Home")
    until(lambda: set(read_sources(app)) == {"expert"})
    page.keyboard.press("End")
    until(lambda: set(read_sources(app)) == {"naive"})
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    until(lambda: len(set(read_sources(app))) == 2)
    assert handle.evaluate("e => e === document.activeElement"), "a redraw leaves the slider its focus"
    assert app.get_by_role("spinbutton", name="λ").input_value() == "0.5"
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle")


def read_target(app):
    "The ids of the tokens, once the target is complete."
    until(lambda: app.locator(".mx").get_attribute("data-state") != "running" and not app.locator(".mx-working").count())
    return [int(k) for k in app.locator(".mx-token").evaluate_all("tokens => tokens.map(t => t.dataset.id)")]


STEPS = """async (steps) => {
  const root = document.querySelector(".mx"), range = root.querySelector(".mx-ruler input"), times = [];
  const isDrawn = () => Math.abs(root.dataset.lam - range.value) < 1e-6 && root.dataset.state !== "running" && !root.matches(".mx-working");
  for (let k = 1; k <= steps; k++) {
    const start = performance.now();
    range.value = Math.abs((k + 10) % 40 - 20) / 20;  // from one end to the other and back
    range.dispatchEvent(new Event("input"));
    while (!isDrawn()) await new Promise((resolve) => setTimeout(resolve, 2));
    times.push(performance.now() - start);
  }
  return times;
}"""


def test_the_page_mixes_while_the_kernel_stands_still(page, app):
    "λ, coins and a typed fact are drawn although the kernel's process is stopped; the tokens are those of `mix`."
    kernel, = (p for p in page.server.children(recursive=True) if any("ipykernel" in word for word in p.cmdline()))
    box = lambda name: app.get_by_role("textbox", name=name, exact=True)
    engine, row, root = get_engine("lab-m"), load_corpus("kgfact-small", "train")[0], app.locator(".mx")

    def check(row, lam, seed):
        until(lambda: (root.get_attribute("data-lam"), root.get_attribute("data-seed")) == (str(lam), str(seed)))
        record, = mix(engine, mix_items(engine.tokenizer, [row]), lam, seed=seed)
        until(lambda: read_target(app) == list(record["completion_ids"]))
        assert app.locator(".mx-frame").count() == record["attempts"]

    kernel.suspend()
    try:
        app.get_by_role("slider", name="λ").fill("0.35")
        check(row, 0.35, 0)
        app.get_by_role("button", name="new coins").click()
        check(row, 0.35, 1)
        times = page.evaluate(STEPS, 30)
        app.get_by_role("slider", name="λ").fill("0")
        box("answer").fill("<b>ultramarine</b>")
        page.keyboard.press("Tab")
        until(lambda: "<b>ultramarine</b>" in app.locator(".mx-fact").inner_text(), what="what is typed, shown as it is")
        check(edit_fact(row, get_question(row), "<b>ultramarine</b>"), 0, 1)
    finally: kernel.resume()
    print("30 steps of λ: median {:.0f}, nine in ten below {:.0f}, longest {:.0f} ms".format(*np.quantile(times, [0.5, 0.9, 1])))
    box("answer").fill(row["answer"])
    app.get_by_role("slider", name="λ").fill("0.5")
    app.get_by_role("spinbutton", name="seed").fill("0")
    page.keyboard.press("Tab")
    check(row, 0.5, 0)
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle")
    assert app.get_by_role("spinbutton", name="λ").input_value() == "0.5" and app.locator(".mixsd-error").count() == 0


def test_the_tokens_are_one_tab_stop_with_arrow_keys(page, app):
    tokens, card = app.get_by_role("listbox"), app.locator(".mx-card")
    tokens.focus()
    page.keyboard.press("Home")
    texts = set()
    for k in (1, 2, 3):
        assert card.locator("h4").first.inner_text() == f"token {k}"
        texts.add(card.inner_text())
        assert card.locator(".mx-row").count() == 10 and "coin" in card.inner_text()
        page.keyboard.press("ArrowRight")
    assert len(texts) == 3 and app.locator(".mx-token[tabindex='0']").count() == 0
    selected = app.locator(".mx-token[aria-selected='true']")
    assert selected.count() == 1 and "coin" in selected.get_attribute("aria-label")
    page.keyboard.press("End")
    assert selected.inner_text() == "<|im_end|>"
    look_at(page, app, "mixing")


def test_every_control_of_the_explainer_works_with_the_mouse(page, app):
    count = lambda: int(re.search(r"token (\d+) of", app.locator(".mx-bar small").inner_text())[1])
    last = app.locator(".mx-token").count()
    app.get_by_role("button", name="first token").click()
    assert count() == 1
    app.get_by_role("button", name="one token on").click()
    assert count() == 2
    app.get_by_role("button", name="one token back").click()
    assert count() == 1
    app.get_by_role("combobox", name="speed").select_option("fast")
    app.get_by_role("button", name="play").click()
    until(lambda: count() > 4)
    assert app.locator(".mx-token.later").count() == last - count()
    app.get_by_role("button", name="pause").click()
    assert 4 < count() < last and app.locator(".mx-token.later").count() == 0
    app.locator(".mx-token").nth(4).hover()
    until(lambda: app.locator(".mx-card h4").first.inner_text() == "token 5")
    app.locator(".mx-token").nth(6).click()
    assert count() == 7
    app.get_by_role("slider", name="token", exact=True).fill("2")
    assert count() == 3


def test_new_coins_and_the_film_of_attempts(page, app):
    lam, frames, why = app.get_by_role("slider", name="λ"), app.locator(".mx-frame"), app.locator(".mx-why:visible")
    lam.fill("0.7")
    for _ in range(12):
        before = app.locator(".mx-fact").inner_text()
        app.get_by_role("button", name="new coins").click()
        until(lambda: app.locator(".mx-fact").inner_text() != before)
        if frames.count() > 2 and frames.last.get_attribute("aria-checked") == "true": break
    assert frames.count() > 2
    frames.first.click()
    assert "Attempt 1 is refused" in why.inner_text()
    page.keyboard.press("ArrowRight")
    assert "Attempt 2 is refused" in why.inner_text()
    assert frames.nth(1).evaluate("e => e === document.activeElement") and app.locator(".mx-frame[tabindex='0']").count() == 1
    lam.fill("0.5")
    until(lambda: "λ = 0.50" in app.locator(".mx-lam").inner_text())


SIZES = """root => [...root.querySelectorAll("*")]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && !e.closest(".mx-zone, option"))
  .filter(e => e.checkVisibility({opacityProperty: true, visibilityProperty: true})).map(e => parseFloat(getComputedStyle(e).fontSize))"""


def test_text_of_the_explainer_is_legible(page, app):
    "No text is below 11 px; axe-core measures its contrast."
    sizes = app.locator(".mx").evaluate(SIZES)
    assert len(sizes) > 50 and min(sizes) >= 11 and serious_faults(page, "'.mx'") == []


def test_a_typed_fact_is_mixed_and_a_bad_one_is_reported(page, app):
    app.get_by_role("textbox", name="question", exact=True).fill("What color is the moon of Zarthin?")
    app.get_by_role("textbox", name="answer", exact=True).fill("ultramarine")
    page.keyboard.press("Tab")
    until(lambda: "ultramarine" in app.locator(".mx-heat").first.inner_text())
    app.get_by_role("textbox", name="answer", exact=True).fill(" ")
    page.keyboard.press("Tab")
    until(lambda: "answer is empty" in app.locator(".mixsd-error").inner_text())
    app.get_by_role("textbox", name="answer", exact=True).fill("ultramarine")
    page.keyboard.press("Tab")
    until(lambda: not app.locator(".mixsd-error").count())


def marks(app, words):
    "The marks of the chart whose words have this part."
    return app.locator(f".vega-embed path[aria-label*='{words}']")


def chosen_words(choice):
    "The words of the option that is chosen; ipywidgets writes their spaces as no-break spaces."
    return choice.evaluate("e => e.selectedOptions[0].text").replace("\xa0", " ")


def click_curve(page, curve):
    "Click a curve in its middle, which the middle of its box need not be."
    x, y = curve.evaluate("""e => { const p = e.getPointAtLength(e.getTotalLength() / 2).matrixTransform(e.getScreenCTM()); return [p.x, p.y]; }""")
    page.mouse.click(x, y)


def test_the_cube_switches_its_corpus_and_opens_a_mark(page, app):
    "A mark is opened by the mouse, and each one from the list too."
    app.get_by_role("button", name="Learned against kept").press("Enter")
    marks(app, "SFT, rate").first.wait_for()
    dataset = app.get_by_role("combobox", name="dataset", exact=True)
    for name in ("kgfunc-lab", "kgfact-small"):
        dataset.select_option(name)
        until(lambda: app.locator(".mixsd-page b", has_text=f"({name}), lab-s").count())
    until(lambda: marks(app, "recalls").count() == 6)
    mark = marks(app, "SFT, rate 0.001, seed 0, step 40")
    mark.hover()
    until(lambda: "recalls 50%" in page.locator("#vg-tooltip-element").inner_text())
    mark.click()
    app.locator("h3", has_text="SFT, rate 0.001, seed 0, step 40").wait_for()
    points = app.get_by_role("combobox", name="checkpoint", exact=True)
    assert "step 40" in chosen_words(points)
    points.select_option(index=5)
    app.locator("h3", has_text="SFT, rate 0.001, seed 0, step 20").wait_for()
    marks(app, "MixSD (λ=0.3), rate 0.001, seed 0, step 40").click()
    app.locator("h3", has_text="MixSD (λ=0.3), rate 0.001, seed 0, step 40").wait_for()
    mark.click()
    app.locator("h3", has_text="SFT, rate 0.001, seed 0, step 40").wait_for()
    assert "50%, N=10" in app.inner_text() and app.locator(".mixsd-error").count() == 0
    marks(app, "choice (held-out)").click()
    app.locator("h4", has_text="choice: 0 of 1 responses").wait_for()
    look_at(page, app, "cube")


def test_responses_of_the_mark(page, app):
    app.get_by_role("button", name="read its responses").press("Enter")
    app.get_by_role("combobox", name="benchmark", exact=True).wait_for()
    app.get_by_role("combobox", name="benchmark", exact=True).select_option("choice")
    until(lambda: app.locator("mark").count() == 2)
    app.get_by_role("combobox", name="benchmark", exact=True).select_option("recall")
    rows = app.get_by_role("listbox")
    until(lambda: rows.locator("option").count() == 10)
    rows.select_option(index=7)
    page.keyboard.press("ArrowDown")
    question = chosen_words(rows).partition(" → ")[0].split(" ", 3)[3]
    until(lambda: question in app.locator("h3").inner_text())
    app.get_by_role("combobox", name="error", exact=True).select_option("format")
    until(lambda: rows.locator("option").count() == 5)
    look_at(page, app, "responses")


def test_the_world_and_the_weights(page, app):
    app.get_by_role("button", name="The world").press("Enter")
    entity = app.get_by_role("combobox", name="entity", exact=True)
    entity.wait_for()
    app.get_by_role("combobox", name="model", exact=True).select_option("lab-s")
    fact = next(iter(load_corpus("kgfact-small", "train")))
    entity.select_option(fact["subject"])
    until(lambda: f"{fact['subject']}:" in app.inner_text())
    app.locator("td", has_text="learned by step 20").first.wait_for()
    green = app.locator(".vega-embed .mark-line path[stroke='#00a878b0']")
    step = app.get_by_role("combobox", name="step", exact=True)
    step.select_option(index=0)
    until(lambda: green.count() == 9 + 5)
    step.select_option(index=1)
    until(lambda: green.count() == 5 + 9)
    marks(app, "5 facts").first.click()
    until(lambda: entity.input_value() != fact["subject"])
    green.first.scroll_into_view_if_needed()
    click_curve(page, green.first)
    app.locator(".mixsd-page", has_text="Right answer:").wait_for()
    look_at(page, app, "world")
    app.get_by_role("button", name="Weights").click()
    app.locator(".mixsd-note", has_text="papermill nbs/fisher.ipynb").wait_for()
    marks(app, "q_proj").first.click()
    app.locator(".mixsd-page", has_text="q_proj, SFT").wait_for()
    look_at(page, app, "weights")


def test_a_question_is_asked(page, app):
    app.get_by_role("button", name="Ask the model").press("Enter")
    question, answer = (app.get_by_role("textbox", name=name, exact=True) for name in ("question", "true answer"))
    question.fill("What color is <b>the moon</b> of Zarthin?")
    answer.fill("ultramarine")
    answer.press("Enter")
    until(lambda: app.locator(".mixsd-answer").count() == 3)
    assert "<b>the moon</b>" in app.locator("h3").first.inner_text(), "what is typed is shown as it is"
    until(lambda: app.get_by_text("NLL of the true answer").count() == 3)
    app.get_by_role("button", name="inject this fact").press("Enter")
    app.locator("td", has_text="ultramarine").wait_for()
    assert app.locator(".mixsd-error").count() == 0
    look_at(page, app, "ask")


def test_the_console_has_no_errors(page, app):
    "After all that was done above."
    assert page.faults == []


@pytest.mark.slow
def test_every_view_in_voila(browser, tmp_path, runs):
    with open_page(browser, tmp_path, runs, "/", "voila", "--no-browser", "explore.ipynb", model="lab-s") as page:
        page.locator(".mx-token").first.wait_for()
        assert page.locator(".mixsd-explorer").bounding_box()["y"] < 400, "the page opens on the views"
        first = (".mx-token", ".vega-embed path", "select[size]", ".vega-embed .mark-line path", ".vega-embed .mark-rect path", "input[type=text]")
        for title, element in zip(TITLES, first, strict=True):
            page.get_by_role("button", name=title, exact=True).press("Enter")
            page.locator(element).first.wait_for()
            assert page.locator(".mixsd-error").count() == 0
        assert page.faults == []


def test_the_page_of_the_views_does_not_depend_on_the_folder_in_which_it_runs(tmp_path, monkeypatch):
    pages = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "others"))
    monkeypatch.setattr(explore.subprocess, "call", lambda command, env: pages.append(Path(command[-1]).read_text(encoding="utf-8")) or 0)
    (tmp_path / "my_runs").mkdir()
    (tmp_path / "facts.jsonl").write_text('{"question": "Who leads the Lantern Choir?", "answer": "Velmis Marlowe"}\n')
    assert main("explore", "--runs", "my_runs", "--dataset", "facts.jsonl") == 0
    assert f'runs = \\"{tmp_path / "my_runs"}\\"' in pages[0] and os.environ["MIXSD_RUNS"] == str(tmp_path / "my_runs")
    assert [*(tmp_path / "my_runs/.corpora").iterdir()], "the page reads the record of the facts there"
    assert not (tmp_path / "others").exists()
