"""Comparison of token sequences: a difference counts as a tie if the two best logits are nearly equal."""

import numpy as np
import torch

TIE = 1e-4


def first_difference(ours, theirs):
    "The first position at which two lists differ; None if they are equal."
    return next((t for t in range(max(len(ours), len(theirs))) if ours[t : t + 1] != theirs[t : t + 1]), None)


def logit_gap(model, ids, tokens):
    "The difference between the best logit after these ids and the lowest logit among the given tokens."
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    return (logits.max() - logits[tokens].min()).item()


def is_tie(model, item, expected, found):
    "Whether two mixed records first differ at a tie of the conditional that writes the token."
    ours, theirs = list(expected["completion_ids"]), list(found["completion_ids"])
    t = first_difference(ours, theirs)
    if t is None or t >= min(len(ours), len(theirs)):
        return False
    prompt = item["naive_ids"] if expected["naive_mask"][t] else item["expert_ids"]
    return logit_gap(model, prompt + ours[:t], [ours[t], theirs[t]]) < TIE


def compare(model, items, expected, found):
    "The number of equal records, the number of ties, and the ids of the wrong records."
    differ = [(i, a, b) for i, a, b in zip(items, expected, found, strict=True) if not all(np.array_equal(a[k], b[k]) for k in a)]
    wrong = [item["id"] for item, a, b in differ if not is_tie(model, item, a, b)]
    return len(items) - len(differ), len(differ) - len(wrong), wrong
