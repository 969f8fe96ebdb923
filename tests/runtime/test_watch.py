"""`--watch` against a float64 model that is followed step by step; and the run that it must not disturb."""

import copy
import json
import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import train
from data.batches import training_batch
from model import Llama, rotate
from norms.placement import as_tuple
from pages.run import plot_streams
from runtime.checkpoint import load_pretrained
from runtime.flags import read_train
from runtime.run import open_run
from runtime.run_dir import read_rows
from runtime.watch import Watch, measure_sites

LAYERS, LR = 3, 0.5
# fp32 rounds at 6e-8. Three blocks, whose norms divide small differences, amplify that about a hundredfold.
TOLERANCE = 1e-5
TOKENS, TARGETS = torch.randint(20, (2, 4, 8), generator=torch.Generator().manual_seed(3))


def make_model(norm: str = "rmsnorm", placement: str = "pre", **fields) -> Any:
    """A tiny model whose gains are not all one, and some of them negative."""
    sizes: dict[str, Any] = {"dim": 16, "layers": LAYERS, "heads": 4, "kv_heads": 2, "context": 8, "vocab_size": 20}
    model = Llama(norm=norm, placement=placement, **sizes, **fields)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1).mul_(torch.randn_like(weight).sign())
    return model


def rms(x: Tensor) -> float:
    return math.sqrt(sum(value * value for value in x.flatten().tolist()) / x.numel())


