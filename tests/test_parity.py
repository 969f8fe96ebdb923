"""Parity with `transformers` through directories on disk, both ways: for random configurations of each architecture,
and for eight families in the shape in which they are published.

In float64 the two compute the same. In fp32 and bf16, our error against that is at most as large as theirs, up to a
factor that allows for another order of sums.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import generate as command
import train
from config import ModelConfig
from data.tokenizer import SentencePieceTokenizer, train_tokenizer
from model import Llama
from recipes import RECIPES
from runtime.checkpoint import load_pretrained, save_pretrained
from runtime.huggingface.architectures import ARCHITECTURES, to_theirs
from runtime.huggingface.directory import TOKEN_IDS
from sampling import Sampling, generate, stream_ids
from tests.random_values import fp32_is_float64, randomize

CONTEXT, VOCAB = 128, 384
TOKENS = torch.randint(0, VOCAB, (8, 48), generator=torch.Generator().manual_seed(2))
OURS: dict[str, dict[str, Any]] = {name: dict(RECIPES[name.removesuffix("_text")]) for name in ARCHITECTURES}
for name in ("mistral", "helium", "ernie4_5", "smollm3", "seed_oss", "phi3", "olmo3"):  # others compute the same
    OURS[name]["model_type"] = name
for name in ("qwen2", "seed_oss", "glm4"):
    OURS[name]["attention_bias"] = True
OURS["granite"]["embedding_scale"] = 3.0


def draw_config(name: str, seed: int) -> ModelConfig:
    """A random configuration that the architecture expresses."""
    choose = random.Random(f"{name} {seed}").choice
    heads = choose([2, 4])
    dim = heads * choose([8, 16])
    head_dim = None if ARCHITECTURES[name].square else choose([None, 8, 24])
    norm_args = OURS[name].get("norm_args", {}) | ({} if name == "olmo" else {"eps": choose([1e-3, 1e-5, 1e-6])})
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32.0}
    return ModelConfig(
        **OURS[name] | dict(
            dim=dim, layers=choose([1, 3]), heads=heads, kv_heads=choose([1, 2, heads]), head_dim=head_dim,
            hidden_dim=choose([48, 96]), context=CONTEXT, vocab_size=VOCAB, rope_theta=choose([500.0, 1e4, 5e5]),
            rope_scaling=choose([{}, {} if name == "phi3" else scaling]), tie_embeddings=choose([True, False]),
            norm_args=norm_args, rotary_fraction={"stablelm": 0.25, "glm4": 0.5, "phi3": 0.5}.get(name, 1.0),
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return train_tokenizer([Path(__file__).read_text("utf-8")] * 3, VOCAB)


def their_model(directory: Path, dtype: torch.dtype) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


def their_greedy_tokens(model: Any, prompt: Tensor, tokens: int = 8) -> Tensor:
    options = dict(do_sample=False, max_new_tokens=tokens, pad_token_id=0, attention_mask=torch.ones_like(prompt))
    return model.generate(prompt, **options)


@torch.no_grad()
def exact_logits(directory: Path, atol: float = 1e-9) -> Tensor:
    """Logits in float64, and that ours and theirs are the same, as are 40 greedy tokens, or fewer if they end."""
    (ours, tokenizer), theirs = load_pretrained(directory), their_model(directory, torch.float32)
    with fp32_is_float64():
        ours, theirs = ours.double(), theirs.double()  # ours computes its rotary table again
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
        if hasattr(theirs.model.embed_tokens, "embed_scale"):
            theirs.model.embed_tokens.embed_scale.fill_(ours.config.embedding_scale)
        tokens = TOKENS % ours.config.vocab_size
        logits, prompt = theirs(tokens).logits, tokens[:1, :8]
        assert logits.dtype == torch.float64
        torch.testing.assert_close(ours(tokens), logits, rtol=0, atol=atol)
        generated = their_greedy_tokens(theirs, prompt, 40)
        mine = [token for (token,) in stream_ids(ours, prompt, Sampling(tokens=40, temperature=0), tokenizer.ends)]
    assert mine == generated[0, 8:].tolist()
    return logits


@torch.no_grad()
def assert_as_exact(directory: Path, dtype: torch.dtype) -> None:
    """As `exact_logits`. And weights, residual stream and logits are in `dtype`, with RMS errors as large as theirs."""
    exact = exact_logits(directory)
    ours, theirs = load_pretrained(directory)[0].to(dtype), their_model(directory, torch.float32)
    for weight in theirs.parameters():  # not `theirs.to(dtype)`, which would round the RoPE frequencies too
        weight.data = weight.to(dtype)
    logits = ours(TOKENS), theirs(TOKENS).logits
    assert [each.dtype for each in logits] == [torch.float32 if ours.config.logit_cap else dtype, dtype]
    our_error, their_error = (float((each - exact).square().mean().sqrt()) for each in logits)
    rounding = torch.finfo(dtype).eps / 2 * float(exact.square().mean().sqrt())  # rounding of the logits alone
    assert our_error <= 1.5 * their_error + rounding


def tensors(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_bytes(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


# What these families need is tested with another one.
ALIKE = ("gemma2", "exaone4", "arcee", "qwen2", "ernie4_5", "smollm3", "olmo3")
NAMES = [pytest.param(*each, marks=[pytest.mark.slow] * (each[1] in ALIKE)) for each in enumerate(OURS)]


@pytest.mark.parametrize("number, name", NAMES)
def test_parity_and_round_trips(tmp_path, tokenizer, number, name):
    ours = randomize(Llama(draw_config(name, 0)))
    assert to_theirs(ours.config)["model_type"] == name

    # Ours opens in transformers.
    save_pretrained(tmp_path / "ours", ours, tokenizer)
    described, end = json.loads((tmp_path / "ours/config.json").read_text()), tokenizer.end_of_document
    assert [described[name] for name in TOKEN_IDS] == [end, end, None]
    assert_as_exact(tmp_path / "ours", torch.float32)

    # Theirs opens here: other dtypes, several files.
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    directory, again = tmp_path / "theirs", tmp_path / "again"
    theirs = their_model(tmp_path / "ours", dtype)
    theirs.save_pretrained(directory, max_shard_size="1GB" if number % 2 else "20KB")
    tokenizer.save(directory)
    loaded, loaded_tokenizer = load_pretrained(directory)
    assert loaded.config == ours.config and loaded_tokenizer.hash == tokenizer.hash
    # Ours → theirs → ours has the same bytes, and so has theirs → ours → theirs.
    assert_same_bytes(loaded.state_dict(), {name: tensor.to(dtype) for name, tensor in ours.state_dict().items()})
    save_pretrained(again, loaded, loaded_tokenizer)
    assert_same_bytes(tensors(again), tensors(directory))
    assert_same_bytes(their_model(again, dtype).state_dict(), theirs.state_dict())

    # A directory that knows nothing of us, in the spelling of transformers 4. Theirs was in that of 5.
    config = json.loads((again / "config.json").read_text())
    del config["normal_llama"]
    (again / "config.json").write_text(json.dumps(config))
    llama = transformers.LlamaConfig()  # qwen2 would name a kind of tokenizer
    transformers.AutoTokenizer.from_pretrained(again, config=llama).save_pretrained(again)
    assert_as_exact(again, torch.bfloat16)


MULTIPLIERS: dict[str, dict[str, Any]] = {
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 7.0},
    "gemma3_text": {"query_pre_attn_scalar": 50},
}


@pytest.mark.parametrize("name", MULTIPLIERS)
def test_multipliers_are_folded_into_weights(tmp_path, tokenizer, name):
    save_pretrained(tmp_path / "ours", randomize(Llama(draw_config(name, 0))), tokenizer)
    path = tmp_path / "ours/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | MULTIPLIERS[name]))
    before = exact_logits(tmp_path / "ours", atol=1e-5)  # the folded weights are rounded to fp32
    save_pretrained(tmp_path / "again", *load_pretrained(tmp_path / "ours"))
    torch.testing.assert_close(exact_logits(tmp_path / "again"), before, rtol=0, atol=1e-5)


# The files of each family, with small sizes. The vocabulary of a tokenizer has its special tokens only; pieces follow.
FAMILIES: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
PIECES, MERGES = FAMILIES.pop("pieces"), FAMILIES.pop("merges")
for name, (family, fields) in FAMILIES.pop("variants").items():  # the variants compute the same
    FAMILIES[name] = FAMILIES[family] | {"config.json": FAMILIES[family]["config.json"] | fields}
TEXTS = ["def f(x):\n    return 1.5 * x  # é 漢字 😀", "Hello world's 1234 <s> ok", "<think>no</think>\t\tz"]


def publish(family: str, directory: Path) -> dict[str, Any]:
    """A directory of random weights in the shape of the family. Returns what its files hold."""
    files, config = FAMILIES[family], FAMILIES[family]["config.json"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    model.to(getattr(torch, config["torch_dtype"])).save_pretrained(directory)
    tokenizer = files["tokenizer.json"]
    bpe, kind = tokenizer["model"], tokenizer["model"]["merges"]
    pieces = {piece: number for number, piece in enumerate(bpe["vocab"] + PIECES[kind])}
    tokenizer = tokenizer | {"model": bpe | {"vocab": pieces, "merges": MERGES[kind]}}
    for name, fields in (files | {"tokenizer.json": tokenizer}).items():
        (directory / name).write_text(json.dumps(fields))
    return files


@torch.no_grad()
def assert_as_published(directory: Path, files: dict[str, Any]) -> None:
    """Ids of texts, special tokens, logits, and each end: in transformers as here and as in the family."""
    exact_logits(directory)
    (ours, tokenizer), theirs = load_pretrained(directory), their_model(directory, torch.float32)
    in_transformers = transformers.AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert tokenizer.encode_prompt(text) == in_transformers(text, split_special_tokens=True)["input_ids"], text
    described, config = json.loads((directory / "config.json").read_text()), files["config.json"]
    assert [described.get(name) for name in TOKEN_IDS] == [config.get(name) for name in TOKEN_IDS]
    generation = files["generation_config.json"]
    assert json.loads((directory / "generation_config.json").read_text()) == generation
    prompt, ends = torch.tensor([tokenizer.encode_prompt("def f")]), generation["eos_token_id"]
    assert tokenizer.ends == set(ends if isinstance(ends, list) else [ends])
    for end in tokenizer.ends:  # it changes places with a token that comes
        new = generate(ours, prompt, tokens=8, temperature=0)[0, prompt.shape[1] :].tolist()
        other = next(token for token in new if token not in prompt)
        for model, embedding in ((ours, ours.embed_tokens), (theirs, theirs.model.embed_tokens)):
            for weight in {embedding.weight, model.lm_head.weight}:
                weight[[end, other]] = weight[[other, end]]
        mine = generate(ours, prompt, tokenizer.ends, tokens=8, temperature=0)
        assert mine[0, -1] == end and mine.tolist() == their_greedy_tokens(theirs, prompt).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_read_fine_tuned_and_read_by_transformers(tmp_path, text, family):
    files = publish(family, base := tmp_path / "base")
    assert_as_published(base, files)
    flags = f"--init-from {base} --data {text} --cache-dir {tmp_path / 'cache'} --out {tmp_path / 'run'} --context 48"
    flags += " --steps 10 --batch-size 2 --optimizer adamw --lr 3e-3 --device cpu --dtype float32 --eval-tokens 400"
    train.main(flags.split())
    run = tmp_path / "run/checkpoints/step-000010"
    assert_as_published(run, files)
    described = json.loads((run / "config.json").read_text())
    assert (described["max_position_embeddings"], load_pretrained(run)[0].config.context) == (64, 48)


def test_the_command_begins_prompts_and_ends_texts_as_a_family_does(tmp_path, capsys):
    """With Llama 3's first token, and at each end, although only generation_config.json has all of them."""
    publish("Llama 3 Instruct", tmp_path)
    path, weights = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 317}))
    in_transformers = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt, embedding = in_transformers("def", return_tensors="pt").input_ids, weights["model.embed_tokens.weight"]
    for end in (317, 319):  # it changes places with the third token that comes
        other = int(generate(load_pretrained(tmp_path)[0], prompt, tokens=3, temperature=0)[0, -1])
        embedding[[end, other]] = embedding[[other, end]]
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        command.main(f"--checkpoint {tmp_path} --prompt def --temperature 0 --dtype float32".split())
        theirs = their_greedy_tokens(their_model(tmp_path, torch.float32), prompt)
        assert theirs[0, -1] == end and len(set(theirs[0].tolist())) > 5
        assert capsys.readouterr().out == f"{in_transformers.decode(theirs[0], skip_special_tokens=True)}\n"
