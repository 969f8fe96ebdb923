"""Sampling against reference formulas, streaming of UTF-8 text, and the command line with invalid input."""

import dataclasses
import io
import itertools
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import generate as command
from config import ModelConfig
from data.tokenizer import ByteTokenizer, train_tokenizer
from model import LayerCache, Llama
from runtime.checkpoint import save_checkpoint
from sampling import Sampling, TextStream, draw, generate, keep_top_p, max_new_tokens, stream_ids, stream_text
from tests.random_values import randomize

CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=40, context=48, vocab_size=257)
END = ByteTokenizer.end_of_document
GREEDY = Sampling(tokens=12, temperature=0)


def random_weights_model(config: ModelConfig = CONFIG) -> Llama:
    """Its logits differ by several nats."""
    return randomize(Llama(config), matrices=1.5, gains=0)


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_weights_model()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    (folder := tmp_path_factory.mktemp("runs") / "a-run").mkdir()
    save_checkpoint(folder, 1, random_weights_model(), ByteTokenizer(), [], {}, 1)
    return folder


FILTERS = {  # of eight tokens, and how many they keep
    Sampling(temperature=2.0, top_k=9): 8,
    Sampling(temperature=1.5, top_k=6, top_p=0.8, min_p=0.1): 4,  # top-p before the temperature would keep three
    Sampling(temperature=1.0, top_k=4, top_p=0.7): 2,  # top-p before top-k would keep three tokens
    Sampling(temperature=1.0, top_p=0.7, min_p=0.2): 3,  # min-p before top-p would keep two tokens
    Sampling(temperature=1.0, top_k=9, top_p=0.40): 1,  # the likeliest has a probability of 0.407
    Sampling(temperature=1.0, top_p=0.41): 2,  # the token that crosses p is kept
    Sampling(temperature=1.0, min_p=0.60): 2,  # the second is 0.607 times as likely as the first
    Sampling(temperature=1.0, min_p=0.61): 1,
}


