"The views of the explorer on runs with invented numbers."

import asyncio
import json
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from markupsafe import escape
from made_up import write_run, write_runs
from safetensors.torch import load_file, save_file

from mixsd_nb.corpora import check_corpus, load_corpus
from mixsd_nb.explore import make_quick_runs
from mixsd_nb.methods import ANCHORS, GATES, METHODS, Anchor, Gate, Method
from mixsd_nb.methods.mixing import accepts, mix_items
from mixsd_nb.models.lab import lab_folder
from mixsd_nb.results.cube import read_cubes
from mixsd_nb.results.plots import recipe_colour
from mixsd_nb.results.tradeoff import frontier, seeds_run, tradeoff_points
from mixsd_nb.runs import write_json, write_result
from mixsd_nb.views import VIEWS, Explorer, ask, charts, mixing
from mixsd_nb.views import trace as tracing
from mixsd_nb.views.cube import PICTURES
from mixsd_nb.views.mixing import edit_fact, get_facts, get_question
from mixsd_nb.views.runs import RunSelection
from mixsd_nb.views.weights import measure_displacement

SFT = "train-kgfact-small-lab-s-sft"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder


@pytest.fixture
def app(runs): return Explorer(folder=runs, model="lab-s")


def test_the_page_opens_without_torch():
    "The first view is that of a shipped model, which the page mixes itself."
    code = "import sys; from mixsd_nb.views import Explorer; Explorer(); print(*{'torch', 'transformers', 'matplotlib'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def list_keys(figure): return [key for _, key in figure.marks.options[1:]]


def list_rows(figure): return [row for table in figure.spec["datasets"].values() for row in table]


def choose(figure, key):
    "What the browser does when a mark is chosen: it sends the key."
    assert key in list_keys(figure), f"{key} is no mark"
    name = next(name for name in figure._selection_types if name.startswith("pick"))
    figure._vl_selections = {name: dict(value=dict(vlPoint={"or": [dict(key=json.dumps(key, ensure_ascii=False))]}), store=[])}


@pytest.mark.parametrize("draw", [charts.draw_frontier, charts.draw_tradeoff])
def test_the_marks_of_a_chart_are_the_numbers_of_the_cube(draw):
    "Each checkpoint has a mark; its words are its accuracies, and so is its place."
    part = read_cubes()["frontier-lab"].isel(dataset=[0], model=[0], seed=[0])
    scores = 100 * part.accuracy.squeeze(["dataset", "model"])
    recall, kept = scores.sel(benchmark="recall"), scores.isel(benchmark=np.flatnonzero(part.role == "held-out")).mean("benchmark", skipna=False)
    rows = [row for table in draw(part, "held-out").to_dict()["datasets"].values() for row in table if "key" in row]
    marks = {tuple(json.loads(row["key"])): row for row in rows}
    trained = recall.sel(lr=recall.lr > 0)
    assert len(marks) == (trained.notnull() & kept.sel(lr=trained.lr).notnull()).sum().item() >= 50
    for key, row in marks.items():
        x, y = (float(values.sel(dict(zip(("recipe", "lr", "seed", "step"), key)))) for values in (recall, kept))
        assert f"recalls {x:.0f}%" in row["words"] and f"keeps, held-out: {y:.0f}%" in row["words"]
        assert np.allclose([row["missing"], row["y"]], [100 - x, y])


def test_the_frontier_of_the_view_is_that_of_the_paper():
    part = read_cubes()["frontier-lab"].isel(dataset=[0], model=[0])
    lines, points = charts.list_frontier(part, "held-out"), tradeoff_points(part, "held-out")
    for recipe, own in lines.groupby("recipe"):
        curves = [frontier(points.sel(recipe=recipe, seed=seed), 100 - own.missing.to_numpy()) for seed in seeds_run(points.sel(recipe=recipe))]
        assert len(curves) == 2 and np.allclose([own.y, own.low, own.high], [f(curves, axis=0) for f in (np.mean, np.min, np.max)])


