"Models of the families that were tried are scored, decoded and trained as the formulas say; others are told or refused."

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures import tiny_config, tiny_model
from helpers import error_sentence
from transformers import AutoConfig, BartForCausalLM

from mixsd_nb.models import load_base
from mixsd_nb.models.accepted import TRIED, check_config
from mixsd_nb.models.gradients import recompute_layers
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.models.geometry import count_shape
from mixsd_nb.training.loss import Example, LossHead, nll, summed_loss
from mixsd_nb.training.trainer import TrainingSpec, fine_tune, read_curves

PROMPTS = ["Who?", "What location does Kelmor Bellamy live in? Tell me, please.", "Where is the city of the king now", "A"]
PAIRS = [(list(range(5, 9 + k)), list(range(20, 23 + 2 * k)) + [2]) for k in range(4)]
EXAMPLES = [Example(prompt, completion, (torch.tensor(completion),)) for prompt, completion in PAIRS]
REFUSED = dict(bart="a decoder of text alone", t5="a decoder of text alone", gemma3="a decoder of text alone", phi4_multimodal="a decoder of text alone",
               gemma2="logits from its head", cohere="logits from its head", recurrent_gemma="logits from its head")


@torch.inference_mode()
def write_by_hand(model, engine, prompt, count):
    "The likeliest tokens after a prompt, each from a pass over the whole text."
    ids = list(prompt)
    while len(ids) < len(prompt) + count and ids[-1] not in engine.stop.tolist() or len(ids) == len(prompt):
        ids.append(engine.mask_padding(model(torch.tensor([ids]), use_cache=False).logits[0, -1:]).argmax().item())
    return ids[len(prompt):]


def check_decoding(model, tokenizer):
    "Responses do not depend on their neighbours in the batch, nor scores on padding."
    prompts, engines = [tokenizer(text)["input_ids"] for text in PROMPTS], [HFEngine(model, tokenizer, size) for size in (1, 4)]
    expected = [write_by_hand(model, engines[0], prompt, 8) for prompt in prompts]
    for engine in engines: assert [c.ids for c in engine.generate(prompts, max_new_tokens=8)] == expected
    pairs = list(zip(prompts, expected))
    with torch.inference_mode(): logs = [model(torch.tensor([p + c]), use_cache=False).logits[0].float().log_softmax(-1) for p, c in pairs]
    for (p, c), log, found in zip(pairs, logs, engines[0].score(pairs)):
        assert np.allclose(found, [-log[len(p) - 1 + k, token].item() for k, token in enumerate(c)], rtol=1e-3, atol=1e-3)


def check_losses(model):
    "A loss is the same for examples alone and padded, and in training mode with recomputed layers of the evaluation mode."
    head = LossHead(model)
    with torch.no_grad():
        alone = sum(summed_loss(model, head, [e], nll).item() for e in EXAMPLES)
        assert summed_loss(model, head, EXAMPLES, nll).item() == pytest.approx(alone, rel=1e-5)
    slopes = []
    for on in (False, True):
        recompute_layers(model, on)
        model.zero_grad()
        summed_loss(model, head, EXAMPLES, nll).backward()
        slopes.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    recompute_layers(model, on=False)
    assert slopes[0].any() and torch.allclose(*slopes, rtol=1e-4, atol=1e-6)
    head.head.forward = head.logits


def check_saving(model, tokenizer, folder):
    "A saved model has the same logits."
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = torch.tensor([PAIRS[-1][0] + PAIRS[-1][1]])
    with torch.inference_mode(): assert torch.allclose(load_base(str(folder))[0](ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def check_training(folder, runs):
    "The losses of a training do not depend on the size of its microbatches or on recomputed layers; adapters are merged."
    spec = TrainingSpec(str(folder), lr=1e-3, steps=2, batch=4, objective="methods.supervised:stored_pairs", data=dict(pairs=PAIRS), seed=3)
    for name, options in dict(plain={}, other=dict(micro_tokens=16, recompute=True), lora=dict(lora=2)).items():
        fine_tune(replace(spec, **options), runs / name)
    curves = {name: read_curves(runs / name)["loss"] for name in ("plain", "other", "lora")}
    assert curves["other"] == pytest.approx(curves["plain"], rel=1e-4) and curves["lora"][0] == pytest.approx(curves["plain"][0], rel=1e-4)
    load_base(str(runs / "lora/checkpoint-2"))


@pytest.mark.parametrize("family", TRIED)
def test_a_family_that_was_tried_is_decoded_scored_and_saved_rightly(family, lab_s, tmp_path):
    config = tiny_config(family, len(lab_s[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_config(config, "a-model")
    model = tiny_model(config)
    assert count_shape(config).parameters == sum(p.numel() for p in model.parameters())
    check_decoding(model, lab_s[1])
    check_losses(model)
    check_saving(model, lab_s[1], tmp_path)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_be_measured_wrongly_is_refused(family):
    said = error_sentence(lambda: check_config(AutoConfig.for_model(family), "a-model"))
    assert said.startswith("model must ") and REFUSED[family] in said


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "jamba"])
def test_another_family_is_told_and_refused_by_the_engine_if_its_batches_differ(family, lab_s):
    config = tiny_config(family, len(lab_s[1]))
    with pytest.warns(UserWarning, match=f"^model a-model is of the family {family}, which was not tried; .*llama"): check_config(config, "a-model")
    assert error_sentence(lambda: HFEngine(tiny_model(config), lab_s[1])).startswith("model must compute the same states for a text alone and in a batch")


@pytest.mark.parametrize("family", ["mixtral", "opt"])
def test_a_training_depends_on_no_noise_of_its_base(family, lab_s, tmp_path):
    "Experts with adapters, and a family with dropout and with layers that are left out at random."
    check_saving(tiny_model(tiny_config(family, len(lab_s[1]))), lab_s[1], tmp_path / "base")
    check_training(tmp_path / "base", tmp_path)


def test_a_decoder_that_ignores_positions_is_refused_by_the_engine(lab_s):
    "The decoder of BART counts padding as tokens."
    config = tiny_config("bart", len(lab_s[1]), is_encoder_decoder=False, is_decoder=True)
    assert error_sentence(lambda: HFEngine(BartForCausalLM(config).eval(), lab_s[1])).startswith("model must compute the same states for a text alone and in a batch")
