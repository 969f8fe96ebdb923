"""Continue a text: `python generate.py --prompt "def "`. The command first, then the sampler, then ids to text.

Shapes in comments: B samples, T tokens, V token ids.
"""

import argparse
import codecs
import dataclasses
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

import decode
from checkpoint import find_checkpoint, load_model
from config import Parser, add_knobs, check_sizes, knob, require
from data.tokenizer import Tokenizer
from exits import as_command, bad_input, exit_codes
from machine import pick_device, pick_dtype
from model import Llama
from rounding import round_weights

OFTEN_ENOUGH = 512  # likeliest tokens that are looked at first for --top-p
MOST_BY_DEFAULT = 256  # tokens, where the context has room for them


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are drawn. Raises ValueError, in one line that names the flag, for what makes no sense."""

    tokens: int = knob(None, f"most tokens to add (default: what fits into the context, up to {MOST_BY_DEFAULT})")
    temperature: float = knob(0.8, "divides the logits; 0 always takes the likeliest token")
    top_k: int = knob(0, "draw from this many of the likeliest; 0 is all")
    top_p: float = knob(1.0, "draw from the fewest of the likeliest whose probabilities add up to this")
    min_p: float = knob(0.0, "draw from those that are at least this share as likely as the likeliest")
    seed: int = knob(0, "of the draws; the same seed gives the same text")

    def __post_init__(self) -> None:
        check_sizes(self, "tokens")
        require(0 <= self.temperature < math.inf, f"--temperature must be a number from 0 up, not {self.temperature}")
        require(self.top_k >= 0, f"--top-k must be at least 1, or 0 for all, not {self.top_k}")
        require(0 < self.top_p <= 1, f"--top-p must be above 0 and at most 1, not {self.top_p}")
        require(0 <= self.min_p < 1, f"--min-p must be at least 0 and below 1, not {self.min_p}")
        require(self.seed >= 0, f"--seed must be a number from 0 up, not {self.seed}")


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    flags = parse(arguments)
    with exit_codes("--samples or --tokens"):
        with bad_input():
            check_sizes(flags, "samples")
            require(all(flags.stop), "--stop must not be empty")
            names = [field.name for field in dataclasses.fields(Sampling)]
            sampling = Sampling(**{name: value for name, value in vars(flags).items() if name in names})
            device = pick_device(flags.device)
            dtype = pick_dtype(flags.dtype, device)
            require(dtype != torch.int8 or device.type == "cpu", "--dtype int8 needs --device cpu; try bfloat16")
            prompt = read_prompt(flags.prompt)
            checkpoint = find_checkpoint(flags.checkpoint)
            model, tokenizer = load_model(checkpoint, device)
            ids = tokenizer.encode(prompt)
            check_room(ids, sampling, model.config.context)
        how = f", {decode.in_use()}" if device.type == "cpu" else ""
        print(f"{checkpoint} on {device} in {str(dtype).removeprefix('torch.')}{how}", file=sys.stderr)
        round_weights(model, dtype)
        show(prompt, stream_text(model, tokenizer, ids, sampling, flags.samples, flags.stop), flags.samples)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="generate.py", description="Let a trained model continue a text.")
    parser.add_argument("--checkpoint", metavar="DIR", help="a run or one of its checkpoints (default: the newest run)")
    parser.add_argument(
        "--prompt",
        default="",
        metavar="TEXT|-",
        help="what to continue; - reads standard input (default: a new document)",
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; may be repeated")
    parser.add_argument("--samples", type=int, default=1, metavar="INT", help="continuations to draw (default: 1)")
    add_knobs(parser, Sampling)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"], help="where to compute")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16", "int8"],
        help="of matrix products (default: bfloat16 where the device computes in it; float32 is exact)",
    )
    return parser.parse_args(arguments)


def read_prompt(prompt: str) -> str:
    """The text of `--prompt`, from standard input for "-". Raises ValueError if that is closed, or not UTF-8."""
    require(prompt != "-" or sys.stdin is not None, "--prompt - reads standard input, which is closed")
    try:
        raw = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from None


def check_room(prompt: list[int], sampling: Sampling, context: int) -> int:
    """How many tokens may follow `prompt`. Raises ValueError if the context cannot hold those that were asked for."""
    taken = max(1, len(prompt))  # an empty prompt becomes an end-of-document token
    room = context - taken
    require(room > 0, f"--prompt has {taken} tokens, and the model's context of {context} must hold the answer too")
    require(
        sampling.tokens is None or sampling.tokens <= room,
        f"--tokens {sampling.tokens} after a prompt of {taken} tokens is more than the model's context of {context}; "
        f"ask for at most {room}",
    )
    return sampling.tokens or min(room, MOST_BY_DEFAULT)


def show(prompt: str, stream: Iterator[list[str | None]], samples: int) -> None:
    """Print what follows the prompt: one sample as it is made, several one after the other at the end.

    The speed goes to standard error. Somebody who stops reading, as `| head` does, ends it without a complaint.
    """
    texts, tokens, started = [""] * samples, 0, time.perf_counter()
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        if samples == 1:
            print(prompt, end="", flush=True)
        for pieces in stream:
            tokens += len(pieces) - pieces.count(None)
            if samples == 1:
                print(pieces[0], end="", flush=True)
            else:
                texts = [text + (piece or "") for text, piece in zip(texts, pieces, strict=True)]
        seconds = time.perf_counter() - started
        for number, text in enumerate(texts, 1):
            heading = f"----- sample {number} of {samples} -----\n{prompt}" if samples > 1 else ""
            print(heading + text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
        return
    print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s", file=sys.stderr)


# --- the sampler -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def generate(
    model: Llama,
    prompt: list[int],
    sampling: Sampling,
    end_of_document: int,
    samples: int = 1,
) -> Iterator[list[int]]:
    """The next token's id for each of `samples` continuations of `prompt`, again and again until all of them ended.

    A continuation that has ended goes on with `end_of_document`, which is also what an empty prompt starts from.
    Every sample has its own random numbers, a function of the seed and its index: they are the same beside
    others and alone, and no other random state is touched. Raises ValueError, before the first token, where the
    context has no room.
    """
    device = model.embed_tokens.weight.device
    tokens = torch.tensor([prompt or [end_of_document]], device=device).expand(samples, -1)  # B T
    generators = [make_generator(sampling.seed, sample) for sample in range(samples)]
    cache, ended = model.new_cache(), [False] * samples
    for _ in range(check_room(prompt, sampling, model.config.context)):
        drawn = draw(model.next_logits(tokens, cache), sampling, generators)  # B
        ids = [end_of_document if over else token for over, token in zip(ended, drawn.tolist(), strict=True)]
        yield ids
        ended = [token == end_of_document for token in ids]
        if all(ended):
            return
        tokens = drawn.to(device).unsqueeze(1)  # B 1


def make_generator(seed: int, sample: int) -> Generator:
    """The source of random numbers of one sample. On the CPU, so that it does not depend on the device."""
    digest = hashlib.sha256(f"{seed} sample {sample}".encode()).digest()
    return Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))


def draw(logits: Tensor, sampling: Sampling, generators: list[Generator]) -> Tensor:
    """An id for each row of logits, B V, by that row's generator."""
    if sampling.temperature == 0:
        return likeliest(logits)
    logits = logits.cpu().double()  # the last bits of a sum over V decide less that way
    logits = temper(logits, sampling.temperature)
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
    # One uniform number for each row, where torch.multinomial draws V of them.
    points = torch.cat([torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators])
    sums = logits.exp().cumsum(-1)  # of shares of the likeliest one's probability
    # In (0, total]: a token's share of the sums excludes its lower end, so none of probability 0 is ever drawn.
    return torch.searchsorted(sums, ((1 - points) * sums[:, -1]).unsqueeze(1)).squeeze(1)