@pytest.mark.parametrize("sampling, kept", FILTERS.items(), ids=str)
def test_draw_follows_the_filtered_probabilities(sampling, kept):
    """Of each row by itself."""
    logits, count = torch.tensor([1.0, 0.0, 2.5, -1.0, 2.0, 1.5, 0.5, -2.0]), 20_000
    exp = np.exp(logits.numpy().astype(float) / sampling.temperature)
    exp[np.argsort(exp)[:-kept]] = 0
    expected = exp / exp.sum()
    points = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = draw(torch.stack((logits, logits.flip(0))).repeat(count // 2, 1), sampling, points)
    ids[1::2] = 7 - ids[1::2]
    frequencies = np.bincount(ids.numpy(), minlength=8) / count
    assert not frequencies[expected == 0].any()
    # within five standard deviations
    assert (np.abs(frequencies - expected) <= 5 * np.sqrt(expected * (1 - expected) / count)).all()


def test_a_token_of_probability_0_is_never_sampled_and_reaching_p_is_enough():
    """Not even by the number 0, which a generator can return."""
    kept = keep_top_p(torch.tensor([[0.05, 0.5, 0.15, 0.3], [0.25] * 4], dtype=torch.float64).log(), 0.5)
    assert kept.isfinite().sum(-1).tolist() == [1, 2]
    logits = torch.tensor([[5.0, 0.0, 6.0, 1.0]])
    points = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits.expand(2, -1), Sampling(top_k=1), points).tolist() == [2, 2]


def stream(model: Llama, prompt: list[int], sampling: Sampling, samples: int = 1) -> list[list[int]]:
    """In the order of a CPU, and a token ahead as on CUDA, which gives the same ids."""
    found = []
    for device in ("cuda", "cpu"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sampling.AHEAD", device)
            patch.setattr("sampling.start_reading", lambda x: x.clone().tolist)
            found.append([*stream_ids(model, torch.tensor([prompt] * samples), sampling, END)])
    assert found[0] == found[1]
    return found[0]


def test_greedy_sampling_matches_uncached_forward(model):
    prompt, expected = list(b"def "), list(b"def ")
    with torch.no_grad():
        for _ in range(GREEDY.tokens):
            expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    assert END not in expected
    assert prompt + [token for (token,) in stream(model, prompt, GREEDY)] == expected
    from_nothing, from_end = (list(stream_text(model, ByteTokenizer(), each, GREEDY)) for each in ([], [END]))
    assert from_nothing == from_end  # a new document


def test_a_sample_depends_on_the_seed_and_its_index_alone(model):
    """Not on the number of samples or tokens, nor on the global random state, which it keeps."""

    def rows(samples: int, tokens: int = 20, seed: int = 0) -> list[tuple[int, ...]]:
        sampling = Sampling(tokens=tokens, temperature=1.0, seed=seed)
        return [*zip(*stream(model, [7], sampling, samples), strict=True)]

    state, batch = torch.get_rng_state(), rows(4)
    assert torch.equal(state, torch.get_rng_state()) and len({*batch}) == 4
    torch.manual_seed(2)
    for samples, tokens in ((1, 20), (2, 20), (4, 30)):
        again = rows(samples, tokens)
        assert [row[: len(batch[0])] for row in again] == [row[: len(again[0])] for row in batch[:samples]]
    assert len({*rows(4, seed=1), *rows(4, seed=-1), *batch}) == 12


def test_samples_stop_at_end_of_document():
    model = random_weights_model(dataclasses.replace(CONFIG, norm="layernorm"))
    with torch.no_grad():  # raise the probability of END to about 10% per token
        model.get_parameter("final_norm.bias").copy_(model.lm_head.weight[END] * 2.5)
    rows = [list(row) for row in zip(*stream(model, [7], Sampling(tokens=40, temperature=1.0), samples=5), strict=True)]
    lengths = [row.index(END) for row in rows]
    assert len(set(lengths)) > 1  # samples end at different steps
    assert all(set(row[length:]) == {END} for row, length in zip(rows, lengths, strict=True))
    assert len(rows[0]) == max(lengths) + 1 < 40  # generation stops when all samples have ended
    first = rows[0][0]  # several ends: each row repeats the one that came
    for row, new in zip(rows, generate(model, [[7]] * 5, {first, END, 999}, tokens=40, temperature=1.0), strict=True):
        stop = min(row.index(token) for token in {first, END} & set(row))
        assert new[1:].tolist() == row[:stop] + [row[stop]] * (len(new) - 1 - stop)
    assert generate(model, [7], first, tokens=40, temperature=1.0).tolist() == [7, first]
    streamed = zip(*stream_text(model, ByteTokenizer(), [7], Sampling(tokens=40, temperature=1.0), 5), strict=True)
    for pieces, length in zip(streamed, lengths, strict=True):
        assert None not in pieces[: length + 1] and set(pieces[length + 1 :]) <= {None}


def test_generate_appends_the_sampled_ids(model):
    """(T) in, (T + new) out. A batch has one sample per row, with the random numbers of that row."""
    options: dict[str, Any] = dict(tokens=12, temperature=1.0, seed=3)
    rows = [[7, 8, 9], [7, 8, 9], [1, 2, 3]]
    sampled = list(zip(*stream_ids(model, torch.tensor(rows), Sampling(**options)), strict=True))
    expected = torch.cat((torch.tensor(rows), torch.tensor(sampled)), 1)
    assert len({tuple(row) for row in sampled}) == 3
    assert torch.equal(generate(model, rows, **options), expected)
    prompts: list[Any] = [rows[0], np.array(rows[0], np.uint16)]
    for ids in prompts:
        new = generate(model, ids, **options)
        assert new.dtype == torch.int64 and torch.equal(new, expected[0])
    assert len(generate(model, [7])) == CONFIG.context  # as many as fit
    assert [max_new_tokens([], Sampling(), context) for context in (48, 100_000)] == [47, 256]
    assert command.generate is generate


def test_generation_restores_the_mode_and_records_no_gradients(monkeypatch):
    """Also when it fails. The cache is for the tokens that are generated."""
    model, recorded, kept, new_cache = random_weights_model().train(), set(), list[LayerCache](), Llama.new_cache
    monkeypatch.setattr(Llama, "new_cache", lambda *arguments: kept.__iadd__(new_cache(*arguments)))
    model.final_norm.register_forward_hook(lambda norm, _, output: recorded.add((norm.training, output.requires_grad)))
    assert len(generate(model, [7, 8], tokens=3)) == 5 and {cache.keys.shape[2] for cache in kept} == {5}
    assert model.training and recorded == {(False, False)}
    with pytest.raises(ValueError, match="--tokens 99"):
        generate(model, [7], tokens=99)
    assert model.training


@pytest.mark.parametrize(
    "ids, message",
    [
        ([], "ids must be integers of shape (T) or (B, T), not torch.float32 of (0,)"),
        ([[1, 2], [3]], "encode(text); prompts of different lengths need a call each"),
        ([5, 257], "ids must be from 0 to 256, not [257]"),
        ("def ", "ids must be integers of shape (T) or (B, T), such as tokenizer.encode(text); prompts"),
    ],
)
def test_generate_says_what_is_wrong(model, ids, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(model, ids)


@settings(max_examples=100, deadline=None, derandomize=True)
@example("caé😀", [], ["caé😀", "é", "aé"])
@given(
    st.text(alphabet="abé€😀\n", max_size=12),
    st.lists(st.integers(0, 40), max_size=12),
    st.lists(st.text(alphabet="abé€😀\n", min_size=1, max_size=4), max_size=3),
)
def test_text_does_not_depend_on_how_bytes_are_split(text, cuts, stop):
    """It is what comes before the stop string that ends first, of these the longest."""
    found = [(text.index(each) + len(each), text.index(each)) for each in stop if each in text]
    raw, stream, shown = text.encode(), TextStream(stop), ""
    for start, end in itertools.pairwise([0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]):
        shown += "" if stream.ended else stream.add(raw[start:end])
    shown += "" if stream.ended else stream.end()
    assert shown == text[: min(found)[1] if found else None]


def test_incomplete_characters_and_possible_stop_strings_are_held_back():
    text = TextStream()
    assert [text.add(bytes([byte])) for byte in "é😀x".encode()] == ["", "é", "", "", "", "😀", "x"]
    assert text.add(b"\xf0\x9f") == "" and text.end() == ""  # an incomplete character is dropped at the end
    assert TextStream().add(b"a\xffb\x80") == "a\ufffdb\ufffd"
    text = TextStream(["\n\n", "def"])
    assert [text.add(piece) for piece in (b"x\n", b"d", b"e", b"x\n", b"\n")] == ["x", "\n", "", "dex", ""]
    assert text.ended


def join_pieces(stream: Iterator[list[str | None]]) -> str:
    return "".join(piece or "" for (piece,) in stream)


def test_streamed_text_matches_decoded_text():
    """Up to a stop string. What was held back, since it could begin one, is shown at the end."""
    tokenizer = train_tokenizer(["déf f(x):\n\treturn x 😀 é\n" * 30], 290)
    model = random_weights_model(dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size))
    sampling, prompt = Sampling(tokens=40, temperature=1.5, seed=1), tokenizer.encode("déf ")
    ids = [token for (token,) in stream_ids(model, torch.tensor([prompt]), sampling, tokenizer.end_of_document)]
    streamed = join_pieces(stream_text(model, tokenizer, prompt, sampling))
    assert len(streamed) > 5 and tokenizer.decode(ids).removeprefix(streamed) in ("", "\ufffd")
    stop = streamed[5:7]
    stopped = join_pieces(stream_text(model, tokenizer, prompt, sampling, stop=[stop]))
    assert stopped == streamed[: streamed.index(stop)]
    could_begin = [streamed[-1] + "\N{SNOWMAN}"]
    assert join_pieces(stream_text(model, tokenizer, prompt, sampling, stop=could_begin)) == streamed


@pytest.mark.parametrize("dtype, fast", [("float32", ""), ("bfloat16", ""), ("float16", "--no-fast")])
def test_prompt_and_continuation_are_printed_to_stdout(run, model, dtype, fast, capsys, monkeypatch):
    """In half precision too: the likeliest tokens of this model are those of float32, by several nats."""
    opened, open_checkpoint = list[Any](), command.open_checkpoint
    monkeypatch.setattr(command, "open_checkpoint", lambda *each: opened.__iadd__(open_checkpoint(*each)))
    flags = f"--checkpoint {run} --prompt def --tokens 6 --temperature 0 --device cpu --dtype {dtype} {fast}"
    command.main(flags.split())
    assert opened[1].lm_head.weight.dtype == getattr(torch, dtype)
    output = capsys.readouterr()
    sampling = Sampling(tokens=6, temperature=0)
    assert output.out == f"def{join_pieces(stream_text(model, ByteTokenizer(), list(b'def'), sampling))}\n"
    assert "6 tokens in" in output.err and "tokens/s" in output.err and f"step-000001 on cpu in {dtype}" in output.err


def test_text_is_printed_as_it_is_generated(monkeypatch):
    shown, output = [], io.StringIO()  # without an encoding to change, as in a notebook
    monkeypatch.setattr("sys.stdout", output)

    def stream() -> Iterator[list[str | None]]:
        for piece in "abc":
            yield [piece]
            shown.append(output.getvalue())

    command.print_samples("p", stream(), 1)
    assert shown == ["pa", "pab", "pabc"]


def test_newest_run_with_several_samples_and_prompt_from_stdin(run, model, capsys, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    (run.parent.parent / "runs").symlink_to(run.parent)
    (run / "run.json").touch()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é = ".encode()), encoding="latin-1"))
    flags = "--prompt - --tokens 9 --samples 3 --seed 4 --temperature 1 --device cpu --dtype float32"
    command.main([*flags.split(), *(f"--stop={letter}" for letter in string.ascii_letters)])
    texts, count = ["", "", ""], 0
    prompt, sampling = list("é = ".encode()), Sampling(9, 1.0, seed=4)
    for pieces in stream_text(model, ByteTokenizer(), prompt, sampling, 3, string.ascii_letters):
        texts = [text + (piece or "") for text, piece in zip(texts, pieces, strict=True)]
        count += len(pieces) - pieces.count(None)
    blocks = [f"----- sample {number} of 3 -----\né = {text}\n" for number, text in enumerate(texts, 1)]
    output = capsys.readouterr()
    assert output.out == "".join(blocks)
    assert count < 27 and f"\n{count} tokens in" in output.err  # a sample that has ended has no more


def test_invalid_prompts_and_compiling_without_a_compiler_are_refused(run, refused, monkeypatch):
    common = ["--checkpoint", str(run), "--device", "cpu"]
    line = refused(command.main, [*common, "--prompt", "x" * 48])
    assert "--tokens 1 plus 48 of the prompt exceed the model's context of 48; shorten either" in line
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert "--prompt is not text in UTF-8" in refused(command.main, [*common, "--prompt", "-"])
    assert "--stop must not be empty" in refused(command.main, [*common, "--stop", "a", "--stop", ""])
    monkeypatch.setattr("machine.device.missing_for_compile", lambda device: "a compiler")
    assert refused(command.main, [*common, "--compile"]) == "error: --compile needs a compiler; or use --no-compile\n"