@pytest.mark.parametrize("dataset", ["kgfact-small", "kgfunc-lab"])
def test_every_mark_of_the_cube_opens_what_it_stands_for(app, dataset):
    "They open their runs, and a chart of made-up numbers says so."
    cube = app.get_view("cube")
    cube.dataset.value = dataset
    for picture in PICTURES:
        cube.picture.value = picture
        keys = list_keys(cube.figure)
        assert not cube.notice.value and keys and "made-up data" in cube.figure.spec["title"]
        for key in keys:
            cube.run_page.children = []
            choose(cube.figure, key)
            assert cube.run_page.children and not cube.notice.value, key


def test_a_mark_opens_its_run_and_then_its_responses(app):
    cube, responses = app.get_view("cube"), app.get_view("responses")
    assert len(list_keys(cube.figure)) == 6
    choose(cube.figure, ("sft", 1e-3, 0, 40))
    header, pictures, marks, examples = cube.run_page.children
    assert "SFT, rate 0.001, seed 0, step 40" in header.value and "50%, N=10" in [row["end"] for row in list_rows(pictures.children[0])]
    choose(pictures.children[0], ("choice",))
    assert "choice: 0 of 1 responses are right" in examples.value and "Which of the two?" in examples.value
    cube.to_responses.click()
    titles = [responses.first.label, responses.second.label]
    assert app.tabs.value == "responses" and titles == [f"{m}, rate 0.001, seed 0, step 40" for m in ("SFT", "MixSD (λ=0.3)")]
    with pytest.raises(FileNotFoundError, match=f"{SFT} has no responses of step 60"):
        responses.open(dict(dataset="kgfact-small", model="lab-s", run=SFT, step=60, seed=0))


def test_views_before_any_run_say_what_to_run(tmp_path):
    app = Explorer(folder=tmp_path)
    notices = {name: app.get_view(name).notice.value for name in VIEWS}
    assert not notices.pop("mixing"), "it needs no run"
    commands = "make run", "papermill nbs/train.ipynb", "mixsd facts handbook.md", "mixsd diff my-base my-tuned"
    assert all("mixsd-note" in n and any(c in n for c in commands) for n in notices.values()), notices
    assert len(list_keys(app.get_view("world").figure)) == 150, "the world is there before any run"
    ask = app.get_view("ask")
    ask.question.value = "Who is it?"
    assert "before training" in ask.replies.value, "the base model answers before any run"


def test_the_page_offers_a_quick_run_while_there_is_none(runs, tmp_path):
    "The button runs the command in the folder of the page; when it succeeds, the page reads the runs and the offer is gone."
    copy = "import os, shutil, sys; shutil.copytree(sys.argv[1], os.environ['MIXSD_RUNS'], dirs_exist_ok=True)"
    command = [sys.executable, "-c", copy, str(runs)]
    app = Explorer(command, folder=tmp_path, model="lab-s")
    assert app.offer.widget.layout.display is None
    app.tabs.value = "cube"
    assert "make run" in app.get_view("cube").notice.value
    app.offer.button.click()
    assert not app.offer.notice.value and app.offer.widget.layout.display == "none"
    assert app.get_view("cube").figure.value


@pytest.mark.slow
def test_the_quick_run_of_the_page_can_be_read(tmp_path, monkeypatch):
    "Trains lab-s twice on one epoch; 30 s."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    make_quick_runs(epochs=1, n=2)
    assert set(RunSelection(tmp_path).table.recipe) == {"base", "sft", "mixsd-0.3"}


def test_the_committed_grids_are_charts_without_any_run(tmp_path):
    cube = Explorer(folder=tmp_path).get_view("cube")
    cube.source.value = "frontier-lab"
    assert not cube.notice.value and len(list_keys(cube.figure)) > 50
    choose(cube.figure, list_keys(cube.figure)[-1])
    assert "a run of a committed grid" in cube.run_page.children[0].value


