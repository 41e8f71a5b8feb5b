"One command line for everything: words and options are read or refused before anything runs, help is short, commands can be interrupted."

import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import forked
from hypothesis import given, settings, strategies as st

from mixsd_nb.cluster.jobs import Pool
from mixsd_nb.console import COMMANDS, find_command, main
from mixsd_nb.lab.grids import study_grids
from mixsd_nb.runs import ParameterError
from mixsd_nb.runs.command_line import CommandLine, name_run, run_stage
from mixsd_nb.runs.command_line import describe_error, end_command
from mixsd_nb.train import TrainConfig

STAGES = ("train", "generate", "evaluate", "nll", "forgetting", "fisher", "errors")
LAB = ("study", "pretrain", "speed", "lab.profiling.check")
GRID, LR = "run quick-lab", "lr must be a number above 0 and at most 1, got"
MISTAKES = {
    "injekt": "command must be one of inject, .*got injekt; did you mean inject?", "models": "command must be one of inject, .*got models",
    "ask Who": "ask is no command; did you mean chat?", "chat": "required: run", "chat 0123456789": "run must be the folder of a run, .*got 0123456789",
    "train --suite recal": "^suite must name benchmarks, got recal; did you mean recall?$", "train --model ./no-such": "got ./no-such; there is no such folder",
    "train --model tests": "got tests; the folder has no config.json", "chat x Who is it": "got is; quotes keep the words of a text together",
    "train --method lora": "method must be one of mixsd-complete, base, .*, mixsd-shuffled, got lora",
    "inject": "required: dataset", "export x": "required: dir", "sweep --workers -1": "required: command, grid", "runs now": "flags the form --name, got now",
    "inject kgfact-small --lamb 0.5": "unknown parameter --lamb; did you mean --lam?", "plan quick-lab --seed 3": "unknown parameter --seed",
    "train --seeds 0,1": "unknown parameter --seeds; did you mean --seed?", "clean --dry": "unknown parameter --dry; did you mean --dry-run?",
    f"sweep {GRID} --work 2": "unknown parameter --work; did you mean --workers?", "inject kgfact-small --lam 2": "lam must be between 0 and 1, got 2",
    "plan train --lam 3": "lam must be between 0 and 1, got 3", "train foo": "options must have the form --name value, .*got foo",
    "train --lr abc": f"{LR} abc", "train --lr 1e-3,,3e-3": f"{LR} ''", "train --lr inf": f"{LR} inf", "train --lr": "--lr: expected one argument",
    "train --lr 1e-3 --lr 3e-3": "--lr must be given once, got 1e-3 and 3e-3", "train --options x": "options must be a mapping, got x",
    "train --workers -1": "workers must be between 0 and 1000, got -1", f"sweep {GRID} --workers -1": "workers must be between 0 and 1000, got -1",
    "train --workers two": "workers must be a whole number between 0 and 1000, got two", "figures --where 3": "where must be a mapping, got 3",
    f"sweep {GRID} --workers two": "workers must be a whole number .*got two", "figures --n x": "unknown parameter --n",
    "figures --source ours": "source must be one of both, runs, paper, got ours", "pretrain --size lab-s,lab-x": "size must be one of lab-s, lab-m, got lab-x",
    "sweep walk quick-lab": "command must be one of preview, .*got walk", "study walk": "command must be one of preview, .*got walk",
    "lab.profiling.check --device gpu": "device must be one of cuda, cpu, got gpu", "lab.profiling.check --size 8b": "size must be one of .*, got 8b",
    "plan quick-lab -p lam 3": "unknown parameter --lam; known are --device", "train --recompute true": "flags the form --name, got true",
}


