"""Continue a text: `python generate.py --prompt "def "`. sampling.py has the sampler, also for Python."""

if __name__ == "__main__":
    from machine.process import start

    start(["stderr"])

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from config import DEVICES, DTYPES, option
from files import require
from machine.device import autocast, pick_device, pick_dtype, set_up_cpu
from machine.process import bad_input, exit_codes, write
from runtime.acceleration import fast_decoder
from runtime.checkpoint import open_checkpoint
from runtime.flags import Parser, add_options
from sampling import Sampling, cast_matrices, max_new_tokens, stream_text
from sampling import generate as generate  # from Python: `from generate import generate`


@dataclass(frozen=True)
class Options(Sampling):
    checkpoint: str = option(
        None, "a run, one of its checkpoints, or a Hugging Face directory (default: the newest run)", metavar="DIR"
    )
    prompt: str = option("", "text to continue, or - for standard input (default: a new document)", metavar="TEXT|-")
    stop: list[str] = option(
        [], "end the output before this text; may be repeated", action="append", nargs=None, metavar="TEXT"
    )
    samples: int = option(1, "number of samples", bounds={"at least": 1, "at most": 1 << 16})
    device: str = option("auto", DEVICES, metavar="DEVICE")
    dtype: str = option("auto", "dtype of matmuls; auto is bfloat16 or float16 if fast, else float32", choices=DTYPES)
    fast: bool = option(True, "on a CPU and without --compile, use the C code in fast/ if it supports this model")
    compile: bool = option(False, "use torch.compile, with a CUDA graph on CUDA; the first token waits for compilation")


def main(arguments: list[str]) -> None:
    parser = Parser(prog="generate.py", description="Generate text with a trained model.")
    add_options(parser, Options)
    with exit_codes("--samples or --tokens"):
        with bad_input():
            options = Options(**parser.read(arguments))
            device = pick_device(options.device)
            dtype = pick_dtype(options.dtype, device)
            raw = sys.stdin.buffer.read() if options.prompt == "-" else os.fsencode(options.prompt)
            prompt = raw.decode(errors="ignore")
            require(prompt.encode() == raw, "--prompt is not text in UTF-8; convert it")
            checkpoint, model, tokenizer = open_checkpoint(options.checkpoint, device)
            ids = tokenizer.encode_prompt(prompt)
            max_new_tokens(ids, options, model.config.context)
            cast_matrices(model, dtype)
            decoder, how = fast_decoder(model, options.samples, options.fast and device.type == "cpu", options.compile)
        print(f"{checkpoint} on {device} in {str(dtype).removeprefix('torch.')}{how}", file=sys.stderr)
        with autocast(device, dtype, cache=True):
            stream = stream_text(model, tokenizer, ids, options, options.samples, options.stop, decoder)
            print_samples(prompt, stream, options.samples)


def print_samples(prompt: str, stream: Iterator[list[str | None]], samples: int) -> None:
    """Print a single sample as it is generated, or several samples at the end, and the speed to standard error."""
    texts, tokens, started = [""] * samples, 0, time.perf_counter()
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(encoding="utf-8")
    with suppress(BrokenPipeError):  # the reader has ended, such as `head`
        if samples == 1:
            write(prompt)
        for pieces in stream:
            tokens += len(pieces) - pieces.count(None)
            if samples == 1:
                write(pieces[0] or "")
            texts = [text + (piece or "") for text, piece in zip(texts, pieces, strict=True)]
        seconds = time.perf_counter() - started
        for number, text in enumerate(texts, 1):
            write(f"----- sample {number} of {samples} -----\n{prompt}{text}\n" if samples > 1 else "\n")
        print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    set_up_cpu()
    main(sys.argv[1:])