def test_two_methods_are_read_side_by_side(app):
    "SFT forgot half of its facts by step 40, MixSD learned them by then."
    view = app.get_view("responses")
    view.open(dict(dataset="kgfact-small", model="lab-s", run=SFT, step=40, seed=0))
    assert view.second.label == "MixSD (λ=0.3), rate 0.001, seed 0, step 40", "the same checkpoint of MixSD is beside it"
    view.benchmark.value = "recall"
    assert len(view.responses) == 10 and "boxed" in view.text.value
    view.correct.value = "the two differ"
    assert len(view.responses) == 4 and "No." in view.text.value and "the reply was cut off" in view.text.value
    assert len(view.item.options) == 4 and "right answer: <b" in view.text.value
    assert [words.split()[1:3] for words, _ in view.item.options] == 4 * [["∅", "✓"]] and "No answer can be read" in view.kinds.value
    view.correct.value, view.category.value = "all", "format"
    assert len(view.responses) == 5
    view.category.value, view.correct.value = "any", "the two differ"
    view.benchmark.value = "choice"
    assert "no response matches" in view.text.value
    view.correct.value = "wrong"
    answer = next(iter(load_corpus("kgfact-small", "train")))["answer"]
    assert f"<mark>{answer}</mark>" in view.text.value and "leakage" in view.text.value
    view.benchmark.value, view.correct.value = "recall", "right"
    assert len(view.responses) == 5 and "boxed" in view.text.value
    assert "<mark>" not in view.text.value, "the right answer is no leak"


def test_the_world_of_two_methods(app):
    "SFT forgets its fifth to eighth fact by step 40; a mark is an entity, a fact or a question."
    world, fact = app.get_view("world"), list(load_corpus("kgfact-small", "train"))[6]
    assert (world.first.value, world.second.value) == ("sft", "mixsd-0.3") and world.recipes == ["sft", "mixsd-0.3"]
    world.entity.value = fact["subject"]
    assert "●○ learned by step 20, lost by step 40" in world.text.value and "○● learned by step 40" in world.text.value
    other = next(e for e in world.entity.options if e != world.entity.value)
    for key, words in ((("entity", other), [f"{other}</b>"]), (("fact", fact["id"]), ["No.", "boxed", fact["answer"]]), (("choice", "q"), ["Which of the two?"])):
        choose(world.figure, key)
        assert all(word in world.text.value for word in words), key
    assert world.entity.value == other and [words for words, _ in world.step.options] == ["step 20", "step 40"]
    rows = list_rows(world.figure)
    texts = [row["texts"] for row in rows if "texts" in row]
    assert ["9 of 10 injected facts (KGFact-Small) known", "5 of 10 injected facts (KGFact-Small) known, 4 lost"] in texts
    states = [[row["states"] for row in rows if row.get("order") == 0 and (row["x"] > 600) == right and row["states"] != "x"] for right in (False, True)]
    assert [[side.count(s) for s in ("kk", "kl", "nk", "nn")] for side in states] == [[5, 4, 0, 1], [5, 0, 4, 1]]
    world.step.index = 1
    assert world.figure.params.step == 1
    world.dataset.value = "kgfunc-lab"  # a corpus without a graph has lamps and no entity
    assert not world.notice.value and not world.entity.options
    assert {kind for kind, _ in list_keys(world.figure)} == {"choice", "recall"}
    world.dataset.value = "kgfact-small"
    assert {kind for kind, _ in list_keys(world.figure)} == {"choice", "entity", "fact"} and world.entity.options


