"A plan agrees with measured memory, refuses what cannot fit, and covers every method, stage and shipped grid."

import functools
import gc
import itertools
import json
import math
import re
import time
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb import evaluate, train
from mixsd_nb.benchmarks import SUITES
from mixsd_nb.planning import plan as plans
from mixsd_nb.planning.estimates import Burden, Layout, fisher_peak, optimiser_peak, scoring_peak, serve, update_peak
from mixsd_nb.cluster.grid import list_grids, make_resources, read_grid
from mixsd_nb.planning.preflight import UNPUBLISHED, MACHINE, check_inputs, list_deviations
from mixsd_nb.planning.token_lengths import count_questions
from mixsd_nb.planning.plan import plan_grid, plan_run, planned_cells
from mixsd_nb.planning.probe import probe
from mixsd_nb.planning.rates import DEVICES, RATES, Machine, Rate, Work, bound_seconds, cpu_device, use_rates
from mixsd_nb.planning.workload import burden_of, list_drafts, plan_training, planned_steps, smallest_layout, training_peaks
from mixsd_nb.console import find_command, main
from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.methods import ANCHORS, GATES, METHODS, Demand, Method, runnable_methods
from mixsd_nb.methods.replay import Replay
from mixsd_nb.methods.supervised import Supervised
from mixsd_nb.models.engine_vllm import PART
from mixsd_nb.models import load_tokenizer
from mixsd_nb.models.geometry import GEOMETRIES, count_shape, read_shape
from mixsd_nb.models.tiny import random_model
from mixsd_nb.runs import ParameterError, find_stage, make_config, project_root
from mixsd_nb.runs.config import is_runtime

H100 = Machine("h100", DEVICES["h100"], 4, 400, 16, 240)
PAPER = dict(preset="paper", dataset="kgfact-small", engine="vllm", processes=4, sharded=True, recompute=True)


def paper_run(model="Qwen/Qwen3-8B", method="sft", **more):
    return make_config(train.TrainConfig, **PAPER | dict(model=model, method=method) | more)


# --- memory: the plan beside the trainer


@pytest.fixture(autouse=True)
def old_garbage_is_collected(monkeypatch): monkeypatch.setattr("gc.collect", functools.partial(gc.collect, 2))


def memory_events(call):
    "The changes of a CPU's tensor memory during a call: pairs of a time (ns) and bytes, in order."
    from torch.profiler import ProfilerActivity, profile
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder: call()
    events = recorder.profiler.kineto_results.events()
    return sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")


def phase_peaks(spec, folder):
    "Peak bytes of the last update and of the optimiser step after it, of a real training on this CPU."
    from mixsd_nb.training import trainer
    marks, step = [], trainer.FineTuner.training_step

    def marked_step(self, *args, **options):
        marks.append(time.time_ns())
        result = step(self, *args, **options)
        marks.append(time.time_ns())
        return result
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.FineTuner, "training_step", marked_step)
        patch.setattr(trainer.FineTuner, "_save_checkpoint", lambda self, *_: marks.append(time.time_ns()))
        events = memory_events(lambda: trainer.train_process(spec, folder))
    total, peaks, begin, middle, end = 0, [0, 0], *marks[-3:]
    for moment, size in events:
        for k, (first, last) in enumerate(((begin, middle), (middle, end))):
            if first <= moment <= last: peaks[k] = max(peaks[k], total, total + size)
        total += size
    return peaks


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "Folders of random models by name, with the tokenizer of lab-s."
    tokenizer, found = load_tokenizer("lab-s"), {}
    for name, numbers in {"wide": dict(width=192, layers=2, feed_forward=512), "deep": dict(width=96, layers=6, feed_forward=256)}.items():
        found[name] = str(tmp_path_factory.mktemp("planned") / name)
        random_model(tokenizer, heads=4, head_dim=48, context=1024, **numbers).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


@pytest.mark.parametrize(("name", "burden", "layout"), [
    ("wide", Burden(8, 20, 40), Layout()), ("wide", Burden(8, 20, 40), Layout(recompute=True)),
    ("wide", Burden(8, 20, 40), Layout(micro_tokens=200)), ("wide", Burden(2, 20, 120), Layout()),
    ("deep", Burden(8, 20, 40), Layout()), ("deep", Burden(8, 20, 40), Layout(recompute=True)),
    ("deep", Burden(8, 20, 40), Layout(micro_tokens=200)), ("deep", Burden(4, 20, 80), Layout(micro_tokens=200, recompute=True)),
    ("deep", Burden(4, 60, 20), Layout())])