def largest_logit(x: Tensor, model: Any, layer: int) -> float:
    """Over all sequences, heads, tokens and those that each token sees, from the normalized input of attention."""
    attention, (batch, length, _) = model.layers[layer].self_attn, x.shape
    rope = model.rope(slice(length))
    q = attention.rotated_q_norm(rotate((x @ attention.q_proj.weight.T).view(batch, length, 4, 4), rope))
    k = attention.rotated_k_norm(rotate((x @ attention.k_proj.weight.T).view(batch, length, 2, 4), rope))
    seen = [(b, h, t, s) for b in range(batch) for h in range(4) for t in range(length) for s in range(t + 1)]
    return max(float(q[b, t, h] @ k[b, s, h // 2]) / 2 for b, h, t, s in seen)


WATCHED = [("rmsnorm", "pre"), ("layernorm", "siamese"), ("batchnorm", "post"), ("rmsnorm", "attnres-block")]


@pytest.mark.parametrize("norm, placement", WATCHED)
def test_rows_match_float64(norm, placement, tmp_path):
    fields: Any = {"qk_norm": "head", "qk_norm_after_rope": True} if placement == "pre" else {}
    model = make_model(norm, placement, embedding_norm="gain", **fields)
    exact = copy.deepcopy(model).double()
    exact.loss(TOKENS, TARGETS).backward()
    watch = Watch(model, 7, tmp_path / "watch.jsonl")
    model.loss(TOKENS, TARGETS).backward()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    watch.start(TOKENS, torch.float32, 1.0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(weight.grad, alpha=LR)
    watch.finish()
    rows = read_rows(tmp_path / "watch.jsonl")
    assert [row["site"] for row in rows] == ["embedding", *["attention", "mlp"] * LAYERS, "output"]
    assert [row["block"] for row in rows] == [0, 1, 1, 2, 2, 3, 3, 4] and {row["step"] for row in rows} == {7}
    exact.requires_grad_(False)
    assert rows[0]["input_rms.norm"] == pytest.approx(rms(exact.embed_tokens.weight[TOKENS]), rel=TOLERANCE)
    stream = exact.init_stream(exact.embed_tokens(TOKENS))
    rope = exact.rope(slice(TOKENS.shape[1]))
    for layer, block in enumerate(exact.layers):
        for site, arguments in (("attention", (block.self_attn, rope)), ("mlp", (block.mlp,))):
            row = next(row for row in rows if (row["block"], row["site"]) == (layer + 1, site))
            residual = getattr(block, f"{site}_residual")
            before, stream = stream, residual(stream, *arguments)
            watched = [as_tuple(x)[-1:] if placement.startswith("attnres") else as_tuple(x) for x in (before, stream)]
            for prefix, x, after in zip(("", "second_"), *watched, strict=False):
                assert row[f"{prefix}stream_before"] == pytest.approx(rms(x), rel=TOLERANCE)
                assert row[f"{prefix}stream_after"] == pytest.approx(rms(after), rel=TOLERANCE)
            if placement == "pre":
                assert row["input_rms.norm"] == pytest.approx(rms(before), rel=TOLERANCE)
                if site == "attention":
                    expected = largest_logit(residual.norm(before), exact, layer)
                    assert row["max_logit"] == pytest.approx(expected, rel=TOLERANCE)
            for name, x in residual.get_submodule("norm").named_parameters():
                name = "gain" if name == "weight" else name
                assert row[f"{name}_mean.norm"] == pytest.approx(float(x.mean()), rel=TOLERANCE, abs=1e-7)
                assert row[f"{name}_std.norm"] == pytest.approx(float(x.std(correction=0)), rel=TOLERANCE)
            for name in ("q_proj", "o_proj") if site == "attention" else ("gate_proj", "down_proj"):
                weight = arguments[0].get_submodule(name).weight
                assert row[f"grad_rms.{name}"] == pytest.approx(rms(weight.grad), rel=TOLERANCE)
                assert row[f"update.{name}"] == pytest.approx(LR * rms(weight.grad) / rms(weight), rel=1e-4)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.fixture
def run(text, tmp_path):
    """Train for six steps in this process; `run("--watch 2", "name")` returns the folder."""

    def start(flags: str, name: str):
        sizes = "--dim 32 --layers 2 --heads 2 --context 32 --tokenizer bytes --device cpu --steps 6 --save-every 4"
        cache = tmp_path / "cache"
        train.main(f"{sizes} --data {text} --cache-dir {cache} --out {tmp_path / name} {flags}".split())
        return tmp_path / name

    return start


def test_watching_does_not_change_a_bit(run, fingerprint):
    """And a resumed run repeats the rows after its checkpoint."""
    flags = "--norm batchnorm --dropout 0.5 --dtype bfloat16 --micro-batch-size 4"
    watched, plain = run(f"{flags} --watch 3", "watched"), run(flags, "plain")
    assert fingerprint(watched) == fingerprint(plain)
    assert not (plain / "watch.jsonl").exists()
    assert sorted({row["step"] for row in read_rows(watched / "watch.jsonl")}) == [1, 3, 6]
    before = (watched / "watch.jsonl").read_text()
    (watched / "metrics.jsonl").write_text("")
    shutil.rmtree(watched / "checkpoints/step-000006")
    (watched / "watch.jsonl").write_text(before + '{"step": 6, "block"')
    run("--resume", "watched")
    assert (watched / "watch.jsonl").read_text() == before


@pytest.mark.parametrize("dtype, tolerance", [("float32", TOLERANCE), ("float16", 0.02)])
def test_a_row_is_about_its_step_before_the_gradients_are_clipped(dtype, tolerance, run):
    """Gradients of the whole batch, without the scale of the loss, and the stream of its first micro-batch."""
    flags = "--watch 2 --save-every 1 --keep 9 --eval-every 9 --clip 1e-3 --batch-size 8 --micro-batch-size 4"
    folder = run(f"{flags} --dtype {dtype}", "run")
    model, _ = load_pretrained(folder / "checkpoints/step-000003")
    data = open_run(read_train(["--eval-only", "--out", str(folder)]), []).data
    tokens, targets = training_batch(data.train, 0, 3, range(8), 32)
    model.loss(tokens, targets).backward()
    rows = [row for row in read_rows(folder / "watch.jsonl") if row["step"] == 4]
    columns = [row["stream_after"] for row in rows if "stream_after" in row]
    expected = [row["stream_after"] for row in measure_sites(model, tokens[:4]) if "stream_after" in row]
    assert len(columns) == 4 and columns == pytest.approx(expected, rel=tolerance)
    for row, layer in zip(rows[1:5:2], range(2), strict=True):
        weight = model.get_parameter(f"layers.{layer}.self_attn.q_proj.weight")
        assert weight.grad is not None and row["grad_rms.q_proj"] == pytest.approx(rms(weight.grad), rel=tolerance)


def test_what_is_not_finite_is_none_and_white(tmp_path):
    model = make_model()
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    watch = Watch(model, 1, tmp_path / "watch.jsonl")
    watch.start(TOKENS, torch.float32, 1.0)
    watch.finish()
    lines = (tmp_path / "watch.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert rows[3]["stream_after"] > 0 and rows[4]["stream_after"] is None
    none = [row | {"step": 1} for row in measure_sites(make_model(norm="none", placement="rezero"), TOKENS)]
    later = [row | {"step": 9, "stream_after": 5.0} for row in none[1:7]]
    first, last = plot_streams({"a": rows, "b": [*none, *later]}).axes
    broken, whole = (np.asarray(line.get_xydata()).tolist() for line in first.lines)
    assert broken[:3] == [[0.5, rows[1]["stream_after"]], [1, rows[2]["stream_after"]], [1.5, rows[3]["stream_after"]]]
    assert math.isnan(broken[3][1]) and whole[5] == [3, none[6]["stream_after"]]
    assert np.asarray(last.lines[1].get_ydata()).tolist() == [5.0] * 6
