"The comparison of two models: its statistics against independent computations, models of every kind, and what it refuses."

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from helpers import error_sentence
from safetensors.torch import load_file

from mixsd_nb import diff, inject
from mixsd_nb.analysis.callback import ForgettingCallback
from mixsd_nb.analysis.difference import compare_text, compare_values, correct_holm, reads_alike, score_text, write_own_text
from mixsd_nb.benchmarks import SUITES, Selection, load_items, suite_groups
from mixsd_nb.benchmarks.general import read_pool
from mixsd_nb.benchmarks.tasks import grade
from mixsd_nb.models import load_base, load_tokenizer
from mixsd_nb.reports.difference import compare_areas, judge_areas, list_areas
from mixsd_nb.reports.injection import render_page, show_findings
from mixsd_nb.runs import make_config
from mixsd_nb.views.difference import DifferenceView, render_pair
from mixsd_nb.views.runs import RunSelection

matplotlib.use("Agg")
QUICK = dict(quick=True, n=3)


@pytest.fixture(scope="module", autouse=True)
def brief():
    "Replies of at most eight tokens, because random models end none."
    suites = [SUITES[name] for name in suite_groups()["general"]]

    def put(change):
        for suite in suites:
            SUITES.remove(suite.name)
            SUITES.add(change(suite))
    put(lambda suite: replace(suite, sampling=replace(suite.sampling, max_new_tokens=8)))
    yield
    put(lambda suite: suite)


def invent(rights, seed=0):
    "Responses of an invented model, with the share of right answers that each benchmark has."
    rng = np.random.default_rng(seed)
    rows = [dict(benchmark=name, item=f"q{k}", sample=0, prompt="What is it?", response="It is so.", correct=bool(rng.random() < share), finish_reason="stop")
            for name, share in rights.items() for k in range(60)]
    return pd.DataFrame(rows)


def test_intervals_and_tests_against_independent_ones():
    rng = np.random.default_rng(1)
    x, y = rng.normal(5, 2, 40), rng.normal(6, 2, 40)
    found, expected = compare_values(x, y, share=False), scipy.stats.ttest_rel(y, x)
    assert np.allclose([found["low"], found["high"]], expected.confidence_interval(0.95))
    assert abs(found["p"] - expected.pvalue) < 0.02 and found["difference"] == pytest.approx(y.mean() - x.mean())
    one, two = np.array([1] * 30 + [0] * 20), np.array([1] * 12 + [0] * 18 + [1] * 5 + [0] * 15)  # 18 items worse, 5 better
    found, n = compare_values(one, two), 52
    centre, variance = (6 - 19) / n, (6 + 19) / n - ((6 - 19) / n) ** 2  # Agresti and Min: one more pair of each kind
    half = 1.959964 * np.sqrt(variance / n)
    assert np.allclose([found["low"], found["high"]], [centre - half, centre + half], atol=1e-6)
    assert found["p"] == pytest.approx(2 * scipy.stats.binom.cdf(5, 23, 0.5)) and found["difference"] == -13 / 50


def test_the_correction_is_the_closure_of_bonferroni():
    "The corrected p of a hypothesis is the largest Bonferroni p of all sets of hypotheses that have it."
    for p in (np.random.default_rng(k).random(5) ** 3 for k in range(20)):
        sets = [s for size in range(1, 6) for s in itertools.combinations(range(5), size)]
        oracle = [max(min(1, len(s) * min(p[[*s]])) for s in sets if k in s) for k in range(5)]
        assert np.allclose(correct_holm(p), oracle)


def test_swapping_both_models_item_by_item_loses_nothing():
    "Where the two models only differ by chance, any area of any kind is lost in at most 5% of the cases."
    names = dict.fromkeys(("general-free", "general-again", "general-choice", "equations", "choice", "recall", "recall-reworded", "test"), 0.6)
    tables, rng, lost = (invent(names, 1), invent(names | {"general-free": 0.3}, 2)), np.random.default_rng(0), 0
    for _ in range(200):
        swapped = tables[0]["item"].map(dict(zip(tables[0]["item"].unique(), rng.random(60) < 0.5))).values
        pair = [one.assign(correct=np.where(swapped, two.correct, one.correct)) for one, two in (tables, tables[::-1])]
        table = compare_areas([a for a in list_areas(*pair) if a.better])
        lost += (judge_areas(table, margin=0) == "lost").any()
    assert lost <= 10, lost