def test_planned_peaks_are_those_of_the_trainer(name, burden, layout, folders, tmp_path):
    from mixsd_nb.training.trainer import TrainingSpec
    pairs = [([5] * burden.prompt, [7] * burden.completion)] * burden.batch
    spec = TrainingSpec(model=folders[name], lr=1e-4, steps=2, batch=burden.batch, objective="methods.supervised:stored_pairs",
                        data=dict(pairs=pairs), recompute=layout.recompute, micro_tokens=layout.micro_tokens)
    shape, measured = read_shape(folders[name]), phase_peaks(spec, tmp_path)
    for planned, peak in zip((update_peak(shape, burden, layout), optimiser_peak(shape, burden, layout)), measured):
        assert planned == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("numbers", [dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=768, vocab_size=4_000),
                                     dict(hidden_size=1_024, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4, head_dim=128, intermediate_size=3_072, vocab_size=8_000)])
def test_planned_peaks_are_those_of_scoring_and_of_the_fisher(numbers):
    from transformers import AutoModelForCausalLM, Qwen3Config

    from mixsd_nb.models.gradients import diagonal_fisher
    from mixsd_nb.models.scoring import token_nll
    model = AutoModelForCausalLM.from_config(Qwen3Config(**numbers, tie_word_embeddings=True), dtype=torch.float32).eval()
    shape, pairs = count_shape(model.config), [([5] * 30, [7] * 200)] * 16
    peak = lambda call: 4 * shape.parameters + max(itertools.accumulate(size for _, size in memory_events(call)))
    assert scoring_peak(shape, 16, 30, 200) == pytest.approx(peak(lambda: token_nll(model, pairs)), rel=0.15)
    assert 0.85 < fisher_peak(shape, 30, 200) / peak(lambda: diagonal_fisher(model, pairs[:2])) < 1.25  # it never needs much more


def test_shapes_are_those_of_loaded_models(lab):
    shape = read_shape("lab-m")
    assert shape.parameters == sum(p.numel() for p in lab[0].parameters())
    assert count_shape(lab[0].config, "lab-m") == shape
    assert [round(read_shape(name).parameters / 1e7) for name in GEOMETRIES] == [60, 172, 402, 819, 124, 13]


def test_a_model_of_unknown_shape_is_one_sentence(own_runs, capsys):
    assert main("plan", "train", "--model", "some/model") == 2 and capsys.readouterr().err.count("\n") == 1


# --- layouts


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*GEOMETRIES]), st.integers(1, 64), st.sampled_from(["", "student", "teacher"]), st.sampled_from(["a100-40", "h100"]))
def test_the_smallest_layout_fits_and_no_smaller_one_does(model, batch, writer, device):
    shape, room = read_shape(model), 1e9 * DEVICES[device].memory
    burden = Burden(batch, 60, 400, 4 if writer else 1, writer, teacher=2 if writer else 0, copy=writer == "student")
    found = smallest_layout(shape, burden, Layout(gpu=True), room)
    fits = lambda n: any(max(training_peaks(shape, burden, Layout(True, n, s, recompute=r)).values()) <= room
                         for s in (False, True)[:n] for r in (False, True))
    legal = [n for n in range(1, batch + 1) if batch % n == 0]
    assert (found is None) == (not any(map(fits, legal)))
    if found: assert found.processes == next(n for n in legal if fits(n))


def test_what_does_not_fit_says_what_would():
    plan = plan_run(paper_run(method="opsd", dataset="kgfunc", processes=2), H100)
    assert "80 GB; processes=" in plan.problems["rollout"]
    words = dict(word.split("=") for word in plan.smallest.split())
    fitting = plan_run(paper_run(method="opsd", dataset="kgfunc", **words), Machine("h100", DEVICES["h100"], int(words["processes"]), 4_000, 16, 240))
    assert {*fitting.problems} <= {"disk"} and not plan_run(paper_run(), H100).problems
    crowded = plan_run(paper_run(engine="hf"), H100)
    rows = int(crowded.problems["hf"].rpartition("batch_size=")[2].removesuffix(" fits"))
    assert "hf" not in plan_run(paper_run(engine="hf", batch_size=rows), H100).problems


@pytest.mark.parametrize(("machine", "kind", "words"), [
    (dict(memory=20), "host", "GB on each node, got 20"),
    (dict(minutes=0.01), "minutes", "minutes must be at least 1"), (dict(gpus=2), "processes", "processes must be at most 2"),
    (dict(disk=10), "disk", "of which 10 GB are free"), (dict(device=DEVICES["l40s"]._replace(memory=12)), "update", "needs")])
def test_every_lack_has_its_sentence(machine, kind, words):
    plan = plan_run(paper_run(), replace(H100, **machine))
    assert words in plan.problems[kind]


def test_a_run_is_tight_between_what_fits_and_what_cannot():
    config = paper_run(method="sft", processes=1, sharded=False, recompute=False)
    peak = max(plan_run(config, H100).peaks.values()) / 1e9
    for memory, tight, refused in ((1.01 * peak, False, False), (0.99 * peak, True, False), (0.88 * peak, True, False), (0.86 * peak, False, True)):
        machine = replace(H100, device=DEVICES["h100"]._replace(memory=memory))
        plan = plan_run(config, machine)
        assert (plans.is_tight(plan, machine), bool({*plan.problems} & {*plan.peaks})) == (tight, refused)
        assert ("tight: may not fit" in plans.describe_plan(plan, machine)) == tight


