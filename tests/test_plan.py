"A plan agrees with measured memory, refuses what cannot fit, and covers every method, stage and shipped grid."

import functools
import gc
import itertools
import json
import re
import shlex
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb import evaluate, train
from mixsd_nb.benchmarks import SUITES
from mixsd_nb.planning import estimates
from mixsd_nb.planning import plan as plans
from mixsd_nb.planning.estimates import Burden, Layout, fisher_peak, optimiser_peak, scoring_peak, serve, update_peak
from mixsd_nb.planning.estimates import DEVICES, VLLM, Machine, machine_for
from mixsd_nb.cluster.grid import Resources, list_grids, read_grid
from mixsd_nb.planning.preflight import UNPUBLISHED, MACHINE, check_inputs, list_deviations
from mixsd_nb.planning.plan import GridPlan, format_all, plan_cells, plan_grid, plan_run, planned_cells
from mixsd_nb.planning.workload import RunPlan, burden_of, planned_steps, smallest_layout, training_peaks
from mixsd_nb.console import find_command, main
from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.methods import ANCHORS, GATES, METHODS, Demand, Method, runnable_methods
from mixsd_nb.models.engine_vllm import PART
from mixsd_nb.models import load_tokenizer
from mixsd_nb.models.geometry import GEOMETRIES, count_shape, read_shape
from mixsd_nb.models.tiny import random_model
from mixsd_nb.runs import ParameterError, find_stage, make_config, project_root
from mixsd_nb.runs.config import is_runtime

H100 = Machine("h100", DEVICES["h100"], 4, 400)
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
    words = dict(re.findall(r"(\w+)=(\w+)", plan.problems["rollout"]))
    fitting = plan_run(paper_run(method="opsd", dataset="kgfunc", **words), Machine("h100", DEVICES["h100"], int(words["processes"]), 4_000))
    assert {*fitting.problems} <= {"disk"} and not plan_run(paper_run(), H100).problems
    crowded = plan_run(paper_run(engine="hf"), H100)
    rows = int(crowded.problems["hf"].rpartition("batch_size=")[2].removesuffix(" fits"))
    assert "hf" not in plan_run(paper_run(engine="hf", batch_size=rows), H100).problems


