"""The check of one device, with the tiny shape on the CPU."""

import json

import pytest

from mixsd_nb.lab.profiling import check


@pytest.mark.slow
def test_the_whole_check(tmp_path, monkeypatch, own_runs, capsys):
    "Every part succeeds, and its line and the report tell what it measured."
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "report.json"
    assert check.main("--device", "cpu", "--out", str(file)) == 0, capsys.readouterr()
    report = json.loads(file.read_text())
    parts = {part["name"]: part for part in report["parts"]}
    assert not [part for part in report["parts"] if part["error"] and not part["name"].endswith("vllm")] and report["size"] == "tiny"
    for name in ("mix, hf", "evaluate", "NLL", "Fisher", "train, sft", "train, opsd"):
        assert parts[name]["tokens"] > 0 and parts[name]["peak_gib"] > 0 and 0 < parts[name]["share"] < 1, name
    assert parts["resume"]["notes"]["largest_difference"] == 0 and parts["resume"]["notes"]["checkpoint_gb"] > 0
    assert parts["compare with CPU"]["notes"]["different_sequences"] == 0
    output = capsys.readouterr().out
    assert all(line in output for line in parts) and "file" not in output
    assert {*check.trainable_recipes()} == {name.removeprefix("train, ") for name in parts if name.startswith("train, ")}


def test_only_recipes_that_need_an_able_model_are_left_out():
    found = check.trainable_recipes()
    assert {"sft", "mixsd", "opsd", "sdft", "sft+ewc", "sft+stm"} <= {*found}
    assert not {"base", "memit", "own-words", "sft+replay", "sft+replay-kl", "sft+average"} & {*found}


def test_an_error_is_a_line_of_the_report(tmp_path, monkeypatch, own_runs, capsys):
    "The other parts follow, the code is 1, and methods are skipped when the minutes are over."
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("mix_facts", "ask_facts", "square_gradients", "resume_training", "compare_with_cpu"): monkeypatch.setattr(check, name, lambda *_: (0, {}))
    monkeypatch.setattr(check, "score_facts", lambda device: 1 / 0)
    file = tmp_path / "report.json"
    assert check.main("--device", "cpu", "--minutes", "0", "--out", str(file)) == 1
    errors = {part["name"]: part["error"] for part in json.loads(file.read_text())["parts"] if part["error"]}
    assert errors.pop("NLL") == "ZeroDivisionError: division by zero" and {*errors.values()} == {"skipped: no time"}
    assert "failed: NLL" in capsys.readouterr().out


def test_a_report_becomes_the_rates_of_plans(own_runs):
    "With a part for each kind of work; of several trainings the median counts, and a failed part not at all."
    from mixsd_nb.planning.rates import RATES, current_rates, write_rates
    work = lambda kind, seconds, **amounts: dict(work=dict(kind=kind, seconds=seconds, **amounts))
    part = lambda name, notes, error="": dict(name=name, notes=notes, error=error)
    parts = [part(f"train, {k}", work("update", seconds, passes=1, tokens=920)) for k, seconds in enumerate((0.1, 0.3, 0.2))]
    parts += [part("evaluate", work("decode hf", 2.0, passes=64, written=4096)), part("evaluate, vllm", {}, "ImportError"), part("load", {})]
    rates = check.collect_rates(dict(size="1.7b", parts=parts), "here.json")
    assert [(rate.kind, rate.seconds, rate.written) for rate in rates] == [("update", 0.2, 0.0), ("decode hf", 2.0, 4096)]
    assert not check.collect_rates(dict(size="tiny", parts=parts), "here.json")
    write_rates(own_runs / "rates.json", rates)
    here = [rate for rate in current_rates() if rate.source.startswith("here.json")]
    assert here == rates and len(current_rates()) < len(RATES) + 2
