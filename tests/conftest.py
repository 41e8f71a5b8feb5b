"Fixtures that several test files use."

import gc
import os

import pytest
from helpers import small_model

from mixsd_nb.models import load_base


# What a killed process has written stays in the memory of the system; only a loss of power needs the disk. Processes that
# tests start do sync.
os.fsync = lambda handle: None


@pytest.fixture(scope="session")
def lab():
    "The model and the tokenizer of lab-m."
    return load_base("lab-m")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than 20 seconds on a busy machine and runs only in `make test-slow`")


def pytest_collection_finish():
    "What the test files import stays, so the garbage collector, which every training starts, does not have to visit it."
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    "The folder of a small model with random weights, on which every stage takes only seconds."
    return small_model(tmp_path_factory.mktemp("models") / "tiny")


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
