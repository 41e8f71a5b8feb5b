"The choice of a composition: the rule, leaks, and one cube from trainings on two files of the same facts."

import json

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from mixsd_nb import train
from mixsd_nb.benchmarks import SUITES
from mixsd_nb.lab.real import LEAKS, leak_share, merge_folders
from mixsd_nb.lab.tuning import rank_by_leaks, rank_recipes, tuning_figure, tuning_table
from mixsd_nb.methods import ALIASES, parse_label
from mixsd_nb.results.cube import read_cube
from mixsd_nb.runs import project_root

scores = st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 9)), min_size=1, max_size=8)


def table(values):
    index = pd.MultiIndex.from_tuples([(f"r{k}", 3) for k in range(len(values))], names=["recipe", "seed"])
    return pd.DataFrame(values, index, ["validation", "own-text NLL"]).assign(leaks=np.nan)


@given(scores)
def test_the_first_of_the_rule_is_eligible_and_has_the_least_nll_of_those_that_are(values):
    order = rank_recipes([table(values)])
    best, eligible = max(v for v, _ in values), [nll for v, nll in values if v >= max(v for v, _ in values) - 2 - 1e-9]
    assert order.iloc[0]["own-text NLL"] == min(eligible) and order.iloc[0].validation >= best - 2 - 1e-9
    assert len(order) == len(values) and order.eligible.sum() == len(eligible)


def test_the_rule_takes_the_largest_of_a_score_that_is_no_nll():
    rows = table([(99, 1), (98, 2), (90, 0.1)]).assign(LAMBADA=[20.0, 30.0, 50.0])
    assert rank_recipes([rows], score="LAMBADA").index[0] == "r1" and rank_recipes([rows]).index[0] == "r0"


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 9), st.floats(0, 100)), min_size=1, max_size=8))
def test_the_first_by_leaks_recalls_and_keeps_as_much_as_the_best_and_leaks_least_of_those(values):
    rows = table([pair[:2] for pair in values]).assign(leaks=[leaks for *_, leaks in values], **{"in other words": 0.0, "asked freely": 0.0})
    first = rank_by_leaks(rows).iloc[0]
    recalled = [row for row in values if row[0] >= max(v for v, *_ in values) - 2 - 1e-9]
    keeping = [row for row in recalled if row[1] <= min(nll for _, nll, _ in recalled) + 0.02]
    assert first.eligible and first.leaks == min(leaks for *_, leaks in keeping)


def test_a_composition_that_one_corpus_lacks_takes_no_part():
    assert rank_recipes([table([(90, 2), (99, 1)]), table([(90, 2)])]).index.tolist() == ["r0"]


def test_leaks_are_the_mean_of_the_corpora_that_have_entities():
    one = table([(90, 2)]).assign(leaks=30.0)
    assert rank_recipes([one, table([(90, 2)])]).leaks.tolist() == [30]


def test_only_held_out_replies_leak():
    names = ["trivia-qa", "recall", "arc-easy", "known-facts"]
    assert [SUITES[name].role for name in names] == ["held-out", "in-domain", "style-free", "held-out"]
    replies = pd.DataFrame(dict(benchmark=names, prompt="Who?", response="Ada Bell"))
    assert leak_share(replies, ["Ada Bell"]) == 1 and np.isnan(leak_share(replies.iloc[1:3], ["Ada Bell"]))
    assert leak_share(replies.assign(prompt=["Ada Bell?", "", "", "Who?"]), ["Ada Bell"]) == 0.5


def test_two_files_of_a_corpus_become_one_cube_without_paths(tiny, own_runs):
    "The second file has a paraphrase more, so it is another corpus by content."
    runs, path = [], own_runs / "cube.nc"
    for k, more in enumerate(({}, dict(paraphrases=["Who is the head of the choir?"]))):
        file = own_runs / f"facts{k}.jsonl"
        file.write_text(json.dumps(dict(question="Who leads the choir?", answer="Ana") | more) + "\n")
        runs.append(train.run(dataset=str(file), model=tiny, method="sft", lr=1e-3 * (1 + k), epochs=2, batch=1, n=4, suite="recall", max_new_tokens=4, own_text=2))
    cube = read_cube(merge_folders("tuning-mquake", [run.folder for run in runs], path))
    assert cube.sizes["lr"] == 3 and cube.dataset.item() == "mquake" and str(own_runs).encode() not in path.read_bytes()
    assert cube[LEAKS].isnull().all(), "edited facts have no entities that only they name"


def test_the_committed_cubes_choose_what_mixsd_complete_is():
    "The rule's first composition has the method, the anchor and the options of the alias; only the prompts of its replay were chosen later."
    cubes = {path.stem: read_cube(path) for path in sorted((project_root() / "papermill_runs/tuning").glob("tuning-*.nc"))}
    tables = {name: tuning_table(cube) for name, cube in cubes.items()}
    assert {*tables} == {"tuning-mquake", "tuning-kgfact-small"}
    recipe, values = parse_label(rank_recipes(tables.values()).index[0])
    alias = ALIASES["mixsd-complete"]
    assert recipe.name == f"{alias.method}+{alias.anchor}" and values["lam"] == alias.settings["lam"]
    options = alias.options_under("real")
    assert all(options[name] == values[name] for name in ("consistent", "fallback", "wordings", "share"))
    assert len(tuning_figure(tables).axes) == 3, "edited facts have no leaks"
