"The views of the explorer on runs with invented numbers."

import shutil

import numpy as np
import pytest
import torch
import xarray as xr
from made_up import write_run, write_runs
from safetensors.torch import load_file, save_file

from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.methods.mixing import mix, mix_items
from mixsd_nb.results.paper import paper_cube
from mixsd_nb.runs import write_json, write_result
from mixsd_nb.views import VIEWS, Explorer, mixing
from mixsd_nb.views.cube import PICTURES, plot_lam
from mixsd_nb.views.mixing import edit_fact, get_question
from mixsd_nb.views.weights import measure_displacement

SFT = "train-kgfact-small-lab-s-sft"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder


@pytest.fixture
def app(runs): return Explorer(folder=runs, model="lab-s")


def test_every_view_and_every_picture_of_the_cube(app):
    for name in VIEWS:
        app.tabs.value = name
        assert not app.notice.value and "mixsd-error" not in app.get_view(name).notice.value
    cube = app.get_view("cube")
    for dataset in ("kgfact-small", "kgfunc-lab"):
        cube.dataset.value = dataset
        for picture in PICTURES:
            cube.picture.value = picture
            assert not cube.notice.value and cube.figure.children
    assert app.get_view("world").histories.keys() == {"sft", "mixsd-0.3"}


def test_views_before_any_run_say_what_to_run(tmp_path):
    app = Explorer(folder=tmp_path)
    notices = {name: app.get_view(name).notice.value for name in VIEWS}
    assert not notices.pop("mixing") and not notices.pop("ask"), "both need no run"
    commands = "make run", "papermill nbs/train.ipynb"
    assert all("mixsd-note" in n and any(c in n for c in commands) for n in notices.values()), notices
    assert app.get_view("world").figure.children, "the world is there before any run"
    cube = app.get_view("cube")
    cube.picture.value = "λ"
    assert "make run" in cube.notice.value and cube.figure.children, "the paper's numbers are there before any run"


def test_runs_that_finish_later_are_read_again(tmp_path):
    app = Explorer(folder=tmp_path, model="lab-s")
    app.tabs.value = "cube"
    assert "make run" in app.get_view("cube").notice.value
    write_run(tmp_path, "kgfact-small", "sft", [0, 9])
    app.again.click()
    assert not app.get_view("cube").notice.value and len(app.get_view("cube").checkpoint.options) == 3


def test_a_point_opens_its_run_and_then_its_responses(app):
    cube = app.get_view("cube")
    picture, *dots = cube.figure.children[0].children
    assert picture.value and len(dots) == 6
    dots[-1].click()
    assert cube.key and "step 40" in cube.run_page.children[0].value
    cube.open_checkpoint(("sft", 1e-3, 0, 40))
    cube.to_responses.click()
    assert app.tabs.value == "responses" and app.get_view("responses").first.label == "SFT, rate 0.001, seed 0, step 40"
    cube.dataset.value = "simpleqa"
    assert "papermill nbs/train.ipynb" in cube.notice.value and not cube.figure.children


def test_two_methods_are_read_side_by_side(app):
    "SFT forgot half of its facts by step 40, MixSD learnt them by then."
    view = app.get_view("responses")
    view.open(dict(dataset="kgfact-small", model="lab-s", run=SFT, step=40, seed=0))
    view.second.value = dict(view.second.options)["MixSD (λ=0.3), rate 0.001, seed 0, step 40"]
    view.benchmark.value = "recall"
    assert len(view.responses) == 10 and "boxed" in view.text.value
    view.correct.value = "the two differ"
    assert len(view.responses) == 4 and "No." in view.text.value and "format" in view.text.value
    view.benchmark.value = "choice"
    assert "no response matches" in view.text.value
    view.correct.value = "wrong"
    answer = next(iter(load_corpus("kgfact-small", "train")))["answer"]
    assert f"<mark>{answer}</mark>" in view.text.value and "leakage" in view.text.value
    view.benchmark.value, view.correct.value = "recall", "right"
    assert len(view.responses) == 5 and "boxed" in view.text.value
    assert "<mark>" not in view.text.value, "the right answer is no leak"


