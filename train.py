"""Train a LLaMA: `python train.py`. From top to bottom: the command, the training loop, what the loop calls."""

if __name__ == "__main__":  # before the imports, which take seconds
    from runtime.process import start

    start()

import argparse
import dataclasses
import math
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from tqdm import tqdm

from config import Parser, add_flags, require
from data.batches import evaluation_batches, row_starts, training_batch
from data.prepare import Prepared, TokenFile
from data.tokenizer import ByteTokenizer
from files import InUse, is_a
from generate import Sampling, sample_text
from model import Llama
from norms.placement import PLACEMENTS, leave
from optim import assign, hidden_matrices, learning_rate, make_optimizers
from runtime import distributed
from runtime.acceleration import accelerate
from runtime.checkpoint import (
    clear_unfinished,
    intact_checkpoint,
    latest_checkpoint,
    load_pretrained_weights,
    load_training_state,
    open_checkpoint,
    save_checkpoint,
    set_aside_after,
    weight_hashes,
)
from runtime.device import (
    CARDS,
    allow_tf32,
    autocast,
    check_device_name,
    describe,
    deterministic,
    peak_flops,
    peak_memory,
    to_device,
)
from runtime.huggingface.directory import open_model
from runtime.meter import Clock, Meter
from runtime.plan import Plan, make_plan
from runtime.plugins import import_first, import_records, keep_copies
from runtime.process import NotFinite, Stopped, bad_input, exit_codes, outlive_readers, stop_requests
from runtime.report import plot_loss, save_plot, write_report
from runtime.run import FIXED_ON_RESUME, Run, check_options, read_configs, resolve_run
from runtime.run_dir import (
    Log,
    check_run_dir,
    continued,
    has_evaluation,
    locked,
    make_tracker,
    read_run_file,
    write_run_file,
)

LOG_EVERY = 10  # steps between log entries of the training loss
EVAL_BATCH_TOKENS = 1 << 12  # tokens per forward pass of an evaluation, or a micro-batch if that is more
SAMPLE_PROMPT = 16  # tokens: samples continue the beginning of the validation text
SAMPLE = Sampling(tokens=160, temperature=0.8, top_p=0.95)


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    outlive_readers()
    with distributed.process_group(), exit_codes("--micro-batch-size, --context or --dim, or --recompute"):
        with distributed.printed_by_main():
            flags = parse(arguments)
        if flags.plan:
            with bad_input():
                print(plan(flags))
            return
        with bad_input():
            run = resolve_run(flags)
        if flags.eval_only:
            evaluate_only(run)
            return
        with distributed.held_by_main(locked(run.folder), InUse):
            with bad_input():
                distributed.from_main(check_run_dir, run.folder, flags.resume)
                distributed.from_main(clear_unfinished, run.folder)
                trainer = Trainer(run, flags.resume)
            trainer.train()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="train.py", description="Train a LLaMA on text. Its norm and the norm's placement are flags.")
    fixed = ", ".join(f"--{name.replace('_', '-')}" for name in FIXED_ON_RESUME)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out (default: the newest run); options that are given anew replace those of the "
        f"run and are printed, but the model, {fixed} cannot change",
    )
    parser.add_argument(
        "--eval-only",
        action="store_true",
        help="evaluate the newest checkpoint of the run in --out (default: the newest run), on --eval-tokens",
    )
    parser.add_argument("--plan", action="store_true", help="only print memory and speed of a step on --card")
    parser.add_argument("--ranks", type=int, metavar="INT", help="number of GPUs for --plan (default: 1)")
    parser.add_argument("--card", choices=CARDS, help="GPU for --plan (default: h100)")
    add_flags(parser)
    import_first(parser, arguments)
    flags = parser.parse_args(arguments)
    if not flags.plan and (flags.ranks is not None or flags.card):
        parser.error("--ranks and --card are for --plan; torchrun --nproc-per-node sets the ranks of a run")
    if getattr(flags, "init_from", "") and (flags.resume or flags.eval_only):
        parser.error("--init-from is for new runs; --resume and --eval-only take the weights of the run")
    return flags