def likeliest(logits: Tensor) -> Tensor:
    """The id of the largest of each row, on the CPU, where NumPy takes a tenth of the time of PyTorch's argmax."""
    if logits.device.type != "cpu":
        return logits.argmax(-1).cpu()
    return torch.from_numpy(logits.float().numpy().argmax(-1))


def temper(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, the largest moved to 0 first so that no temperature is too small."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The k largest of each row, the rest at -inf; among equals the choice is free."""
    largest, where = logits.topk(min(k, logits.shape[-1]))
    return torch.full_like(logits, -math.inf).scatter(-1, where, largest)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The fewest of each row, from the likeliest on, whose probabilities reach p (arXiv 1904.09751)."""
    probabilities = logits.softmax(-1)
    for count in (OFTEN_ENOUGH, logits.shape[-1]):  # to sort them all takes longer than the rest of the token
        likeliest, where = probabilities.topk(min(count, logits.shape[-1]))
        if (likeliest.sum(-1) >= p).all():
            break
    before = likeliest.cumsum(-1) - likeliest
    kept = logits.gather(-1, where).masked_fill(before >= p, -math.inf)
    return torch.full_like(logits, -math.inf).scatter(-1, where, kept)


def keep_min_p(logits: Tensor, share: float) -> Tensor:
    """Those of each row that are at least `share` as likely as the likeliest (arXiv 2407.01082)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(share), -math.inf)


