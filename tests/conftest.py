"What tests share."

import pytest

from mixsd_nb.models import load_base


@pytest.fixture(scope="session")
def lab():
    "Model and tokenizer of lab-m."
    return load_base("lab-m")