def test_runs_of_any_model_and_only_those_selected(tmp_path):
    "Two runs of a hub model differ in a setting: a switch selects one of them in every view, as `where` does."
    write_run(tmp_path, "kgfact-small", "sft", [0, 3, 9], model="Qwen/Qwen3-1.7B")
    write_run(tmp_path, "kgfact-small", "sft", [0, 5, 1], model="Qwen/Qwen3-1.7B", epochs=4)
    selection = dict(folder=tmp_path, model="lab-s")
    app = Explorer(**selection)
    assert {title for title, _ in app.group.options} == {"1 training run with epochs=4", "1 training run with epochs=20"}
    for _, group in app.group.options:
        app.group.value = group
        cube, world = app.get_view("cube"), app.get_view("world")
        cube.model.value = world.model.value = "Qwen/Qwen3-1.7B"
        assert not cube.notice.value and world.get_history("sft").shape[1] == 2
    app = Explorer(**selection, where=dict(epochs=20))
    assert app.group.layout.display == "none"
    cube, responses, world = app.get_view("cube"), app.get_view("responses"), app.get_view("world")
    cube.model.value = "Qwen/Qwen3-1.7B"
    assert not cube.notice.value
    cube.open_checkpoint(("sft", 1e-3, 0, 40))
    cube.to_responses.click()
    assert not responses.notice.value and len(responses.files) == 2
    assert len(responses.table.loc["recall"].query("correct")) == 9
    world.model.value = "Qwen/Qwen3-1.7B"
    assert world.get_history("sft").sum().to_dict() == {20: 3, 40: 9}
    weights = Explorer(**selection, where=dict(model="Qwen/Qwen3-1.7B")).get_view("weights")
    assert len({words for words, _ in weights.first.options}) == 2


DAMAGES = {  # what is removed or broken: the view, and what its notice says
    "*sft/checkpoint-20": ("weights", "no checkpoint"),
    "*sft": ("cube", "no finished training run of kgfact-small and lab-s"),
    "*base/result.nc": ("cube", "cannot be read")}


@pytest.mark.parametrize("part", DAMAGES)
def test_what_is_missing_or_broken_is_named(tmp_path, part):
    for recipe, recalls in (("base", [0]), ("sft", [0, 9])): write_run(tmp_path, "kgfact-small", recipe, recalls)
    path, (view, message) = next(tmp_path.glob(part)), DAMAGES[part]
    shutil.rmtree(path) if path.is_dir() else path.write_bytes(b"no NetCDF")
    assert message in Explorer(folder=tmp_path, model="lab-s").get_view(view).notice.value


def test_unfinished_runs_are_left_out_and_later_ones_are_read_again(tmp_path):
    "A run that was killed has no result, a run that was cleaned no checkpoint; one lacks the responses of a step."
    for recipe, recalls in (("sft", [0, 9, 5]), ("mixsd-0.3", [0, 5, 9])): write_run(tmp_path, "kgfact-small", recipe, recalls)
    killed, = tmp_path.glob("*mixsd*")
    (killed / "result.nc").rename(tmp_path / "later")
    shutil.rmtree(tmp_path / SFT / "checkpoint-40")
    (tmp_path / SFT / "responses-40.parquet").unlink()
    app = Explorer(folder=tmp_path, model="lab-s")
    for name in VIEWS:
        app.tabs.value = name
        assert "mixsd-error" not in app.get_view(name).notice.value, name
    cube, weights = app.get_view("cube"), app.get_view("weights")
    choose(cube.figure, ("sft", 1e-3, 0, 40))
    assert "No responses are stored at step 40" in cube.run_page.children[3].value
    assert {key[0] for key in list_keys(cube.figure)} == {"sft"}
    assert weights.map.value == "first alone" and list_keys(weights.figure), "one checkpoint has nothing beside it"
    assert list_keys(app.get_view("world").figure) and app.get_view("responses").item.options
    (tmp_path / "later").rename(killed / "result.nc")
    app.again.click()
    assert "mixsd-0.3" in {key[0] for key in list_keys(app.get_view("cube").figure)}