# --- from ids to text ------------------------------------------------------------------------------------------------


def stream_text(
    model: Llama,
    tokenizer: Tokenizer,
    prompt: list[int],
    sampling: Sampling,
    samples: int = 1,
    stop: Sequence[str] = (),
) -> Iterator[list[str | None]]:
    """What each sample's text grows by, token by token; None for one that has ended.

    A sample ends at an end-of-document token or before the first of the `stop` strings.
    """
    texts = [GrowingText(stop) for _ in range(samples)]
    length = check_room(prompt, sampling, model.config.context)
    for count, ids in enumerate(generate(model, prompt, sampling, tokenizer.end_of_document, samples), 1):
        pieces: list[str | None] = []
        for text, token in zip(texts, ids, strict=True):
            if text.ended:
                pieces.append(None)
                continue
            piece = text.add(tokenizer.decode_bytes([token]))
            last = token == tokenizer.end_of_document or count == length
            pieces.append(piece + text.end() if last else piece)
        yield pieces
        if all(text.ended for text in texts):
            return


def sample_text(model: Llama, tokenizer: Tokenizer, prompt: list[int], sampling: Sampling) -> str:
    """`prompt` and one continuation, as far as the context has room, by a model that may be in training."""
    ids = list(prompt)
    room = model.config.context - max(1, len(prompt))
    if room > 0:
        sampling = dataclasses.replace(sampling, tokens=min(sampling.tokens or MOST_BY_DEFAULT, room))
        training = model.training
        model.eval()
        ids += [token for (token,) in generate(model, prompt, sampling, tokenizer.end_of_document)]
        model.train(training)
    return GrowingText().add(tokenizer.decode_bytes(ids))


class GrowingText:
    """Bytes that come in pieces, as text that can be shown at once.

    An unfinished character is held back, and so is what may be the beginning of a stop string. Bytes that are no
    UTF-8 become U+FFFD; an unfinished character at the very end is left out. The result does not depend on how
    the bytes were divided.
    """

    def __init__(self, stop: Sequence[str] = ()):
        self.stop, self.held, self.ended = stop, "", False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes) -> str:
        """What can be shown now; after the first stop string to be complete, `ended` is true and that is all."""
        text = self.held + self.decoder.decode(piece)
        found = [(start + len(stop), start) for stop in self.stop if (start := text.find(stop)) >= 0]
        if found:
            self.held, self.ended = "", True
            return text[: min(found)[1]]
        beginnings = (stop[:size] for stop in self.stop for size in range(1, len(stop)))
        shown = len(text) - max((len(part) for part in beginnings if text.endswith(part)), default=0)
        self.held = text[shown:]
        return text[:shown]

    def end(self) -> str:
        """What was held back and turned out to be text."""
        held, self.held, self.ended = self.held, "", True
        return held


if __name__ == "__main__":
    as_command(main)
