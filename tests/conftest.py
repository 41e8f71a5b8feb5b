"Fixtures that several test files use."

import copy
import gc
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

sys.modules["rfc3987_syntax"] = None  # jsonschema's check of IRIs takes a second to import, and notebooks have none

import hypothesis
import pytest
from helpers import CELL, PLUGIN, every_state, need_tools, small_model, stored_training

from mixsd_nb import models, train
from mixsd_nb.models import load_base
from mixsd_nb.training.trainer import fine_tune


# A slow machine is no fault of what is tested.
hypothesis.settings.register_profile("calm", deadline=None)
hypothesis.settings.load_profile("calm")

# What a killed process has written stays in the memory of the system; only a loss of power needs the disk. Processes that
# tests start do sync.
os.fsync = lambda handle: None

# A tokenizer is read once as long as its files stay the same. Each caller gets its own copy, to which it may add tokens.
read_part, tokenizers = models.load_part, {}


def load_part(cls, name, **options):
    if cls.__name__ != "AutoTokenizer" or not (folder := Path(models.model_source(name))).is_dir(): return read_part(cls, name, **options)
    states = tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.iterdir()))
    if (key := (folder, states)) not in tokenizers: tokenizers[key] = read_part(cls, name, **options)
    return copy.deepcopy(tokenizers[key])


models.load_part = load_part


@pytest.fixture(scope="session")
def lab():
    "The model and the tokenizer of lab-m."
    return load_base("lab-m")


@pytest.fixture(scope="session")
def lab_s():
    "The model and the tokenizer of lab-s, for tests that write much text."
    return load_base("lab-s")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than 20 seconds on a busy machine and runs only in `make test-slow`")


def pytest_collection_finish():
    "What the test files import stays, so the garbage collector, which every training starts, does not have to visit it."
    gc.freeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    "The folder of a small model with random weights, on which every stage takes only seconds."
    return small_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def strong(tmp_path_factory):
    "The folder of a small model whose response depends on the prompt."
    return small_model(tmp_path_factory.mktemp("models") / "strong", scale=4)


@pytest.fixture(scope="session")
def shallow(tmp_path_factory):
    "The folder of a random model of two layers with tied embeddings."
    return small_model(tmp_path_factory.mktemp("models") / "shallow", "lab-s", layers=2, heads=2, head_dim=16, feed_forward=64, context=512)


@pytest.fixture(scope="session")
def short(shallow, tmp_path_factory):
    "Six updates with checkpoints after two, four and six, each with the optimiser's state, and the finished run."
    spec, run = stored_training(shallow, lr=1e-4, steps=6, checkpoints=[2, 4]), tmp_path_factory.mktemp("short")
    with every_state(): fine_tune(spec, run)
    return spec, run


@pytest.fixture(scope="session")
def real():
    "The folder of real models, facts and benchmarks: the one in MIXSD_REAL, or the one beside the checkout."
    folder = Path(os.environ.get("MIXSD_REAL") or Path(__file__).parents[2] / "shared" / "real")
    if not folder.is_dir(): pytest.skip("real facts are not here; MIXSD_REAL names their folder")
    return folder


@pytest.fixture(scope="module")
def browser():
    need_tools("chromium")
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]) as browser: yield browser


@pytest.fixture
def own_runs(tmp_path, monkeypatch):
    "A separate folder of runs for one test."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    monkeypatch.delenv("MIXSD_BENCHMARKS", raising=False)
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch):
    "Figures are made but saved as empty files, where their pictures are not looked at."
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **options: open(path, "wb").close())


@pytest.fixture
def plugin():
    "The declarations of a plugin, which no module reads."
    for registry, entry in PLUGIN: registry.add(entry)
    yield
    for registry, entry in PLUGIN: registry.remove(entry.name)


@pytest.fixture
def data(own_runs):
    "A folder for files of facts, and a function that writes one of them."
    folder = own_runs / "data"
    folder.mkdir()

    def write(name, content):
        if content is not None: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(folder / name)
    return write


@pytest.fixture(scope="session")
def prompted(tmp_path_factory):
    "A small model whose responses depend on the prompt."
    return small_model(tmp_path_factory.mktemp("tiny"), "lab-s", scale=4, heads=2, head_dim=16, context=512)


@pytest.fixture(scope="session")
def averages(tiny, tmp_path_factory):
    "SFT for one update, and its averages with the base model at three α; the tuned run is computed once."
    with patch.dict("os.environ", MIXSD_RUNS=str(tmp_path_factory.mktemp("runs"))):
        found = {alpha: train.run(method="sft", anchor="average", options=dict(alpha=alpha), model=tiny, **CELL) for alpha in (0.0, 0.25, 1.0)}
        with patch("mixsd_nb.training.trainer.train_process", side_effect=AssertionError):
            return found, train.run(method="sft", model=tiny, **CELL)
