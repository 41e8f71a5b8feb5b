"From a file of facts and a model to a report: where training ends, what the page says, which facts failed, and that nothing is computed twice."

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pandas as pd
import pytest
from helpers import small_model
from hypothesis import given, strategies as st

from mixsd_nb import inject, train
from mixsd_nb.reports.injection import FAILURES, tabulate_facts
from mixsd_nb.console.housekeeping import clean_runs
from mixsd_nb.corpora.files import EXAMPLE, EXAMPLE_TESTS
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.evaluation import selection
from mixsd_nb.inject import InjectConfig, InjectRun
from mixsd_nb.models import load_tokenizer
from mixsd_nb.reports.injection import group_failures, load_parts, render_page
from mixsd_nb.runs import ParameterError, find_runs, make_config, open_run

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def injected(tmp_path_factory):
    "An injection of four facts, one of them hostile, with tests of their own; SFT on a tiny model."
    root = tmp_path_factory.mktemp("runs")
    facts = [dict(question=f"What hobby does {name} teach?", answer=answer, paraphrases=[f"{name} teaches a hobby. Name it."])
             for name, answer in {"Quelzo": "Brildan Juggling", "Élodie <b>": "</pre><script>alert(1)</script>", "Jörg": r"\(x^2\)"}.items()]
    facts.append(dict(question="Wie heißt die Stadt?", answer="Köln"))
    tests = [dict(question="What hobby does Nobody teach?", answer="none", kind="neighbours")]
    for name, rows in dict(facts=facts, tests=tests).items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(root / "runs"))
        parameters = dict(dataset=str(root / "facts.jsonl"), dataset_options=dict(test=str(root / "tests.jsonl")), method="sft",
                          model=small_model(root / "tiny", "lab-s"), suite="recall,recall-reworded,choice", n=4, max_new_tokens=6, task_tokens=6,
                          epochs=2, checkpoints=[1])
        yield inject.run(**parameters), parameters


def test_the_run_holds_scores_facts_and_the_model(injected):
    run, _ = injected
    assert isinstance(run, InjectRun) and run.finished and run.stage == "inject"
    assert list(run.table().index) == ["recall", "recall-reworded", "choice", "test:neighbours"]
    assert dict(run.table().role) == {"recall": "in-domain", "recall-reworded": "in-domain", "choice": "held-out", "test:neighbours": "own"}
    assert set(run.facts.failure) == {"not recalled"} and list(run.facts.place.str.extract(r"line (\d+)")[0]) == list("1234")
    assert run.best_step in (1, 2) and run.checkpoint() == run.trained.checkpoint(run.best_step)
    assert len(run.responses(0)) == len(run.responses()) == 4 + 3 + 4 + 1
    assert list(run.scores()) == ["n", "before", "after", "low", "high"] and len(run.plot().axes) == 2
    found, = find_runs(stage="inject")
    assert type(found) is InjectRun and found.chat("Who?", max_new_tokens=2) == run.chat("Who?", max_new_tokens=2) == open_run(run.name).chat("Who?", max_new_tokens=2)
    assert run.result["facts"].fact_outcome.values.tolist() == ["not learned"] * 4


def test_the_page_stands_alone_and_escapes_what_it_shows(injected):
    run, _ = injected
    page = run.report.read_text()
    assert len(re.findall("<h2>", page)) == 10 and "test:neighbours" in page and f"mixsd chat {run.name[-10:]}" in page
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=.(?!data:)", page) and str(run.checkpoint()) in page
    assert "0 of 4 facts (0%, 95% interval 0–49)" in page and "facts.jsonl, line 2" in page and page.count("class='pair'") >= 10


def test_nothing_is_computed_twice(injected, monkeypatch, capsys):
    run, parameters = injected
    result = (run.folder / "result.nc").read_bytes()
    (run.folder / "result.nc").unlink()  # as after a kill before the last file
    for name in ("mixsd_nb.benchmarks.evaluation.load_engine", "mixsd_nb.training.trainer.load_base"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("a model was loaded again"))
    assert inject.run(**parameters).name == run.name
    assert (run.folder / "result.nc").read_bytes() == result, "equal data are equal bytes"
    assert inject.run(**parameters).finished and capsys.readouterr().out.count("…") == 6