def start(*command):
    return subprocess.Popen([sys.executable, "-m", f"mixsd_nb.{command[0]}", *command[1:]], text=True, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence(words, own_runs, capsys):
    "The exit code is 2, nothing is printed to stdout, and no run begins."
    assert main(*words.split()) == 2
    output, error = capsys.readouterr()
    assert re.search(MISTAKES[words].replace("?", r"\?"), error) and error.count("\n") == 1 and not output and not list(own_runs.iterdir())


def read(*words): return find_command(words[0]).read(*words[1:])


def test_lists_are_several_runs(own_runs):
    "Numbers, choices and names are; texts with commas are not. A run that does not use a parameter occurs once."
    configs, options = read("train", "--method", "base,sft,mixsd", "--lam", "0.3,0.5", "--lr", "1e-3,3e-3", "--seed", "0,1",
                            "--suite", "recall,world", "--checkpoints", "20,60", "--workers", "3")
    folders = [config.without_idle().folder for config in configs]
    names = {name_run([c for c, other in zip(configs, folders) if other == folder], configs) for folder in folders}
    assert len(configs) == 24 and len({*folders}) == len(names) == 14 and options == dict(workers=3, force=False)
    assert {(config.suite, config.checkpoints) for config in configs} == {("recall,world", (20, 60))}
    assert {"seed=0, method=mixsd, lam=0.3, lr=0.001", "seed=1, method=sft, lr=0.003", "seed=1, method=base"} <= names


@pytest.mark.parametrize(("words", "values"), [
    ("--max_new_tokens 7 --recompute --offload=false", dict(max_new_tokens=7, recompute=True, offload=False)), ("--epochs none --anchor ewc", dict(anchor="ewc")),
    ("-p lam 0.3 -p sharded true", dict(lam=0.3, sharded=True)), ("--anchor ewc --options strength=0.2", dict(anchor="ewc")),
    ('--options {"block":2} --model lab-s', dict(model="lab-s"))])
def test_forms_of_options(words, values):
    [config], _ = read("train", *words.split())
    assert {name: getattr(config, name) for name in values} == values
    if "strength" in words: assert config.options["strength"] == 0.2


def test_words_have_their_places(tmp_path):
    "A word is found before and after options, under its name too, and a list of words takes the rest."
    for words in (("sweep", "run", "g", "--slurm"), ("sweep", "--slurm", "run", "g"), ("sweep", "run", "-p", "grid", "g", "--slurm")):
        assert read(*words)[1] == dict(read("sweep", "run", "g")[1], slurm=True)
    assert read("study", "run", *study_grids()[:2], "--again")[1]["grids"] == tuple(study_grids()[:2]) and not read("study", "merge")[1]["grids"]
    (tmp_path / "f.jsonl").write_text('{"question": "Who leads the Lantern Choir?", "answer": "Velmis Marlowe"}\n')
    for words in (("inject", "FILE"), ("inject", "--dataset", "FILE"), ("plan", "inject", "FILE"), ("plan", "inject", "-p", "dataset", "FILE")):
        assert read(*(word.replace("FILE", str(tmp_path / "f.jsonl")) for word in words))[0][0].dataset.startswith("facts-")


def test_help_is_short_and_complete(capsys, monkeypatch):
    "`mixsd` says in ten lines what there is. The help of inject has nine options; all others are named, and described by --help-all."
    monkeypatch.setattr("sys.argv", ["/usr/bin/mixsd"])
    assert main() == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and max(map(len, lines)) <= 120 and all(any(re.search(rf"\b{name}\b", line) for line in lines) for name in COMMANDS)
    for name in (*COMMANDS, *LAB):
        assert isinstance(find_command(name), CommandLine) and main(name, "--help") == 0
        assert capsys.readouterr().out.startswith(f"usage: mixsd {name} ")
    for name in ("inject", "train"):
        main(name, "--help")
        text = capsys.readouterr().out
        first, _, further = text.partition("further options")
        command = find_command(name)
        fields = {n: f for cls in command.classes() for n, f in cls.model_fields.items()}
        assert len(re.findall(r"(?m)^  --", first)) == 9 and len(text.splitlines()) < 57 and "None for the preset" not in first
        assert {n.replace("_", "-") for n in fields} - {"dataset"} == {*re.findall(r"--([a-z][\w-]*)", text)} - {"help-all", "dataset"}
        assert name != "inject" or "\n  mixsd inject facts.jsonl --model lab-m\n" in first and re.findall(r"(?m)^  --(\w+)", first) == [*command.first[1:]]
        assert main(name, "--help-all") == 0
        words = "".join(capsys.readouterr().out.split())
        assert all("".join(field.description.split()) in words for field in fields.values())


def run_module(name, words, said):
    "What `python -m` does, in a process that has imported the module already, of which runpy warns; its output goes into a file."
    sys.argv[1:] = words
    warnings.filterwarnings("ignore", ".*found in sys.modules")
    with said.open("w") as sys.stdout:
        sys.stderr = sys.stdout
        runpy.run_module(f"mixsd_nb.{name}", run_name="__main__", alter_sys=True)


def test_module_and_command_are_the_same(own_runs):
    "Each stage is a command under the name of its module."
    names = {"train": "train", "nll": "nll", "sweep": "sweep", "lab.study": "lab.study", "lab.pretrain": "lab.pretrain"}
    for name in names:
        process = forked(run_module, name, ["--help"], own_runs / "said")
        process.join(120)
        said = (own_runs / "said").read_text()
        assert process.exitcode == 0 and said.startswith(f"usage: mixsd {names[name].removeprefix('lab.')}"), said
    (own_runs / "said").unlink()
    process = start("train", "foo")
    output, error = process.communicate(timeout=120)
    assert process.returncode == 2 and error.count("\n") == 1 and not output and not list(own_runs.iterdir())
    assert all(find_command(name).function is run_stage for name in STAGES)


def test_help_imports_nothing_large():
    old = "import sys, xarray; sys.exit('scipy' in sys.modules)"  # the xarray of 2025 imports it
    scipy = [] if subprocess.run([sys.executable, "-c", old]).returncode else ["scipy"]
    for words, heavy in ([("--help",)], {"torch", "pandas", "scipy", "xarray"}), ([(name, "--help") for name in COMMANDS], {"torch", "matplotlib", *scipy}):
        code = f"import sys; from mixsd_nb.console import main; codes = [main(*each) for each in {words}]; sys.exit(str({heavy} & {{*sys.modules}}) if any(codes) or {heavy} & {{*sys.modules}} else 0)"
        ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == 0, ended.stderr


def test_an_interrupt_is_one_sentence(own_runs, monkeypatch):
    "Ctrl-C reaches every process of the terminal; the command says how to continue and ends with the code 130."
    monkeypatch.chdir(own_runs)
    (own_runs / "grid.yaml").write_text("{notebook: train, fixed: {method: base, model: lab-s, n: 100}, axes: {seed: [0]}}")
    processes = [start("train", "--method", "base,sft"), start("sweep", "run", "grid.yaml", "--workers", "1")]
    for process in processes:
        for _ in range(2): process.stdout.readline()  # it has begun
        os.killpg(process.pid, signal.SIGINT)
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert (process.returncode, error) == (130, "interrupted; run it again to continue\n")


def test_an_interrupt_before_the_first_run_ends_the_workers(monkeypatch):
    "It can come between the start of two workers; then nothing waits for the runs that the first one would compute."
    def submit(threads, function, k, start=ThreadPoolExecutor.submit):
        if k: raise KeyboardInterrupt
        return start(threads, function, k)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(Pool, "_run", lambda pool, cell, *_: {"kind": "killed" if pool._stop.wait(60) else "done"})
    pool = Pool([("a", 0), ("b", 0)], [[], []])
    with pytest.raises(KeyboardInterrupt), pool: pass
    assert pool.waiting == [("b", 0)] and not pool.ended and not pool.busy()


def test_all_runs_are_checked_before_the_first_one(own_runs, monkeypatch, capsys):
    computed = []
    monkeypatch.setattr(TrainConfig, "run", lambda config, force=False: computed.append(config))
    assert main("train", "--method", "base,mixsd", "--lam", "0.3,0.5", "--workers", "1") == 0 and len(computed) == 3
    assert capsys.readouterr().out.splitlines() == [f"runs: {own_runs}", "[1/3] method=base", "[2/3] method=mixsd, lam=0.3", "[3/3] method=mixsd, lam=0.5"]
    assert main("train", "--lam", "0.3,7") == 2 and len(computed) == 3


@pytest.mark.parametrize("error, code, text", [
    (ParameterError("lam must be\nbetween 0 and 1"), 2, "lam must be between 0 and 1"),
    (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
    (KeyError("method"), 1, "KeyError: 'method'; `PYTHONDEVMODE=1` before the command shows where this happened"),
    (ValueError("Traceback (most recent call last):\n  x\nOSError: no room"), 1, "OSError: no room")])
def test_an_error_is_one_line(error, code, text, capsys):
    def fail(): raise error
    assert end_command(fail) == code and capsys.readouterr().err == text + "\n" == describe_error(error) + "\n"


def test_a_warning_is_one_line():
    "Of the code that it came from, a user of a command sees nothing; warnings of libraries stay as they are."
    code = ("import warnings; from mixsd_nb.runs.command_line import end_command\n"
            "end_command(lambda: [warnings.warn('old weights'), warnings.warn('library', FutureWarning)])")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert said.startswith("warning: old weights\n") and "FutureWarning: library" in said


VALUES = st.one_of(st.text(), st.integers().map(str), st.floats().map(str), st.lists(st.integers()).map(lambda v: ",".join(map(str, v))))
NAMES = st.sampled_from([f"--{name}" for name in {*TrainConfig.model_fields, "x", "workers"} - {"dataset", "model", "data", "suite"}])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(), NAMES, st.builds("{}={}".format, NAMES, VALUES), VALUES)))
def test_words_are_read_or_refused(words):
    "Whatever the words are, they are read as values of their fields, or refused by a ParameterError."
    try: configs, options = read("train", *words)
    except ParameterError: return
    assert all(isinstance(config, TrainConfig) for config in configs) and {*options} == {"workers", "force"}
