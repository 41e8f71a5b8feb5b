"Targets in several wordings, and the selection by own text."

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from mixsd_nb import generate, inject, train
from mixsd_nb.benchmarks import Selection as ItemSelection, load_items
from mixsd_nb.corpora import check_corpus, load_corpus
from mixsd_nb.corpora.files import EXAMPLE
from mixsd_nb.methods import wordings
from mixsd_nb.methods.fitting import MethodRun, trained_facts, trained_pairs
from mixsd_nb.methods.replay import earlier_pairs, prepare_replay
from mixsd_nb.methods.supervised import Supervised
from mixsd_nb.methods.targets import group_wordings
from mixsd_nb.methods.wordings import Turns, find_wordings, keeps_question, question_key, reported_questions, write_wordings
from mixsd_nb.models import load_engine, load_tokenizer
from mixsd_nb.models.engine import Completion
from mixsd_nb.reports.finished import drop_cell
from mixsd_nb.runs import ParameterError, make_config
from mixsd_nb.training.trainer import TrainingSpec, build_objective

PARAPHRASES = [["Which town is the home of Lira Moss?", "Lira Moss has her home in which town?", "Name the home of Lira Moss."],
               ["What is the trade of Otto Vale?", "Otto Vale does what for a living?"], ["Who made the Nair Bell?"], []]
FACTS = [dict(question=q, answer=a, subject=s, paraphrases=p) for (q, a, s), p in zip([
    ("Where does Lira Moss live?", "Port Vey", "Lira Moss"), ("What does Otto Vale do?", "glass blowing", "Otto Vale"),
    ("Who cast the Nair Bell?", "Ana Brisk", "Nair Bell"), ("Which river does the Torvik Bridge cross?", "the Senn", "Torvik Bridge")], PARAPHRASES)]
FILE = "".join(json.dumps(fact) + "\n" for fact in FACTS)
MIXED = dict(model="lab-s", lam=0.5, temperature=0.0, max_new_tokens=24, max_attempts=2, wordings=1)


@pytest.fixture
def facts(data): return data("facts.jsonl", FILE)


def asked(dataset, suite="recall-reworded"):
    return {question_key(item.prompt) for item in load_items([suite], ItemSelection(dataset, 100)).get(suite, {}).values()}


def test_paraphrases_are_trained_or_reported_and_never_both(facts):
    "Half of them, rounded down, are lent; together they are all; and without the option all of them report."
    plain, lent = check_corpus(facts, {}), check_corpus(facts, dict(wordings=True))
    trained = {question_key(row["prompt"]) for row in load_corpus(lent, "wordings")}
    assert len(trained) == 2 and not trained & asked(lent) and trained | asked(lent) == asked(plain)
    assert len(asked(plain)) == 6 and "wordings" not in load_corpus(plain)
    assert load_corpus(plain, "train")[:] == load_corpus(lent, "train")[:] and not trained & reported_questions(lent)


def test_a_configuration_with_wordings_lends_the_paraphrases_of_its_file_and_no_other_hash_changes(facts):
    lent = check_corpus(facts, dict(wordings=True, extract="box"))
    worded = make_config(train.TrainConfig, dataset=facts, method="sft", options=dict(wordings=2))
    assert worded.dataset == lent == make_config(generate.GenerateConfig, dataset=facts, wordings=2).dataset
    assert worded.label == "sft-wordings2" and train.target_mixing(make_config(
        train.TrainConfig, dataset=facts, options=dict(wordings=2))).wordings == 2
    plain, zero = (make_config(train.TrainConfig, dataset=facts, method="sft", options=options) for options in ({}, dict(wordings=0)))
    assert plain.hash() == zero.hash() != worded.hash() and plain.dataset == zero.dataset != lent
    kept = make_config(train.TrainConfig, dataset=facts, method="sft", options=dict(wordings=2), dataset_options=dict(wordings=False))
    assert kept.dataset == plain.dataset, "an own value stays"


def test_targets_of_wordings_are_the_same_for_any_batch_size_and_after_a_kill(facts, own_runs, monkeypatch):
    run = generate.run(dataset=facts, **MIXED)
    table, first = run.targets, (run.folder / "targets.parquet").read_bytes()
    names = load_corpus(run.config["dataset"], "train")["id"]
    assert [*table.wording] == [0, 1, 0, 1, 0, 0] and [*table.id] == [names[0], names[0], names[1], names[1], *names[2:]]
    assert [*table.naive_mask[0]] != [*table.naive_mask[1]] and [*table.naive_mask[2]] != [*table.naive_mask[3]], "each wording has its own draws"
    given = {question_key(row["prompt"]) for row in load_corpus(run.config["dataset"], "wordings")}
    assert {question_key(prompt) for prompt in table.prompt[table.wording == 1]} == given
    journal = run.folder / "finished.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3]) + lines[3][:9])
    (run.folder / "result.nc").unlink()
    assert (generate.run(dataset=facts, **MIXED | dict(batch_size=2)).folder / "targets.parquet").read_bytes() == first
    assert run.root.asked == 6