def test_the_plan_of_facts_is_a_line_and_its_exit_code_says_whether_it_is_tight(own_runs, monkeypatch, capsys):
    from mixsd_nb.corpora.files import EXAMPLE
    monkeypatch.setattr(plans, "free_disk", lambda folder: 4_000)
    assert main("plan", "inject", str(EXAMPLE), "--model", "lab-m") == 0
    out = capsys.readouterr().out
    assert out.startswith("plan: ") and not re.search(r"differs from|0\.0 hours|\b0\.00\b", out) and out.count("\n") <= 2
    large = "plan", "inject", str(EXAMPLE), "--model", "Qwen/Qwen3-8B", "--anchor", "lora", "--batch-size", "8", "--suite", "in-domain", "--device", "h100"
    assert main(*large) == 3 and re.match(r"plan: \S+ GB of 80 GB in update, tight: may not fit, ", capsys.readouterr().out)
    monkeypatch.setattr(plans, "free_disk", lambda folder: 4)
    assert main(*large) == 1 and "\ndoes not fit: checkpoints need" in capsys.readouterr().out


def test_the_disk_of_finished_runs_is_there_already():
    from mixsd_nb.planning.plan import GridPlan
    from mixsd_nb.planning.workload import RunPlan
    runs = lambda *finished: [RunPlan("lab-s", disk=6e9, disk_peak=8e9, finished=done) for done in finished]
    problems = lambda *finished: GridPlan("g", replace(H100, disk=10), 1, runs(*finished), [], []).problems()
    assert problems(False, False) == {"all cells need 14 GB of disk, of which 10 GB are free": 2}
    assert problems(True, False) == problems(True, True) == {}


def test_a_hosted_student_and_offloaded_moments_need_less():
    shape, layout = read_shape("Qwen/Qwen3-8B"), Layout(True, 4, True, recompute=True)
    burden = Burden(20, 60, 400, 8, "student", teacher=2, copy=True)
    own, hosted = (training_peaks(shape, replace(burden, hosted=value), layout) for value in (False, True))
    assert own["optimiser"] - hosted["optimiser"] == pytest.approx(3.5 * shape.parameters)
    four = read_shape("Qwen/Qwen3-4B-Instruct-2507")
    found = smallest_layout(four, Burden(20, 60, 60), Layout(True), 75e9, offload=True)
    assert found.offload and found.processes == 1


def test_vllm_reserves_weights_cache_and_logits():
    shape = read_shape("Qwen/Qwen3-8B")
    one, four = serve(shape, 16_384, 80e9), serve(shape, 16_384, 80e9, gpus=4)
    assert one.weights == 2 * shape.parameters == 4 * four.weights and four.room > one.room > 5 and one.least > one.weights + one.cache
    assert one.logprobs == PART * 151_936 * 10


# --- methods, stages, grids


PLANNED = [*(dict(method=name) for name in runnable_methods()), *(dict(method="opsd", anchor=name) for name in ANCHORS), *(dict(method="mixsd", gate=name) for name in GATES),
           dict(method="own-words", anchor="replay"), dict(method="memit-each")]


@pytest.mark.parametrize("parts", PLANNED, ids=lambda parts: "+".join(parts.values()))
def test_every_part_has_a_plan(parts):
    config = make_config(train.TrainConfig, **parts)
    lab, paper = plan_run(config), plan_run(paper_run("Qwen/Qwen3-1.7B", **parts), H100)
    assert lab.peaks and paper.peaks and all(size > 0 for size in [*lab.peaks.values(), *paper.peaks.values()])
    assert ("rollout" in paper.peaks) == bool(config.recipe.demand.rollout_model and not config.recipe.source())
    assert len([name for name in paper.peaks if name.startswith("draft")]) == sum(bool(part.demand.pregenerated) for part in config.recipe.parts)


def test_a_declared_demand_is_planned():
    method = Method("heavy", "Heavy", settings=METHODS["sft"].settings, fit="methods.supervised:fit_canonical", demand=Demand(copies=5))
    METHODS.add(method)
    try:
        heavy, sft = (plan_run(make_config(train.TrainConfig, method=name)) for name in ("heavy", "sft"))
        assert heavy.peaks["update"] - sft.peaks["update"] == 5 * 4 * read_shape("lab-m").parameters
    finally: METHODS.remove("heavy")


