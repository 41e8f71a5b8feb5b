"What a run gives back: its table, its picture, its checkpoints, its responses, its model, and a conversation with it."

import matplotlib
import pytest
from helpers import small_model

from mixsd_nb import evaluate, train
from mixsd_nb.reports.dialogue import ask, newest_runs
from mixsd_nb.reports.finished import FinishedRun, ModelRun
from mixsd_nb.runs import ParameterError, open_run

matplotlib.use("Agg")
QUICK = dict(dataset="kgfact-small", suite="recall", n=4, max_new_tokens=4, batch=100, epochs=2, checkpoints=[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "The runs of SFT and of the base model on a tiny model, and the folder that holds them."
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(root))
        model = small_model(root / "tiny", "lab-s")
        yield train.run(model=model, method="sft", **QUICK), evaluate.run(model=model, suite="recall", n=4, max_new_tokens=4)


def test_a_run_says_where_it_is_and_what_it_found(runs):
    trained, measured = runs
    assert isinstance(trained, ModelRun) and trained.path.is_absolute() and (trained.path / "result.nc").is_file()
    table = trained.table()
    assert list(table) == ["step 0", "step 1", "step 2", "N"] and set(table.index) >= {"recall", "validation"}
    assert table.N["recall"] == 4
    assert measured.table().loc["recall", "n"] == 4
    assert len(trained.plot().axes) == 2 and len(measured.plot().axes) == 1


def test_the_step_is_the_papers_unless_it_is_given(runs):
    trained, measured = runs
    assert trained.best_step in (1, 2) and measured.best_step == 0
    assert trained.checkpoint(2) == trained.checkpoints[2] and trained.checkpoint().name == f"checkpoint-{trained.best_step}"
    assert len(trained.responses()) == len(trained.responses(1)) and len(measured.responses()) == 4
    with pytest.raises(ValueError, match="step must be one of 1, 2 of train-.*, got 7"): trained.checkpoint(7)
    with pytest.raises(ValueError, match="step must be one of none"): measured.checkpoint(1)
    base, tuned = (trained.model(step)[0] for step in (0, 2))
    assert not base.lm_head.weight.equal(tuned.lm_head.weight)


def test_chat_adds_template_and_request(runs, monkeypatch):
    from mixsd_nb.models.engine import Engine
    trained, prompts = runs[0], []
    generate = Engine.generate
    monkeypatch.setattr(Engine, "generate", lambda self, p, **o: prompts.append(self.tokenizer.decode(p[0])) or generate(self, p, **o))
    said = trained.chat("Who is it?", max_new_tokens=3)
    assert said == trained.chat("Who is it?", max_new_tokens=3), "a greedy reply is always the same"
    trained.chat("Who is it?", suffix=False, max_new_tokens=3)
    assert prompts[0].startswith("<|im_start|>user\nWho is it?\n\nThink step by step") and prompts[0].endswith("<|im_start|>assistant\n")
    assert "Think step by step" not in prompts[-1]


def test_ask_puts_replies_side_by_side(runs):
    trained, _ = runs
    replies = ask("What is <b>?", max_new_tokens=3)
    assert [run.label for run in newest_runs()] == ["sft"] and list(replies) == ["tiny", trained.title]
    assert replies[trained.title] == trained.chat("What is <b>?", max_new_tokens=3)
    assert replies._repr_html_().count("<pre") == 2 and "&lt;b&gt;" in replies._repr_html_() and "[tiny]" in repr(replies)
    assert list(ask("What?", "lab-s", trained, max_new_tokens=3)) == ["lab-s", trained.title]


def test_jupyter_shows_a_run_with_links(runs, monkeypatch):
    trained, _ = runs
    monkeypatch.chdir(trained.folder)
    page = trained._repr_html_()
    assert str(trained.path) in page and "href='result.nc'" in page and "href='checkpoint-2'" in page and "recall" in page
    (trained.folder / "notes<.html").touch()
    assert "notes&lt;.html" in trained._repr_html_()


@pytest.mark.parametrize("form", [lambda run: run.name, lambda run: run.path, lambda run: run.name.rpartition("-")[2]])
def test_a_run_is_opened_by_name_or_folder(runs, form):
    assert open_run(form(runs[0])).table().equals(runs[0].table())


def test_a_folder_that_is_no_run(runs, tmp_path):
    with pytest.raises(ParameterError, match=f"run must be the folder of a run, or its name in .* or the ten digits at its end, which `mixsd runs` lists, got {tmp_path}"): open_run(tmp_path)


def test_a_run_without_accuracies_has_a_table(runs):
    from mixsd_nb import generate
    mixed = generate.run(model=runs[0].base, lam=0.5, max_new_tokens=2, max_attempts=1)
    assert isinstance(mixed, FinishedRun) and mixed.table().value["asked"] == 100
    with pytest.raises(ValueError, match="plot needs a run with accuracies"): mixed.plot()


def test_replies_of_models_with_one_name_are_all_shown(tmp_path, monkeypatch):
    "Two checkpoints of the same step, and a run with the title of another one."
    from mixsd_nb.reports import dialogue
    monkeypatch.setattr(dialogue, "reply", lambda model, question, **_: model)
    folders = [str(tmp_path / run / "checkpoint-20") for run in ("a", "b")]
    assert [*dialogue.ask("Who?", *folders).values()] == folders
