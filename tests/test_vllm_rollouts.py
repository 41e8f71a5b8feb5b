"""Rollouts written by vLLM during training are those of transformers (`make test-vllm`)."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.sample.logits_processor", exc_type=Exception, reason="vllm is not here or cannot be imported; `make test-vllm` brings it")

from safetensors.torch import load_file

from mixsd_nb.methods.distill import VARIANTS, distill_items
from mixsd_nb.training.trainer import TrainingSpec, fine_tune
from mixsd_nb.models import load_tokenizer


@pytest.mark.parametrize("more", [{}, dict(processes=2), dict(processes=2, sharded=True)], ids=["one", "ddp", "fsdp2"])
def test_vllm_writes_the_rollouts_of_the_current_student(more, tiny, tmp_path):
    """Three updates at a high rate, so that later rollouts differ from those of the base model; the weights are the same afterwards.

    Each of several processes has an engine beside it, and all engines read the weights that the first process wrote once."""
    items = distill_items(load_tokenizer(tiny), [dict(id=f"i{k}", prompt="Q" * k + "?", target="The answer is A.") for k in range(4)])
    data = dict(items=items, variant=VARIANTS["opsd"], rollouts=2, max_new_tokens=8)
    spec = TrainingSpec(tiny, lr=3e-2, steps=3, batch=4, objective="methods.distill:distillation", data=data, seed=3, **more)
    fine_tune(spec, tmp_path / "hf")
    fine_tune(replace(spec, data=data | dict(engine="vllm", engine_options={}, name="both")), tmp_path / "vllm")
    one, two = (load_file(tmp_path / name / "checkpoint-3/model.safetensors") for name in ("hf", "vllm"))
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-5
    assert not list(Path("/dev/shm").glob("mixsd-both-*"))
