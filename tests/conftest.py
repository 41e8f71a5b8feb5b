"What tests share."

import pytest

from mixsd_nb.models import load_base


@pytest.fixture(scope="session")
def lab():
    "Model and tokenizer of lab-m."
    return load_base("lab-m")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: may take more than 20 seconds on a busy machine; `-m 'not slow'` leaves it out")
