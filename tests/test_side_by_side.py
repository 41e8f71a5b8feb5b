"""Runs side by side: the same bytes as one after the other, shared runs once, and errors, kills and interrupts of processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import until
from side_by_side_stages import Sum

from mixsd_nb import train
from mixsd_nb.cluster.jobs import compute_runs
from mixsd_nb.runs import find_runs, make_config

HERE = Path(__file__).parent


@pytest.fixture
def runs(own_runs, monkeypatch):
    monkeypatch.setenv("MIXSD_PLUGINS", "side_by_side_stages")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return own_runs


def bytes_of(folder): return {path.parent.name: path.read_bytes() for path in Path(folder).glob("*/result.nc")}


def lines_of(folder): return [line.rsplit(" ", 1) for line in (folder / "log.txt").read_text().splitlines()]


def sums(**fail): return {f"sum {k}": Sum(number=k, source=k % 2, fail=fail.get(f"f{k}", "")) for k in range(4)}


def test_runs_are_the_same_side_by_side(runs, monkeypatch, capsys):
    "Two cells that need each other to go on end, so they run at the same time; every shared run is computed once."
    assert compute_runs(sums(f0="meet", f1="meet"), workers=2) == 0
    output, error = capsys.readouterr()
    assert sorted(line.partition(":")[0] for line in output.splitlines() if line.startswith("sum")) == [*sums()] and not error
    done = lines_of(runs)
    assert sorted(text for text, _ in done) == ["source 0", "source 1", *sums()] and len({pid for _, pid in done}) == 2
    here = runs / "here"
    here.mkdir()
    monkeypatch.setenv("MIXSD_RUNS", str(here))
    (here / "log.txt").write_text("sum 0\nsum 1\n")
    assert compute_runs(sums(f0="meet", f1="meet"), workers=1) == 0
    assert bytes_of(here) == bytes_of(runs) and len(bytes_of(here)) == 6
    capsys.readouterr()
    assert compute_runs(sums(f0="meet", f1="meet"), workers=2) == 0 and len(lines_of(here)) == 8, "finished runs are found"


FAILURES = dict(raises="KeyError: 1; `PYTHONDEVMODE=1` before the command shows where this happened", check="fail must be empty, got check",
                kill="the process was killed (exit status -9); run it again to continue")


@pytest.mark.parametrize("failures, workers, code", [(["raises"], 1, 1), (["check"], 1, 2), (["raises", "kill"], 2, 1), (["check"], 2, 2)])
def test_an_error_ends_one_run(failures, workers, code, runs, capsys):
    assert compute_runs(sums(**{f"f{k}": failure for k, failure in enumerate(failures, 1)}), workers=workers) == code
    *errors, last = capsys.readouterr().err.splitlines()
    assert sorted(line.removeprefix("sum 1: ").removeprefix("sum 2: ") for line in errors) == sorted(FAILURES[failure] for failure in failures)
    assert last == "finished runs are kept; run it again to compute the others"
    assert len(find_runs(stage="pooltest-sum")) == 4 - len(failures)


def test_what_needs_a_failed_run_fails_with_its_sentence(runs, capsys):
    cells = {f"sum {k}": Sum(number=k, source=k, fail="source" * (k < 2)) for k in (0, 1, 2)}
    cells["sum 3"] = Sum(number=3, source=0, fail="source")
    assert compute_runs(cells, workers=3) == 1
    error = capsys.readouterr().err
    assert error.count("number 0 cannot be read") == 2 and error.count("number 1 cannot be read") == 1
    assert len(find_runs(stage="pooltest-sum")) == 1


COMMAND = """from side_by_side_stages import Sum
from mixsd_nb.cluster.jobs import compute_runs
from mixsd_nb.runs.command_line import end_command
raise SystemExit(end_command(compute_runs, {f"sum {k}": Sum(number=k, fail="wait") for k in range(4)}, 2))"""


@pytest.mark.parametrize("number, code, sentence", [(signal.SIGINT, 130, "interrupted; run it again to continue\n"), (signal.SIGKILL, -9, "")])
def test_no_process_survives_the_command(number, code, sentence, runs):
    "After an interrupt or a kill of the command, its workers end, and the sentence is printed once."
    command = subprocess.Popen([sys.executable, "-c", COMMAND], text=True, stderr=subprocess.PIPE, start_new_session=True)
    until(lambda: (runs / "log.txt").exists() and len(lines_of(runs)) == 2)
    os.killpg(command.pid, number)
    assert command.communicate(timeout=60)[1] == sentence and command.returncode == code
    for _, pid in lines_of(runs): until(lambda: not Path(f"/proc/{pid}").exists(), what=f"the end of {pid}")
    assert not find_runs(stage="pooltest-sum")


@pytest.mark.slow
def test_two_cells_of_the_table(runs, tiny, monkeypatch):
    "A trained and a mixed cell side by side, with a process that measures checkpoints of one of them, have the same bytes as one after the other."
    small = dict(model=tiny, n=2, epochs=1, max_new_tokens=8, target_tokens=8, suite="recall", checkpoints=(2,))
    cells = {name: make_config(train.TrainConfig, **small, **method) for name, method in
             dict(sft=dict(method="sft"), mixed=dict(method="mixsd", lam=1.0, options=dict(fallback="canonical"))).items()}
    found = {}
    for workers in (2, 1):
        folder = runs / str(workers)
        folder.mkdir()
        monkeypatch.setenv("MIXSD_RUNS", str(folder))
        assert compute_runs(cells, workers) == 0
        found[workers] = bytes_of(folder)
    assert found[1] == found[2] and sorted(name.partition("-")[0] for name in found[1]) == ["evaluate", "generate", "train", "train"]


MODELS = ["torch", "transformers", "accelerate", "peft", "datasets", "sympy", "math_verify", "networkx", "papermill"]
DRAWING = ["matplotlib", "seaborn", "IPython", "ipywidgets"]
STARTS = {**dict.fromkeys(["train", "evaluate", "generate", "sweep", "lab.pretrain", "lab.speed"], MODELS + DRAWING), **dict.fromkeys(["nll", "errors", "figures"], MODELS)}


def test_the_start_of_a_stage_is_light():
    "The module of a stage imports no package that only its work needs: torch and transformers take seconds, and a command may have nothing to compute."
    code = "\n".join(["import importlib, sys", f"for stage, heavy in {STARTS}.items():", "    importlib.import_module('mixsd_nb.' + stage)",
                      "    assert not (found := [name for name in heavy if name in sys.modules]), (stage, found)"])
    subprocess.run([sys.executable, "-c", code], check=True)
