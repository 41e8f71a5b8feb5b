"Functions that several test files call."

import ast
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

import mixsd_nb
from mixsd_nb.benchmarks import SUITES, Suite
from mixsd_nb.benchmarks.sandbox import SandboxError, check_sandbox
from mixsd_nb.corpora import CORPORA, Corpus, Schedule
from mixsd_nb.methods import METHODS, TRAINED, Method
from mixsd_nb.methods.distill import VARIANTS, distill_items
from mixsd_nb.models import load_base, load_tokenizer
from mixsd_nb.models.tiny import random_model
from mixsd_nb.runs import checkpoint_steps, find_stage, load_plugins
from mixsd_nb.runs.processes import _begin
from mixsd_nb.training.trainer import TrainingSpec


def small_model(folder, tokenizer="lab-m", *, seed=0, scale=1, layers=1, heads=1, head_dim=32, feed_forward=32, context=2048):
    "Save a random model with tied embeddings and the tokenizer of a lab model; returns its folder. With a scale of 4, its response depends on the prompt."
    tokenizer = load_tokenizer(tokenizer)
    model = random_model(tokenizer, seed=seed, scale=scale, layers=layers, heads=heads, head_dim=head_dim, feed_forward=feed_forward, context=context)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


PAIRS = [(list(range(5, 9 + k)), list(range(20, 23 + 2 * k)) + [2]) for k in range(6)]  # of ids of prompts and completions


def stored_training(folder, **options):
    "A training of a model in a folder on PAIRS."
    same = dict(lr=1e-3, batch=4, objective="methods.supervised:stored_pairs", data=dict(pairs=PAIRS), seed=3)
    return TrainingSpec(folder, **same | options)


def distillation_training(folder, **options):
    "The same, on-policy: rollouts at T=1, scored by a teacher that sees the answer."
    items = distill_items(load_tokenizer(folder), [dict(id=f"i{k}", prompt="Q" * k + "?", target="The answer is A.") for k in range(5)])
    data = dict(items=items, variant=VARIANTS["opsd"], rollouts=2, max_new_tokens=5)
    return stored_training(folder, **options | dict(objective="methods.distill:distillation", data=data))


def parameters_of(source):
    "The parameters of a model by name; of a run, those of its first checkpoint."
    return dict(load_base(source if isinstance(source, str) else str(source.checkpoints[1]))[0].named_parameters())


def last_weights(run): return load_file(list(checkpoint_steps(run).values())[-1] / "model.safetensors")


def need(reason):
    "Skip a test that this machine cannot run; on CI the test fails instead."
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def need_tools(*names):
    "Skip a test if one of these programs is not installed."
    missing = [name for name in names if shutil.which(name) is None]
    if missing: need(f"{', '.join(missing)} not found; `make ci-tools` installs what the tests need")


def need_sandbox():
    "Skip a test if generated code cannot be isolated; on CI the test fails instead."
    try: check_sandbox()
    except SandboxError as error: need(str(error))


def error_sentence(call):
    "The one-line message of a call's ValueError, with which Python shows no other exception."
    with pytest.raises(ValueError) as caught: call()
    error = caught.value
    assert "\n" not in str(error) and (error.__suppress_context__ or error.__context__ is None)
    return str(error)


def outputs_by_hash_seed(code):
    "The outputs of a program under two hash seeds of Python, neither of which is that of pytest, as a set of byte strings."
    return {subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
                           capture_output=True, check=True).stdout for seed in "12"}


def stage_of(name):
    "The class of a stage, also of the one in a room."
    import_module("mixsd_nb.analysis.divergence")  # declares one of them
    return find_stage(name)


ROW_COLUMNS = ["id", "prompt", "target", "answer", "subject", "statement"]
ROOT = Path(__file__).resolve().parents[1]


def papermill(*arguments, cwd=ROOT, runs=None, stdout=subprocess.PIPE):
    """Run the command `papermill`, with another folder of runs if one is given.

    It is started again if the kernel does not answer: Jupyter chooses free ports that another process may take before the kernel does."""
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", *map(str, arguments)]
    environment = os.environ | (dict(MIXSD_RUNS=str(runs)) if runs else {})
    for _ in range(4):
        ran = subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=600)
        if "Kernel didn't respond" not in ran.stderr and "Kernel died before replying" not in ran.stderr: break
        if stdout != subprocess.PIPE: stdout.seek(0), stdout.truncate()
    return ran


@contextmanager
def every_state():
    "Let every checkpoint keep the optimiser's state, so that a training can go on from any of them."
    with pytest.MonkeyPatch.context() as patch:
        for module in ("training.saving", "evaluation.checkpoints"): patch.setattr(f"mixsd_nb.{module}.remove_states", lambda *_, **__: None)
        yield


def until(condition, seconds=40, what="it", pause=0.05):
    "Wait until a condition returns a true value; returns that value."
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(pause)
    return found