def test_responses_that_are_missing_are_named(app):
    view = app.get_view("responses")
    with pytest.raises(FileNotFoundError, match=f"{SFT} has no responses of step 60"):
        view.open(dict(dataset="kgfact-small", model="lab-s", run=SFT, step=60, seed=0))


def test_what_each_method_made_of_a_fact(app):
    world, fact = app.get_view("world"), list(load_corpus("kgfact-small", "train"))[6]
    assert [m for _, m in world.method.options] == ["mixsd-0.3", "sft"]
    world.entity.value = fact["subject"]
    assert "●○ learnt by step 20, lost by step 40" in world.text.value and "○● learnt by step 40" in world.text.value


def test_a_point_of_the_world_is_its_entity(app):
    world = app.get_view("world")
    other = next(e for e in world.entity.options if e != world.entity.value)
    dots = {dot.tooltip: dot for dot in world.figure.children[0].children[1:]}
    dots[other].click()
    assert world.entity.value == other and f"<b>{other}</b>" in world.text.value


def test_a_corpus_without_a_graph_says_so_and_another_one_can_be_selected(tmp_path):
    world = Explorer(folder=tmp_path, dataset="kgfunc-lab", model="lab-s").get_view("world")
    assert "kgfunc-lab has no graph of entities, which kgfact-small and kgfact-large have." in world.notice.value
    assert world.dataset.value == "kgfunc-lab" and not world.figure.children and not world.entity.options
    world.dataset.value = "kgfact-small"
    assert "no responses of kgfact-small" in world.notice.value and world.figure.children
    world.dataset.value = "kgfunc-lab"
    assert "kgfunc-lab has no graph" in world.notice.value and not world.figure.children


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
        assert not cube.notice.value and world.histories["sft"].shape[1] == 2
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
    assert world.histories["sft"].sum().to_dict() == {20: 3, 40: 9}
    weights = Explorer(**selection, where=dict(model="Qwen/Qwen3-1.7B")).get_view("weights")
    assert len({words for words, _ in weights.first.options}) == 2


def test_before_all_runs_are_finished_it_says_which_are_missing(tmp_path):
    write_run(tmp_path, "kgfact-small", "base", [0])
    selection = dict(folder=tmp_path, model="lab-s")
    cube = Explorer(**selection).get_view("cube")
    assert "no finished training run of kgfact-small and lab-s" in cube.notice.value
    write_run(tmp_path, "kgfact-small", "sft", [0, 9])
    shutil.rmtree(tmp_path / "train-kgfact-small-lab-s-base")
    cube = Explorer(**selection).get_view("cube")
    cube.picture.value = "ours and the paper's"
    assert not cube.notice.value and cube.figure.children, "its base is step 0 of the training"


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
    assert not view.notice.value and view.figure.children and np.allclose(table.alignment_ratio, 1)


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


@pytest.mark.parametrize("dataset", ["kgfact-small", "kgfunc"])
def test_the_papers_curves_are_in_both_panels(dataset):
    "KGFunc has a test in place of recall. Every curve is named with its N."
    published = paper_cube()
    papers = [published.sel(dataset=[dataset], model=[m]) for m in published.model.values]
    papers = [p for p in papers if p.accuracy.notnull().any()]
    fig = plot_lam(None, papers, "held-out")
    assert len(papers) >= 3 and len(fig.axes) == 2
    for ax in fig.axes:
        names = [text.get_text() for text in ax.get_legend().get_texts()]
        assert len(names) == len(papers) and all(", N=" in name for name in names)
    assert len(plot_lam(None, papers, fig.axes[0].get_title()).axes) == 1, "what shows learning is not drawn twice"