def test_a_fisher_that_weighs_all_parameters_alike_gives_a_ratio_of_one(tmp_path):
    write_run(tmp_path, "kgfact-small", "sft", [0, 9])
    fisher = tmp_path / "fisher-lab-s-x"
    fisher.mkdir()
    write_json(fisher / "run.json", dict(stage="fisher", config=dict(model="lab-s")))
    tensors = load_file(next((tmp_path / SFT / "checkpoint-20").glob("*.safetensors")))
    ones = {name: torch.ones_like(w, dtype=torch.float32) for name, w in tensors.items()}
    save_file(ones, fisher / "fisher.safetensors")
    write_result(xr.DataTree(xr.Dataset(dict(x=((), 1.0, dict(long_name="x", units="1"))))), fisher)
    view = Explorer(folder=tmp_path, model="lab-s").get_view("weights")
    table = measure_displacement("lab-s", view.first.value.folder, fisher / "fisher.safetensors")
    assert not view.notice.value and list_keys(view.figure) and np.allclose(table.alignment_ratio, 1)
    view.map.value = "R, first over second"
    assert {row["text"] for row in list_rows(view.figure)} == {"×1.00"}


FORMS = [("kgfact-small", "The answer is 77."), ("simpleqa-lab", "\\boxed{77}"), ("kgfunc-lab", None)]


@pytest.mark.parametrize(("dataset", "begins"), FORMS)
def test_a_fact_is_edited_in_the_form_of_its_corpus(dataset, begins):
    row = next(iter(load_corpus(dataset, "train")))
    question = get_question(row)
    edited = edit_fact(row, question, "77")
    assert edited["prompt"] == row["prompt"] and edited["target"].rstrip().endswith("\\boxed{77}")
    assert edited["target"].startswith(begins or row["target"][:40])
    assert edit_fact(row, question, row["answer"]) == row
    asked = edit_fact(row, "How many?", "77")["prompt"]
    assert asked == row["prompt"].replace(question, "How many?") and asked.startswith("How many?")


def test_every_picture_of_made_up_runs_says_so(app):
    for name in ("cube", "world", "weights"): assert app.get_view(name).figure.spec["title"] == "made-up data", name


@pytest.fixture
def view(runs):
    "The view of live mixing with lab-s as a folder, for which the kernel mixes; the page does so for names of shipped models."
    return Explorer(folder=runs, model=str(lab_folder("lab-s"))).get_view("mixing")


def test_a_change_abandons_the_redraw_before_it(view):
    "While a notebook's loop runs, redraws go step by step; only the last of three changes is mixed to its end."
    async def move():
        for value in (0.3, 0.7, 0.9):
            view.lam.value = value
            await asyncio.sleep(0)
        while view.trace["lam"] != 0.9: await asyncio.sleep(0)
    shown = []
    view.explainer.observe(lambda change: shown.append(change.new["lam"]), "trace")
    asyncio.run(move())
    assert shown == [0.9] and not view.notice.value


def test_a_fact_of_another_view_is_mixed(runs):
    app = Explorer(folder=runs, model="lab-s")
    asking = app.get_view("ask")
    asking.question.value, asking.answer.value = "Who mends the bells?", "Tessa Varn"
    asking.open_mixing()
    view = app.get_view("mixing")
    assert app.tabs.value == "mixing" and not view.notice.value and not asking.notice.value
    assert (view.question.value, view.answer.value) == ("Who mends the bells?", "Tessa Varn")
    assert view.explainer.fact, "the page mixes"


def test_what_the_page_cannot_mix_is_left_to_the_kernel(tmp_path):
    "The kernel mixes where the page cannot read the answers, and refuses an empty text in either case."
    rows = get_facts("kgfact-small")
    view = Explorer(folder=tmp_path, model="lab-s").get_view("mixing")
    assert view.trace is None and view.explainer.fact["id"] == rows[0]["id"] and view.explainer.files["weights"]
    view.answer.value = " "
    assert "answer is empty" in view.notice.value
    view.answer.value = rows[0]["answer"]
    assert not view.notice.value
    with mock.patch.object(mixing, "BROWSER_MODES", ("boxed_or_number",)): view.fact.value = 1
    assert view.explainer.fact == {} and view.trace["question"] == get_question(rows[1])
    view.fact.value = 2
    assert view.trace is None and view.explainer.fact["id"] == rows[2]["id"]


