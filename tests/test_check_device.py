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


def test_a_report_has_the_rate_of_plans():
    "The median of the parts: a mixed token is computed twice, and four tokens are read in the time of one."
    part = lambda name, rate: dict(name=name, tokens_per_second=rate)
    parts = [part("mix, hf", 50.0), part("evaluate", 90.0), part("NLL", 440.0), part("Fisher", 1.0), part("train, sft", 120.0), part("load", 0.0), part("train, opsd", 0.0)]
    report = dict(parts=parts, parameters=1.72e9, rate_tflops=600)
    assert check.measured_rate(report) == pytest.approx(105 * 2.72e9) and not check.measured_rate(report | dict(parts=[]))