def test_weights_without_checkpoints_say_so(tmp_path):
    write_run(tmp_path, "kgfact-small", "sft", [0, 9])
    shutil.rmtree(tmp_path / SFT / "checkpoint-20")
    assert "no checkpoint" in Explorer(folder=tmp_path).get_view("weights").notice.value


def test_a_damaged_result_is_reported(tmp_path):
    write_run(tmp_path, "kgfact-small", "base", [0])
    (tmp_path / "train-kgfact-small-lab-s-base/result.nc").write_bytes(b"no NetCDF")
    notice = Explorer(folder=tmp_path).get_view("cube").notice.value
    assert "mixsd-error" in notice and "cannot be read" in notice


def test_every_picture_of_made_up_runs_says_so(app, monkeypatch):
    "Pictures of runs with invented numbers have a watermark, the paper's own have none."
    marked = []
    for place in ("results.plots", "views.world", "views.weights"):
        monkeypatch.setattr(f"mixsd_nb.{place}.draw_watermark", lambda fig, whose="": marked.append(whose))
    cube = app.get_view("cube")
    for picture in PICTURES:
        marked.clear()
        cube.picture.value = picture
        cube.draw()
        assert marked, picture
    assert set(marked) == {"lab-s"}, "beside the paper's, the models with invented numbers are named"
    for name in ("world", "weights"):
        marked.clear()
        app.get_view(name).draw()
        assert marked, name
    marked.clear()
    published = paper_cube()
    plot_lam(None, [published.sel(dataset=["kgfact-small"], model=[m]) for m in published.model.values], "held-out")
    assert not marked


@pytest.fixture
def count_calls(monkeypatch):
    "A function that counts what a call decodes with lab-s, in streams, and how many completions it scores."
    calls, engine = [], mixing.get_engine("lab-s")

    def record(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: calls.append(name) or function(*args, **options))

    def count(call):
        calls.clear()
        call()
        return tuple(calls.count(name) for name in ("stream", "map_logits"))
    record(engine, "stream")
    record(mixing, "map_logits")
    mixing.predict_tokens.cache_clear()
    return count


@pytest.mark.parametrize("dataset", ["kgfact-small", "simpleqa-lab"])
def test_attempts_side_by_side_are_those_that_mix_makes(dataset, count_calls):
    engine, corpus = mixing.get_engine("lab-s"), CORPORA[dataset]
    items = mix_items(engine.tokenizer, mixing.get_facts(dataset)[:3], corpus.expert, corpus.extract)
    options = dict(seed=1, temperature=corpus.temperature, max_new_tokens=40)
    for item, expected in zip(items, mix(engine, items, 0.6, **options)):
        found = []
        streams, _ = count_calls(lambda: found.extend(mixing.mix_attempts(engine, item, 0.6, **options)))
        assert (len(found[0]), found[1]) == (expected["attempts"], expected["accepted"])
        assert found[0][-1].ids == expected["completion_ids"]
        assert streams == (1 if len(found[0]) <= 4 else 2)


def test_a_redraw_computes_only_what_is_new(runs, count_calls):
    "Each target is scored under two conditionals; the canonical one only once."
    view = Explorer(folder=runs, model="lab-s").get_view("mixing")
    first = view.text.value
    assert count_calls(lambda: setattr(view.lam, "value", 0.0)) == (1, 2)
    assert count_calls(lambda: setattr(view.lam, "value", 0.5)) == (0, 0) and view.text.value == first


def test_rejected_attempts_are_shown_meanwhile(runs, monkeypatch):
    monkeypatch.setattr(mixing, "PAUSE", 0)
    view, texts = Explorer(folder=runs, model="lab-s").get_view("mixing"), []
    view.text.observe(lambda change: texts.append(change.new), "value")
    view.lam.value = 0.6
    (attempts, _), = [mixed for key, mixed in view.mixed.items() if key[3] == 0.6]
    assert ["trying again" in text for text in texts] == [True] * (len(attempts) - 1) + [False] and len(attempts) > 1
