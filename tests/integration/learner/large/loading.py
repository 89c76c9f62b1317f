"""What a rank holds of a model after loading it, beside what transformers loads by itself."""

import deepspeed
import torch

from learner.update.engine import DTYPES
from learner.update.policy import without_dropout
from learner.update.ranks import cut_while_loading


def loaded(model, config, ranks):
    """Return the numbers of all parameters, those that this rank holds whole, those of its share, and what differs.

    With several ranks, every rank calls this.
    """
    dtype = DTYPES[config.dtype]
    plain = without_dropout(model, dtype)
    lm = without_dropout(model, dtype, cut_while_loading(config, ranks))
    parameters = dict(lm.named_parameters())
    result = {
        "all": sum(p.numel() for p in plain.parameters()),
        "whole": sum(p.data.numel() for p in parameters.values()),
        "share": sum(p.ds_tensor.numel() for p in parameters.values()),
        "differ": [],
    }
    for name, p in plain.named_parameters():
        with deepspeed.zero.GatheredParameters([parameters[name]]):
            if not same(parameters[name], p):
                result["differ"].append(name)
    buffers = dict(lm.named_buffers())
    result["differ"] += [name for name, buffer in plain.named_buffers() if not same(buffers[name], buffer)]
    return result


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(found, expected)