def test_what_the_base_model_writes_before_training_is_planned():
    "Own words are one target for each of the 1,600 facts, of the published length of the expert's. Replay doubles an update."
    run = lambda method="sft", **options: plan_run(paper_run("Qwen/Qwen3-1.7B", method, dataset="kgfunc", **options), H100)
    sft, *_ = plans = [run(), run("own-words"), run(anchor="replay")]
    parts = [{part.name: part for part in plan.parts} for plan in plans]
    facts = len(load_corpus("kgfunc", "train"))
    assert "draft" not in parts[0] and [p["draft"].tokens for p in parts[1:]] == [facts * CORPORA["kgfunc"].mixed[0.0], 200 * SUITES["gsm8k"].lengths[1]]
    assert parts[2]["update"].tokens - parts[0]["update"].tokens == pytest.approx(facts * sum(SUITES["gsm8k"].lengths))
    for plan, part in zip(plans[1:], parts[1:]):
        assert plan.peaks["update"] > sft.peaks["update"] and plan.peaks["draft"] > 2 * read_shape("Qwen/Qwen3-1.7B").parameters
        assert plan.first - sft.first > part["draft"].low > 0
    without = run(anchor="replay", options=dict(share=0.0))
    assert (without.parts, without.peaks) == (sft.parts, sft.peaks)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.75])
def test_as_many_samples_are_planned_as_replay_draws(share):
    config = make_config(train.TrainConfig, method="sft", anchor="replay", options=dict(share=share))
    draws = [len(Replay(Supervised([]), [None] * 9, share).draw(fact, step)) for fact in range(40) for step in range(40)]
    drafts, = list_drafts(config)
    assert drafts.added == pytest.approx(sum(draws) / len(draws), abs=0.05) and burden_of(config).rollouts == 1 + max(draws)


def test_shared_runs_count_once():
    plan = plan_grid("quick-lab")
    assert len(plan.cells) == 5 and len(plan.shared) == 2
    assert plan.totals()["hours_at_least"] == pytest.approx(sum(p.hours[0] for p in [*plan.cells, *plan.shared]))


def test_axes_over_unfinished_grids_are_planned(own_runs):
    assert len(planned_cells("high-nll")[2]) == len(planned_cells("high-nll-targets")[2]) == 48
    assert plan_grid("high-nll", "h100").cells[0].peaks["NLL"] > 0
    plan = plan_grid("recovery-lab", "cpu")  # continues the checkpoints of another grid, which have the shapes of their models
    assert {cell.model for cell in plan.cells} == {"lab-m"} and plan.cells[0].peaks["update"] > 0


def test_cells_are_planned_with_their_own_resources(own_runs, tmp_path):
    "A grid of a model that needs one GPU and of one that needs four, and a grid over the best of its cells."
    grid, best = tmp_path / "unequal.yaml", tmp_path / "best.yaml"
    grid.write_text("notebook: train\nfixed: {preset: paper, engine: vllm, method: sft, measure: scores, keep: chosen}\n"
                    "axes:\n  model: [{model: Qwen/Qwen3-1.7B}, {model: Qwen/Qwen3-8B, processes: 4, sharded: true, recompute: true, replicas: 4}]\n"
                    "  lr: [1.0e-5, 1.0e-4]\nresources: {gpus: 4, memory: 320}\nadjust: [{when: {model: Qwen/Qwen3-1.7B}, resources: {gpus: 1, memory: 80}}]\n")
    best.write_text(f"notebook: train\nfixed: {{measure: selection}}\naxes: {{run: {{of: [{grid}], best: lr}}}}\nresources: {{gpus: 4}}\n"
                    "exclude: [{model: Qwen/Qwen3-8B}]\nadjust: [{when: {model: Qwen/Qwen3-1.7B}, resources: {gpus: 1}}]\n")
    plan = plan_grid(grid, "h100")
    assert [cell.gpus for cell in plan.cells] == [1, 1, 4, 4] and plan.rows().gpus.tolist() == [1, 4]
    assert "on 1 or 4 × h100 a cell" in plans.format_grid(plan)
    assert not any({*cell.problems} & {"host", "processes"} for cell in plan.cells)
    assert [(cell.model, cell.gpus) for cell in plan_grid(best, "h100").cells] == [("Qwen/Qwen3-1.7B", 1)]


def test_an_optimiser_on_the_host_was_not_measured():
    part = next(part for part in plan_run(paper_run("Qwen/Qwen3-4B-Instruct-2507", processes=1, sharded=False, offload=True), H100).parts if "offloaded" in part.name)
    assert part.high == math.inf and part.low > 0 and part.lacks == part.name


def test_selection_asks_less():
    config = paper_run()
    whole, chosen = (plan_training(config.model_copy(update=more), H100)
                     for more in (dict(measure="all", keep="all", stored="float32", state="all"), dict(measure="selection", suite_steps=(), keep="chosen", stored="bfloat16", state="none")))
    asked = lambda plan: sum(part.low for part in plan.parts if part.name.startswith("ask"))
    assert asked(whole) > 4 * asked(chosen)
    assert chosen.disk == 2 * read_shape("Qwen/Qwen3-8B").parameters < whole.disk / 20
    assert chosen.disk_peak == 5 * chosen.disk


