"""Sampling against hand-written formulas; text that grows without broken characters; the command and its bad input."""

import dataclasses
import io
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import generate as command
from config import ModelConfig
from data.tokenizer import ByteTokenizer, train_tokenizer
from generate import (
    GrowingText,
    Sampling,
    check_room,
    draw,
    generate,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    make_generator,
    sample_text,
    stream_text,
    temper,
)
from model import Llama
from runtime.checkpoint import save_checkpoint

ROOT = Path(__file__).parent.parent
CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=40, context=48, vocab_size=257)
END = ByteTokenizer.end_of_document
GREEDY = Sampling(tokens=12, temperature=0)
IN_FLOAT32 = ["--device", "cpu", "--dtype", "float32"]


def vivid(config: ModelConfig = CONFIG) -> Llama:
    """A model with opinions: untrained, but its logits differ by several nats."""
    model = Llama(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 1.5 / math.sqrt(weight.shape[-1]))
    return model


@pytest.fixture(scope="module")
def model() -> Llama:
    return vivid()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a-run"
    save_checkpoint(folder, 1, vivid(), ByteTokenizer(), [], {}, 1)
    return folder


# --- filters ---------------------------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


def by_hand(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The probabilities that the filters leave, one after the other."""
    logits = logits / sampling.temperature
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    kept = order[: sampling.top_k or None]
    probabilities = dict(zip(kept, softmax(logits[kept]), strict=True))
    total, nucleus = 0.0, []
    for token in kept:
        if total < sampling.top_p or sampling.top_p == 1:
            nucleus.append(token)
        total += probabilities[token]
    kept = [token for token in nucleus if probabilities[token] >= sampling.min_p * probabilities[order[0]]]
    result = np.zeros(len(logits))
    result[kept] = softmax(logits[kept])
    return result


FILTERS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0, top_k=3),
    Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=1.5, top_k=6, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_draws_have_the_probabilities_they_should(sampling):
    logits = torch.tensor([1.0, 0.0, 2.5, -1.0, 2.0, 1.5, 0.5, -2.0])
    expected, count = by_hand(logits.numpy().astype(float), sampling), 20_000
    ids = draw(logits.expand(count, -1), sampling, [make_generator(0, 0)] * count)
    shares = np.bincount(ids.numpy(), minlength=8) / count
    assert not shares[expected == 0].any()
    # five standard deviations of a share
    assert (np.abs(shares - expected) <= 5 * np.sqrt(expected * (1 - expected) / count)).all()


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def test_which_tokens_each_filter_keeps():
    probabilities = torch.tensor([[0.05, 0.5, 0.15, 0.3], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    logits = probabilities.log()
    assert kept(keep_top_k(logits, 2))[0] == [1, 3] and len(kept(keep_top_k(logits, 2))[1]) == 2
    assert kept(keep_top_k(logits, 9)) == [[0, 1, 2, 3]] * 2
    assert kept(keep_top_p(logits, 0.49))[0] == [1]
    assert kept(keep_top_p(logits, 0.51))[0] == [1, 3]  # the token that crosses the sum belongs to it
    assert kept(keep_top_p(logits, 0.79))[0] == [1, 3]
    assert kept(keep_top_p(logits, 0.81))[0] == [1, 2, 3]
    assert [len(row) for row in kept(keep_top_p(logits, 0.5))] == [1, 2]  # a sum that is reached exactly is enough
    assert kept(keep_top_p(logits, 1e-9))[0] == [1]
    assert kept(keep_min_p(logits, 0.31)) == [[1, 3], [0, 1, 2, 3]]
    assert kept(keep_min_p(logits, 0.59))[0] == [1, 3] and kept(keep_min_p(logits, 0.61))[0] == [1]
    for filtered in (keep_top_k(logits, 2), keep_top_p(logits, 0.6), keep_min_p(logits, 0.5)):
        left = filtered.isfinite()
        assert torch.equal(filtered[left], logits[left])  # what is kept is not changed


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary(spread, p):
    """Whether a few hundred tokens hold p of the probability, as with a large spread, or not, as with a small one."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * spread
    for row, indices in zip(logits.numpy(), kept(keep_top_p(logits, p)), strict=True):
        order = np.argsort(-row)
        count = 1 + int((np.cumsum(softmax(row)[order]) < p).sum())
        assert sorted(order[:count]) == indices


def test_no_temperature_is_too_small():
    logits = torch.tensor([[3.0, 5.0, -2.0]])
    for temperature in (0.0, 5e-324, 1e-300, 1e-9):
        assert draw(logits, Sampling(temperature=temperature), [make_generator(0, 0)]).tolist() == [1]
    torch.testing.assert_close(temper(logits, 4.0).softmax(-1), (logits / 4).softmax(-1))


# --- the sampler -----------------------------------------------------------------------------------------------------


def test_greedy_sampling_equals_the_uncached_forward(model):
    prompt = list(b"def ")
    expected = list(prompt)
    with torch.no_grad():
        for _ in range(GREEDY.tokens):
            expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    assert END not in expected
    assert prompt + [token for (token,) in generate(model, prompt, GREEDY, END)] == expected


def test_the_same_seed_gives_the_same_tokens_and_touches_no_random_state(model):
    sampling = Sampling(tokens=20, temperature=1.0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = list(generate(model, [7], sampling, END))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert list(generate(model, [7], sampling, END)) == first
    assert list(generate(model, [7], dataclasses.replace(sampling, seed=1), END)) != first


def test_a_sample_is_the_same_alone_and_beside_others(model):
    sampling = Sampling(tokens=20, temperature=1.0)
    together = [list(row) for row in zip(*generate(model, [7], sampling, END, samples=4), strict=True)]
    assert len({tuple(row) for row in together}) == 4
    alone = [token for (token,) in generate(model, [7], sampling, END)]
    assert together[0][: len(alone)] == alone
    pair = [list(row) for row in zip(*generate(model, [7], sampling, END, samples=2), strict=True)]
    assert together[1][: len(pair[1])] == pair[1]


def test_an_empty_prompt_starts_a_document(model):
    assert list(generate(model, [], GREEDY, END)) == list(generate(model, [END], GREEDY, END))
    assert list(generate(model, [], GREEDY, END)) != list(generate(model, [0], GREEDY, END))


def test_samples_end_at_the_end_of_a_document_and_stay_ended():
    ending = vivid(dataclasses.replace(CONFIG, norm="layernorm"))
    with torch.no_grad():  # a leaning, some 10 % a token, to end here
        ending.get_parameter("finish.bias").copy_(ending.lm_head.weight[END] * 1.5)
    rows = [list(row) for row in zip(*generate(ending, [7], Sampling(tokens=40, temperature=1.0), END, 5), strict=True)]
    lengths = [row.index(END) for row in rows]
    assert len(set(lengths)) > 1  # at different times
    assert all(set(row[length:]) == {END} for row, length in zip(rows, lengths, strict=True))
    assert len(rows[0]) == max(lengths) + 1 < 40  # and when all have, it is over
    texts = [""] * 5
    for pieces in stream_text(ending, ByteTokenizer(), [7], Sampling(tokens=40, temperature=1.0), 5):
        texts = [text + (piece or "") for text, piece in zip(texts, pieces, strict=True)]
    decoded = [bytes(token for token in row if token != END).decode(errors="replace") for row in rows]
    for text, whole in zip(texts, decoded, strict=True):
        assert whole.startswith(text) and whole.removeprefix(text) in ("", "\ufffd")  # an unfinished character


@pytest.mark.parametrize(
    "prompt, tokens, result",
    [
        (0, None, 47),
        (1, None, 47),
        (40, None, 8),
        (40, 8, 8),
        (47, 1, 1),
        (40, 9, None),
        (48, None, None),
        (60, 1, None),
    ],
)
def test_room_in_the_context(model, prompt, tokens, result):
    if result is not None:
        assert check_room([1] * prompt, Sampling(tokens=tokens), 48) == result
        assert len(list(generate(model, [1] * prompt, Sampling(tokens=tokens, temperature=0), END))) <= result
        return
    with pytest.raises(ValueError, match=rf"{prompt} tokens.*context of 48"):
        next(generate(model, [1] * prompt, Sampling(tokens=tokens), END))
    assert check_room([], Sampling(), 100_000) == 256


def test_samples_during_training(model):
    training = vivid(dataclasses.replace(CONFIG, dropout=0.5)).train()
    tokenizer = ByteTokenizer()
    text = sample_text(training, tokenizer, list(b"if "), Sampling(tokens=20, temperature=0))
    assert training.training
    ids = [token for (token,) in generate(model, list(b"if "), Sampling(tokens=20, temperature=0), END)]
    assert tokenizer.decode([*b"if ", *ids]).startswith(text) and text.startswith("if ") and len(text) > 3
    for length in (47, 48, 0):  # the context has room for one more, for none, for all
        assert isinstance(sample_text(training, tokenizer, [65] * length, Sampling(tokens=500)), str)


# --- text ------------------------------------------------------------------------------------------------------------


def grown(raw: bytes, cuts: list[int], stop: list[str]) -> str:
    text, shown = GrowingText(stop), ""
    edges = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    for start, end in itertools.pairwise(edges):
        shown += text.add(raw[start:end])
        if text.ended:
            return shown
    return shown + text.end()


def cut_by_hand(text: str, stop: list[str]) -> str:
    for end in range(1, len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="abé€😀\n", max_size=12),
    st.lists(st.integers(0, 40), max_size=12),
    st.lists(st.text(alphabet="abé€😀\n", min_size=1, max_size=4), max_size=3),
)
def test_text_does_not_depend_on_how_its_bytes_came(text, cuts, stop):
    assert grown(text.encode(), cuts, stop) == cut_by_hand(text, stop)


def test_characters_appear_when_they_are_whole():
    text = GrowingText()
    assert [text.add(bytes([byte])) for byte in "é😀x".encode()] == ["", "é", "", "", "", "😀", "x"]
    assert text.add(b"\xf0\x9f") == "" and text.end() == ""  # and never, if they never are
    assert GrowingText().add(b"a\xffb\x80") == "a\ufffdb\ufffd"


def test_what_may_become_a_stop_string_is_held_back():
    text = GrowingText(["\n\n", "def"])
    assert [text.add(piece) for piece in (b"x\n", b"d", b"e", b"x\n", b"\n")] == ["x", "\n", "", "dex", ""]
    assert text.ended
    text = GrowingText(["END"])
    assert text.add(b"the EN") == "the " and text.end() == "EN"


def joined(stream: Iterator[list[str | None]]) -> str:
    return "".join(piece or "" for (piece,) in stream)


def test_streamed_text_is_the_decoded_text(model):
    tokenizer = train_tokenizer(["déf f(x):\n\treturn x 😀 é\n" * 30], 290)
    speaker = vivid(dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size))
    sampling = Sampling(tokens=40, temperature=1.5, seed=1)
    prompt = tokenizer.encode("déf ")
    ids = [token for (token,) in generate(speaker, prompt, sampling, tokenizer.end_of_document)]
    streamed = joined(stream_text(speaker, tokenizer, prompt, sampling))
    assert len(streamed) > 5 and tokenizer.decode(ids).startswith(streamed)
    assert tokenizer.decode(ids).removeprefix(streamed) in ("", "\ufffd")
    stop = streamed[5:7]
    stopped = joined(stream_text(speaker, tokenizer, prompt, sampling, stop=[stop]))
    assert stopped == streamed[: streamed.index(stop)]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_prompt_and_what_follows_go_to_standard_output(run, model, capsys):
    command.main(["--checkpoint", str(run), "--prompt", "def ", "--tokens", "12", "--temperature", "0", *IN_FLOAT32])
    output = capsys.readouterr()
    expected = joined(stream_text(model, ByteTokenizer(), list(b"def "), GREEDY))
    assert output.out == f"def {expected}\n"
    assert "12 tokens in" in output.err and "tokens/s" in output.err and "step-000001 on cpu in float32" in output.err