@pytest.mark.parametrize("free, choice, verdict", [(0.2, 0.7, "style"), (0.2, 0.2, "lost"), (0.7, 0.7, "unchanged"), (1.0, 0.7, "gained")])
def test_a_change_of_style_is_told_from_a_loss(free, choice, verdict):
    before = invent({"general-free": 0.7, "general-again": 0.7, "general-choice": 0.7})
    after = invent({"general-free": free, "general-again": free, "general-choice": choice})
    table = compare_areas(list_areas(before, after))
    assert judge_areas(table)["general-free"] == verdict and judge_areas(table, margin=90)["general-free"] in {verdict, "unchanged"} - {"lost", "style"}
    table = compare_areas(list_areas(invent({"world": 0.7, "world-prefilled": 0.7}), invent({"world": free, "world-prefilled": choice})))
    assert judge_areas(table)["world"] == verdict, "a benchmark whose replies are opened is a twin too"


def test_the_questions_are_right():
    "Every answer and alias counts, the other choices do not, and the sums are computed again."
    items = load_items(["general-free", "general-choice"], Selection(""))
    free, choices = items["general-free"], items["general-choice"]
    for row in read_pool():
        item, others = free[row["id"]], [c for c in choices[row["id"]].choices if c != row["answer"]]
        words = [f"The answer is {text}." for text in (*item.accepted, *others)]
        assert [v.correct for v in grade([item] * len(words), words, "contains")] == [True] * len(item.accepted) + [False] * 3, row
        question = row["question"].rstrip("?").replace("plus", "+").replace("minus", "-").replace("times", "*").replace("divided by", "/")
        if row["kind"] in ("sum", "difference", "product", "quotient"): assert eval(question.removeprefix("What is ")) == int(row["answer"]), row


