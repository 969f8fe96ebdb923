"""Sampling: ids to their continuation, `ids = generate(model, tokenizer.encode("def "), tokens=100)`, and ids to text.

Shapes in comments: B samples, T tokens, V token ids.
"""

import codecs
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from config import FRACTION, NOT_NEGATIVE, check_values, option
from data.tokenizer import Tokenizer
from files import require
from machine.device import start_reading, to_device
from machine.process import NotFinite
from model import Llama

DEFAULT_TOKENS = 256  # maximum of new tokens without --tokens
INVALID = -2  # sampled where the largest logit is not finite
AHEAD = "cuda"  # on this device, the next step is launched before the ids of this one are read


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are sampled. Raises ValueError, in one line that names the flag, for values out of range."""

    tokens: int = option(
        None, f"maximum number of new tokens (default: as many as fit into the context, at most {DEFAULT_TOKENS})"
    )
    temperature: float = option(0.8, "divide the logits by this; 0 is greedy decoding")
    top_k: int = option(0, "sample from the k most likely tokens; 0 is off", bounds=NOT_NEGATIVE)
    top_p: float = option(
        1.0, "sample from the smallest set of tokens with total probability p", bounds={"above": 0, "at most": 1}
    )
    min_p: float = option(
        0.0, "sample from tokens with at least this fraction of the highest probability", bounds=FRACTION
    )
    seed: int = option(0, "random seed", bounds={"at least": -math.inf})

    def __post_init__(self) -> None:
        check_values(self)


def max_new_tokens(prompt: Sequence[int] | Tensor, sampling: Sampling, context: int) -> int:
    """How many tokens may follow `prompt`. Raises ValueError if the context cannot hold the requested number."""
    used = max(1, len(prompt))  # an empty prompt becomes an end-of-document token
    count = sampling.tokens or max(1, min(context - used, DEFAULT_TOKENS))
    too_many = f"--tokens {count} plus {used} of the prompt exceed the model's context of {context}; shorten either"
    require(used + count <= context, too_many)
    return count


def cast_matrices(model: Llama, dtype: torch.dtype) -> None:
    """Store the weights of all matrix products in `dtype`, for a model that only generates.

    The embedding, the norms and the residual stream are in fp32; a tied head becomes a tensor of its own.
    """
    for module in model.modules():
        role = getattr(module, "role", None)
        for name, weight in module.named_parameters(recurse=False):
            matrix = name == "weight" and role and role.low_precision
            setattr(module, name, nn.Parameter(weight.to(dtype if matrix else torch.float32), requires_grad=False))


def generate(
    model: Llama,
    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    ends: int | Collection[int] = (),
    decoder: Any = None,
    **options: Any,
) -> Tensor:
    """`ids` with their continuation: (T) → (T + new), or for several prompts (B, T) → (B, T + new).

    `options` are the fields of `Sampling`, such as tokens=100 and temperature=0.7. A row ends with an id of `ends`,
    such as `tokenizer.ends`, and repeats it; by default no row ends. The model may be in training mode. Raises
    ValueError for bad ids, for more tokens than the context holds, and if a logit is NaN or infinite.
    """
    sampling = Sampling(**options)
    try:
        prompts = torch.as_tensor(ids)
    except (TypeError, ValueError) as error:
        wanted = "ids must be integers of shape (T) or (B, T), such as tokenizer.encode(text)"
        raise ValueError(f"{wanted}; prompts of different lengths need a call each") from error
    integers = not (prompts.is_floating_point() or prompts.dtype == torch.bool)
    if not integers or prompts.ndim not in (1, 2) or not prompts.numel():
        raise ValueError(f"ids must be integers of shape (T) or (B, T), not {prompts.dtype} of {tuple(prompts.shape)}")
    prompts, last = prompts.long(), model.config.vocab_size - 1
    outside = prompts[(prompts < 0) | (prompts > last)].tolist()
    require(not outside, f"ids must be from 0 to {last}, not {outside[:1]}")
    training = model.training
    model.eval()
    try:
        new = list(stream_ids(model, prompts.reshape(-1, prompts.shape[-1]), sampling, ends, decoder))
    finally:
        model.train(training)
    continuation = prompts.new_tensor(new).T  # B new
    return torch.cat((prompts, continuation.reshape(*prompts.shape[:-1], -1)), -1)


@torch.inference_mode()
def stream_ids(
    model: Llama, prompts: Tensor, sampling: Sampling, ends: int | Collection[int] = (), decoder: Any = None
) -> Iterator[list[int]]:
    """Yield the next token id of each sample, which continues its row of `prompts` (B, T), until all have ended.

    The `decoder` computes the logits: the model itself, or faster code that has its `new_cache` and `next_logits`.
    Each sample has its own random numbers, a function of the seed and its index, so it does not depend on the other
    samples. No global random state is touched. `ends` and errors are those of `generate`.

    A GPU computes a token ahead while Python reads this one; a CPU does not, so a slow model shows each at once.
    """
    device = model.embed_tokens.weight.device
    samples, count = len(prompts), max_new_tokens(prompts[0], sampling, model.config.context)
    tokens = to_device(prompts, device)  # B T
    # A uniform number for each token of each sample, drawn on the CPU so that it does not depend on the device.
    generator = Generator("cpu").manual_seed(sampling.seed % 2**63)
    points = torch.rand(samples, model.config.context, dtype=torch.float64, generator=generator, device="cpu")
    points = points.T if device.type == "mps" else to_device(points.T, device)  # mps has no float64
    ends = {ends} if isinstance(ends, int) else set(ends)
    decoder = decoder or model
    cache, ids = decoder.new_cache(tokens.shape[1] + count), [INVALID] * samples
    ahead = int(device.type == AHEAD)  # the number of steps
    launched: list[Callable] = []  # functions that read the ids
    for index in range(count + ahead):
        if index < count:
            sampled = draw(decoder.next_logits(tokens, cache), sampling, points[index])  # B
            launched.append(start_reading(sampled) if ahead else sampled.tolist)
            tokens = sampled.clamp(min=0).to(device).unsqueeze(1)  # B 1, without INVALID
        if index < ahead:
            continue
        read = launched.pop(0)()  # the only time that Python waits for the device
        if INVALID in read:
            raise NotFinite("a logit of the model is not finite")
        ids = [last if last in ends else token for last, token in zip(ids, read, strict=True)]
        yield ids
        if all(token in ends for token in ids):
            return


def draw(logits: Tensor, sampling: Sampling, points: Tensor) -> Tensor:
    """One id for each row of `logits` (B, V), selected by that row's number in `points` (B), on its device.

    The id is `INVALID` for a row whose largest logit is infinite or NaN.
    """
    invalid = ~logits.amax(-1).isfinite()
    if sampling.temperature == 0:
        return logits.argmax(-1).masked_fill(invalid, INVALID)
    logits = logits.to(points.device).double()
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # at most 0, so exp does not overflow
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
    # Inverse transform sampling: one uniform number per row; torch.multinomial draws V of them.
    sums = logits.exp().cumsum(-1)  # unnormalized
    # 1 - points is in (0, 1], so a token of probability 0 is never sampled.
    wanted = (1 - points) * sums[:, -1]  # B
    ids = torch.searchsorted(sums, wanted.unsqueeze(1)).squeeze(1)
    return ids.masked_fill(invalid.to(ids.device), INVALID)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest of each row and set the rest to -inf."""
    largest, index = logits.topk(min(k, logits.shape[-1]))
    return torch.full_like(logits, -math.inf).scatter(-1, index, largest)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of tokens of each row with total probability p (arXiv 1904.09751)."""
    ordered, index = logits.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    more_likely = probabilities.cumsum(-1) - probabilities
    return logits.scatter(-1, index, ordered.masked_fill(more_likely >= p, -math.inf))


def keep_min_p(logits: Tensor, fraction: float) -> Tensor:
    """Keep the tokens with at least `fraction` of the highest probability of each row (arXiv 2407.01082)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(fraction), -math.inf)


