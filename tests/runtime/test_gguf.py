"""GGUF files: what was written is read back with the gguf package, with transformers, and by llama.cpp itself."""

import email
import io
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from torch import Tensor

import train
from config import ModelConfig
from data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, train_tokenizer
from generate import generate
from model import Llama, precompute_freqs_cis, rotate
from runtime import gguf as command
from runtime.checkpoint import load_pretrained, save_pretrained
from runtime.gguf import export, pair_neighbors

gguf = pytest.importorskip("gguf")

TEXT = "".join(f"def f{n}(x):\n\treturn x + {n}  # größer, 你好\n\n" for n in range(300))
SIZES: dict[str, Any] = dict(
    dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48, context=256, vocab_size=320, rope_theta=500.0
)
GGUF_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": dict(norm_args={"eps": 1e-3}),
    "qwen3": dict(qk_norm="head", tie_embeddings=False),
    "olmo2": dict(placement="reordered", qk_norm="full"),
    "olmo": dict(norm="layernorm", norm_args={"elementwise_affine": False}),
    "stablelm": dict(norm="layernorm", norm_args={"eps": 1e-4}),
}


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return train_tokenizer([TEXT], SIZES["vocab_size"])


def random_model(**settings: Any) -> Llama:
    """A model with gains far from 1, whose logits differ by several nats."""
    model = Llama(ModelConfig(**SIZES | settings)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            scale = 1.5 / math.sqrt(weight.shape[-1]) if weight.ndim == 2 else 0.3
            weight.copy_(noise * scale + (weight.ndim == 1 and name.endswith("weight")))
    return model


def contents(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


# --- read back by the gguf package ------------------------------------------------------------------------------------


# From the standard names in the gguf package: ours, and theirs with the place of a tensor in a block.
BLOCK = {
    "self_attn.q_proj": "ATTN_Q",
    "self_attn.k_proj": "ATTN_K",
    "self_attn.v_proj": "ATTN_V",
    "self_attn.o_proj": "ATTN_OUT",
    "mlp.gate_proj": "FFN_GATE",
    "mlp.up_proj": "FFN_UP",
    "mlp.down_proj": "FFN_DOWN",
}
BLOCK_NORMS = {
    "llama": {"attention_residual.norm": "ATTN_NORM", "mlp_residual.norm": "FFN_NORM"},
    "olmo": {},
    "olmo2": {
        "attention_residual.norm": "ATTN_POST_NORM",
        "mlp_residual.norm": "FFN_POST_NORM",
        "self_attn.q_norm.norm": "ATTN_Q_NORM",
        "self_attn.k_norm.norm": "ATTN_K_NORM",
    },
}
BLOCK_NORMS["stablelm"] = BLOCK_NORMS["llama"]
BLOCK_NORMS["qwen3"] = BLOCK_NORMS["llama"] | {"self_attn.q_norm": "ATTN_Q_NORM", "self_attn.k_norm": "ATTN_K_NORM"}


def expected_names(architecture: str, model: Llama) -> dict[str, str]:
    """llama.cpp's name of every weight, from the enumeration in its gguf package."""

    def name(tensor: str, layer: int | None = None) -> str:
        return gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[tensor]].format(bid=layer)

    names = {"embed_tokens": name("TOKEN_EMBD"), "finish": name("OUTPUT_NORM"), "lm_head": name("OUTPUT")}
    for layer in range(model.config.layers):
        for ours, theirs in (BLOCK | BLOCK_NORMS[architecture]).items():
            names[f"layers.{layer}.{ours}"] = name(theirs, layer)
    endings = {ours: (ours.rpartition(".")[0], ours.rpartition(".")[2]) for ours in model.state_dict()}
    return {ours: f"{names[path]}.{kind}" for ours, (path, kind) in endings.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_everything_is_read_back(architecture, dtype, tokenizer, tmp_path):
    model, out = random_model(**GGUF_ARCHITECTURES[architecture]), tmp_path / "model.gguf"
    export(model, tokenizer, out, dtype)
    assert list(tmp_path.iterdir()) == [out]
    reader = gguf.GGUFReader(out)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = expected_names(architecture, model)
    if model.config.tie_embeddings and architecture in ("llama", "olmo"):
        del names["lm_head.weight"]
    assert sorted(names.values()) == sorted(tensors)
    for ours, theirs in names.items():
        weight, tensor = model.state_dict()[ours], tensors[theirs]
        if ours.endswith(("q_proj.weight", "k_proj.weight")) and architecture in ("llama", "olmo"):
            half = model.config.head_dim // 2  # row 2i is our row i of the head, row 2i + 1 our row i + D/2
            heads = weight.reshape(-1, 2 * half, model.config.dim)
            weight = torch.stack([heads[:, i // 2 + half * (i % 2)] for i in range(2 * half)], 1).flatten(0, 1)
        kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype] if weight.ndim == 2 else "F32"
        assert tensor.tensor_type.name == kind and list(tensor.shape) == list(reversed(weight.shape))
        expected = weight.to(getattr(torch, dtype)) if weight.ndim == 2 else weight
        assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), expected.float().numpy())
    check_settings(contents(reader), architecture, model)


def check_settings(found: dict[str, Any], architecture: str, model: Llama) -> None:
    config = model.config
    assert found["general.architecture"] == architecture
    expected = {
        "context_length": 256,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "rope.dimension_count": 8,
        "rope.freq_base": 500.0,
        "vocab_size": 320,
    }
    default = 1e-6 if config.norm == "rmsnorm" else 1e-5
    eps = "layer_norm_rms_epsilon" if config.norm == "rmsnorm" else "layer_norm_epsilon"
    expected[f"attention.{eps}"] = float(np.float32(config.norm_args.get("eps", default)))
    assert {name: value for name, value in found.items() if name.startswith(f"{architecture}.")} == {
        f"{architecture}.{name}": value for name, value in expected.items()
    }


def test_reordered_rows_rotate_alike():
    """q·k with llama.cpp's RoPE on neighbors and reordered rows equals q·k here. In float64."""
    generator = torch.Generator().manual_seed(0)
    rope = precompute_freqs_cis(8, 20)
    weights = [torch.randn(heads * 8, 16, generator=generator, dtype=torch.float64) for heads in (4, 2)]
    x = torch.randn(20, 16, generator=generator, dtype=torch.float64)
    ours = [rotate((x @ weight.T).unflatten(-1, (-1, 8)), rope) for weight in weights]
    theirs = [neighbors((x @ pair_neighbors(weight, 8).T).unflatten(-1, (-1, 8)), rope) for weight in weights]
    for q, k in ((0, 0), (3, 1)):
        scores = [query[:, q] @ key[:, k].T for query, key in (ours, theirs)]
        torch.testing.assert_close(*scores, rtol=1e-12, atol=1e-12)
    unordered = [neighbors((x @ weight.T).unflatten(-1, (-1, 8)), rope) for weight in weights]
    assert ((unordered[0][:, 0] @ unordered[1][:, 0].T) - (ours[0][:, 0] @ ours[1][:, 0].T)).abs().max() > 1


def neighbors(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE on features (2i, 2i + 1), as complex numbers. T H D."""
    angles = torch.complex(rope[0].double(), rope[1].double()).unsqueeze(1)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * angles).flatten(-2)


def test_tokenizer_is_read_back(tokenizer, tmp_path):
    export(random_model(), tokenizer, tmp_path / "model.gguf")
    found = contents(gguf.GGUFReader(tmp_path / "model.gguf"))
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    ids = range(tokenizer.vocab_size)
    types = {(1, 0, 0): 2, (0, 1, 0): 3, (0, 0, 1): 6}  # unknown, control, byte
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.tokens"] == [processor.id_to_piece(token) for token in ids]
    assert found["tokenizer.ggml.scores"] == [processor.get_score(token) for token in ids]
    assert found["tokenizer.ggml.token_type"] == [
        4
        if processor.id_to_piece(token) == "\t"  # defined by us as a piece of its own
        else types.get((processor.is_unknown(token), processor.is_control(token), processor.is_byte(token)), 1)
        for token in ids
    ]
    names = ["unknown_token_id", "bos_token_id", "eos_token_id", "add_bos_token", "add_eos_token", "add_space_prefix"]
    assert [found[f"tokenizer.ggml.{name}"] for name in names] == [0, 1, 2, False, False, False]


def test_bytes_are_pieces_with_the_same_ids(tmp_path):
    export(random_model(vocab_size=257), ByteTokenizer(), tmp_path / "model.gguf")
    found = contents(gguf.GGUFReader(tmp_path / "model.gguf"))
    pieces = found["tokenizer.ggml.tokens"]
    assert pieces[65] == "<0x41>" and pieces[32] == "\u2581" and pieces[256] == "</s>" and len(pieces) == 257
    assert found["tokenizer.ggml.token_type"] == [6] * 32 + [1] + [6] * 223 + [3]
    assert found["tokenizer.ggml.eos_token_id"] == 256


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"norm": "dyt"}, "--norm dyt; it has rmsnorm or layernorm"),
        ({"placement": "post"}, "--placement post; it has pre or reordered with llama, qwen3, olmo2"),
        ({"norm": "layernorm", "placement": "sandwich"}, "--placement sandwich; it has pre with olmo, stablelm"),
        ({"placement": "reordered"}, "--qk-norm none; it has full with olmo2"),
        ({"norm": "layernorm", "qk_norm": "head"}, "--qk-norm head; it has none with olmo, stablelm"),
        ({"norm_args": {"elementwise_affine": False}}, "--norm-arg elementwise_affine=false; it has true with llama"),
        ({"norm": "layernorm", "norm_args": {"bias": False}}, "--norm-arg bias=false"),
        ({"scaled_embedding": True}, "--scaled-embedding, which is True, not False"),
        ({"embedding_scale": 4.0}, "--embedding-scale, which is 4.0, not 1.0"),
        ({"norm_args": {"zero_centered": True}}, "--norm-arg zero_centered=true"),
        ({"norm": "layernorm", "head_dim": 16}, "--head-dim 16 with stablelm; it has --dim / --heads"),
    ],
)
def test_settings_are_refused_by_name(settings, message, tokenizer, tmp_path):
    with pytest.raises(ValueError) as excinfo:
        export(random_model(**settings), tokenizer, tmp_path / "model.gguf")
    assert str(excinfo.value) == f"llama.cpp cannot express {message}"
    assert not list(tmp_path.iterdir())


def test_other_vocabularies_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="the tokenizer has 320 ids, but the model has --vocab-size 330"):
        export(random_model(vocab_size=330), tokenizer, tmp_path / "model.gguf")
    unigram = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=unigram, vocab_size=320, byte_fallback=True,
        minloglevel=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"can have a tokenizer that train\.py has trained"):
        export(random_model(), SentencePieceTokenizer(unigram.getvalue()), tmp_path / "model.gguf")


@pytest.mark.parametrize("value", [65520.0, -65520.0])
def test_dtypes_are_checked(value, tokenizer, tmp_path):
    model = random_model()
    with torch.no_grad():
        model.get_parameter("layers.1.mlp.up_proj.weight")[3, 4] = value
    with pytest.raises(ValueError, match=r"float16 cannot hold a value of blk\.1\.ffn_up\.weight; use bfloat16 or fl"):
        export(model, tokenizer, tmp_path / "model.gguf", "float16")
    with pytest.raises(ValueError, match="dtype 'int8' is not one of float32, float16, bfloat16"):
        export(model, tokenizer, tmp_path / "model.gguf", "int8")
    assert not list(tmp_path.iterdir())
    export(model, tokenizer, tmp_path / "model.gguf", "bfloat16")


def test_missing_packages_are_named(tokenizer, tmp_path, monkeypatch):
    for module in ("gguf", "sentencepiece.sentencepiece_model_pb2"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)  # importing it fails
            with pytest.raises(ValueError, match="a GGUF file needs two packages: pip install gguf protobuf"):
                export(random_model(), tokenizer, tmp_path / "model.gguf")


# --- the command ------------------------------------------------------------------------------------------------------


def test_command(tokenizer, tmp_path, capsys):
    model, out = random_model(), tmp_path / "new/model.gguf"
    save_pretrained(tmp_path / "checkpoint", model, tokenizer)
    command.main([str(tmp_path / "checkpoint"), str(out), "--dtype", "float16"])
    assert (
        capsys.readouterr().out
        == f"{out}: {tmp_path}/checkpoint as llama in float16, {out.stat().st_size / 1e6:.1f} MB\n"
    )
    export(model, tokenizer, tmp_path / "same.gguf", "float16")
    assert out.read_bytes() == (tmp_path / "same.gguf").read_bytes()
    before = out.stat().st_mtime_ns
    for arguments, message in (
        ([tmp_path / "checkpoint", out], f"error: {out} exists; name a new file\n"),
        ([tmp_path / "nowhere", tmp_path / "b.gguf"], "is not a directory; name a run of train.py"),
        ([tmp_path / "checkpoint", out / "c.gguf"], "File exists"),
        ([tmp_path / "checkpoint", tmp_path / "b.gguf", "--dtype", "int8"], "invalid choice: 'int8'"),
    ):
        with pytest.raises(SystemExit) as exit:
            command.main([str(argument) for argument in arguments])
        error = capsys.readouterr().err
        assert exit.value.code == 2 and message in error and error.count("\n") == 1
    config = json.loads((tmp_path / "checkpoint/config.json").read_text())
    config["normal_llama"]["model"]["norm"] = "outside"
    imported = {"file": "outside.py", "sha256": "", "norms": ["outside"], "placements": []}
    config["normal_llama"]["imports"] = [imported]
    (tmp_path / "checkpoint/config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        command.main([str(tmp_path / "checkpoint"), str(tmp_path / "b.gguf")])
    assert "llama.cpp cannot express the norm or placement of" in capsys.readouterr().err
    assert out.stat().st_mtime_ns == before and sorted(path.name for path in out.parent.iterdir()) == ["model.gguf"]


# --- read by others --------------------------------------------------------------------------------------------------


def random_texts(count: int) -> list[str]:
    """Strings of everything that tokenizers trip over, but U+2581."""
    draw = random.Random(0)
    parts = [
        "def ",
        "return",
        "x + 1",
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "é",
        "größer",
        "你好",
        "😀",
        "\0",
        "\u200b",
        "<",
        "s>",
    ]
    parts += ["</s>", "<unk>", "<0x41>"]
    letters = [(32, 127), (160, 0x2500), (0x4E00, 0x9FFF)]
    parts += [chr(draw.randrange(*draw.choice(letters))) for _ in range(60)]
    return ["", " ", " x", "x ", *("".join(draw.choices(parts, k=draw.randrange(1, 30))) for _ in range(count - 4))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [dict(norm_args={"eps": 1e-3}), dict(qk_norm="head", dim=256, heads=2, kv_heads=1)]
)
def test_transformers_computes_the_same_logits(settings, tokenizer, tmp_path):
    """It reads no OLMo from GGUF files, no rope.freq_base of StableLM, and heads of 128 features only of Qwen 3."""
    transformers = pytest.importorskip("transformers")
    model = random_model(**settings)
    export(model, tokenizer, tmp_path / "model.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.randint(0, 320, (4, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(ids).logits, model(ids), rtol=1e-5, atol=5e-5)


class LlamaCpp:
    """A GGUF file in llama.cpp, with keys and values in float32."""

    def __init__(self, path: Path, context: int):
        llama_cpp = pytest.importorskip("llama_cpp")
        self.llm = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=context, n_threads=1, logits_all=True, verbose=False,
            type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, flash_attn=False,
        )  # fmt: skip

    def encode(self, text: str) -> list[int]:
        return self.llm.tokenize(text.encode(), add_bos=False, special=False)

    def logits(self, ids: list[int]) -> Tensor:
        self.llm.reset()
        self.llm.eval(ids)
        return torch.tensor(self.llm.scores[: len(ids)])

    def greedy(self, ids: list[int], tokens: int) -> tuple[list[int], str]:
        """The ids after `ids`, and their text."""
        self.llm.reset()
        self.llm.eval(ids)
        found: list[int] = []
        for _ in range(tokens):
            found.append(int(np.argmax(self.llm.scores[self.llm.n_tokens - 1])))
            self.llm.eval(found[-1:])
        return found, self.llm.detokenize(found).decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_llama_cpp_computes_the_same_logits(architecture, tokenizer, tmp_path):
    model = random_model(**GGUF_ARCHITECTURES[architecture])
    export(model, tokenizer, tmp_path / "model.gguf")
    ids = torch.randint(3, 320, (200,), generator=torch.Generator().manual_seed(0))
    theirs = LlamaCpp(tmp_path / "model.gguf", 256).logits(ids.tolist())
    with torch.no_grad():
        ours = model(ids[None])[0]
    print(f"{architecture}: largest difference of a logit {float((ours - theirs).abs().max()):.1e}")
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--tokenizer sentencepiece", "--kv-heads 1 --no-tie-embeddings", "--tokenizer bytes --qk-norm head"]
)
def test_llama_cpp_continues_a_trained_model_alike(flags, tmp_path):
    """The same 100 tokens and text, greedily, from four prompts, and the same ids of 200 strings."""
    pytest.importorskip("llama_cpp")
    sizes = "--dim 64 --layers 2 --heads 2 --context 256 --vocab-size 512 --steps 300 --batch-size 4 --eval-tokens 1024"
    where = [
        "--data",
        str(Path(email.__file__).parent),
        "--cache-dir",
        str(tmp_path / "cache"),
        "--out",
        str(tmp_path / "run"),
    ]
    train.main([*sizes.split(), *flags.split(), *where, "--device", "cpu", "--dtype", "float32"])
    model, tokenizer = load_pretrained(tmp_path / "run")
    export(model, tokenizer, tmp_path / "model.gguf")
    theirs = LlamaCpp(tmp_path / "model.gguf", 256)
    check_ids(tokenizer, theirs)
    for prompt in ("def ", "import ", "        return self", "# größer\n\tx"):
        ids = tokenizer.encode(prompt)
        ours = generate(model, ids, tokens=100, temperature=0)[len(ids) :].tolist()
        found, text = theirs.greedy(ids, 100)
        assert found == ours and text == tokenizer.decode(ours)


def check_ids(tokenizer: Tokenizer, theirs: LlamaCpp) -> None:
    for text in random_texts(200):
        assert theirs.encode(text) == tokenizer.encode(text), text
    # The difference that the module's documentation names.
    assert theirs.encode("a\u2581b") == tokenizer.encode("a b") != tokenizer.encode("a\u2581b")