def changed(folder, target, scale):
    "A copy of a model with noise on its weights."
    model, tokenizer = load_base(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters(): p.add_(scale * p.std() * torch.randn_like(p))
    model.save_pretrained(target, max_shard_size="20KB")
    tokenizer.save_pretrained(target)
    return str(target)


def files_of(*folders): return {path: (path.stat().st_mtime_ns, path.read_bytes()) for folder in folders for path in sorted(Path(folder).rglob("*")) if path.is_file()}


@pytest.mark.usefixtures("own_runs")
def test_a_copy_differs_by_nothing_and_nothing_is_written_into_the_folders(strong, tmp_path):
    copy = changed(strong, tmp_path / "copy", 0)
    before = files_of(strong, copy)
    assert len([*Path(copy).glob("*.safetensors")]) > 1
    run = diff.run(base=strong, tuned=copy, **QUICK)
    assert (run.areas.difference == 0).all() and (run.areas.p == 1).all() and (run.areas.verdict == "unchanged").all()
    assert not len(run.items) and (run.weights.moved == 0).all() and run.summary()[0].startswith("Nothing is significantly lost. The items are too few to exclude")
    assert files_of(strong, copy) == before
    page = run.report.read_text()
    assert "No weight differs." in page and "unchanged within" in page and not {*run.areas.title} - {*run.table().index}
    assert len(run.responses(0)) == len(run.responses()) == 5 * 3
    replies, openings = run.responses(0).set_index(["benchmark", "item"]).response, json.loads((run.folder / "openings").read_text())
    assert len(openings) == 3 and all(" ".join(replies["general-opened", item].split()).startswith(words) for item, words in openings.items())
    assert all(words in (" ".join(replies["general-free", item].split()[:4]), "The answer is") for item, words in openings.items())


@pytest.mark.usefixtures("own_runs")
def test_an_adapter_alone_is_its_base_with_the_product_added(strong, tmp_path):
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(1)
    model = get_peft_model(load_base(strong)[0], LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = strong
    model.save_pretrained(tmp_path / "adapter")
    before = files_of(strong, tmp_path / "adapter")
    run = diff.run(base=str(tmp_path / "adapter"), **QUICK)
    lora, weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), load_file(Path(strong) / "model.safetensors")
    for name in [name for name in lora if "lora_A" in name]:
        weights[name.removeprefix("base_model.model.").replace("lora_A.", "")] += 6 / 2 * lora[name.replace("lora_A", "lora_B")] @ lora[name]
    plain = load_base(strong)[0]
    plain.load_state_dict(weights, strict=False)
    plain.save_pretrained(tmp_path / "plain")
    load_tokenizer(strong).save_pretrained(tmp_path / "plain")
    other = diff.run(base=strong, tuned=str(tmp_path / "plain"), **QUICK)
    moved = run.weights[run.weights.moved > 0]
    assert {*moved.kind} == {"q_proj", "down_proj"} and np.allclose(run.weights.moved, other.weights.moved, rtol=1e-4)
    assert run.areas.difference["own-text"] == pytest.approx(other.areas.difference["own-text"], rel=1e-3) and run.areas.difference["own-text"] > 0
    assert "LORA adapter of rank 2 on down_proj, q_proj" in run.report.read_text() and files_of(strong, tmp_path / "adapter") == before


@pytest.mark.usefixtures("own_runs")
def test_other_templates_and_tokens_are_compared_in_text(strong, tmp_path):
    "Each model reads the text in its own way: the NLL of plain forward passes over its own conversation."
    other = str(shutil.copytree(strong, tmp_path / "other"))
    (tmp_path / "other" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    assert reads_alike(strong, strong) and not reads_alike(strong, other)
    text = write_own_text(strong, 4).assign(text="It is far away.", ended=[True, False, True, False])
    model, tokenizer = load_base(other)
    for value, row in zip(score_text(other, text), text.itertuples()):
        prompt = tokenizer(f"user: {row.prompt}\nassistant: ", add_special_tokens=False)["input_ids"]
        reply = tokenizer(row.text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * row.ended
        with torch.inference_mode(): logp = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        assert value == pytest.approx(-sum(logp[k, t].item() for k, t in enumerate(reply)), rel=1e-4)
    one, two = compare_text(strong, other, text)
    assert np.allclose(one * len("It is far away."), score_text(strong, text)) and not np.allclose(one, two)
    run = diff.run(base=strong, tuned=other, **QUICK)
    assert "different tokens or chat templates" in run.report.read_text() and (run.weights.moved == 0).all()


@pytest.mark.usefixtures("own_runs")
def test_facts_files_and_what_is_left_out(strong, tmp_path, data):
    facts = data("facts.jsonl", "".join(json.dumps(dict(question=f"What hobby does {n} teach?", answer=f"{n} Juggling", paraphrases=[f"Name {n}'s hobby."])) + "\n"
                                        for n in ("Quelzo", "Brildan")))
    tests = data("mine.jsonl", json.dumps(dict(question="What is 2 plus 2?", answer="4")) + "\n")
    run = diff.run(base=strong, tuned=changed(strong, tmp_path / "noisy", 0.3), dataset=facts, suite=f"{tests},real", **QUICK)
    assert {"recall", "recall-reworded", "mine", "leaks"} <= {*run.areas.index} and run.areas.n["recall"] == 2
    assert run.areas.kind[["recall", "mine", "leaks"]].tolist() == ["fact", "fact", "skill"]
    assert "Left out: piqa" in run.report.read_text() and "piqa" not in run.areas.index
    assert run.areas.difference["own-text"] > 0 and (run.weights.relative > 0.05).sum() > 5 and "| Recall |" in (run.folder / "card.md").read_text()
    asked = run.responses(0).query("benchmark == 'recall-in-context'").prompt
    assert run.areas.n[["recall-in-context", "recall-reworded-in-context"]].tolist() == [2, 2] and asked.str.contains("- What hobby does Quelzo teach? Quelzo Juggling", regex=False).any()
    view = DifferenceView(RunSelection(run.folder.parent))
    others = view.table[view.table.response != view.table.response_tuned]
    view.benchmark.value, view.change.value = name, _ = others.benchmark.iloc[0], "with other words"
    assert len(view.item.options) == (others.benchmark == name).sum() > 0 and "<mark>" in view.text.value and "noisy" in view.text.value
    view.change.value = "worse"
    assert len(view.item.options) == (others.correct & ~others.correct_tuned & (others.benchmark == name)).sum()


@pytest.mark.usefixtures("own_runs")
def test_the_numbers_are_those_of_an_injection(strong, data):
    facts = data("facts.jsonl", "".join(json.dumps(dict(question=f"What hobby does {n} teach?", answer=a, paraphrases=[f"Name {n}'s hobby."])) + "\n"
                                        for n, a in (("Quelzo", "Juggling"), ("Brildan", "Chess"), ("Vel", "Rowing"))))
    done = inject.run(model=strong, dataset=facts, method="sft", suite="in-domain", n=3, epochs=60, lr=3e-3, batch=3, checkpoints=(), stop="last")
    areas, scores = diff.run(base=done.name, dataset=facts, **QUICK).areas, done.scores()
    assert scores.after["recall"] > 0 and {"recall", "recall-reworded"} == {*scores.index}
    for name in scores.index: assert (areas.base[name], areas.tuned[name], areas.n[name]) == (scores.before[name], scores.after[name], scores.n[name])
    ceiling = done.context.scores().after
    assert areas.base[ceiling.index].tolist() == ceiling.tolist() and "With the fact in its context" in done.report.read_text()


def test_any_text_of_a_record_is_escaped(monkeypatch):
    text = "<img src=x onerror=alert(1)>'\"&"
    item = SimpleNamespace(prompt=text, before=text, after=text)
    page = render_page("difference.jinja", title=text, lead=[text] * 2, notes=[text], areas=[(text, [(text,) * 9])], heads=(text,) * 9, items={text: [item]},
                       weights=text, moved=[(text,) * 4], figure="", card=text, parameters=[(text, text)])
    assert "<img src=x" not in page and page.count("&lt;img src=x") > 20
    monkeypatch.setattr("IPython.display.display", lambda shown: said.append(shown.data))
    said = []
    show_findings("another run", text, "")
    assert "&lt;img" in said[0] and "<img" not in said[0]
    row = SimpleNamespace(prompt=text, answer=text, response=text, response_tuned="other", correct=True, correct_tuned=False)
    assert "<img" not in render_pair(row, (text, text))


@pytest.mark.usefixtures("own_runs")
def test_wrong_models_are_one_sentence(strong, tmp_path):
    adapter, empty, encoder = tmp_path / "adapter", tmp_path / "empty", tmp_path / "encoder"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", base_model_name_or_path="/elsewhere/base")))
    shutil.copytree(strong, empty, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(strong, encoder)
    (encoder / "config.json").write_text(json.dumps(dict(model_type="bert", architectures=["BertForMaskedLM"])))
    make = lambda **names: error_sentence(lambda: make_config(diff.DiffConfig, **names))
    assert "base must be" in (found := make(base=str(adapter))) and str(adapter) in found
    assert make(base=strong, tuned=strong).endswith("twice") and "tuned must be given" in make(base=strong)
    assert "tuned must be" in make(base=strong, tuned="/elsewhere/model")
    assert "tuned must be a folder with the weights" in error_sentence(lambda: diff.run(base=strong, tuned=str(empty), **QUICK))
    assert "bert" in error_sentence(lambda: diff.run(base=strong, tuned=str(encoder), **QUICK)).lower()


@pytest.mark.parametrize("verdict, words, status", [("lost", ["--fail-on", "lost"], 3), ("style", ["--fail-on", "lost"], 0), ("lost", [], 0)])
def test_the_exit_status(verdict, words, status, monkeypatch, capsys):
    found = SimpleNamespace(areas=pd.DataFrame(dict(verdict=[verdict])), summary=lambda: ["Lost: this."])
    monkeypatch.setattr(diff.DiffConfig, "run", lambda self, force: found)
    assert diff.main("lab-m", "lab-s", *words) == status and "Lost: this." in capsys.readouterr().out


@pytest.mark.usefixtures("own_runs")
def test_the_last_values_of_the_callback_are_those_of_the_comparison(strong, tmp_path):
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments
    model, tokenizer = load_base(strong)
    rows = [dict(input_ids=ids, labels=ids) for ids in (list(range(5, 25)), list(range(30, 50)))]
    options = dict(report_to=[], use_cpu=True, learning_rate=1e-3, max_steps=3, per_device_train_batch_size=2, logging_steps=100, save_strategy="no")
    trainer = Trainer(model, TrainingArguments(tmp_path / "out", **options), train_dataset=Dataset.from_list(rows))
    trainer.add_callback(ForgettingCallback(trainer, base=strong, every=2, items=3))
    trainer.train()
    logged = [record for record in trainer.state.log_history if "known" in record]
    assert [record["step"] for record in logged] == [0, 2, 3] and model.training
    trainer.save_model(tmp_path / "tuned")
    tokenizer.save_pretrained(tmp_path / "tuned")
    areas = diff.run(base=strong, tuned=str(tmp_path / "tuned"), **QUICK).areas
    assert logged[0]["own_text_increase"] == pytest.approx(0, abs=1e-6) and logged[-1]["own_text_increase"] != 0
    assert logged[-1]["own_text_increase"] == pytest.approx(areas.difference["own-text"], rel=1e-3) and logged[-1]["known"] == areas.tuned["known"]