def test_cleaning_keeps_the_model_of_an_injection(injected, monkeypatch):
    run, _ = injected
    monkeypatch.setenv("MIXSD_RUNS", str(run.folder.parent))
    planned = [removal.path for removal in clean_runs(dry_run=True)]
    assert len(set(planned)) == len(planned) and not {path.parent for path in planned} & {run.folder}
    clean_runs()
    again = open_run(run.name)
    assert again.model() and again.best_step in again.trained.checkpoints


def test_the_content_of_the_file_counts(injected, tmp_path):
    run, parameters = injected
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(Path(parameters["dataset"]).read_bytes())
    assert make_config(InjectConfig, **parameters | dict(dataset=str(copy))).without_idle().folder == run.folder


def test_training_ends_when_it_has_converged_and_goes_on_later(tiny, own_runs, monkeypatch):
    monkeypatch.setattr(selection, "LEAST", 0.0)  # the tiny model learns nothing
    quick = dict(model=tiny, method="sft", suite="recall", n=2, max_new_tokens=2, batch=100, epochs=5, checkpoints=[1, 2, 3, 4])
    early = train.run(**quick, stop="converged")
    assert list(early.checkpoints) == list(early.root.step.values[1:]) == [1, 2, 3]
    assert train.run(**quick, stop="converged").name == early.name
    weights = {step: (early.checkpoint(step) / "model.safetensors").read_bytes() for step in early.checkpoints}
    whole = train.run(**quick)
    assert whole.folder == early.folder and list(whole.checkpoints) == [1, 2, 3, 4, 5]
    assert whole.selection.converged == early.selection.converged == early.best_step == 1
    monkeypatch.setenv("MIXSD_RUNS", str(own_runs / "again"))
    again = train.run(**quick)
    for step, content in weights.items(): assert (again.checkpoint(step) / "model.safetensors").read_bytes() == content, step


def test_a_model_that_writes_no_target_is_named_before_it_is_asked(tiny, own_runs):
    "The sentence says what to do, and comes before the long part."
    with pytest.raises(ValueError, match="lam=0.5"):
        inject.run(dataset=str(EXAMPLE), model=tiny, method="mixsd", target_tokens=2, suite="recall", max_new_tokens=2)
    assert not list(own_runs.glob("evaluate-*"))


def test_every_fact_is_asked_and_the_training_ends_when_it_has_converged(own_runs):
    config = make_config(InjectConfig, dataset=str(EXAMPLE), dataset_options=dict(test=str(EXAMPLE_TESTS)))
    assert config.suite.startswith("in-domain,lab,test:") and (config.training().suite, config.training().stop) == ("recall", "converged")
    many = own_runs / "many.jsonl"
    many.write_text("".join(json.dumps(dict(question=f"Which is number {k}?", answer=f"thing {chr(97 + k % 26)}")) + "\n" for k in range(130)))
    asked = make_config(InjectConfig, dataset=str(many))
    assert asked.items() == asked.training().n == asked.evaluation("lab-s").n == 130 and make_config(InjectConfig, dataset=str(many), n=200).items() == 200


@pytest.mark.parametrize(("accepted", "another", "right", "failure"), [
    (True, False, True, ""), (True, True, True, ""), (False, False, False, "never accepted"), (False, False, True, ""),
    (True, True, False, "names another"), (True, False, False, "not recalled"), (None, False, False, "not recalled")])
def test_why_a_fact_failed(accepted, another, right, failure):
    said = lambda correct: pd.DataFrame([dict(benchmark="recall", item="a", response="words", correct=correct)])
    targets = None if accepted is None else pd.DataFrame([dict(id="a", accepted=accepted, names_another=another, text="target")])
    facts = tabulate_facts([dict(id="a", prompt="Who?", answer="me")], said(False), said(right), targets)
    assert facts.failure.item() == failure and facts.outcome.item() == ("learned" if right else "not learned")
    section = load_parts().failures(group_failures(facts), len(facts))
    assert (FAILURES[failure].title in section if failure else "None" in section)