def test_a_pause_bounds_the_weights_and_holds_the_state_in_memory():
    "KGFact-Small has five checkpoints; a state of 12 bytes a parameter is written once a pause, and held beside its copy."
    parameters = read_shape("Qwen/Qwen3-8B").parameters
    plans = {(pause, state): plan_run(paper_run(pause=pause, state=state, keep="chosen", stored="bfloat16"), H100) for pause, state in ((0, "newest"), (1, "newest"), (1, "memory"), (5, "memory"))}
    weights = {key: (plan.disk_peak - 24 * parameters * (key[1] == "newest")) / (2 * parameters) for key, plan in plans.items()}
    assert weights == {(0, "newest"): 5, (1, "newest"): 4, (1, "memory"): 4, (5, "memory"): 5}
    assert plans[1, "memory"].host >= 24 * parameters > plans[5, "memory"].host
    assert plans[0, "newest"].first < plans[5, "memory"].first, "the latter can only be resumed when its training has ended"


def test_planned_steps_are_those_of_the_run():
    for more in ({}, dict(checkpoints=(20, 60)), dict(epochs=3), dict(dataset="kgfunc-lab")):
        config = make_config(train.TrainConfig, method="sft", **more)
        assert planned_steps(config) == config.steps()


@pytest.mark.slow  # 60 s
def test_every_shipped_grid_has_a_plan():
    table = plans.plan_all(list_grids())
    assert len(table) == len(list_grids()) + 3 and (table.hours >= 0).all() and not table.do_not_fit.any()
    whole = table.loc["all, once, on GPUs"]
    assert whole.hours_at_least < whole.hours < 1_000 < whole.hours_at_most < math.inf and whole.terabytes < 2
    said = f"{whole.hours:,.0f} GPU-hours of H100s (between {whole.hours_at_least:,.0f} and {whole.hours_at_most:,.0f}) and {whole.terabytes:.2f} TB"
    for text in "guides/scale.md", "planning/plan.ipynb": assert said in (project_root() / "nbs" / text).read_text()
    large = plan_grid("knowledge-eval-large", "h100").rows()
    assert large[large.model == "Qwen3-8B"].disk.max() < 82.1, "five of eight checkpoints of a third have weights at a time"


PAPER_GRIDS = [name for name in list_grids() if make_resources(*(lambda grid: (grid, find_stage(grid.notebook)))(read_grid(name)[1])).gpus]


@pytest.mark.slow  # 60 s; the same plans as above
@pytest.mark.parametrize("name", PAPER_GRIDS)
def test_a_cell_asks_for_as_many_gpus_as_it_needs(name):
    """Every cell of the paper's grids has the GPUs of its smallest layout, no more and no fewer, and enough of all else.

    The exception is an optimiser in the host's memory, with which 4B needs one GPU and not two, and seconds an update."""
    plan, exceptions = plan_grid(name, "h100"), set()
    for config, cell in zip(planned_cells(name)[2], plan.cells):
        assert not {*cell.problems} - {"disk"}, cell.problems
        if cell.smallest.endswith("offload=true"): exceptions.add(config.model)
        if not cell.layout:  # an evaluation, a mixing, an edit, or an analysis
            assert cell.gpus == 1
            continue
        found = smallest_layout(read_shape(config.model), burden_of(config), Layout(gpu=True), H100.room)
        assert cell.gpus == found.processes == config.processes == config.replicas, (cell.model, cell.method, cell.layout)
    assert exceptions <= {"Qwen/Qwen3-4B-Instruct-2507"}


# --- a run


def test_a_run_begins_with_its_plan(own_runs, tiny, capsys):
    evaluate.run(model=tiny, suite="recall", n=2, max_new_tokens=4)
    assert capsys.readouterr().err.startswith("plan: ") and len(list(own_runs.glob("evaluate-*"))) == 1


def test_a_run_that_cannot_fit_writes_nothing(own_runs, tiny, monkeypatch, capsys):
    small = plans.this_machine()
    monkeypatch.setattr(plans, "this_machine", lambda: Machine("cpu", small.device, 0, 0.1))
    with pytest.raises(ParameterError, match="needs .* of this machine, which has 0.1 GB"): train.run(model=tiny, method="sft", suite="recall", n=2)
    assert not list(own_runs.glob("*"))
    monkeypatch.setenv("MIXSD_PLAN", "ignore")
    evaluate.run(model=tiny, suite="recall", n=2, max_new_tokens=4)


# --- inputs, commands, probe


