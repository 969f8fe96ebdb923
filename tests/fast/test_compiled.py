"""Tokens of the compiled decoder: those of the plain model, from one graph for each number of samples."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from fast.compiled import CompiledDecoder, StaticCache
from machine.device import deterministic
from model import Llama
from sampling import Sampling, stream_ids
from tests import test_options as options
from tests.random_values import normal, randomize
from tests.test_compile import SMALL, count_graphs

GREEDY = Sampling(tokens=12, temperature=0)


@pytest.mark.parametrize("changes", [{}, {"placement": "hybrid", "qk_norm": "full"}, {"attention_cap": 5.0}])
def test_compiled_decoding_gives_the_same_tokens(changes, monkeypatch):
    """Once for each number of samples, without symbolic sizes, with a cache that is smaller than the context."""
    monkeypatch.setattr("fast.compiled.SMALLEST", 2)
    model = randomize(Llama(dataclasses.replace(SMALL, **changes, context=32)))
    prompts = [torch.tensor([[3, 1, 4]] * 2), *(torch.tensor([[1]] * samples) for samples in (2, 3))]
    plain = [list(stream_ids(model, prompt, GREEDY)) for prompt in prompts]
    assert len({ids[0] for sample in plain for ids in sample}) > 3
    graphs = count_graphs(monkeypatch, "eager" if changes else "aot_eager")  # AOTAutograd takes longest
    decoder = CompiledDecoder(model)
    assert plain == [list(stream_ids(model, prompt, GREEDY, decoder=decoder)) for prompt in prompts]
    assert len(graphs) == 2 and len({len(each.graph.nodes) for each in graphs}) == 1  # a symbolic size is a node
    decoder = CompiledDecoder(Llama(dataclasses.replace(SMALL, context=600)))
    assert [decoder.new_cache(tokens).size for tokens in (None, 1, 257, 512, 513)] == [600, 2, 512, 512, 600]


def test_a_compiled_stream_has_the_addresses_of_one_that_is_gone(monkeypatch):
    """Never those of one that goes on: two take turns. NaN in what a stream has left, or in new memory, is not read."""
    model = randomize(Llama(dataclasses.replace(SMALL, layers=1)))
    prompts = [torch.tensor(rows) for rows in ([[3, 1, 4]] * 2, [[1, 5, 9]] * 2)]
    plain = [list(stream_ids(model, prompt, GREEDY)) for prompt in prompts]
    count_graphs(monkeypatch)
    decoder = CompiledDecoder(model)
    streams = [stream_ids(model, prompt, GREEDY, decoder=decoder) for prompt in prompts]
    with deterministic(True):  # memory that nobody has written is NaN
        assert plain == [list(ids) for ids in zip(*zip(*streams, strict=True), strict=True)]
    (unused,) = decoder.unused.values()
    before = {layer.keys.data_ptr() for (layer,) in unused}
    with torch.inference_mode():
        for (layer,) in unused:
            layer.values.fill_(math.nan)
    assert [list(stream_ids(model, prompt, GREEDY, decoder=decoder)) for prompt in prompts] == plain
    assert {layer.keys.data_ptr() for (layer,) in unused} == before and len(before) == 2


@pytest.mark.parametrize("option", options.OPTIONS, ids=options.NAMES)
def test_generation_with_a_cache_of_fixed_size_is_that_without(option, monkeypatch):
    monkeypatch.setattr("machine.device.missing_for_compile", lambda device: "")
    monkeypatch.setattr(torch, "compile", lambda step, **others: step)
    model = options.random_weights_model(**option)
    options.assert_same_with_a_cache(CompiledDecoder(model), model)


def test_the_first_tokens_are_attended_to_as_they_are_without_a_mask():
    k, v = normal(2, 1, 2, 3, 8)
    cache: Any = StaticCache(4, torch.tensor(0))
    found, values, mask = cache.extend(k, v)
    assert found is k and values is v and mask is None
