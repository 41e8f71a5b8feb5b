"""The commands refuse unknown or unreadable words before anything runs, print help, and can be interrupted."""

import os
import signal
import subprocess
import sys
from importlib import import_module

import pytest
from hypothesis import given, settings, strategies as st

from mixsd_nb import train
from mixsd_nb.runs import ParameterError
from mixsd_nb.runs.commands import describe_error, end_command, read_words, words_of
from mixsd_nb.runs.pool import PoolConfig
from mixsd_nb.train import TrainConfig

COMMANDS = ("train", "figures", "pretrain", "speed", "sweep")
MISTAKES = {
    ("train", "seeds=0,1"): "unknown parameter seeds; did you mean seed?",
    ("train", "foo"): "words must have the form name=value, got foo; known are lr, seed, workers",
    ("train", "lr=abc"): "lr must be a number above 0 and at most 1, got abc",
    ("train", "lr=1e-3,,3e-3"): "lr must be a number above 0 and at most 1, got ''",
    ("train", "lr=1e-3", "lr=3e-3"): "lr must be given once, got lr=3e-3 as well",
    ("train", "lr=inf"): "lr must be a number above 0 and at most 1, got inf",
    ("train", "workers=-1"): "workers must be between 0 and 1000, got -1",
    ("train", "workers=two"): "workers must be a whole number between 0 and 1000, got two",
    ("train", "--lr", "3"): "unrecognized arguments: --lr; --help shows what the command takes",
    ("figures", "n=abc"): "n must be a whole number of at least 1, got abc",
    ("figures", "epoch=20"): "unknown parameter epoch; did you mean epochs?",
    ("figures", "source=ours"): "source must be one of both, runs, paper, got ours",
    ("pretrain", "foo"): "words must have the form name=value, got foo; known are size, n",
    ("pretrain", "size=lab-s,lab-x"): "size must be one of lab-s, lab-m, got lab-x",
    ("sweep", "--workers", "-1"): "the following arguments are required: command, grid",
    ("sweep", "run", "quick-lab", "--workers", "-1"): "workers must be between 0 and 1000, got -1",
    ("sweep", "run", "quick-lab", "--workers", "two"): "workers must be a whole number between 0 and 1000, got two",
    ("sweep", "run", "quick-lab", "--work", "2"): "unrecognized arguments: --work 2",
    ("sweep", "walk", "quick-lab"): "invalid choice: 'walk'",
}


def start(*command, **environment):
    return subprocess.Popen([sys.executable, "-m", f"mixsd_nb.{command[0]}", *command[1:]], text=True,
                            env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize("command", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_sentence(command, own_runs, capsys):
    "The exit code is 2, nothing is printed to stdout, and no run begins."
    assert import_module(f"mixsd_nb.{command[0]}").main(*command[1:]) == 2
    output, error = capsys.readouterr()
    assert error.count("\n") == 1 and MISTAKES[command] in error and not output and not list(own_runs.iterdir())


def test_help_and_mistakes_of_the_processes(own_runs):
    "Every command prints what it takes, and the process ends with the code 2 after a mistake."
    processes = {name: start(name, "--help") for name in COMMANDS}
    mistake = start("train", "foo")
    for name, process in processes.items():
        output, error = process.communicate(timeout=120)
        assert process.returncode == 0 and f"usage: python -m mixsd_nb.{name}" in output and not error, error
    output, error = mistake.communicate(timeout=120)
    assert mistake.returncode == 2 and error.count("\n") == 1 and not output, error
    assert not list(own_runs.iterdir())


def test_help_names_every_word(capsys):
    assert train.main("-h") == 0
    output = capsys.readouterr().out
    for name, default in dict(lr="0.001", seed="0", workers="0").items():
        field = (TrainConfig.model_fields | PoolConfig.model_fields)[name]
        assert f"{name} " in output and field.description in output and f"default {default})" in output


GRID = "{notebook: train, fixed: {method: base, model: lab-s, n: 100}, axes: {seed: [0]}}"


def test_an_interrupt_is_one_sentence(own_runs, monkeypatch):
    "Ctrl-C reaches every process of the terminal; the command says how to continue and ends with the code 130."
    monkeypatch.chdir(own_runs)
    (own_runs / "grid.yaml").write_text(GRID)
    processes = [start("train"), start("sweep", "run", "grid.yaml", "--workers", "1")]
    for process in processes:
        process.stdout.readline()  # it has begun
        os.killpg(process.pid, signal.SIGINT)
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert (process.returncode, error) == (130, "interrupted; run it again to continue\n")


def test_main_runs_are_checked_before_the_first_one(monkeypatch, capsys):
    computed = []
    monkeypatch.setattr(TrainConfig, "run", lambda config: computed.append(config))
    assert train.main("lr=1e-3,3e-3", "seed=0,1", "workers=1") == 0 and len(computed) == 14
    assert "[3/14] method=mixsd, lam=0.3, lr=0.001, seed=0, checkpoints=" in capsys.readouterr().out

    def refuse(rates, seeds): return [dict(seed=0), dict(lam=7)]
    monkeypatch.setattr(train, "main_runs", refuse)
    assert train.main() == 2 and len(computed) == 14


@pytest.mark.parametrize("error, code, text", [
    (ParameterError("lam must be\nbetween 0 and 1"), 2, "lam must be between 0 and 1"),
    (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
    (KeyError("method"), 1, "KeyError: 'method'; `PYTHONDEVMODE=1` before the command shows where this happened"),
    (ValueError("Traceback (most recent call last):\n  x\nOSError: no room"), 1, "OSError: no room"),
])
def test_an_error_is_one_line(error, code, text, capsys):
    def fail(): raise error
    assert end_command(fail) == code and capsys.readouterr().err == text + "\n" == describe_error(error) + "\n"


def test_a_warning_is_one_line():
    "Of the code that it came from, a user of a command sees nothing; warnings of libraries stay as they are."
    code = ("import warnings; from mixsd_nb.runs.commands import end_command\n"
            "end_command(lambda: [warnings.warn('old weights'), warnings.warn('library', FutureWarning)])")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert said.startswith("warning: old weights\n") and "FutureWarning: library" in said


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(), st.builds("{}={}".format, st.sampled_from([*TrainConfig.model_fields, "x"]), st.one_of(
    st.text(), st.integers().map(str), st.floats().map(str), st.lists(st.integers()).map(lambda v: ",".join(map(str, v))))))))
def test_words_are_read_or_refused(words):
    "Whatever the words are, they are read as values of their fields, or refused by a ParameterError."
    known = words_of(TrainConfig, *(set(TrainConfig.model_fields) - {"dataset", "model", "data", "suite"})) | words_of(TrainConfig, "lr", many=True)
    try: values = read_words(known, words)
    except ParameterError: return
    assert set(values) == {word.partition("=")[0] for word in words}