def test_inputs_are_checked_before_any_work(own_runs, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_BENCHMARKS", str(tmp_path))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps(dict(model_type="qwen3")))
    config = make_config(evaluate.EvaluateConfig, model="lab-s", suite="recall,gsm8k,humaneval")
    found = {entry.name: entry for entry in check_inputs([config, SimpleNamespace(model=str(broken))])}
    assert found["model lab-s"].fine and "padded rows" in found["model lab-s"].note
    assert found["locks"].fine and found["corpus kgfact-small"].fine and "sandbox" in found
    assert not found["benchmark gsm8k"].fine and not found[f"model {broken}"].fine


def test_the_printed_commands_for_models_of_the_hub_fit_one_gpu(own_runs):
    from guides import ROOT, console_commands

    facts = own_runs / "facts.jsonl"
    facts.write_text('{"question": "Who leads the Lantern Choir?", "answer": "Ana"}\n{"question": "Who sings?", "answer": "Bo"}\n')
    commands = [words[3:] for words in console_commands(ROOT / "nbs/guides/own-model.md") if words[:2] == ["mixsd", "inject"] and "paper" in words]
    assert len(commands) == 3
    for words in commands:
        pairs = [pair for pair in zip(words[::2], words[1::2]) if pair[0] != "--model-options"]  # no download
        [config], _ = find_command("inject").read(str(facts), *itertools.chain(*pairs))
        assert not plan_run(config, Machine("h100", DEVICES["h100"], 1, 400, 16, 0)).problems, words


def test_nothing_is_published_about_the_length_of_a_training_on_a_file(own_runs):
    from mixsd_nb.corpora.files import EXAMPLE
    shared = dict(preset="paper", model="Qwen/Qwen3-1.7B")
    converged = "stop=converged, published last"
    for stage, dataset, values, told in [("inject", str(EXAMPLE), dict(method="mixsd"), [converged]), ("train", str(EXAMPLE), dict(epochs=3, batch=2), []),
                                         ("inject", "kgfact-small", dict(method="mixsd"), [converged, "epochs=40, published 20"]),
                                         ("inject", "kgfact-small", dict(batch=10, epochs=20, method="mixsd"), [converged, "batch=10, published 20"])]:
        config = make_config(find_stage(stage), dataset=dataset, **shared, **values)
        other = [f"dataset={config.dataset}, which the paper does not have"] if dataset == str(EXAMPLE) else []
        assert list_deviations([config]) == other + told
    default = list_deviations([make_config(find_stage("inject"), dataset="kgfact-small", **shared)])
    assert {"anchor=replay-kl, published none", "temperature=0.5, published 1.0", converged, "options[consistent]=True, published False"} <= {*default}


def test_deviations_name_both_values():
    assert list_deviations([paper_run("Qwen/Qwen3-1.7B")]) == []
    told = list_deviations([paper_run("Qwen/Qwen3-1.7B", "opsd", epochs=3, dtype="float32", rollouts=2)])
    assert {*told} == {"dtype=float32, published bfloat16", "epochs=3, published 20", "rollouts=2, published 8"}


def changed(value):
    "Another value than the given one."
    if isinstance(value, bool): return not value
    if isinstance(value, (int, float)): return value + 1
    return {"other": 1} if isinstance(value, dict) else ["other"] if isinstance(value, list) else "other"


@pytest.mark.parametrize("stage", ["train", "inject"])
def test_every_parameter_that_can_change_a_result_is_a_deviation(own_runs, stage):
    "All fields and all options of the paper's recipes are walked through; those of the machine are no part of a run's hash."
    cls = find_stage(stage)
    runs = [make_config(cls, preset="paper", model="Qwen/Qwen3-1.7B", method=method) for method in ("mixsd", "opsd", "sft", "memit")]
    told = {run.method: {*list_deviations([run])} for run in runs}
    further = lambda run, name, value: [text for text in list_deviations([run.model_copy(update={name: value})]) if text not in told[run.method]]
    for name, field in cls.model_fields.items():
        if name in MACHINE: assert is_runtime(field), name
        elif name == "method": assert further(runs[0], name, "own-words") == ["method=own-words, which the paper does not have"]
        elif name in ("anchor", "gate"): assert further(runs[0], name, dict(anchor="ewc", gate="stm")[name])[0].startswith(f"{name}=")
        elif name not in {*UNPUBLISHED, "options"}:
            value = lambda run: "train:100" if name == "suite" else changed(getattr(run, name))
            assert any(text.startswith(f"{name}=") for run in runs for text in further(run, name, "known-lab" if name == "dataset" else value(run))), name
    for run in runs:
        for name, value in run.options.items():
            assert further(run, "options", run.options | {name: changed(value)})[0].startswith(f"options[{name}]="), (run.method, name)


def test_commands(own_runs, capsys):
    assert main("plan", "quick-lab", "--probe", "--constants") == 0
    told = capsys.readouterr().out
    assert "tokens/s" in told and "report.json" in told and "the hours are bounds" not in told
    assert main("sweep", "preview", "quick-lab", "--check") == 0 and "5 cells and 2 shared runs" in capsys.readouterr().out
    assert main("plan", "train", "--model", "Qwen/Qwen3-8B", "--method", "opsd", "-p", "preset", "paper", "--device", "h100") == 1
    assert "does not fit" in capsys.readouterr().out
    assert main("plan", "quick-lab", "--device", "h1000") == 2 and "did you mean h100?" in capsys.readouterr().err
    assert main("plan", "quick-lap") == 2 and not list(own_runs.iterdir())


# --- hours


REPORT = json.loads((project_root() / "papermill_runs/gpu/report.json").read_text())
MEASURED = {part["name"]: part for part in REPORT["parts"]}
OF_UPDATES = {name.removeprefix("train, "): part["notes"]["seconds_of_update"] for name, part in MEASURED.items() if name.startswith("train, ")}
WRITE = ("opsd", "opsd-nll", "mixsd-kl", "sdft")


def test_rates_are_those_of_the_report():
    rates = {rate.source.partition(": ")[2]: rate for rate in RATES if "report.json" in rate.source}
    seconds = {text.partition(", both")[0].partition(", with")[0]: rate.seconds for text, rate in rates.items()}
    assert seconds.pop("median of eight recipes with given targets") == pytest.approx(median(s for name, s in OF_UPDATES.items() if name not in WRITE), abs=1e-3)
    assert seconds.pop("median of opsd, opsd-nll, mixsd-kl and sdft") == pytest.approx(median(OF_UPDATES[name] for name in WRITE), abs=1e-3)
    assert seconds.pop("resume, a checkpoint and its state") == pytest.approx(MEASURED["resume"]["notes"]["seconds_with_checkpoint"], rel=1e-3)
    assert len(seconds) == 4
    for name, found in seconds.items(): assert found == pytest.approx(MEASURED[name]["tokens"] / MEASURED[name]["tokens_per_second"], rel=1e-3)


@pytest.mark.parametrize("recipe", OF_UPDATES)
def test_hours_on_the_measured_gpu_are_those_that_were_measured(recipe):
    "With the configuration of the report; the lengths of texts are estimated, because the tokenizer of Qwen3 is not here."
    method, _, added = recipe.partition("+")
    parts = {"anchor" if added in ANCHORS else "gate": added}
    config = make_config(train.TrainConfig, method=method, **parts, model="Qwen/Qwen3-1.7B", preset="paper", dataset="kgfact-small", suite="recall",
                         epochs=1, batch=20, rollouts=8, rollout_tokens=64, target_tokens=64, batch_size=160, checkpoints=())
    part = next(part for part in plan_run(config, Machine("h200", DEVICES["h200"], 1)).parts if part.name in ("update", "distillation"))
    assert part.low / 5 < 1.4 * OF_UPDATES[recipe] and part.high / 5 > OF_UPDATES[recipe] / 1.4 and part.high < 2.5 * part.low and not part.lacks


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.lists(st.floats(0.1, 30), min_size=3, max_size=3), st.sampled_from([*GEOMETRIES]), st.sampled_from([*DEVICES]))
def test_bounds_hold_whatever_the_share_of_each_cost(shares, factors, model, device):
    "Seconds are a sum of costs, no less than a data sheet allows; a rate measured on one device bounds the time of other work on another."
    one = Work("update", read_shape("Qwen/Qwen3-1.7B"), 3, 900, 5_000)
    other = Work("update", read_shape(model), *(factor * amount for factor, amount in zip(factors, one[2:5])))
    scale = [1e-4 * shares[0], 1e-9 * (1 + 9 * shares[1]), 1e-12 * (1 + 9 * shares[2])]
    seconds = lambda work, place: sum(a * b for a, b in zip(scale, work.costs(DEVICES[place])))
    with use_rates([Rate(DEVICES["h200"], "Qwen/Qwen3-1.7B", "update", *one[2:6], seconds(one, "h200"), "")]):
        low, high, measured = bound_seconds(other, Machine(device, DEVICES[device], 1))
    assert low <= seconds(other, device) * 1.000001 and seconds(other, device) <= high * 1.000001 and measured == (device == "h200")


