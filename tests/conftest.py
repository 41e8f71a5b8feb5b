"What tests share."

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from mixsd_nb.models import load_base
from mixsd_nb.models.lab import lab_folder


@pytest.fixture(scope="session")
def lab():
    "Model and tokenizer of lab-m."
    return load_base("lab-m")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: may take more than 20 seconds on a busy machine; `-m 'not slow'` leaves it out")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    "A model folder with random weights: everything runs through it in seconds."
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(lab_folder("lab-m"))
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=32,
                         intermediate_size=32, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=2048)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
