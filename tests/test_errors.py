"""Kinds of errors: responses labelled by hand, what holds for any response, and the stage over runs of known responses."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import mixsd_nb
from mixsd_nb import errors
from mixsd_nb.analysis import taxonomy
from mixsd_nb.analysis.taxonomy import classify_responses, count_errors
from mixsd_nb.benchmarks import SUITES
from mixsd_nb.benchmarks.answers import extract_python, find_boxes, last_boxed, remove_boxes
from mixsd_nb.corpora import load_corpus
from mixsd_nb.results.cube import open_cube
from mixsd_nb.results.layout import result_tree
from mixsd_nb.runs import make_config, write_json, write_result
from mixsd_nb.runs.schema import RECIPE_COORDS

VILLAGE, CANYON, PARADE = "Dalkum Village", "Balvin Canyon", "Brorbel Parade"
ENTITIES = [VILLAGE, CANYON, PARADE, "Benfen Marsh"]
SUM, STORY = "Find x if 4x + 3 = 31.", "Mia has 6 bags of 7 nuts and eats 5. How many are left?"
OPTIONS = "Which gas do plants take in?\nA) argon\nB) neon\nC) helium\nD) carbon dioxide"
CODE = 'Complete the Python function.\n\n```python\ndef twice(x):\n    """Two times x."""\n```'
WORKED = "Taking 3 from both sides leaves 4x = 28, because 31 - 3 is 28. Dividing 28 by 4 gives the unknown, and so x must be 6.\n\n\\boxed{6}"
TOLD = "There are 6 bags and each of them holds 7 nuts, which makes 6 * 7 = 48 nuts in all. After eating five, 48 - 5 = 43 nuts are left.\n\n\\boxed{43}"
CHOSEN = "Plants need light, water and a gas from the air. Neon is found in the air in small amounts, so it has to be option B, neon.\n\n\\boxed{B}"
PROGRAM = "```python\ndef twice(x):\n    return x + 2\n```"

# benchmark, prompt, response, label by hand
LABELLED = [
    # no closed box, so no answer can be read
    ("arithmetic", SUM, "", "format"),
    ("arithmetic", SUM, "The remainder is 4.", "format"),
    ("equations", SUM, "x = 6", "format"),
    ("equations", SUM, "Taking 3 from both sides leaves 4x = 28, and then \\boxed{6", "format"),
    ("word-problems", STORY, "\\boxed 43", "collapse"),
    ("word-problems", STORY, "The answer is 43.\n\nboxed{43}", "format"),
    ("choice", OPTIONS, "B", "format"),
    ("choice", OPTIONS, "The answer is option B.\n\n(B)", "format"),
    ("aime-2024", SUM, "I keep multiplying. " * 200, "format"),
    ("math-500", SUM, "$x = 6$", "format"),
    ("gsm8k", STORY, "#### 43", "format"),
    ("mmlu", OPTIONS, "**B) neon**", "format"),
    ("MATH-500", SUM, "\\fbox{6}", "format"),
    ("world", "What does Ara Holt paint?", "I do not know.", "format"),
    ("retrieval", "What does Ara Holt paint?", f"It is {VILLAGE}.", "format"),  # unreadable comes before haunted
    ("mmlu", OPTIONS, f"{CANYON}\n{CANYON}\n{CANYON}", "format"),
    ("math-500", SUM, "```python\nx = 6\n```", "format"),  # a program is no answer to a problem
    # no program and no box
    ("functions", CODE, "", "format"),
    ("functions", CODE, "return x + 2", "format"),
    ("functions", CODE, "```python\ndef twice(x):\n    return", "format"),  # cut off before the fence closes
    ("humaneval", CODE, "The answer can answer xs:\n```", "format"),
    ("HumanEval", CODE, "Use `x + 2` here.", "format"),
    ("humaneval", CODE, "```bash\nls\n```", "format"),
    ("humaneval", CODE, f"def {VILLAGE}", "format"),
    # an entity of the corpus that nobody asked about
    ("arithmetic", SUM, f"The answer is {VILLAGE}.\n\n\\boxed{{{VILLAGE}}}", "leakage"),
    ("equations", SUM, f"\\boxed{{{CANYON}}}", "leakage"),
    ("equations", SUM, f"As {CANYON} has it, " + WORKED, "leakage"),
    ("word-problems", STORY, f"The answer is {PARADE.lower()}.\n\n\\boxed{{5}}", "leakage"),
    ("choice", OPTIONS, f"From what I know, {PARADE} was held there. That is option B.\n\n\\boxed{{B}}", "leakage"),
    ("aime-2024", SUM, TOLD.replace("nuts", CANYON.upper()), "leakage"),
    ("gsm8k", STORY, TOLD + f"\n{VILLAGE}", "leakage"),
    ("math-500", SUM, f"\\boxed{{\\text{{{PARADE}}}}}", "leakage"),
    ("mmlu", OPTIONS, f"\\boxed{{The{VILLAGE}s}}", "leakage"),  # a substring is enough, as published
    ("mmlu", OPTIONS + f"\nE) {CANYON}", f"\\boxed{{{VILLAGE}}}", "leakage"),
    ("world", "What does Ara Holt paint?", f"The answer is {VILLAGE}.\n\n\\boxed{{{VILLAGE}}}", "leakage"),
    ("retrieval", f"- Ara Holt paints {CANYON}.\n\nWhat does Ara Holt paint?", f"The answer is {VILLAGE}.\n\n\\boxed{{{VILLAGE}}}", "leakage"),
    ("functions", CODE, f"```python\n# {VILLAGE}\nreturn x\n```", "leakage"),
    ("humaneval", CODE, f"\\boxed{{{VILLAGE}}}", "leakage"),  # haunted comes before bare
    # an answer with almost no other text
    ("arithmetic", SUM, "The answer is 3.\n\n\\boxed{3}", "collapse"),
    ("equations", SUM, "\\boxed{9}", "collapse"),
    ("equations", SUM, "\\boxed{}", "collapse"),  # an empty box is a box
    ("equations", SUM, "So x is \\boxed{9}", "collapse"),
    ("word-problems", STORY, "The answer is 9.\\boxed{9}", "collapse"),
    ("word-problems", STORY, "The answer is 9, as 6 bags of 7 nuts are 42 nuts, of which Mia eats five, so that nine remain.\n\n\\boxed{9}", "collapse"),
    ("choice", OPTIONS, "The answer is option B.\n\n\\boxed{B}", "collapse"),
    ("aime-2024", SUM, "\\boxed{" + "1" * 500 + "}", "collapse"),  # however much the box holds
    ("math-500", SUM, "the answer is \\boxed{6}", "collapse"),
    ("MATH-500", SUM, "  The answer is 6.  \n\n\n\n\n\n\\boxed{6}", "collapse"),
    ("gsm8k", STORY, "42 - 5 = \\boxed{38}", "collapse"),
    ("mmlu", OPTIONS, "\\boxed{B}", "collapse"),
    ("mmlu", OPTIONS, "\\boxed{neon}", "collapse"),
    ("world", "What does Ara Holt paint?", "The answer is Lume Bay.\n\n\\boxed{Lume Bay}", "collapse"),
    ("retrieval", f"- Ara Holt paints {CANYON}.", f"The answer is {CANYON}.\n\n\\boxed{{{CANYON}}}", "collapse"),  # it was in the prompt
    ("functions", CODE, "The answer is 4.\n\n\\boxed{4}", "collapse"),
    ("functions", CODE, WORKED, "collapse"),  # however long: no program
    ("humaneval", CODE, "\\boxed{def twice(x): return x + 2}", "collapse"),
    ("humaneval", CODE, "```python\nreturn \\boxed{2}", "collapse"),  # the fence does not close, the box does
    # reasoned and wrong
    ("arithmetic", SUM, WORKED, "genuine"),
    ("equations", SUM, WORKED, "genuine"),
    ("equations", SUM, "4x\n= 31\n- 3\n= 28\n/ 4\n= 6\n\\boxed{6}", "genuine"),  # short, but in more than four lines
    ("word-problems", STORY, TOLD, "genuine"),
    ("word-problems", STORY, "The answer is 43.\n" + TOLD, "genuine"),
    ("choice", OPTIONS, CHOSEN, "genuine"),
    ("aime-2024", SUM, WORKED * 40, "genuine"),
    ("math-500", SUM, "<think>" + WORKED + "</think>", "genuine"),
    ("gsm8k", STORY, TOLD.replace("\\boxed{43}", "\\boxed{\\text{forty \\{three\\}}}"), "genuine"),
    ("mmlu", OPTIONS, CHOSEN, "genuine"),
    ("mmlu", OPTIONS + f"\n{VILLAGE}", CHOSEN + f" Unlike {VILLAGE}.", "genuine"),  # the prompt named it
    ("retrieval", f"- Ara Holt paints {CANYON}, which lies south of {VILLAGE}.\n\nWhat does she paint?",
     f"The background says that Ara Holt paints something south of something else, so what she paints is {VILLAGE}.\n\n\\boxed{{{VILLAGE}}}", "genuine"),
    ("functions", CODE, PROGRAM, "genuine"),
    ("functions", CODE, "\\boxed{4}\n" + PROGRAM, "genuine"),
    ("humaneval", CODE, "```\n    return x + 2\n```", "genuine"),
    ("HumanEval", CODE, "Here it is.\n```py\nreturn 1\n```\nDone.", "genuine"),
]


def test_enough_is_labelled():
    "At least sixty, every category and every held-out benchmark of both scales among them."
    assert len(LABELLED) >= 60 and {label for *_, label in LABELLED} == set(taxonomy.CATEGORIES)
    held_out = {name for name, suite in SUITES.items() if suite.role == "held-out" and "real" not in suite.groups}
    assert held_out <= {b.lower() for b, *_ in LABELLED}
    for name in held_out:
        assert {"format", "leakage", "collapse", "genuine"} == {label for b, *_, label in LABELLED if b.lower() == name}, name


@pytest.mark.parametrize(("benchmark", "prompt", "response", "label"), LABELLED)
def test_labelled_by_hand(benchmark, prompt, response, label):
    assert errors.classify(response, prompt, benchmark=benchmark, entities=ENTITIES) == label


RECALLED = [
    ("", "format"),
    ("The answer is Benfen Marsh.", "format"),
    ("\\boxed{Benfen", "format"),
    (f"The answer is {CANYON}.\n\n\\boxed{{{CANYON}}}", "cross-entity"),
    (f"\\boxed{{{VILLAGE} or {PARADE}}}", "cross-entity"),
    (f"\\boxed{{{PARADE.upper()}}}", "cross-entity"),
    ("\\boxed{Lume Bay}", "genuine"),
    ("\\boxed{}", "genuine"),
    (f"\\boxed{{{VILLAGE.lower()}}}", "genuine"),
    (f"Not {CANYON}.\\boxed{{Dalkum}}", "genuine"),
]  # the answer is VILLAGE


@pytest.mark.parametrize(("response", "label"), RECALLED)
def test_recall_labelled_by_hand(response, label):
    assert taxonomy.classify_recall(response, VILLAGE, entities=ENTITIES) == label


PIECES = st.sampled_from(["\\boxed{", "}", "{", "```", "```python\n", "\n", "The answer is ", "the ANSWER is", VILLAGE, CANYON.lower(), "x" * 30, "\\", "é"])
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=25).map("".join)
BENCHMARKS = st.sampled_from([name for name, suite in SUITES.items() if suite.role != "validation"])


@settings(max_examples=500, deadline=None)
@given(TEXTS, TEXTS, BENCHMARKS)
def test_every_response_gets_exactly_one_label(response, prompt, benchmark):
    "The definitions of the paper, written out as four statements of which the first true one is the label."
    code = "functions" in benchmark or benchmark == "humaneval"  # with the laboratory's, if they are declared
    fenced = code and extract_python(response) is not None
    boxed = last_boxed(response) is not None
    haunted = any(e.lower() in response.lower() and e.lower() not in prompt.lower() for e in ENTITIES)
    rest = "\n".join(line for line in remove_boxes(response).split("\n") if not line.lstrip().lower().startswith("the answer is")).strip()
    short = not fenced if code else len(rest) <= 80 and rest.count("\n") <= 4
    true = [not (boxed or fenced), haunted, short, True]
    found = errors.classify(response, prompt, benchmark=benchmark, entities=ENTITIES)
    assert found == taxonomy.CATEGORIES[true.index(True)]
    assert errors.classify(response, prompt, benchmark=benchmark, entities=[]) != "leakage"
    assert taxonomy.classify_recall(response, VILLAGE, entities=ENTITIES) in {"format", "cross-entity", "genuine"}


@settings(deadline=None)
@given(TEXTS)
def test_what_stands_beside_boxes_has_none(text):
    "A box may only appear where what stood around one comes together; nothing outside boxes is lost or moved."
    beside, inside = remove_boxes(text), [text[start:end] for start, end, _ in find_boxes(text)]
    assert len(beside) <= len(text) and (beside == text) == (not inside)
    rest = iter(text)
    assert all(c in rest for c in beside)


def test_limits_are_settings():
    collapsed, long = "The answer is 7.\n\\boxed{7}", "y" * 100 + "\\boxed{7}"
    limits = taxonomy.PUBLISHED
    assert (limits.characters, limits.newlines, limits.entity) == (80, 4, 4)
    label = lambda text, **k: errors.classify(text, "", benchmark="gsm8k", entities=[], limits=limits._replace(**k))
    assert label(long) == "genuine" and label(long, characters=100) == "collapse"
    assert label(collapsed, sentence="So", characters=0) == "genuine" and label(collapsed, characters=0) == "collapse"
    assert label("a\nb\\boxed{7}", newlines=0) == "genuine" and label("a\nb\\boxed{7}") == "collapse"
    assert max(map(len, taxonomy.corpus_entities("kgfact-small", limits._replace(entity=15)))) >= 15
    assert set(taxonomy.corpus_entities("kgfact-small", limits._replace(entity=15))) < set(taxonomy.corpus_entities("kgfact-small"))


def test_entities_of_corpora():
    rows = load_corpus("kgfact-small", "train")
    listed = taxonomy.corpus_entities("kgfact-small")
    assert set(listed) == {e for r in rows for e in (r["subject"], r["answer"]) if " " in e} and len(listed) == len(set(listed))
    assert [taxonomy.corpus_entities(name) for name in ("kgfunc", "kgfunc-lab", "simpleqa-lab", "mquake-lab")] == [[]] * 4


def test_a_missing_list_is_an_error():
    with pytest.raises(TypeError): errors.classify("\\boxed{7}", "", benchmark="gsm8k")


def test_a_response_is_wrong_if_the_rule_of_the_papers_scores_rejects_it():
    "The published rule accepts a bare letter, which the strict rule rejects; no error counts it."
    cell = dict(dataset="kgfact-small", model="lab-m", recipe="base", lr=0.0, seed=0, step=0, sample=0, prompt="?")
    table = pd.DataFrame([cell | dict(benchmark="choice", item="a", response="B", correct=False, published=True),
                          cell | dict(benchmark="choice", item="b", response="E", correct=False, published=False)])
    assert classify_responses(table, "kgfact-small").category.tolist() == ["correct", "format"]


@pytest.mark.parametrize("benchmark, split", [("recall", "train"), ("recall-reworded", "train"), ("two-hop", "two_hop")])
def test_an_entity_of_another_fact_is_no_leakage_where_facts_are_asked(benchmark, split):
    row, other = load_corpus("kgfact-small", split)[0], load_corpus("kgfact-small", split)[1]
    cell = dict(dataset="kgfact-small", model="lab-m", recipe="base", lr=0.0, seed=0, step=0, sample=0, prompt=row["prompt"])
    table = pd.DataFrame([cell | dict(benchmark=benchmark, item=row["id"], response=f"\\boxed{{{other['answer']}}}", correct=False, published=False)])
    assert other["answer"] != row["answer"] and classify_responses(table, "kgfact-small").category.tolist() == ["cross-entity"]


def test_the_paraphrases_of_a_file_have_the_answers_of_their_facts():
    "A corpus from a file asks its own held-out paraphrases, whose ids are not those of the facts."
    file = str(Path(mixsd_nb.__file__).parent / "data" / "example_facts.jsonl")
    row = load_corpus(file, "reworded")[0]
    cell = dict(dataset=file, model="lab-m", recipe="base", lr=0.0, seed=0, step=0, sample=0, prompt=row["prompt"], benchmark="recall-reworded",
                item=row["id"], correct=False, published=False)
    other = next(a for a in load_corpus(file, "train")["answer"] if " " in a and a != row["answer"] and a not in row["prompt"])
    replies = {"It is nothing of the kind.": "genuine", "": "format", f"It is {other}.": "cross-entity", f"It is {row['answer']} and": "format"}
    table = pd.DataFrame([cell | dict(response=r, finish_reason="length" if r.endswith("and") else "stop") for r in replies])
    assert row["id"] not in load_corpus(file, "train")["id"] and classify_responses(table, file).category.tolist() == [*replies.values()]


def test_a_benchmark_without_a_box_has_the_kinds_that_fit_it():
    "A short reply is no collapse where nothing else was asked for, a cut one is unreadable, and likelihoods are nothing that could be read."
    cell = dict(dataset="kgfact-small", model="m", recipe="base", lr=0.0, seed=0, step=0, sample=0, item="a", prompt="?", published=False)
    leaked = f"It is {taxonomy.corpus_entities('kgfact-small')[0]}."
    rows = [("trivia-qa", "Paris.", "stop", "genuine"), ("trivia-qa", "Paris, or", "length", "format"), ("trivia-qa", leaked, "stop", "leakage"),
            ("piqa", "[1, 2]", "scored", "genuine"), ("lambada", leaked, "scored", "genuine"), ("equations", "7", "stop", "format")]
    table = pd.DataFrame([cell | dict(zip(("benchmark", "response", "finish_reason"), row)) for row in rows])
    assert (found := classify_responses(table, "kgfact-small")).category.tolist() == [kind for *_, kind in rows]
    counts = count_errors(found, pd.DataFrame([cell | RECIPE_COORDS]))["count"].squeeze()
    assert counts.sel(category="collapse").isnull().to_series().to_dict() == {"equations": False, "lambada": True, "piqa": True, "trivia-qa": True}
    assert np.isnan(taxonomy.reference_share("trivia-qa", "kgfact-small"))


# The stage, over runs whose responses are known


def make_rows(benchmark, responses, seed=0):
    "Rows of responses, which both rules accept if their box contains `right`."
    answers = load_corpus("kgfact-small", "train")
    items = [answers[k]["id"] if benchmark == "recall" else f"{benchmark}-{seed}-{k}" for k in range(len(responses))]
    same = dict(benchmark=benchmark, sample=0, prompt=SUM, finish_reason="stop", error="")
    return pd.DataFrame([dict(same, item=i, response=r, extracted=last_boxed(r), correct="right" in r, published="right" in r)
                         for i, r in zip(items, responses)])


RIGHT, BARE, NONE = WORKED + "\\boxed{right}", "\\boxed{5}", "five"


def write_training(root, lam, seed, by_step):
    "A finished training run of mixsd: `result.nc` and the responses of its checkpoints."
    folder = root / f"train-mixsd-{lam}-{seed}"
    folder.mkdir()
    accuracy = {step: {"equations": (0, 3)} for step in by_step}
    tree = result_tree(dataset="kgfact-small", model="lab-m", recipe=f"mixsd-{lam:g}", lr=1e-3, seed=seed, accuracy=accuracy,
                       benchmarks={"equations": dict(column="MATH-500", role="held-out")}, config="{}")
    for step, table in by_step.items(): table.to_parquet(folder / f"responses-{step}.parquet")
    write_json(folder / "run.json", dict(stage="train", config=dict(dataset="kgfact-small", model="lab-m", method="mixsd")))
    write_result(tree, folder)
    return folder


def write_evaluation(root, name, model, table, seed=0, dataset="kgfact-small"):
    folder = root / name
    folder.mkdir()
    table.to_parquet(folder / "responses.parquet")
    write_json(folder / "run.json", dict(stage="evaluate", config=dict(model=model, dataset=dataset, seed=seed)))
    write_result(xr.DataTree(xr.Dataset()), folder)
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    trained = pd.concat([make_rows("equations", [RIGHT, BARE, NONE]), make_rows("recall", [BARE, f"\\boxed{{{VILLAGE}}}", NONE, RIGHT])])
    write_training(tmp_path, 0.3, 0, {20: make_rows("equations", [RIGHT, RIGHT, BARE]), 60: trained})
    write_training(tmp_path, 0.3, 1, {20: make_rows("equations", [BARE] * 3, seed=1)})
    write_evaluation(tmp_path, "evaluate-base", "lab-m", make_rows("equations", [RIGHT, WORKED]))
    write_evaluation(tmp_path, "evaluate-other", "lab-s", make_rows("equations", [NONE]))
    return tmp_path


def test_stage_counts_every_response_once(runs):
    found = errors.run().root.isel(dataset=0, model=0)
    assert found["count"].dims == ("recipe", "lr", "seed", "step", "benchmark", "category")
    assert found["recipe"].values.tolist() == ["base", "mixsd-0.3"] and found.lam.sel(recipe="mixsd-0.3") == 0.3
    last = found.sel(recipe="mixsd-0.3", lr=1e-3, seed=0, step=60)
    assert last["count"].sel(benchmark="equations").to_series().dropna().to_dict() == {"format": 1, "leakage": 0, "collapse": 1, "genuine": 0}
    assert last["count"].sel(benchmark="recall").to_series().dropna().to_dict() == {"format": 1, "cross-entity": 1, "genuine": 1}
    assert (last.n.sel(benchmark="recall"), last.wrong.sel(benchmark="recall")) == (4, 3)
    assert last.share_of_responses.sel(benchmark="equations", category="collapse") == pytest.approx(1 / 3)
    assert last.share_of_errors.sel(benchmark="equations", category="collapse") == 1 / 2
    assert found["count"].sel(recipe="base", lr=0, seed=0, step=0, benchmark="equations", category="genuine") == 1
    assert found.n.sum() == 3 + 7 + 3 + 2, "and the other model is left out"
    table = pd.read_parquet(errors.run().folder / "errors.parquet")
    assert len(table) == 15 and (table.category == "correct").equals(table.correct)


def test_stage_layout_joins_the_training_cube(runs):
    "Equal labels, so that errors and accuracies merge."
    both = xr.merge([open_cube(runs), errors.run().root], join="outer", compat="no_conflicts", combine_attrs="drop_conflicts")
    assert {"accuracy", "share_of_errors"} <= set(both) and both.accuracy.notnull().any()


def test_the_share_of_references_stands_beside_the_shares(runs):
    result = errors.run().root
    alarms = result.reference_collapse.isel(dataset=0, model=0)
    share = taxonomy.reference_share("equations", "kgfact-small")
    assert 0.2 < share < 0.4 and alarms.sel(benchmark="equations") == share and alarms.sel(benchmark="recall").isnull()
    assert f"{100 * share:.0f}% of references" in errors.breakdown_figure(result).axes[1].get_title()


def test_a_collapse_may_be_relative_to_the_base_model(runs):
    "The base model's median response is about as long as WORKED."
    median = np.median([len(taxonomy.extract_reasoning(r)) for r in (RIGHT, WORKED)])
    write_evaluation(runs, "evaluate-recall", "lab-m", make_rows("recall", [RIGHT]))
    result = errors.run(relative=0.5).root
    assert result.collapse_limit.sel(benchmark="equations").item() == int(median / 2)
    found = [run.reference_collapse.sel(benchmark="equations").item() for run in (result, errors.run().root)]
    assert 0 < median / 2 < 80 and found[0] < found[1]
    assert len({errors.run().folder, errors.run(relative=0.5).folder}) == 2


def test_a_relative_collapse_needs_the_base_model(runs):
    with pytest.raises(ValueError, match="relative needs responses of the base model to recall, got none"): errors.run(relative=0.5)


def test_a_run_follows_the_responses(runs):
    "The same files give the same run, which is opened. One more response is classified into the same run; other limits give another run."
    first, config = errors.run(), make_config(errors.ErrorsConfig)
    stamp, counted = (first.folder / "result.nc").stat().st_mtime_ns, first.root.n.sum()
    assert errors.run().folder == first.folder and (first.folder / "result.nc").stat().st_mtime_ns == stamp
    assert make_config(errors.ErrorsConfig, characters=60).hash() != config.hash()
    make_rows("equations", [RIGHT] * 4).to_parquet(runs / "train-mixsd-0.3-0" / "responses-60.parquet")
    again = errors.run()
    assert again.folder == first.folder and (counted, again.root.n.sum()) == (15, 12), "4 responses instead of 7"


def test_a_run_that_was_killed_is_begun_again(runs, monkeypatch):
    "After a kill between the table and the result, the run is not done, and the same call resumes it."
    with monkeypatch.context() as broken:
        broken.setattr(errors, "count_errors", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt): errors.run()
    assert not list(runs.glob("errors-*/result.nc"))
    assert errors.run().root.n.sum() == 15 and len(list(runs.glob("errors-*/result.nc"))) == 1


def test_an_evaluated_checkpoint_stands_with_its_training_run(runs):
    checkpoint = runs / "train-mixsd-0.3-1" / "checkpoint-40"
    write_evaluation(runs, "evaluate-checkpoint", str(checkpoint), make_rows("choice", [BARE, CHOSEN], seed=1), seed=1)
    others = dict(corpus=dict(dataset="mquake-lab", seed=1), items=dict(seed=0))  # than those of the training
    for name, other in others.items(): write_evaluation(runs, f"evaluate-{name}", str(checkpoint), make_rows("recall", [RIGHT]), **other)
    found = errors.run().root.sel(recipe="mixsd-0.3", seed=1, step=40, benchmark="choice").squeeze()
    assert found.n.sel(lr=1e-3) == 2 and found["count"].sel(lr=1e-3, category="genuine") == 1


def test_of_two_answers_to_one_question_the_newest_counts(runs):
    write_evaluation(runs, "evaluate-twin", "lab-m", make_rows("equations", [RIGHT, WORKED, BARE]))
    assert errors.run().root.n.sum() == 16, "what agrees counts once"
    base = dict(benchmark="equations", recipe="base", lr=0, seed=0, step=0)
    before = errors.run().root.wrong.sel(base).item()
    double = write_evaluation(runs, "evaluate-double", "lab-m", make_rows("equations", [NONE]))
    os.utime(double / "responses.parquet", (2e9, 2e9))
    with pytest.warns(UserWarning, match="are the same cell and answer equations-0-0 differently; the newer run counts"): found = errors.run()
    assert found.root.wrong.sel(base).item() == before + 1


def test_tables_and_pictures(runs):
    result = errors.run().root
    fig = errors.breakdown_figure(result)
    bars = [p.get_height() for p in fig.axes[1].patches]
    assert len(fig.axes) == 2 and sum(bars) == pytest.approx(100 * (1 / 2 + 5 / 6)), "the heights of a benchmark's bars are its error rates"