def test_a_probe_measures_every_kind_of_work(own_runs, tiny):
    config = make_config(train.TrainConfig, model=tiny, method="opsd", rollouts=2, batch=2, batch_size=4)
    rates = probe(config)
    assert {rate.kind for rate in rates} == {"update", "distillation", "files", "decode hf", "score", "Fisher"} and all(rate.seconds > 0 for rate in rates)
    slow = [rate._replace(seconds=1_000 * rate.seconds) for rate in rates]
    with use_rates(rates): own = plan_run(config)
    with use_rates(slow): assert plan_run(config).hours == pytest.approx([1_000 * hours for hours in own.hours])
    assert not any(part.lacks for part in own.parts) and RATES[0].source != "probe"


def test_a_gpu_whose_data_sheet_is_unknown_has_no_bounds():
    machine = Machine("GPU", DEVICES["h100"]._replace(flops=0, bandwidth=0), 1)
    plan = plan_run(paper_run("Qwen/Qwen3-1.7B", processes=1, sharded=False), machine)
    assert plan.hours == (0, math.inf) and plans.describe_plan(plan, machine).endswith("an unknown time on GPU")


def test_adapters_are_planned_as_adapters():
    "A card that cannot hold all moments of the optimiser holds those of adapters."
    whole, adapters = (plan_run(paper_run(method="sft", anchor=anchor), H100).peaks["update"] for anchor in ("", "lora"))
    assert adapters < whole


