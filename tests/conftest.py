"What tests share."

import pytest
from helpers import small_model

from mixsd_nb.models import load_base


@pytest.fixture(scope="session")
def lab():
    "Model and tokenizer of lab-m."
    return load_base("lab-m")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than 20 seconds on a busy machine and is run by `make test-slow` alone")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    "A model folder with random weights: everything runs through it in seconds."
    return small_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def own_runs(tmp_path, monkeypatch):
    "Runs of a test's own."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    monkeypatch.delenv("MIXSD_BENCHMARKS", raising=False)
    return tmp_path