# --- from ids to text ------------------------------------------------------------------------------------------------


def stream_text(
    model: Llama,
    tokenizer: Tokenizer,
    prompt: list[int],
    sampling: Sampling,
    samples: int = 1,
    stop: Sequence[str] = (),
    decoder: Any = None,
) -> Iterator[list[str | None]]:
    """Yield the new text of each sample, token by token; None for one that has ended.

    A sample ends at one of the tokenizer's `ends` or before the first of the `stop` strings.
    """
    texts, ends = [TextStream(stop) for _ in range(samples)], tokenizer.ends
    length = max_new_tokens(prompt, sampling, model.config.context)
    prompts = torch.tensor([prompt or [tokenizer.end_of_document]] * samples)
    for count, ids in enumerate(stream_ids(model, prompts, sampling, ends, decoder), 1):
        pieces = []
        for text, token in zip(texts, ids, strict=True):
            piece = None if text.ended else text.add(tokenizer.decode_bytes([token]))
            if piece is not None and (token in ends or count == length):
                piece += text.end()
            pieces.append(piece)
        yield pieces
        if all(text.ended for text in texts):
            return


class TextStream:
    """Decodes text from bytes that arrive in pieces, with the same result however they are split.

    An unfinished character is held back, and so is a possible beginning of a stop string. Invalid UTF-8 becomes U+FFFD.
    """

    def __init__(self, stop: Sequence[str] = ()):
        self.stop, self.held, self.ended = stop, "", False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes) -> str:
        """The text that can be shown now. `ended` is set once a stop string is complete."""
        text = self.held + self.decoder.decode(piece)
        found = [(first + len(stop), first) for stop in self.stop if (first := text.find(stop)) >= 0]
        if found:
            self.held, self.ended = "", True
            return text[: min(found)[1]]
        prefixes = (stop[:size] for stop in self.stop for size in range(1, len(stop)))
        shown = len(text) - max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        self.held = text[shown:]
        return text[:shown]

    def end(self) -> str:
        """The text that was held back in case a stop string followed."""
        held, self.held, self.ended = self.held, "", True
        return held
