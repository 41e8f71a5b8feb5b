"Functions that several test files call."

import os
import shutil
import subprocess
import time

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mixsd_nb.models import load_tokenizer


def small_model(folder, tokenizer="lab-m", *, seed=0, scale=1, layers=1, heads=1, head_dim=32, feed_forward=32, context=2048):
    "Save a random model with tied embeddings and the tokenizer of a lab model; returns its folder. With a scale of 4, its response depends on the prompt."
    tokenizer = load_tokenizer(tokenizer)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=1,
                                         head_dim=head_dim, intermediate_size=feed_forward, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
                                         max_position_embeddings=context))
    with torch.no_grad():
        [p.mul_(scale) for p in model.parameters() if p.ndim == 2]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def need(reason):
    "Skip a test that this machine cannot run; on CI the test fails instead."
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def need_tools(*names):
    "Skip a test if one of these programs is not installed."
    missing = [name for name in names if shutil.which(name) is None]
    if missing: need(f"{', '.join(missing)} not found; `make ci-tools` installs what the tests need")


def until(condition, seconds=180, what="it"):
    "Wait until a condition returns a true value; returns that value."
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.05)
    return found


def command_output(*command):
    "The standard output of a command; empty if the command hangs."
    try: return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except subprocess.TimeoutExpired: return ""