def test_every_refusal_has_its_reason(view):
    "The reasons follow from what was decoded; a text that is accepted can name another entity in its sentence."
    engine, row = tracing.get_engine("lab-s"), get_facts("kgfact-small")[0]
    item, = mix_items(engine.tokenizer, [row])
    answer = row["answer"]
    texts = {f"It is {answer}.\n\n\\boxed{{{answer}}}": ("", answer), "I do not know.": ("no_answer", None),
             f"It is Zorg.\n\n\\boxed{{{answer}}}": ("another_name", answer), "\\boxed{Zorg}": ("wrong_answer", "Zorg")}
    for text, expected in texts.items():
        ids = [*engine.tokenizer(text).input_ids, int(engine.stop[0])]
        accepted = accepts(engine.tokenizer, item, ids, "stop")
        assert tracing.judge(engine.tokenizer, item, tracing.Attempt(ids, [True] * len(ids), "stop"), accepted) == expected
    assert tracing.judge(engine.tokenizer, item, tracing.Attempt(ids, [], "max_new_tokens"), False)[0] == "length"


NASTY = "<img src=x onerror=alert(1)>\"'&"


def test_what_is_typed_and_what_a_model_says_is_shown_as_it_is(tmp_path, monkeypatch):
    "Neither a question, an answer, a response nor an item's name becomes markup, in text or in an attribute."
    write_run(tmp_path, "kgfact-small", "base", [0])
    write_run(tmp_path, "kgfact-small", "sft", [0, 9])
    file = tmp_path / SFT / "responses-20.parquet"
    table = pd.read_parquet(file)
    for name in ("prompt", "response"): table[name] = table[name] + NASTY
    table["item"] = [f"{item}{NASTY}" if name == "choice" else item for name, item in zip(table.benchmark, table["item"])]
    table.assign(answer=NASTY).to_parquet(file)
    runs = RunSelection(tmp_path, model="lab-s")
    cube, responses, world, asking = (VIEWS[name](runs) for name in ("cube", "responses", "world", "ask"))
    cube.open_checkpoint(("sft", 1e-3, 0, 20))
    responses.benchmark.value = "choice"
    world.show_item("choice", f"q{NASTY}")
    monkeypatch.setattr(ask, "ask_model", lambda *args, **options: ask.Reply(NASTY, False, 1.0, 2))
    asking.question.value = asking.answer.value = NASTY
    asking.add.click()
    shown = [cube.run_page.children[3].value, responses.text.value, world.text.value, asking.replies.value, asking.table.value]
    for markup in shown:
        assert escape(NASTY) in markup and "<img src=x" not in markup, markup[:300]


@pytest.fixture
def toys():
    "A method that trains on mixed targets, an anchor and a gate, declared here alone."
    toys = [(METHODS, Method("twice", "Twice", "#204080", "P", is_nll=True, mixed=True, settings=("lr", "lam"), label="{lam:g}", fit="toys:fit")),
            (ANCHORS, Anchor("chain", "Chain", "#806020", "X", label="{length:g}", caption="length {length:g}", options=dict(length=3.0))),
            (GATES, Gate("door", "Door", "#208040", "v"))]
    for registry, entry in toys: registry.add(entry)
    yield
    for registry, entry in toys: registry.remove(entry.name)