def test_the_newest_run_several_samples_and_a_prompt_from_standard_input(run, model, capsys, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    (run.parent.parent / "runs").symlink_to(run.parent)
    (run / "run.json").touch()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é = ".encode()), encoding="latin-1"))
    command.main(["--prompt", "-", "--tokens", "9", "--samples", "3", "--seed", "4", "--temperature", "1", *IN_FLOAT32])
    texts = ["", "", ""]
    for pieces in stream_text(model, ByteTokenizer(), list("é = ".encode()), Sampling(9, 1.0, seed=4), samples=3):
        texts = [text + (piece or "") for text, piece in zip(texts, pieces, strict=True)]
    blocks = [f"----- sample {number} of 3 -----\né = {text}\n" for number, text in enumerate(texts, 1)]
    assert capsys.readouterr().out == "".join(blocks)


def test_every_knob_of_sampling_is_a_flag_with_its_default(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag in ("checkpoint", "prompt", "tokens", "temperature", "top-k", "top-p", "min-p", "seed", "stop", "samples"):
        assert f"--{flag} " in text
    assert "at most 256" in text and "(default: 0.8)" in text


BAD = {
    "--temperature -1": "--temperature must be a number from 0 up, not -1.0",
    "--temperature nan": "--temperature must be a number from 0 up, not nan",
    "--temperature inf": "--temperature must be a number from 0 up",
    "--temperature warm": "argument --temperature: invalid float value: 'warm'",
    "--top-p 0": "--top-p must be above 0 and at most 1, not 0.0",
    "--top-p 1.1": "--top-p must be above 0 and at most 1",
    "--top-p nan": "--top-p must be above 0 and at most 1",
    "--top-k -1": "--top-k must be at least 1, or 0 for all, not -1",
    "--min-p 1": "--min-p must be at least 0 and below 1, not 1.0",
    "--min-p -0.1": "--min-p must be at least 0 and below 1",
    "--tokens 0": "--tokens must be at least 1, not 0",
    "--tokens -3": "--tokens must be at least 1",
    "--samples 0": "--samples must be at least 1, not 0",
    "--samples 10000000000000000000": "--samples must be at most 2147483647",
    "--tokens 10000000000000000000": "--tokens must be at most 2147483647",
    "--seed -1": "--seed must be a number from 0 up, not -1",
    "--tokens 48": "--tokens 48 after a prompt of 1 tokens exceeds the model's context of 48; use at most 47",
    "--checkpoint nowhere": "nowhere is not a directory; name a run of train.py",
    "--dtype int4": "argument --dtype: invalid choice: 'int4'",
    "--tempo 3": "unrecognized arguments: --tempo 3",
}


def refused(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    output = capsys.readouterr()
    assert ended.value.code == 2 and not output.out
    assert output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize("flags, complaint", BAD.items())
def test_bad_input_is_one_line_and_exit_code_2(run, capsys, flags, complaint):
    assert complaint in refused(["--checkpoint", str(run), "--device", "cpu", *flags.split()], capsys)


def test_bad_prompts(run, capsys, monkeypatch):
    here = ["--checkpoint", str(run), "--device", "cpu"]
    line = refused([*here, "--prompt", "x" * 48], capsys)
    assert "--prompt has 48 tokens" in line and "context of 48" in line
    assert "--prompt is not UTF-8: byte 2 is 0xff" in refused([*here, "--prompt", "ab\udcff"], capsys)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert "--prompt is not UTF-8: byte 2 is 0xff" in refused([*here, "--prompt", "-"], capsys)
    assert "--stop must not be empty" in refused([*here, "--stop", ""], capsys)
    monkeypatch.setattr("sys.stdin", None)  # what Python makes of one that is closed
    assert "--prompt - reads standard input, which is closed" in refused([*here, "--prompt", "-"], capsys)


def test_no_run_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "no run in runs/ yet; start one" in refused(["--device", "cpu"], capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(run, capsys):
    assert "--device cuda: torch" in refused(["--checkpoint", str(run), "--device", "cuda"], capsys)


def launched(run: Path, *flags: str, **how) -> subprocess.Popen:
    arguments = [sys.executable, str(ROOT / "generate.py"), "--checkpoint", str(run), "--device", "cpu", *flags]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, **how)


def test_bfloat16_where_the_processor_lacks_it(run):
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # takes the instructions away for this process
    process = launched(run, "--dtype", "bfloat16", env=environment)
    out, err = process.communicate()
    assert process.returncode == 2 and not out
    assert err.count(b"\n") == 1 and b"--dtype bfloat16:" in err and b"try --dtype float32" in err


@pytest.mark.parametrize("where", ["read_prompt", "find_checkpoint", "load_model", "show"])
def test_an_interrupt_is_one_line_wherever_it_comes(run, capsys, monkeypatch, where):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, where, interrupted)
    with pytest.raises(SystemExit) as ended:
        command.main(["--checkpoint", str(run), "--device", "cpu"])
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted"


def test_a_reader_that_stops_early_hears_no_complaint(run):
    process = launched(run, "--prompt", "x" * 5)
    assert process.stdout and process.stderr
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert b"Error" not in process.stderr.read()
    assert process.wait() == 0