def plan(flags: argparse.Namespace) -> Plan:
    """Memory and speed of a step on a GPU, from the trainer itself with tensors that have no data.

    Raises ValueError for incompatible options.
    """
    require(not (flags.resume or flags.eval_only), "--plan is for new runs; leave out --resume and --eval-only")
    require(not getattr(flags, "init_from", ""), "--plan takes no --init-from; name the sizes of the model")
    require(distributed.world_size() == 1, "--plan takes one process; leave out torchrun and use --ranks")
    device = getattr(flags, "device", "auto")
    check_device_name(device)
    require(device not in ("cpu", "mps"), f"--plan is for a GPU; leave out --device {device}")
    model_config, config = read_configs(flags, "cuda")
    ranks, card = 1 if flags.ranks is None else flags.ranks, flags.card or "h100"
    require(ranks >= 1, f"--ranks must be at least 1, not {ranks}")
    require(config.dtype != "float32", "--plan is for half precision; add --dtype bfloat16")
    check_options(model_config, config, ranks)
    shard = distributed.resolve_shard(config.shard, getattr(flags, "shard", False), config.dtype, ranks)
    rows = config.batch_size // ranks
    micro = min(config.micro_batch_size, rows)
    nothing = TokenFile(np.zeros(model_config.context + 1, np.uint16), 0, 0)
    simulated_config = dataclasses.replace(
        config, batch_size=min(rows, 2 * micro), micro_batch_size=micro, device="cpu", compile=False, fast=False
    )
    run = Run(
        Path(), model_config, simulated_config, torch.device("cpu"), torch.bfloat16,
        Prepared(nothing, nothing, ByteTokenizer(), "", ""),
    )  # fmt: skip
    return make_plan(partial(Trainer, run), flops_per_token, card, ranks, rows // micro, shard)


# --- the training loop -----------------------------------------------------------------------------------------------


class Trainer:
    """Trains the model of a run, from the start or with `resume` from its newest checkpoint."""

    def __init__(self, run: Run, resume: bool = False):
        self.run = run
        allow_tf32(run.config.tf32)
        checkpoint = distributed.from_main(intact_checkpoint, run.folder) if resume else None
        if checkpoint:
            distributed.from_main(set_aside_after, run.folder, checkpoint)
        with distributed.raise_on_all_ranks():
            if checkpoint:
                open_model(checkpoint, run.model_config)  # refuses weights of another model before this one is built
            if run.config.init_from and not checkpoint:
                self.model = load_pretrained_weights(run.config.init_from, run.model_config).to(run.device)
            else:
                self.model = Llama(run.model_config, run.config.seed).to(run.device)
        self.model.recompute = run.config.recompute
        if run.config.fast:
            accelerate(self.model)
        self.parallel = distributed.Parallel(self.model, run.config.shard)
        self.weights = list(self.model.parameters())
        stored = self.model.state_dict()
        self.statistics = [name for name, _ in self.model.named_buffers() if name in stored]
        self.optimizers = make_optimizers(self.model, run.config)
        self.scaler = GradScaler(run.device.type, enabled=run.dtype == torch.float16)
        self.loss = torch.compile(self.parallel.loss) if run.config.compile else self.parallel.loss
        self.step, self.seconds, self.skipped = 0, 0.0, 0
        unlogged: list[Any] = [0, 0.0]
        if checkpoint:
            with distributed.raise_on_all_ranks():
                state = load_training_state(checkpoint, self.model, self.optimizers)
                unlogged = state.get("unlogged", unlogged)
                valid = is_a(state.get("seconds"), float) and is_a(state.get("scaler"), dict[str, float])
                valid = valid and is_a(unlogged, list[float]) and len(unlogged) == 2
                require(valid, f"{checkpoint}/trainer.json: seconds, scaler or unlogged are missing or damaged")
            self.step, self.seconds, self.skipped = state["step"], state["seconds"], state.get("skipped", 0)
            if state["scaler"]:
                self.scaler.load_state_dict(state["scaler"])
        self.saved = self.step
        self.evaluated = resume and distributed.from_main(has_evaluation, run.folder, self.step)  # at this step
        self.meter = Meter(run.device, run.config.skip_nonfinite - self.skipped, *unlogged)

    def train(self) -> None:
        config, folder = self.run.config, self.run.folder
        if self.step > config.steps or (self.step == config.steps and self.evaluated):
            if distributed.is_main():
                if self.evaluated:
                    write_report(folder, self.run.data.val_gzip_bpb)  # the run may have been killed before it did
                print(f"the run in {folder} has already finished: {config.steps} steps")
            return
        with deterministic(config.deterministic), self.opened_log(), stop_requests() as stop:
            if config.init_from and not distributed.from_main(latest_checkpoint, folder):
                self.save()  # so that --resume does not need --init-from
            if self.step and self.due(config.eval_every) and not self.evaluated:
                self.log_evaluation()  # the run ended between saving and evaluating
            while self.step < config.steps:
                self.update(learning_rate(config, self.step))
                self.step += 1
                if any(map(self.due, (config.eval_every, config.save_every, LOG_EVERY))):
                    self.log_training()
                signum = distributed.all_reduce_max(stop[0] if stop else 0)
                if self.due(config.save_every) or signum:
                    self.save()
                if signum:
                    raise Stopped(signum)
                if self.due(config.eval_every):
                    self.log_evaluation()
        self.print_summary()

    def due(self, every: int) -> bool:
        """Whether something is due at this step that is done at every `every`-th and at the last one."""
        return self.step % every == 0 or self.step == self.run.config.steps

    def update(self, rate: float) -> None:
        """One optimizer step at learning rate `rate`, on the batch of this step.

        If the loss or a gradient is not finite, weights, optimizer state and running statistics stay as they are.
        Whether they do is decided on the device, since reading a value synchronizes.
        """
        clip, after_step = self.run.config.clip, PLACEMENTS[self.run.model_config.placement].after_step
        before = [tensor.detach().clone() for tensor in self.changed_outside_optimizers()]
        loss = self.accumulate_gradients()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        grad_norm = distributed.full_tensor(
            get_total_norm(weight.grad for weight in self.weights if weight.grad is not None)
        )
        if clip:
            clip_grads_with_norm_(self.weights, clip, grad_norm)
        # Gradients may overflow in float16: the scaler then reduces the loss scale. In other dtypes the scale is 1.
        overflow = ~grad_norm.isfinite() & (self.scaler.scale(torch.ones_like(loss)) > 1)
        finite = loss.isfinite() & grad_norm.isfinite()
        bad = ~finite & ~(loss.isfinite() & overflow)
        too_many = self.meter.add(self.step + 1, loss, grad_norm, bad)
        applied = finite & ~too_many
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_ratio"]
            optimizer.found_inf = 1 - applied.float()  # type: ignore[attr-defined]
            optimizer.step()
        for weight in self.weights:
            weight.grad = None
        after_step(self.model)
        for tensor, earlier in zip(self.changed_outside_optimizers(), before, strict=True):
            assign(tensor, earlier, unless=applied)
        self.scaler.update()

    def running_statistics(self) -> list[Tensor]:
        """The buffers that the forward pass changes or replaces."""
        return [self.model.get_buffer(name) for name in self.statistics]

    def changed_outside_optimizers(self) -> list[Tensor]:
        """What a step changes but not in an optimizer: running statistics, and the weights that nGPT normalizes."""
        normalized = PLACEMENTS[self.run.model_config.placement].after_step is not leave
        return self.running_statistics() + (self.weights if normalized else [])

    def accumulate_gradients(self) -> Tensor:
        """Accumulate the gradients of this step's batch over its micro-batches and ranks. Returns the mean loss."""
        run, config = self.run, self.run.config
        torch.manual_seed(distributed.seed(config.seed + 1_000_003 * self.step))  # the same dropout in a resumed run
        rows = distributed.rows(config.batch_size)
        batch = training_batch(run.data.train.tokens, config.seed, self.step, rows, run.model_config.context)
        inputs, targets = (to_device(ids, run.device).split(config.micro_batch_size) for ids in batch)
        loss = torch.zeros((), device=run.device)
        for micro_inputs, micro_targets in self.parallel.micro_batches(list(zip(inputs, targets, strict=True))):
            with autocast(run.device, run.dtype):
                micro_loss = self.loss(micro_inputs, micro_targets) / len(inputs)
            self.scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        return distributed.mean(loss)

    # Logging, evaluation, saving.

    @contextmanager
    def opened_log(self) -> Iterator[None]:
        """Write run.json, open the log and the progress bar, and log a divergence, which ends the run.

        Only rank 0 does.
        """
        run, self.clock = self.run, Clock(self.seconds)
        if not distributed.is_main():
            yield
            return
        description = describe_run(run, self.model)
        run_file = run.folder / "run.json"
        if run_file.exists():
            description = continued(read_run_file(run_file), description, self.step)
        elif run.config.init_from:
            description["weights_from"] = weight_hashes(run.config.init_from)
        write_run_file(run_file, description)
        keep_copies(run.folder)
        tracker = make_tracker(run.config.log, run.folder, description)
        self.log = Log(run.folder, self.step, tracker, unlogged=self.meter.unread_loss()[0])
        named = {"fast": " with fast kernels", "tf32": ", TF32 allowed", "deterministic": ", deterministic"}
        modes = [name for option, name in named.items() if getattr(run.config, option)]
        with tqdm(total=run.config.steps, initial=self.step, unit="step", disable=None, dynamic_ncols=True) as self.bar:
            self.bar.write(
                f"{description['parameters']:,} parameters, {run.model_config.norm} {run.model_config.placement}-norm, "
                f"on {description['device']} in {run.config.dtype}{''.join(modes)}; the run is {run.folder}"
            )
            try:
                yield
            except NotFinite as diverged:
                rows = {"row_starts": diverged.row_starts} if diverged.row_starts else {}
                self.log.add(step=diverged.step or self.step, not_finite=True, **rows)
                write_report(run.folder, run.data.val_gzip_bpb)
                raise

    def check_steps(self) -> None:
        """Log the steps since the last call that were skipped because they were not finite.

        If they are too many, save the state before the first of those, because all later updates were withheld, and
        raise NotFinite.
        """
        config, tokens = self.run.config, self.run.data.train.tokens
        for step in self.meter.bad_steps():
            rows = range(config.batch_size)
            starts = row_starts(tokens, config.seed, step - 1, rows, self.run.model_config.context).tolist()
            if self.skipped >= config.skip_nonfinite:
                self.step = step - 1
                if self.step > self.saved and self.finite():
                    self.save(keep=config.keep + 1)  # and delete none that may be better
                raise NotFinite("loss or gradient is", step, starts)
            self.skipped += 1
            if distributed.is_main():
                self.log.add(step=step, skipped=self.skipped, row_starts=starts)
                self.bar.write(f"step {step} is skipped: loss or gradient is not finite")

    def log_training(self) -> None:
        config = self.run.config
        self.check_steps()
        steps, loss, grad_norm = self.meter.read()
        if not distributed.is_main() or not steps:
            return
        tokens_per_step = config.batch_size * self.run.model_config.context
        speed = steps * tokens_per_step / self.clock.lap()
        self.log.add(
            step=self.step,
            tokens=self.step * tokens_per_step,
            seconds=round(self.clock.seconds(), 3),
            train_loss=loss,
            lr=learning_rate(config, self.step - 1),
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,  # infinite in a skipped float16 step
            tokens_per_second=round(speed, 1),
        )
        shown = {"loss": f"{loss:.3f}", "tokens/s": f"{speed:,.0f}"}
        if peak := peak_flops(self.run.device, self.run.dtype):
            shown["MFU"] = f"{speed * flops_per_token(self.model) / peak:.1%}"
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(self.step - self.bar.n)

    def log_evaluation(self) -> None:
        run = self.run
        with self.clock.paused():
            val_loss, val_bpb = evaluate(self.model, run, self.loss)
            if not math.isfinite(val_loss):
                raise NotFinite("validation loss is", self.step)
            prompt = run.data.val.tokens[: min(SAMPLE_PROMPT, run.model_config.context // 2)].tolist()
            with autocast(run.device, run.dtype), deterministic(False):  # CUDA's cumsum is not deterministic
                sample = sample_text(self.model, run.data.tokenizer, prompt, SAMPLE)
            if not distributed.is_main():
                return
            self.log.add_sample(self.step, sample)
            row = {"step": self.step, "val_loss": val_loss, "val_bpb": val_bpb}
            save_plot(plot_loss([*self.log.rows, row], run.data.val_gzip_bpb), run.folder / "loss.png")
            self.log.add(**row)  # the last, since a resumed run repeats an evaluation that has no row
        self.bar.write(f"step {self.step}: val_loss {val_loss:.4f}, val_bpb {val_bpb:.4f}")

    def finite(self) -> bool:
        """Whether all weights and running statistics are finite."""
        tensors = [*self.weights, *self.running_statistics()]
        finite = torch.stack([distributed.local(tensor.detach()).isfinite().all() for tensor in tensors]).all()
        return not distributed.all_reduce_max(int(not finite))

    def save(self, keep: int | None = None) -> None:
        """Write a checkpoint and keep `keep`, by default --keep. Raises NotFinite if a weight is not finite."""
        self.check_steps()
        if not self.finite():
            raise NotFinite("weight or running statistic is", self.step)
        with self.clock.paused():
            run = self.run
            state = {
                "step": self.step,
                "seconds": self.clock.seconds(),
                "scaler": self.scaler.state_dict(),
                "skipped": self.skipped,
                "unlogged": self.meter.unread_loss(),  # for the next row, if a signal stops the run
            }
            save_checkpoint(
                run.folder, self.step, self.model, run.data.tokenizer, self.optimizers, state, keep or run.config.keep
            )
            distributed.barrier()  # until rank 0 has written it
        self.saved = self.step

    def print_summary(self) -> None:
        if not distributed.is_main():
            return
        run, last = self.run, self.log.rows[-1]
        gzip_bpb = run.data.val_gzip_bpb
        write_report(run.folder, gzip_bpb)
        print(f"val_bpb {last['val_bpb']:.4f}; gzip -9 on the whole validation text: {gzip_bpb:.4f} bits per byte")
        print(f"done in {self.clock.seconds():.0f} s, peak memory {peak_memory(run.device) / 1e9:.1f} GB")
        print(f"loss curve, samples and settings: {run.folder}/report.html")
        print(f"generate text: python generate.py --checkpoint {run.folder}")


# --- what the loop calls ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def evaluate(model: Llama, run: Run, loss: Callable | None = None) -> tuple[float, float]:
    """Loss on the validation text, in nats per token and in bits per UTF-8 byte.

    It covers at most `eval_tokens` tokens, in windows of one context that are evenly spaced over the text, and always
    the same ones. Special tokens add their loss and no bytes. `loss` may be a compiled or parallel `model.loss`.
    """
    loss, training = model.loss if loss is None else loss, model.training
    model.eval()
    losses, sizes, utf8_bytes = [], [], 0.0
    context = run.model_config.context
    batch_size = max(run.config.micro_batch_size, EVAL_BATCH_TOKENS // context)
    batches = evaluation_batches(run.data.val.tokens, context, batch_size, run.config.eval_tokens)
    for (inputs, targets), counts in distributed.shares(batches):
        with autocast(run.device, run.dtype):
            batch_loss = loss(to_device(inputs, run.device), to_device(targets, run.device))
        if counts:
            losses.append(batch_loss)
            sizes.append(targets.numel())
            utf8_bytes += int(run.data.tokenizer.token_bytes[targets.numpy()].sum())
    # The losses stay on the device until here, since reading one waits for it.
    values = torch.stack(losses).tolist() if losses else []
    nats = sum(value * size for value, size in zip(values, sizes, strict=True))
    nats, tokens, utf8_bytes = distributed.totals(nats, sum(sizes), utf8_bytes)
    model.train(training)
    return nats / tokens, nats / math.log(2) / utf8_bytes


def evaluate_only(run: Run) -> None:
    """Print the loss of the newest checkpoint."""
    allow_tf32(run.config.tf32)
    with bad_input(), distributed.raise_on_all_ranks():
        checkpoint, model, _ = open_checkpoint(run.folder, run.device)
        require(model.config == run.model_config, f"{checkpoint} is of another model than {run.folder / 'run.json'}")
        if run.config.fast:
            accelerate(model)
    val_loss, val_bpb = evaluate(model, run)
    if distributed.is_main():
        print(f"{checkpoint}: val_loss {val_loss:.4f}, val_bpb {val_bpb:.4f}")


def flops_per_token(model: Llama) -> float:
    """FLOPs of forward and backward: 6 for each weight in a matrix product, plus causal attention."""
    config = model.config
    products = config.vocab_size * config.dim + sum(weight.numel() for weight in hidden_matrices(model))
    return 6 * products + 6 * config.layers * config.heads * config.head_dim * config.context


def describe_run(run: Run, model: Llama) -> dict[str, Any]:
    """The contents of `run.json`: what is needed to repeat the run, and what it ran on."""
    return {
        "model": dataclasses.asdict(run.model_config),
        "training": dataclasses.asdict(run.config),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "corpus": {"name": run.data.corpus_name, "hash": run.data.corpus_hash},
        "tokenizer": {"kind": run.data.tokenizer.kind, "hash": run.data.tokenizer.hash},
        "imports": import_records(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": describe(run.device),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "ranks": distributed.world_size(),
        "launch": distributed.launch(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


if __name__ == "__main__":
    torch.set_flush_denormal(True)  # numbers below 1e-38, as in confident softmaxes, take CPUs up to 190 times longer
    main()