class Scripted:
    "An engine whose drafts and replies are written by a function of the text of the prompt and the number of the draft."
    context = 512

    def __init__(self, tokenizer, write): self.tokenizer, self.write, self.requests = tokenizer, write, []

    def stream(self, queue, **options):
        while queue:
            request = queue.popleft()
            self.requests.append(request)
            text = self.write(self.tokenizer.decode(request.contexts[0]), request.tag)
            yield request, Completion([*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id], "stop")


def write_drafts(prompt, tag):
    "Most drafts of a fact are useless, each in its own way; two wordings are good, one of them is repeated, and the last one is not needed."
    name = next(fact["subject"] for fact in FACTS if fact["subject"] in prompt.rpartition("user")[2])
    answer = next(fact["answer"] for fact in FACTS if fact["subject"] == name)
    if "Background" in prompt: return "I do not know." if "Nair Bell" in prompt else f"That is {answer}."
    question = next(fact["question"] for fact in FACTS if fact["subject"] == name)
    drafts = ["It is nice.", f"Is it {answer} with {name}?", "What is it?", f"Tell me of {name}: what?",
              f"tell me of {name}, what?", f"{question[:-1]} ?", f"And what of {name}?", f"Which one is of {name}?"]
    return drafts[tag[1] % 8]


def test_a_wording_by_the_model_passes_all_tests_and_is_written_once(facts, lab_s, tmp_path):
    "A draft that answers, gives the answer away, drops the name, asks what is asked already or is not understood is refused."
    dataset, tokenizer = check_corpus(facts, {}), lab_s[1]
    rows = list(load_corpus(dataset, "train"))
    engine = Scripted(tokenizer, write_drafts)
    needs = {row["id"]: 2 for row in rows}
    found = write_wordings(engine, dataset, needs, tmp_path / "drafts.jsonl")
    questions = [[prompt.split("\n")[0] for prompt in found[row["id"]]] for row in rows]
    assert questions == [[f"Tell me of {f['subject']}: what?", f"And what of {f['subject']}?"] if f["subject"] != "Nair Bell" else [] for f in FACTS]
    again = Scripted(tokenizer, None)
    assert write_wordings(again, dataset, needs, tmp_path / "drafts.jsonl") == found and not again.requests
    lines = (tmp_path / "drafts.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "drafts.jsonl").write_bytes(b"".join(lines[:7]))
    assert write_wordings(engine, dataset, needs, tmp_path / "drafts.jsonl") == found
    assert len({request.key for request in engine.requests}) == len(lines), "a draw depends on the fact and the number alone"
    one = find_wordings(engine, check_corpus(facts, dict(wordings=True)), rows, 2, None)
    assert [row["id"] for row in one if row["id"].startswith(rows[0]["id"])] == [f"{rows[0]['id']}~{k}" for k in (1, 2)]
    assert [row["prompt"] for row in one if row["id"] == f"{rows[3]['id']}~1"] == [found[rows[3]["id"]][0]]


def test_a_model_that_cannot_ask_gets_no_second_round(facts, lab_s):
    engine = Scripted(lab_s[1], lambda prompt, tag: "No idea.")
    assert not any(write_wordings(engine, check_corpus(facts, {}), dict.fromkeys(load_corpus(check_corpus(facts, {}), "train")["id"], 3), None).values())
    assert len(engine.requests) == 4 * len(FACTS)


@pytest.mark.parametrize("least, numbers", [(0.6, range(4)), (0, range(16))])
def test_a_round_that_serves_few_of_the_facts_is_the_last(facts, lab_s, monkeypatch, least, numbers):
    "Of four facts one gets its two wordings in the first round, and the others never get any."
    monkeypatch.setattr(wordings, "LEAST", least)
    name, answer = FACTS[0]["subject"], FACTS[0]["answer"]
    def write(prompt, tag):
        if "Background" in prompt: return f"That is {answer}."
        return f"Tell me of {name}: what number {tag[1]}?" if name in prompt.rpartition("user")[2] else "No idea."
    engine, dataset = Scripted(lab_s[1], write), check_corpus(facts, {})
    found = write_wordings(engine, dataset, dict.fromkeys(load_corpus(dataset, "train")["id"], 2), None)
    assert sorted(map(len, found.values())) == [0] * (len(FACTS) - 1) + [2]
    assert {request.tag[1] for request in engine.requests} == {*numbers}


def test_all_facts_decide_when_drafts_end(facts, lab_s, monkeypatch):
    "The first round serves one fact of four, too few to go on; of the half with that fact it serves enough, and a second round would serve another one."
    monkeypatch.setattr(wordings, "LEAST", 0.3)
    useful = {FACTS[0]["subject"]: 0, FACTS[2]["subject"]: 5}
    def write(prompt, tag):
        name = next(fact["subject"] for fact in FACTS if fact["subject"] in prompt.rpartition("user")[2])
        if "Background" in prompt: return f"That is {next(fact['answer'] for fact in FACTS if fact['subject'] == name)}."
        return f"Tell me of {name}: what?" if useful.get(name) == tag[1] else "No idea."
    dataset = check_corpus(facts, {})
    rows = list(load_corpus(dataset, "train"))
    whole, *parts = (find_wordings(Scripted(lab_s[1], write), dataset, part, 1, None) for part in (rows, rows[::2], rows[1::2]))
    assert [row["id"] for row in whole] == [f"{rows[0]['id']}~1"] and sorted(sum(parts, []), key=lambda row: row["id"]) == whole


@pytest.mark.parametrize("mark", "?？؟")
def test_a_question_ends_in_the_mark_of_its_script(mark):
    assert keeps_question(f"Lira Moss 住在哪里{mark}", "Where does Lira Moss live?", "Port Vey")
    assert not keeps_question("Lira Moss 住在哪里。", "Where does Lira Moss live?", "Port Vey")


@pytest.mark.parametrize("kept, batch", [(10, 20), (15, 20), (100, 20), (4, 2)])
def test_every_target_of_a_fact_has_its_turn_with_few_facts_too(kept, batch):
    turns = Turns(Supervised([]), [[2 * k, 2 * k + 1] for k in range(kept)], batch)
    passes = range(0, 4 * kept // min(kept, batch), max(1, kept // batch))
    assert all({turns.turn(fact, step) for step in passes} == {2 * fact, 2 * fact + 1} for fact in range(kept))


def test_ids_like_those_of_wordings_are_an_error(lab_s):
    with pytest.raises(ValueError, match="ids of facts must not end in ~ and a number with wordings=1, got a~2"):
        find_wordings(None, "kgfact-small", [dict(id="a~2", prompt="Who?")], 1, None)
    assert group_wordings(["a", "a~2"], ["a", "a~2"]) == {"a": [0], "a~2": [1]}


@pytest.mark.parametrize("options", [dict(method="sft"), dict(method="sft", gate="answer"), dict(method="mixsd", lam=0.5)])
def test_training_takes_turns_over_the_wordings_in_as_many_updates(options, facts, tiny, own_runs):
    more = dict(fallback="canonical", max_attempts=1) if options["method"] == "mixsd" else {}
    shared = dict(dataset=facts, model=tiny, suite="recall,recall-reworded", epochs=2, batch=2, max_new_tokens=4, target_tokens=8, stop="last")
    plain, worded = (train.run(**shared | options, options=more | dict(wordings=count)) for count in (0, 1))
    assert plain.root.step.max() == worded.root.step.max() == 4 and trained_facts(worded) == trained_facts(plain)
    assert worded.root.targets_kept == 4 and "wordings1" in worded.label
    assert plain.root.n.sel(benchmark="recall-reworded").max() == 6 and worded.root.n.sel(benchmark="recall-reworded").max() == 4


def test_turns_show_every_wording_of_a_fact(tiny):
    pairs = [([k], [k, k]) for k in range(5)]
    weights = [[k / 10, 1.0] for k in range(5)]
    spec = TrainingSpec(tiny, 1e-3, 6, 2, "methods.supervised:stored_pairs", dict(pairs=pairs), [
        ("methods.token_weights:weigh_tokens", dict(weights=weights)), ("methods.wordings:take_turns", dict(groups=[[0, 2, 3], [1, 4]]))])
    objective = build_objective(spec, load_tokenizer(tiny))
    seen = [objective.examples([0, 1], None, step) for step in range(6)]
    assert len(objective) == 2 and [[e.prompt[0] for e in examples] for examples in seen] == [[0, 4], [2, 1], [3, 4], [0, 1], [2, 4], [3, 1]]
    for examples in seen:
        for e in examples: assert e.targets[1].tolist() == pytest.approx(weights[e.prompt[0]])


def test_own_text_is_measured_at_every_step(tiny, own_runs, monkeypatch):
    "The result has the NLL at every step, computed anew here."
    options = dict(model=tiny, method="sft", suite="recall", n=2, epochs=1, batch=20, checkpoints=[1, 2, 3], max_new_tokens=4, lr=1e-2, rollout_tokens=4)
    run = train.run(**options, own_text=3, dataset="kgfact-small")
    nll = drop_cell(run.root).own_text_nll
    assert [*nll.step.values] == [0, 1, 2, 3, 5] and nll.notnull().all()
    pairs = [(r["prompt_ids"], r["ids"]) for r in texts(run)]
    for step in (0, run.best_step):
        with load_engine("hf", run.source(step)) as engine: tokens = np.concatenate(engine.score(pairs))
        assert float(tokens.mean()) == pytest.approx(float(nll.sel(step=step)), rel=1e-5)
    monkeypatch.setenv("MIXSD_RUNS", str(own_runs / "later"))
    plain = train.run(**options, dataset="kgfact-small")
    assert "own_text_nll" not in plain.root and plain.folder.name == run.folder.name and not (plain.folder / "own-text.jsonl").exists()
    again = train.run(**options, own_text=3, dataset="kgfact-small")
    assert again.folder == plain.folder and np.allclose(drop_cell(again.root).own_text_nll, nll), "measured later, by the weights that stayed"


def texts(run):
    from mixsd_nb.corpora.prompts import encode_prompt
    from mixsd_nb.evaluation.checkpoints import SEED
    from mixsd_nb.methods.replay import neutral_prompts
    tokenizer, records = load_tokenizer(run.base), [json.loads(line) for line in (run.folder / "own-text.jsonl").read_text().splitlines()]
    assert {r["prompt"] for r in records} == {*neutral_prompts(3, SEED)}
    for record in records:
        yield dict(prompt_ids=encode_prompt(tokenizer, record["prompt"]), ids=record["ids"])


def test_a_second_file_asks_for_the_facts_of_the_first_and_replays_their_targets(facts, data, tiny, own_runs, monkeypatch):
    first = train.run(dataset=facts, model=tiny, method="sft", suite="recall", epochs=2, batch=2, max_new_tokens=4)
    second = data("second.jsonl", '{"question": "Who keeps the Varn Light?", "answer": "Ida Brock"}\n')
    shared = dict(dataset=second, method="sft", preset="smoke", suite="in-domain", max_new_tokens=4, batch=1, n=4)
    config = make_config(inject.InjectConfig, after=first.name.rpartition("-")[2], **shared, options=dict(count=3))
    assert config.anchor == "replay" and config.options["earlier"] == first.name and config.model == first.source()
    name = f"earlier:{first.config['dataset']}"
    assert name in config.suite and len(load_items([name], ItemSelection(config.dataset, 1))[name]) == len(FACTS)
    training = config.training()
    folder = own_runs / "prepared"
    folder.mkdir()
    prepared = prepare_replay(MethodRun(folder, training), config.recipe.options_of(config.recipe.anchors[0], training.options))
    own = trained_pairs(first.folder)
    assert prepared["replays"][3:] == own and len(own) == len(FACTS) and len(prepared["replays"]) == 3 + len(FACTS)
    again = make_config(inject.InjectConfig, after=str(first.folder), **shared, anchor="replay-kl+l2sp", model=tiny)
    assert again.anchor == "replay-kl+l2sp" and again.options["earlier"] == first.name and again.model == tiny
    shutil.copytree(first.folder, own_runs / "data/elsewhere" / first.name)
    moved = make_config(inject.InjectConfig, after=str(own_runs / "data/elsewhere" / first.name), **shared, model=tiny)
    assert moved.options["earlier"] == str(own_runs / "data/elsewhere" / first.name) and earlier_pairs(moved.options["earlier"]) == own
    with monkeypatch.context() as patch:
        patch.setattr(inject, "load_tokenizer", lambda name: SimpleNamespace(get_vocab=lambda: {name: 0}))
        with pytest.raises(ParameterError, match="model must have the tokenizer of .*, whose targets are replayed, got lab-s"):
            make_config(inject.InjectConfig, after=first.name, **shared | dict(model="lab-s")).check()
    assert make_config(inject.InjectConfig, **shared).anchor == "", "without an earlier run nothing changes"
    with pytest.raises(ValueError, match="earlier must be a training on fixed targets"): trained_pairs(own_runs)


@pytest.mark.slow
def test_the_first_file_is_still_known_after_the_second(data, own_runs):
    "Ten facts, then ten others in the model that knows the first ones."
    rows = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    one, two = (data(f"{k}.jsonl", "".join(json.dumps(row) + "\n" for row in rows[k:k + 10])) for k in (0, 10))
    shared = dict(method="sft", anchor="replay", model="lab-m", suite="in-domain", lr=1e-3)
    first = inject.run(dataset=one, **shared)
    second = inject.run(dataset=two, after=first.name, **shared | dict(model=first.source()))
    scores = second.scores()
    known = scores.loc[[name for name in scores.index if name.startswith("earlier:")]]
    assert len(known) == 1 and known.n.item() == 10 and known.after.item() >= 0.9
    assert first.scores().after.recall >= 0.9 and scores.after.recall >= 0.9
