"""explore.ipynb in a browser: JupyterLab runs it, and a person moves λ, types a fact, switches the corpus, opens a point."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from helpers import need_tools, until
from safetensors.torch import load_file, save_file

from mixsd_nb.corpora import load_corpus
from mixsd_nb.explore import PICTURES, VIEWS, ExploreConfig, Explorer, lam_figure, moved, question_of, typed_fact
from mixsd_nb.models import model_source
from mixsd_nb.results.cube import result_tree
from mixsd_nb.results.paper import paper_cube
from mixsd_nb.results.runs import write_atomically, write_result

ROOT = Path(__file__).resolve().parents[1]
ABOUT = {"recall": dict(column="Train", role="in-domain"), "choice": dict(column="MMLU", role="held-out")}


def responses(dataset, right):
    "Responses to ten facts, the first `right` of them correct, and to one question that a fact leaks into."
    facts = list(load_corpus(dataset, "train"))[:10]
    rows = [("recall", f["id"], f["prompt"], f"\\boxed{{{f['answer']}}}" if k < right else "No.", k < right) for k, f in enumerate(facts)]
    rows.append(("choice", "q", "Which of the two?", f"This is {facts[0]['answer']}. \\boxed{{A}}", False))
    return pd.DataFrame(rows, columns=["benchmark", "item", "prompt", "response", "correct"]).assign(sample=0)


def a_run(folder, dataset, method, recalls, lam=np.nan, model="lab-s", epochs=20):
    "A finished run with these recalls of ten facts at steps 0, 20, …, its responses, and checkpoints that moved at random."
    base, lr = method == "base", 1e-3
    settings = dict(method=method, dataset=dataset, model=model, lr=lr, seed=0, epochs=epochs)
    marks = {20 * k: {"recall": (r, 10), "choice": (8 - k, 10)} for k, r in enumerate(recalls)}
    curves = None if base else dict(loss=[2.0, 1.0], learning_rate=[lr, lr], grad_norm=[1.0, 1.0])
    cell = dict(dataset=dataset, model=model, method=method, lam=lam, lr=lr)
    tree = result_tree(**cell, accuracy=marks, benchmarks=ABOUT, config=json.dumps(settings), training=curves)
    run = folder / (f"train-{dataset}-{model.replace('/', '-')}-{method}" + (f"-{epochs}" if epochs != 20 else ""))
    run.mkdir(parents=True)
    write_atomically(run / "run.json", lambda path: path.write_text(json.dumps(dict(config=settings))))
    for step in range(20, 20 * len(recalls), 20):
        write_atomically(run / f"responses-{step}.parquet", responses(dataset, recalls[step // 20]).to_parquet)
        checkpoint = Path(shutil.copytree(model_source("lab-s"), run / f"checkpoint-{step}"))
        file, = checkpoint.glob("*.safetensors")
        save_file({name: w + 1e-3 * step * torch.randn_like(w) for name, w in load_file(file).items()}, file, dict(format="pt"))
        (run / f"checkpoint-{step}/complete").touch()
    write_result(tree, run)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for dataset in ("kgfact-small", "kgfunc-lab"):
        a_run(folder, dataset, "base", [0])
        a_run(folder, dataset, "sft", [0, 9, 5])
        a_run(folder, dataset, "mixsd", [0, 5, 9], lam=0.3)
    return folder


def test_every_picture_of_the_cube_and_every_view(runs):
    app = Explorer(ExploreConfig(runs=str(runs), model="lab-s"))
    for name in VIEWS:
        app.names.value = name
        view = app.view(name)
        assert not app.notice.value and "mixsd-error" not in view.notice.value
    cube = app.view("The cube")
    for dataset in runs.glob("train-*-base"):
        cube.dataset.value = dataset.name.removeprefix("train-").removesuffix("-lab-s-base")
        for what in PICTURES:
            cube.what.value = what
            assert not cube.notice.value and cube.place.children
    assert app.view("The world").histories.keys() == {"sft", "mixsd-0.3"}


def test_views_before_any_run_say_what_to_run(tmp_path):
    app = Explorer(ExploreConfig(runs=str(tmp_path)))
    cube = app.view("The cube")
    said = {name: app.view(name).notice.value for name in VIEWS}
    assert not said.pop("Live mixing")
    assert all("mixsd-news" in notice and ("make run" in notice or "papermill nbs/train.ipynb" in notice) for notice in said.values()), said
    assert app.view("The world").place.children, "the world is there before any run"
    cube.what.value = "λ"
    assert "make run" in cube.notice.value and cube.place.children, "the paper's numbers are there before any run"


@pytest.fixture
def app_of_runs(runs): return Explorer(ExploreConfig(runs=str(runs), model="lab-s"))


def test_a_point_opens_its_run_and_then_its_responses(app_of_runs):
    cube = app_of_runs.view("The cube")
    picture, dots = cube.place.children[0].children[0], cube.place.children[0].children[1:]
    assert picture.value and len(dots) == 6
    dots[-1].click()
    assert cube.key and "step 40" in cube.opened.children[0].value
    cube.open(("sft", 1e-3, 0, 40))
    cube.asked.click()
    assert app_of_runs.names.value == "Responses" and app_of_runs.view("Responses").one.label == "SFT, rate 0.001, seed 0, step 40"
    cube.dataset.value = "simpleqa"
    assert "papermill nbs/train.ipynb" in cube.notice.value and not cube.place.children


def test_two_methods_are_read_side_by_side(app_of_runs):
    "SFT forgot half of its facts at step 40, MixSD learnt them by then."
    reader = app_of_runs.view("Responses")
    reader.go(dict(dataset="kgfact-small", model="lab-s", run="train-kgfact-small-lab-s-sft", step=40, seed=0))
    reader.two.value = next(k for words, k in reader.two.options if words == "MixSD (λ=0.3), rate 0.001, seed 0, step 40")
    reader.benchmark.value = "recall"
    assert len(reader.shown) == 10 and "boxed" in reader.text.value
    reader.correct.value = "the two differ"
    assert len(reader.shown) == 4 and "No." in reader.text.value and "format" in reader.text.value
    reader.benchmark.value = "choice"
    assert "no response is left" in reader.text.value
    reader.correct.value = "wrong"
    answer = next(iter(load_corpus("kgfact-small", "train")))["answer"]
    assert f"<mark>{answer}</mark>" in reader.text.value and "leakage" in reader.text.value
    reader.benchmark.value, reader.correct.value = "recall", "right"
    assert len(reader.shown) == 5 and "boxed" in reader.text.value and "<mark>" not in reader.text.value, "the right answer is no leak"


def test_what_each_method_made_of_a_fact(app_of_runs):
    world, fact = app_of_runs.view("The world"), list(load_corpus("kgfact-small", "train"))[6]
    assert [m for _, m in world.method.options] == ["mixsd-0.3", "sft"]
    world.entity.value = fact["subject"]
    assert "●○ learnt by step 20, lost by step 40" in world.text.value and "○● learnt by step 40" in world.text.value


def test_runs_of_any_model_and_only_those_asked_for(tmp_path):
    "A hub model; two runs that differ in a setting: a conflict is told whatever is drawn, and `where` chooses in every view."
    a_run(tmp_path, "kgfact-small", "sft", [0, 3, 9], model="Qwen/Qwen3-1.7B")
    a_run(tmp_path, "kgfact-small", "sft", [0, 5, 1], model="Qwen/Qwen3-1.7B", epochs=4)
    config = dict(runs=str(tmp_path), model="lab-s")
    cube = Explorer(ExploreConfig(**config)).view("The cube")
    cube.model.value = "Qwen/Qwen3-1.7B"
    for what in ("frontier", "λ"):
        cube.what.value = what
        assert "epochs differs within the cube" in cube.notice.value and "where" in cube.notice.value
    app = Explorer(ExploreConfig(**config, where=dict(epochs=20)))
    app.view("The cube").model.value = "Qwen/Qwen3-1.7B"
    assert not app.view("The cube").notice.value
    app.view("The cube").open(("sft", 1e-3, 0, 40))
    app.view("The cube").asked.click()
    reader, world = app.view("Responses"), app.view("The world")
    assert not reader.notice.value and len(reader.files) == 2 and len(reader.first.loc["recall"].query("correct")) == 9
    world.model.value = "Qwen/Qwen3-1.7B"
    assert world.histories["sft"].sum().to_dict() == {20: 3, 40: 9}
    mixed_up = Explorer(ExploreConfig(**config)).view("The world")
    mixed_up.model.value = "Qwen/Qwen3-1.7B"
    assert "are the same cell" in mixed_up.notice.value
    both = [words for words, k in Explorer(ExploreConfig(**config, where=dict(model="Qwen/Qwen3-1.7B"))).view("Weights").one.options]
    assert len(set(both)) == 4


def test_before_all_runs_are_done_it_says_which_are_missing(tmp_path):
    a_run(tmp_path, "kgfact-small", "base", [0])
    config = ExploreConfig(runs=str(tmp_path), model="lab-s")
    assert "no finished training run of kgfact-small and lab-s" in Explorer(config).view("The cube").notice.value
    a_run(tmp_path, "kgfact-small", "sft", [0, 9])
    shutil.rmtree(tmp_path / "train-kgfact-small-lab-s-base")
    cube = Explorer(config).view("The cube")
    cube.what.value = "ours and the paper's"
    assert "-p method base" in cube.notice.value and not cube.place.children


def test_a_fisher_that_weighs_all_alike_gives_a_ratio_of_one(tmp_path):
    a_run(tmp_path, "kgfact-small", "sft", [0, 9])
    fisher = tmp_path / "fisher-lab-s-x"
    fisher.mkdir()
    (fisher / "run.json").write_text(json.dumps(dict(config=dict(model="lab-s"))))
    tensors = load_file(next((tmp_path / "train-kgfact-small-lab-s-sft/checkpoint-20").glob("*.safetensors")))
    save_file({name: torch.ones_like(w, dtype=torch.float32) for name, w in tensors.items()}, fisher / "fisher.safetensors")
    write_result(xr.DataTree(xr.Dataset(dict(x=((), 1.0, dict(long_name="x", units="1"))))), fisher)
    view = Explorer(ExploreConfig(runs=str(tmp_path), model="lab-s")).view("Weights")
    table = moved("lab-s", view.one.value.folder / "checkpoint-20", fisher / "fisher.safetensors")
    assert not view.notice.value and view.place.children and np.allclose(table.alignment_ratio, 1)


@pytest.mark.parametrize(("dataset", "begins"), [("kgfact-small", "The answer is 77."), ("simpleqa-lab", "\\boxed{77}"), ("kgfunc-lab", None)])
def test_a_fact_is_edited_in_the_form_of_its_corpus(dataset, begins):
    row = next(iter(load_corpus(dataset, "train")))
    edited = typed_fact(row, question_of(row), "77")
    assert edited["prompt"] == row["prompt"] and edited["target"].rstrip().endswith("\\boxed{77}")
    assert edited["target"].startswith(begins or row["target"][:40])
    assert typed_fact(row, question_of(row), row["answer"]) == row
    asked = typed_fact(row, "How many?", "77")["prompt"]
    assert asked == row["prompt"].replace(question_of(row), "How many?") and asked.startswith("How many?")


@pytest.mark.parametrize("dataset", ["kgfact-small", "kgfunc"])
def test_the_papers_curves_are_in_both_panels(dataset):
    "KGFunc has a test in place of recall. Every curve is named with its N."
    published = paper_cube()
    papers = [published.sel(dataset=[dataset], model=[m]) for m in published.model.values]
    papers = [p for p in papers if p.accuracy.notnull().any()]
    fig = lam_figure(None, papers, "held-out")
    assert len(papers) >= 3 and len(fig.axes) == 2
    for ax in fig.axes:
        names = [text.get_text() for text in ax.get_legend().get_texts()]
        assert len(names) == len(papers) and all(", N=" in name for name in names)
    assert len(lam_figure(None, papers, fig.axes[0].get_title()).axes) == 1, "what shows learning is not drawn twice"


def test_weights_without_checkpoints_say_so(tmp_path):
    a_run(tmp_path, "kgfact-small", "sft", [0, 9])
    shutil.rmtree(tmp_path / "train-kgfact-small-lab-s-sft/checkpoint-20")
    assert "no checkpoint" in Explorer(ExploreConfig(runs=str(tmp_path))).view("Weights").notice.value


def test_a_damaged_result_is_told(tmp_path):
    a_run(tmp_path, "kgfact-small", "base", [0])
    (tmp_path / "train-kgfact-small-lab-s-base/result.nc").write_bytes(b"no NetCDF")
    notice = Explorer(ExploreConfig(runs=str(tmp_path))).view("The cube").notice.value
    assert "mixsd-error" in notice and "cannot be read" in notice


SETTINGS = {"notebook-extension/tracker": dict(windowingMode="none"), "apputils-extension/themes": dict(theme="JupyterLab Dark"),
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
    own = dict(MIXSD_RUNS=str(runs), JUPYTERLAB_SETTINGS_DIR=str(folder / "settings"), JUPYTERLAB_WORKSPACES_DIR=str(folder / "workspaces"),
               JUPYTER_RUNTIME_DIR=str(folder / "runtime"), JUPYTER_CONFIG_DIR=str(folder / "config"), PYTHONPATH=str(ROOT))
    port = free_port()
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen([sys.executable, "-m", *command, f"--port={port}"], cwd=folder, env=os.environ | own, stdout=log, stderr=log)
    return process, f"http://127.0.0.1:{port}"


def answers(process, address, folder):
    assert process.poll() is None, (folder / "server.log").read_text()
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5): return True


@pytest.fixture(scope="module")
def browser():
    need_tools("chromium")
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]) as browser: yield browser


@contextlib.contextmanager
def opened(browser, folder, runs, path, *command):
    "A page of a server."
    process, address = serve(folder, runs, *command)
    try:
        until(lambda: answers(process, address, folder), what="the server")
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
    with opened(browser, tmp_path_factory.mktemp("lab"), runs, "/lab/tree/explore.ipynb", *LAB) as page: yield page


@pytest.fixture(scope="module")
def app(page):
    "The widget, after all cells have run."
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.locator(".mixsd-token").first.wait_for()
    return page.locator(".jp-Notebook .jp-Cell").last


def look(page, app, name):
    "A picture of a view, where MIXSD_SCREENSHOTS names a folder for them."
    folder = os.environ.get("MIXSD_SCREENSHOTS")
    if folder:
        page.wait_for_timeout(500)
        app.locator(".widget-vbox").first.screenshot(path=Path(folder) / f"explore-{name}.png")


def sources(app):
    return app.locator(".mixsd-columns > div").first.locator(".mixsd-token").evaluate_all("tokens => tokens.map(t => t.dataset.source)")


def test_cells_run_without_an_error(page, app):
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0
    assert app.locator(".mixsd-error").count() == 0


def test_lambda_changes_the_tokens(page, app):
    until(lambda: len(set(sources(app))) == 2)
    handle = app.get_by_role("slider").first
    handle.focus()
    page.keyboard.press("Home")
    until(lambda: set(sources(app)) == {"expert"})
    page.keyboard.press("End")
    until(lambda: set(sources(app)) == {"naive"})
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    until(lambda: len(set(sources(app))) == 2)


def test_a_token_shows_both_conditionals(page, app):
    token = app.locator(".mixsd-token").nth(3)
    card = token.locator(".mixsd-card")
    assert not card.is_visible()
    token.focus()
    assert card.is_visible() and card.locator("table table").count() == 2 and card.locator("table table tr").count() == 12
    look(page, app, "mixing")


def test_a_typed_fact_is_mixed_and_a_bad_one_is_told(page, app):
    app.get_by_role("textbox", name="question", exact=True).fill("What color is the moon of Zarthin?")
    app.get_by_role("textbox", name="answer", exact=True).fill("ultramarine")
    page.keyboard.press("Tab")
    canonical = app.locator(".mixsd-columns > div").nth(1)
    until(lambda: "ultramarine" in canonical.evaluate("d => [...d.querySelectorAll('.mixsd-token')].map(t => t.firstChild.textContent).join('')"))
    app.get_by_role("textbox", name="answer", exact=True).fill(" ")
    page.keyboard.press("Tab")
    until(lambda: "answer is empty" in app.locator(".mixsd-error").inner_text())
    app.get_by_role("textbox", name="answer", exact=True).fill("ultramarine")
    page.keyboard.press("Tab")
    until(lambda: not app.locator(".mixsd-error").count())


def test_the_cube_switches_its_corpus_and_opens_a_point(page, app):
    "By keyboard alone, as what follows, but for the mouse on one point."
    app.get_by_role("button", name="The cube").press("Enter")
    app.locator(".mixsd-dot").first.wait_for()
    before = app.locator(".mixsd-picture img").first.get_attribute("src")
    app.get_by_role("combobox", name="dataset", exact=True).select_option("kgfunc-lab")
    until(lambda: app.locator(".mixsd-picture img").first.get_attribute("src") != before)
    app.get_by_role("combobox", name="dataset", exact=True).select_option("kgfact-small")
    until(lambda: app.get_by_role("combobox", name="dataset", exact=True).input_value() == "kgfact-small" and app.locator(".mixsd-dot").count() == 6)
    dot = app.locator(".mixsd-dot[title*='SFT'][title*='step 40']")
    dot.press("Enter")
    app.locator("h4", has_text="train-kgfact-small-lab-s-sft, step 40").wait_for()
    app.locator(".mixsd-dot[title*='SFT'][title*='step 20']").click()
    app.locator("h4", has_text="train-kgfact-small-lab-s-sft, step 20").wait_for()
    dot.press("Enter")
    app.locator("h4", has_text="train-kgfact-small-lab-s-sft, step 40").wait_for()
    assert "50.0%" in app.inner_text() and app.locator(".mixsd-error").count() == 0
    look(page, app, "cube")


def test_responses_of_the_point(page, app):
    app.get_by_role("button", name="read its responses").press("Enter")
    app.get_by_role("combobox", name="benchmark", exact=True).wait_for()
    app.get_by_role("combobox", name="benchmark", exact=True).select_option("choice")
    app.locator("mark").wait_for()
    app.get_by_role("combobox", name="beside it", exact=True).select_option(label="MixSD (λ=0.3), rate 0.001, seed 0, step 40")
    until(lambda: app.locator("mark").count() == 2)
    look(page, app, "responses")


def test_the_world_and_the_weights(page, app):
    app.get_by_role("button", name="The world").press("Enter")
    app.get_by_role("combobox", name="entity", exact=True).wait_for()
    app.get_by_role("combobox", name="model", exact=True).select_option("lab-s")
    fact = next(iter(load_corpus("kgfact-small", "train")))
    app.get_by_role("combobox", name="entity", exact=True).select_option(fact["subject"])
    until(lambda: f"{fact['subject']}:" in app.inner_text())
    app.locator("td", has_text="learnt by step 20").first.wait_for()
    look(page, app, "world")
    app.get_by_role("button", name="Weights").click()
    app.locator(".mixsd-news", has_text="papermill nbs/fisher.ipynb").wait_for()
    app.locator(".mixsd-picture img").wait_for()
    look(page, app, "weights")


@pytest.mark.slow
def test_every_view_in_voila(browser, tmp_path, runs):
    with opened(browser, tmp_path, runs, "/", "voila", "--no-browser", "explore.ipynb") as page:
        page.locator(".mixsd-token").first.wait_for()
        for name, seen in zip(VIEWS, (".mixsd-token", ".mixsd-dot", "[class*=mixsd-]", "td", ".mixsd-picture img")):
            page.get_by_role("button", name=name, exact=True).press("Enter")
            page.locator(seen).first.wait_for()
            assert page.locator(".mixsd-error").count() == 0