# For another process: as the fixture `undrawn`.
UNDRAWN = "from matplotlib.figure import Figure; Figure.savefig = lambda self, path, **options: open(path, 'wb').close()"


def command_output(*command):
    "The standard output of a command; empty if the command hangs."
    try: return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except subprocess.TimeoutExpired: return ""


PRELOADED = ["mixsd_nb.train", "mixsd_nb.evaluate", "mixsd_nb.generate", "mixsd_nb.fisher", "mixsd_nb.training.trainer", "mixsd_nb.models.engines",
             "transformers.models.qwen3.modeling_qwen3", "xarray", "netCDF4", "psutil", "pytest"]


def _call(environment, function, arguments):
    import torch
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def forked(function, *arguments, **environment):
    "Start a process that can be killed and whose libraries are imported already; one server for each worker of pytest forks all of them."
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    process = server.Process(target=_call, args=({**os.environ, **environment}, function, arguments))
    process.start()
    return process


def run_program(code):
    "Run a program, in a forked process."
    exec(code, {"__name__": "__main__"})


class ForkedWorker:
    "In place of the `Popen` of a worker: a process whose libraries are imported already."

    def __init__(self, command, *, env, pass_fds, **options):
        pipe = Connection(os.dup(pass_fds[0]))
        self.process = forked(_serve_worker, pipe, **env)
        pipe.close()
        self.pid = self.process.pid

    returncode = property(lambda self: self.process.exitcode)

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.returncode is None: raise subprocess.TimeoutExpired("worker", timeout)
        return self.returncode


def fork_workers(patch):
    "Let workers start as `ForkedWorker`, within a context of pytest's MonkeyPatch."
    patch.setattr("mixsd_nb.runs.processes.subprocess", SimpleNamespace(**vars(subprocess) | dict(Popen=ForkedWorker)))


def _serve_worker(pipe):
    os.setsid()
    load_plugins.cache_clear()
    handle = os.dup(pipe.fileno())
    pipe.close()
    _begin(handle)


# A quick notebook in place of the stage generate. The seed names a file that determines its behaviour.
QUICK_CELLS = """
import os, pathlib, signal, time
import xarray as xr
from mixsd_nb.generate import GenerateConfig
from mixsd_nb.runs import Stage, notebook_config

def note(run, x):
    with open(run.folder / "made", "a") as file: file.write("once\\n")
    return xr.DataTree(xr.Dataset(dict(x=((), x, dict(long_name="x", units="1")))))

class Shared(Stage):
    name = "shared"
    def slug(self): return "work"
    def compute(self, run):
        time.sleep(0.5)
        return note(run, 0)

class Quick(GenerateConfig):
    workload = ""  # a plan would import torch

    def compute(self, run):
        behaviour = pathlib.Path(os.environ["BEHAVIOUR"]) / str(self.seed)
        if behaviour.exists(): exec(behaviour.read_text(), globals() | dict(folder=run.folder))
        return note(run, self.seed)

before = set(globals())
%%
seed: int = 0  # names the behaviour
dataset: str = "kgfact-small"
%%
config = notebook_config(Quick, before, globals())
Shared().run()
config.run()
"""


def quick_notebook(path):
    "Write the notebook."
    tags = lambda k: dict(tags=["parameters"]) if k == 1 else {}
    cells = [dict(cell_type="code", id=f"c{k}", metadata=tags(k), execution_count=None, outputs=[], source=code.strip())
             for k, code in enumerate(QUICK_CELLS.split("%%"))]
    kernel = dict(display_name="python3", language="python", name="python3")
    path.write_text(json.dumps(dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)))


# What a plugin declares: a method with a setting and a learning rate, one that edits the weights, two benchmarks, a corpus.
TOY = Method("toy", "Toy", "#123456", "*", (*TRAINED, "rank"), label="r{rank:g}", caption="rank {rank:g}")
EDIT = Method("edit", "Edit", "#654321", "X")
RIDDLES = Suite("riddles", "Riddles", "held-out", "plugin:items", "riddles")
REVERSED = Suite("reversed", "Reversed", "in-domain", "plugin:items", "reversed")
MINE = Corpus("mine", "Mine", "plugin:build", Schedule(20, 20, 20))
PLUGIN = [(METHODS, TOY), (METHODS, EDIT), (SUITES, RIDDLES), (SUITES, REVERSED), (CORPORA, MINE)]


SOURCES = sorted(Path(mixsd_nb.__file__).parent.rglob("*.py"))


def calls(name):
    "The calls of a function or method of this name in the package, with the names of their options."
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                yield file.stem, ast.unparse(node), {k.arg: ast.unparse(k.value) for k in node.keywords}


CELL = dict(dataset="mquake-lab", suite="recall", n=4, max_new_tokens=4, epochs=1, batch=50)


def lines(*rows): return "\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