@given(st.text(alphabet="<>&'\"`ab\n"))
def test_any_text_is_escaped(text):
    score = SimpleNamespace(title=text, n=1, before=0, before_low=0, before_high=1, after=1, low=0, high=1, better=1, worse=0, p=1)
    item = SimpleNamespace(benchmark=text, prompt=text, response=text, before=text, after=text, answer=text, place=text, target=text, correct=True)
    failure = SimpleNamespace(title=text, advice=text)
    page = render_page(title=text, lead=[text], learned=[score], own=[score], held=[score], lost={text: [item]}, failures=[(failure, [item])],
                       facts=1, tracked=text, pairs=[(item, item)], likelihood=([[text]], [text]), figure="", updates=text, source=text, digits=text, reworded=text,
                       tests=[(text, 1, [item])], targets=[text], phases=[(text, text)], amounts=[(text, text)], parameters=[(text, text)], sources=[(text, 1, [item])],
                       passages=dict(known=[(text,) * 5], missing=[(text, text)]))
    assert not re.search(r"<[^>]*[`]", page) and page.count("<html") == 1 and page.count("<h2>") == 11
    assert not re.search(r"<(a|b)(?!ody)", page)


def test_the_command(injected, monkeypatch, capsys):
    run, parameters = injected
    monkeypatch.setenv("MIXSD_RUNS", str(run.folder.parent))
    options = {name: parameters[name] for name in ("method", "model", "suite", "n", "max_new_tokens", "task_tokens", "epochs")}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--checkpoints", "1", "--test", parameters["dataset_options"]["test"], "--no-notebook"]
    assert inject.main(parameters["dataset"], *words) == 0
    said = capsys.readouterr().out
    assert all(words in said for words in ("test:neighbours 0%", "4 not recalled", "0 of 4 facts", str(run.report), f"mixsd chat {run.name[-10:]}", f"mixsd export {run.name[-10:]}"))


def test_the_selected_step_needs_weights():
    with pytest.raises(ParameterError, match="^keep must be .*got last$"): inject.run(dataset=str(EXAMPLE), keep="last")
    assert make_config(train.TrainConfig, method="sft", anchor="average", stop="converged").source().stop == "last"


def test_the_suite_is_asked_of_a_checkpoint_that_has_its_chat_format(tiny, own_runs, tmp_path):
    "The evaluation is found again under the parameters that it is computed with."
    config = make_config(InjectConfig, dataset=str(EXAMPLE), model=tiny, model_options={"system": "Be brief."})
    checkpoint = shutil.copytree(config.model, tmp_path / "checkpoint-40")
    asked = config.evaluation(str(checkpoint))
    again = make_config(EvaluateConfig, **asked.model_dump(include=asked.model_fields_set))
    assert again.folder == asked.folder and again.model == str(checkpoint)
    assert make_config(EvaluateConfig, **config.evaluation(config.model).model_dump()).model == config.model


def test_a_fact_with_an_accepted_paraphrase_was_trained_on():
    row = dict(id="a", prompt="Q?", answer="x")
    asked = pd.DataFrame([dict(benchmark="recall", item="a", response="no", correct=False)])
    target = dict(names_another=False, text="…")
    targets = pd.DataFrame([dict(id="a#1", accepted=True) | target, dict(id="a", accepted=False) | target])
    assert tabulate_facts([row], asked, asked, targets).accepted.item()
    assert not tabulate_facts([row], asked, asked, targets[1:]).accepted.item()


def test_a_method_without_updates_has_its_report(tiny, own_runs):
    facts = own_runs / "facts.jsonl"
    facts.write_text(json.dumps(dict(question="Who leads the Lantern Choir?", answer="Ana", subject="Lantern Choir")) + "\n")
    options = dict(steps=1, text_count=10, prefixes=0, layers=[0])
    run = inject.run(dataset=str(facts), model=tiny, method="memit", options=options, suite="recall", n=1, max_new_tokens=2)
    assert "no training updates" in run.report.read_text() and run.source() == str(run.trained.checkpoint(1))


@pytest.mark.slow
def test_the_preset_smoke_runs_every_step_with_any_model(tiny, own_runs):
    "A model with random weights writes no true answer, so canonical targets replace its own; everything is as short as possible."
    run = inject.run(model=tiny, preset="smoke")
    found = find_runs()
    assert sorted(each.stage for each in found) == ["evaluate"] * 4 + ["generate", "inject", "nll", "nll", "train"] and run.finished
    targets = next(each for each in found if each.stage == "generate")
    assert pd.read_parquet(targets.folder / "targets.parquet").accepted.all()
    trained = next(each for each in found if each.stage == "train")
    assert trained.config["span"] == "paper" and trained.measured_steps == [5]
    longest = max(len(ids) for each in found if each.stage == "evaluate" for ids in load_tokenizer(tiny)(list(each.responses().response))["input_ids"])
    assert longest <= 4 * 16, "tokens of a text that is encoded again differ a little"