@pytest.mark.parametrize(("machine", "kind", "words"), [
    (dict(memory=20), "host", "GB on each node, got 20"),
    (dict(gpus=2), "processes", "processes must be at most 2"),
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
    monkeypatch.setattr(estimates, "free_disk", lambda folder: 4_000)
    assert main("plan", "inject", str(EXAMPLE), "--model", "lab-m") == 0
    out = capsys.readouterr().out
    assert out.startswith("plan: ") and not re.search(r"differs from|0\.0 hours|\b0\.00\b", out) and out.count("\n") <= 2
    large = "plan", "inject", str(EXAMPLE), "--model", "Qwen/Qwen3-8B", "--lora", "16", "--batch-size", "8", "--suite", "in-domain", "--memory", "52"
    assert main(*large) == 3 and re.match(r"plan: \S+ GB of 52 GB in update, tight: may not fit, ", capsys.readouterr().out)
    assert main("plan", "inject", str(EXAMPLE), "--model", "Qwen/Qwen3-8B", "--device", "rtx4090") == 1
    fitting = capsys.readouterr().out.splitlines()[-1]
    words, needs = shlex.split(re.match(r"fits with (.*) \(", fitting)[1]), re.findall(r"([\d.]+) GB", fitting)
    assert len(needs) >= 5 and max(map(float, needs)) <= 22 and "--lora" in words
    assert main("plan", "inject", str(EXAMPLE), "--model", "Qwen/Qwen3-8B", "--memory", "24", *words) == 0
    nf4 = plan_run(make_config(train.TrainConfig, model="Qwen/Qwen3-8B", lora=16, quantise="nf4", recompute=True), machine_for(Resources(gpus=1), "rtx4090"))
    assert nf4.peaks["load"] < 7e9 and nf4.peaks["update"] < 12e9 and nf4.disk_peak < 4e9
    monkeypatch.setattr(estimates, "free_disk", lambda folder: 0.5)
    assert main(*large) == 1 and "\ndoes not fit: checkpoints need" in capsys.readouterr().out


def test_the_disk_of_finished_runs_is_there_already():
    runs = lambda *finished: [RunPlan("lab-s", disk=6e9, disk_peak=8e9, finished=done) for done in finished]
    problems = lambda *finished: GridPlan("g", replace(H100, disk=10), dict(enumerate(cells := runs(*finished))), cells, 1).problems()
    assert problems(False, False) == {"all cells need 14 GB of disk, of which 10 GB are free": 2}
    assert problems(True, False) == problems(True, True) == {}


def test_vllm_reserves_weights_cache_and_logits():
    shape = read_shape("Qwen/Qwen3-8B")
    one, four = serve(shape, 16_384), serve(shape, 16_384, gpus=4)
    assert one.weights == 2 * shape.parameters == 4 * four.weights and one.cache == 4 * four.cache and one.least > one.weights + one.cache
    assert one.logprobs == PART * 151_936 * 10


# --- methods, stages, grids


PLANNED = [*(dict(method=name) for name in runnable_methods()), *(dict(method="opsd", anchor=name) for name in ANCHORS), *(dict(method="mixsd", gate=name) for name in GATES), dict(method="opsd", lora=8),
           dict(method="own-words", anchor="replay"), dict(method="memit-each")]


@pytest.mark.parametrize("parts", PLANNED, ids=lambda parts: "+".join(map(str, parts.values())))
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
    sft, own, replay = run(), run("own-words"), run(anchor="replay")
    prompt, reply = SUITES["gsm8k"].lengths
    facts = len(load_corpus("kgfunc", "train"))
    assert replay.tokens - sft.tokens == pytest.approx(200 * (reply + prompt / 4) + facts * (prompt + reply))
    assert own.tokens - sft.tokens > facts * CORPORA["kgfunc"].mixed[0.0]
    for plan in own, replay: assert plan.peaks["update"] > sft.peaks["update"] and plan.peaks["draft"] > 2 * read_shape("Qwen/Qwen3-1.7B").parameters
    without = run(anchor="replay", options=dict(share=0.0))
    assert (without.tokens, without.peaks) == (sft.tokens, sft.peaks)


def test_shared_runs_count_once(own_runs):
    plan = plan_grid("quick-lab")
    assert len(plan.cells) == 5 and len(plan.runs) == 7 and plan.seconds == pytest.approx(sum(run.seconds for run in plan.runs.values()))


def test_axes_over_unfinished_grids_are_planned(own_runs):
    assert len(planned_cells("high-nll")) == len(planned_cells("high-nll-targets")) == 48
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


def test_a_pause_bounds_the_weights():
    "KGFact-Small has five checkpoints; two states of 12 bytes a parameter exist while one is written."
    parameters = read_shape("Qwen/Qwen3-8B").parameters
    peaks = {stop: plan_run(paper_run(stop=stop, keep="chosen"), H100).disk_peak for stop in ("last", "converged")}
    assert {stop: (peak - 24 * parameters) / (2 * parameters) for stop, peak in peaks.items()} == dict(last=5, converged=4)


def test_planned_steps_are_those_of_the_run():
    for more in ({}, dict(checkpoints=(20, 60)), dict(epochs=3), dict(dataset="kgfunc-lab")):
        config = make_config(train.TrainConfig, method="sft", **more)
        assert planned_steps(config) == config.steps()


def test_the_page_of_all_shipped_grids_fits_a_screen():
    "Every grid has a plan that fits, apart from the disk, and the guide says what those of the paper need together."
    page = format_all(list_grids(), "h100")
    lines = page.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 120 and " !" not in page.removesuffix(lines[-1])
    assert all(re.search(rf"(^|\s){name}\s+[1-9]", page) for name in list_grids())
    *_, hours, size = next(line for line in lines if "GPU-hours" in line).split()
    assert f"{float(hours):.0f} GPU-hours of H100s and {float(size) / 1e3:.1f} TB" in (project_root() / "nbs/guides/scale.md").read_text()


PAPER_GRIDS = [name for name in list_grids() if read_grid(name)[1].resources.get("gpus")]


@pytest.mark.slow  # 60 s
@pytest.mark.parametrize("name", PAPER_GRIDS)
def test_a_cell_asks_for_as_many_gpus_as_it_needs(name):
    """Every cell of the paper's grids has the GPUs of its smallest layout, no more and no fewer, and enough of all else.

    The exception is an optimiser in the host's memory, with which 4B needs one GPU and not two, and seconds an update."""
    plan, exceptions = plan_grid(name, "h100"), set()
    for config, cell in zip(planned_cells(name), plan.cells):
        assert not {*cell.problems} - {"disk"}, cell.problems
        if "offload=true" in cell.remedies.get("update", ""): exceptions.add(config.model)
        if "update" not in cell.peaks:  # an evaluation, a mixing, an edit, or an analysis
            assert cell.gpus == 1
            continue
        found = smallest_layout(read_shape(config.model), burden_of(config), Layout(gpu=True), H100.room)
        assert cell.gpus == found.processes == config.processes == config.replicas, (cell.model, cell.method)
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


# --- inputs and commands


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
        assert not plan_run(config, Machine("h100", DEVICES["h100"], 1, 400)).problems, words


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
        elif name == "quantise": assert "quantise=nf4, published none" in list_deviations([runs[0].model_copy(update=dict(lora=8, quantise="nf4"))])
        elif name not in {*UNPUBLISHED, "options"}:
            value = lambda run: "train:100" if name == "suite" else changed(getattr(run, name))
            assert any(text.startswith(f"{name}=") for run in runs for text in further(run, name, "known-lab" if name == "dataset" else value(run))), name
    for run in runs:
        for name, value in run.options.items():
            assert further(run, "options", run.options | {name: changed(value)})[0].startswith(f"options[{name}]="), (run.method, name)


def test_commands(own_runs, capsys):
    assert main("plan", "quick-lab") == 0 and re.search("5 cells and 2 shared runs.*core-hours", capsys.readouterr().out)
    assert main("plan", "train", "--model", "Qwen/Qwen3-8B", "--method", "opsd", "-p", "preset", "paper", "--device", "h100") == 1
    assert "does not fit" in capsys.readouterr().out
    assert main("plan", "quick-lab", "--device", "h1000") == 2 and "did you mean h100?" in capsys.readouterr().err
    assert main("plan", "quick-lap") == 2 and not list(own_runs.iterdir())


# --- time


MEASURED = {part["name"]: part for part in json.loads((project_root() / "papermill_runs/gpu/report.json").read_text())["parts"]}
OF_UPDATES = {name.removeprefix("train, "): part["notes"]["seconds_of_update"] for name, part in MEASURED.items() if name.startswith("train, ")}


@pytest.mark.parametrize("recipe", [name for name in OF_UPDATES if name not in ("mixsd", "mixsd+lora")])  # their targets were canonical ones
def test_trainings_on_the_measured_gpu_take_what_was_measured(recipe):
    "Within a factor of two, with the configuration of the report; lengths are estimated, because the tokenizer of Qwen3 is not here."
    method, _, added = recipe.partition("+")
    config = make_config(train.TrainConfig, method=method, **({"lora": 8} if added == "lora" else {"anchor" if added in ANCHORS else "gate": added}), model="Qwen/Qwen3-1.7B", preset="paper", dataset="kgfact-small",
                         suite="recall", epochs=1, batch=20, rollouts=8, rollout_tokens=64, target_tokens=64, batch_size=160, checkpoints=())
    machine = Machine("h200", DEVICES["h200"], 1)
    five, ten = (plan_run(config.model_copy(update=dict(epochs=epochs)), machine).seconds for epochs in (1, 2))
    assert 0.5 < (ten - five) / 5 / OF_UPDATES[recipe] < 2


@pytest.mark.parametrize(("name", "tokens"), [("mix, hf", 2 * 4096 + 64 * 110 / 4), ("evaluate", 4096 + 64 * 31 / 4), ("NLL", 2939 / 4)])
def test_decoding_and_scoring_on_the_measured_gpu_take_what_was_measured(name, tokens):
    "A mixed token is computed by both conditionals. The report has 64 sequences of 64 tokens."
    part = MEASURED[name]
    assert 0.5 < Machine("h200", DEVICES["h200"], 1).seconds(tokens, 1.72e9) / (part["tokens"] / part["tokens_per_second"]) < 2


def test_vllm_takes_what_was_published():
    "1,000 requests of 1,024 and 2,048 tokens with Qwen3-8B on an H100: 378.6 s."
    tokens = 1_000 * (2_048 + 1_024 / 4) / VLLM
    assert 0.5 < Machine("h100", DEVICES["h100"], 1).seconds(tokens, 8.19e9) / 378.6 < 2


SMOL = dict(model="HuggingFaceTB/SmolLM2-135M-Instruct", preset="real")
SEEDS = SMOL | dict(dataset="kgfact-small", dataset_options=dict(extract="contains", instruction=""), suite="recall,recall-reworded,real,real-opened",
                    checkpoints=[40], n=500, limit=500, measure="all")
CELL = dict(model="lab-m", checkpoints=[20, 60])  # of `make run`


@pytest.mark.parametrize(("stage", "parameters", "seconds"), [
    ("evaluate", dict(model="lab-m"), 47), ("generate", dict(model="lab-m", lam=0.5), 57), ("train", CELL | dict(method="sft"), 190),
    ("train", CELL | dict(method="mixsd", lam=0.3), 190), ("train", SEEDS | dict(method="sft"), 18 * 60), ("train", SEEDS | dict(method="mixsd-complete"), 55 * 60)])
def test_runs_on_a_core_take_what_was_measured(stage, parameters, seconds):
    "Seconds of the processor, without the runs that a run shares with others."
    plan = plan_run(make_config(find_stage(stage), **parameters), Machine("cpu", DEVICES["cpu"]))
    assert 0.5 < plan.seconds / seconds < 2


@pytest.mark.parametrize(("parameters", "seconds"), [(dict(model="lab-m"), 245), (SMOL, 40 * 60)])
def test_an_injection_takes_what_was_measured(own_runs, parameters, seconds):
    "The thirty example facts with the default recipe, all of its runs together."
    from mixsd_nb.corpora.files import EXAMPLE
    machine = Machine("cpu", DEVICES["cpu"])
    plan = plan_cells("inject", machine, dict(run=(make_config(find_stage("inject"), dataset=str(EXAMPLE), **parameters), machine)))
    assert 0.5 < plan.seconds / seconds < 2


def test_a_gpu_whose_rate_is_unknown_has_no_time():
    machine = Machine("GPU", DEVICES["h100"]._replace(rate=0), 1)
    line = plans.describe_plan(plan_run(paper_run("Qwen/Qwen3-1.7B", processes=1, sharded=False), machine), machine)
    assert line.startswith("plan: ") and "about" not in line