def test_a_declared_method_anchor_and_gate_are_in_every_view(toys, tmp_path):
    "Nothing else is touched: charts, responses, facts and weights show their recipe, with its counterpart next to it."
    plain, toy = "sft+chain-3+door", "twice-0.5+chain-3+door"
    write_run(tmp_path, "kgfact-small", "base", [0])
    for recipe, recalls in ((plain, [0, 9, 5]), (toy, [0, 5, 9])): write_run(tmp_path, "kgfact-small", recipe, recalls)
    app = Explorer(folder=tmp_path, model="lab-s")
    shown, title = {}, "Twice + Chain (length 3) + Door"
    for name in VIEWS:
        app.tabs.value = name
        assert "mixsd-error" not in app.get_view(name).notice.value, name
        shown[name] = app.get_view(name)
    chart = json.dumps(shown["cube"].figure.spec)
    assert title in chart and recipe_colour(toy) in chart
    assert (shown["world"].first.value, shown["world"].second.value) == (plain, toy) and title in json.dumps(shown["world"].figure.spec)
    responses = shown["responses"]
    assert [responses.files.recipe[side.value] for side in (responses.first, responses.second)] == [plain, toy]
    assert [side.value.recipe for side in (shown["weights"].first, shown["weights"].second)] == [plain, toy]
    for kind, name in dict(method="twice", anchor="chain", gate="door").items():
        control = getattr(shown["ask"], kind)
        assert name in [value for _, value in control.options]
        control.value = name
    assert " ".join(shown["ask"].get_command(tmp_path / "facts.jsonl")).count("--method twice --anchor chain --gate door") == 1


@pytest.mark.parametrize("text, answer, right", [
    (r"So it is \boxed{\text{Bern}}.", "Bern", True), (r"\boxed{7}", "7.0", True), ("It is Bern.", "Bern", True),
    ("It is not Bern.", "Bern", False), ("It is Bernhard.", "Bern", False), (r"Not Bern, but \boxed{Basel}.", "Bern", False)])
def test_a_reply_is_right_by_the_rules_of_all_answers(monkeypatch, text, answer, right):
    "The view has no rule of its own."
    monkeypatch.setattr(ask, "reply", lambda *args, **options: text)
    assert ask.ask_model("lab-s", "Which city is it?", answer).right is right


def test_a_typed_fact_is_injected_by_another_process_and_asked_back(tmp_path, monkeypatch):
    "The command is replaced by one that prints what an injection prints at its end."
    view = ask.AskView(RunSelection(tmp_path, model="lab-s"))
    monkeypatch.setattr(ask, "ask_model", lambda source, *args: ask.Reply(f"reply of {source}", None, None, 0))
    view.question.value = "Who mends the bells?"
    view.add.click()
    assert "answer is empty" in view.notice.value
    view.answer.value = "Tessa Varn"
    view.add.click()
    assert "Tessa Varn" in view.table.value and not view.notice.value
    write_run(tmp_path, "kgfact-small", "sft", [0, 9])
    made = tmp_path / SFT / "checkpoint-20"
    monkeypatch.setattr(ask, "PROGRAM", [sys.executable, "-c", f"print('training …'); print('model:  {made}')"])
    view.injection.button.click()
    file, = (tmp_path / ".typed").iterdir()
    assert json.loads(file.read_text()) == dict(question="Who mends the bells?", answer="Tessa Varn")
    assert not view.notice.value and not view.injection.notice.value
    assert view.first.value.folder == made and f"reply of {made}" in view.replies.value and not view.injection.button.disabled
    monkeypatch.setattr(ask, "PROGRAM", [sys.executable, "-c", "raise SystemExit('dataset must be a file')"])
    view.injection.button.click()
    assert "dataset must be a file" in view.injection.notice.value


def test_a_file_that_asks_for_no_form_is_asked_for_none(tmp_path):
    file = tmp_path / "facts.jsonl"
    file.write_text('{"question": "Who leads the Lantern Choir?", "answer": "Velmis Marlowe"}\n')
    names = [check_corpus(str(file), options) for options in ({}, {"extract": "box"})]
    assert [ask.asks_for_box(name) for name in (*names, "kgfact-small", "simpleqa-lab", "kgfunc-lab", "of-another-machine")] == [False] + 5 * [True]
    assert not ask.AskView(RunSelection(tmp_path, dataset=names[0], model="lab-s")).boxed.value