def test_adapters_on_a_cpu_are_merged_beside_the_weights():
    "A GPU's adapters are merged in the memory of the host, which also holds the merged weights in bfloat16."
    shape, burden = read_shape("lab-m"), Burden(20, 30, 30)
    save, optimiser = zip(*((p["save"], p["optimiser"]) for p in (training_peaks(shape, burden, Layout(gpu, lora=8)) for gpu in (False, True))))
    assert save[0] - optimiser[0] == 4 * shape.parameters and save[1] == optimiser[1]
    adapted = paper_run(method="sft", anchor="lora", stored="bfloat16")
    assert plan_run(adapted, H100).host >= 6 * read_shape(adapted.model).parameters


def test_shards_do_not_divide_the_fisher_of_ewc():
    "It is estimated by one process, in float32 beside the weights, before the training begins."
    config = paper_run(method="sft", anchor="ewc", processes=4, sharded=True)
    plan, parameters = plan_run(config, H100), read_shape(config.model).parameters
    assert plan.peaks["fisher"] > 8 * parameters and "fisher" not in plan_run(paper_run(method="sft", anchor="l2sp"), H100).peaks


@pytest.mark.parametrize("method", ["sft", "mixsd"])
def test_an_average_costs_no_training(method):
    "Its source is planned once, as a shared run."
    config = make_config(find_stage("train"), method=method, anchor="average", epochs=20)
    plan = plan_run(config, Machine("laptop", cpu_device(2), memory=16))
    parts = {part.name: part for part in plan.parts}
    source = plan_run(config.source(), Machine("laptop", cpu_device(2), memory=16))
    assert "update" not in parts and "update" in {part.name for part in source.parts}
    assert 0 < parts["average"].low <= parts["average"].high < 5 and config.source() in plan.shared


def test_a_grid_file_that_changes_is_read_again(own_runs, tmp_path):
    file = tmp_path / "mine.yaml"
    counts = []
    for seeds in ([0], [0, 1]):
        file.write_text(f"notebook: train\nfixed: {{model: lab-s}}\naxes: {{seed: {seeds}}}\n")
        counts.append((len(plan_grid(file).cells), len(planned_cells(file)[2])))
    assert counts == [(1, 1), (2, 2)]


def test_own_questions_are_counted(tmp_path):
    "The items of a file are known before anything runs."
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f'{{"question": "What is {n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(7)))
    asked = count_questions(make_config(find_stage("evaluate"), suite=str(file)))
    assert [questions.requests for questions in asked.values()] == [7]


def test_an_injection_counts_its_training_once_and_everything_that_it_needs(own_runs):
    config = make_config(find_stage("inject"), dataset="kgfact-small", model="lab-m")
    plan = plans.plan_alone(config, H100)
    alone = plans.plan_alone(config.training(), H100)
    assert [run.method for run in plan.shared] == ["base", "base", "mixsd-0"]  # the base is asked all, and recall and validation
    training = alone.cells[0].hours[0]
    assert training < plan.cells[0].hours[0] < 1.5 * training + plan.shared[0].hours[0]
    assert plan.cells[0].peaks.keys() >= alone.cells[0].peaks.keys() and not plan.cells[0].finished


def test_a_training_until_convergence_pauses_at_every_checkpoint():
    last, converged = (plan_run(paper_run(stop=stop, keep="chosen", stored="bfloat16", state="newest"), H100) for stop in ("last", "converged"))
    paused = plan_run(paper_run(pause=1, keep="chosen", stored="bfloat16", state="newest"), H100)
    assert converged.disk_peak == paused.disk_peak < last.disk_peak


def test_a_checkpoint_that_is_asked_the_whole_suite_is_planned():
    config = paper_run(measure="selection", suite_steps=(50,), checkpoints=(20,))
    assert planned_steps(config) == config.steps() and 50 in planned_steps(config)[1]


def test_a_grid_file_named_like_a_stage_is_a_grid(tmp_path, capsys):
    from mixsd_nb.console.plan import main
    (tmp_path / "train.yaml").write_text("notebook: train\nfixed: {model: lab-s}\naxes:\n  seed: [0, 1, 2]\n")
    assert main(str(tmp_path / "train.yaml"), "--device", "cpu") in (0, 1)
    assert "3 cells" in capsys.readouterr().out


def test_runs_that_only_differ_in_their_seed_count_each(tmp_path):
    "Three seeds have three base evaluations and three mixings; the last rows count each once, and cells without shared runs."
    (tmp_path / "three.yaml").write_text("notebook: train\nfixed: {model: lab-s, method: mixsd}\naxes:\n  seed: [0, 1, 2]\n")
    table = plans.plan_all([str(tmp_path / "three.yaml")] * 2, "cpu")
    one, once = table.iloc[0], table.loc["all, once, on CPUs"]
    assert once.cells == one.cells == 3 and once.hours == pytest.approx(one.hours)
