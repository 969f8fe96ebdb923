"""Train a LLaMA: `python train.py`. From top to bottom: a step, the training loop, evaluation, the command."""

if __name__ == "__main__":
    from machine.process import start

    start()

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from data.batches import Batch, evaluation_batches, training_batch
from data.tokenizer import NoTokenizer, Tokenizer
from files import BadInput, lock_file, require, warn
from machine import distributed
from machine.device import autocast, deterministic, set_up_cpu, to_device
from machine.process import NotFinite, Stopped, bad_input, exit_codes, missing_packages, stop_requests
from model import Llama
from norms.placement import PLACEMENTS
from optim import learning_rate, make_optimizers
from pages.run import write_page
from roles import draw_weights, matrices
from runtime import checkpoint as checkpoints
from runtime.flags import read_keywords, read_train, to_flags
from runtime.huggingface.directory import open_model, read_config, read_model, stored_state
from runtime.parallel import Parallel, matrices_on_meta
from runtime.plugins import command_to_type, import_files, import_flags
from runtime.progress import Progress, losses_line
from runtime.run import Run, describe_run, open_run
from runtime.run_dir import LOCK, Row, check_has_no_run, read_rows
from runtime.watch import Watch
from sampling import TextStream, generate

LOG_EVERY = 10  # steps between log entries of the training loss
EVAL_BATCH_TOKENS = 1 << 12  # minimum tokens per evaluation batch
SAMPLE_PROMPT = 16  # tokens: samples continue the beginning of the validation text
SAMPLE_TOKENS = 64  # or fewer, if the context ends
SHARDED_SAMPLE = 10**8  # weights of the largest sharded model that is sampled: each token gathers all of them


# --- a step ----------------------------------------------------------------------------------------------------------


def accumulate_gradients(
    objective: Callable, pairs: Iterable[Batch], count: int, dtype: torch.dtype, scaler: GradScaler
) -> dict[str, Tensor]:
    """Forward and backward of `count` pairs of inputs and targets. Returns the means of the terms of the objective."""
    means: dict[str, Tensor] = {}
    for inputs, targets in pairs:
        with autocast(inputs.device, dtype):
            terms = {name: term / count for name, term in objective(inputs, targets).items()}
        scaler.scale(torch.stack([*terms.values()]).sum()).backward()
        means = {name: means.get(name, 0) + term.detach() for name, term in terms.items()}
    return means


def clip_gradients(model: Llama, clip: float) -> Tensor:
    """Scale the gradients down to the norm `clip`, if that is not 0 and they have a larger one. Returns their norm."""
    weights = list(model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    grad_norm = distributed.full_tensor(get_total_norm(gradients))
    if clip:
        clip_grads_with_norm_(weights, clip, grad_norm)
    return grad_norm


def step_optimizers(model: Llama, optimizers: list[Optimizer], lr: float) -> None:
    """Let the optimizers use the gradients, then return matrices to where the placement keeps them, as in nGPT."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_ratio"]
        optimizer.step()
    if constrain := PLACEMENTS[model.config.placement].constrain:
        for role, _, weight in matrices(model):
            constrain(weight, role)


def update_weights(
    model: Llama, optimizers: list[Optimizer], lr: float, clip: float, scaler: GradScaler, step: int = 0
) -> Tensor:
    """Clip the gradients, let the optimizers use them, and return their norm before clipping. Only float16 waits.

    If it overflows in float16, the update is skipped and the loss scale halved; at a scale of 1, NotFinite has `step`.
    """
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    grad_norm = clip_gradients(model, clip)
    if not scaler.is_enabled() or grad_norm.isfinite():
        step_optimizers(model, optimizers, lr)
    elif scaler.get_scale() <= 1:
        raise diverged("gradient is", step)
    model.zero_grad()
    scaler.update()
    return grad_norm


def diverged(what: str, step: int) -> NotFinite:
    return NotFinite(f"{what} not finite at step {step}; try a lower --lr", step)


# --- the training loop -----------------------------------------------------------------------------------------------


class Trainer:
    """Trains the model of a run, from the start or, if the run exists, from its newest checkpoint."""

    progress: Progress | None = None  # on rank 0, while it trains

    def train(self) -> None:
        """Train to the last step, and write the run directory on rank 0. A run that has ended only says so."""
        run, config, earlier = self.run, self.run.config, self.run.earlier
        same_end = earlier and earlier["resolved"]["steps"] == config.steps
        if self.step > config.steps or (self.step == config.steps and self.evaluated and same_end):
            if distributed.is_main():
                write_page(run.folder, run.data.val_gzip_bpb)  # the run may have been killed before it did
                print(f"the run in {run.folder} already has {self.step} steps; raise --steps to continue")
            return
        description = describe_run(run, sum(weight.numel() for weight in self.model.parameters()))
        with deterministic(config.deterministic), stop_requests() as signals, ExitStack() as opened:
            if distributed.is_main():
                self.progress = opened.enter_context(Progress(run, description, self.step, write_page))
            self.loop(signals)
        if self.progress:
            self.progress.print_summary(self.seconds())

    def loop(self, signals: list[int]) -> None:
        """Step, log, save and evaluate until the last step, or until a signal has come."""
        config = self.run.config
        if config.init_from and not self.restored:
            self.save()  # --resume then does not need --init-from
        if self.step and self.due(config.eval_every) and not self.evaluated:
            self.log_evaluation()  # the run ended between saving and evaluating
        while self.step < config.steps:
            self.train_step()
            self.step += 1
            if any(map(self.due, (config.eval_every, config.save_every, LOG_EVERY))):
                self.log_training()
            out_of_time = over(config.max_minutes, self.began)
            wanted = signals[0] if signals else signal.SIGTERM * out_of_time
            stop, save = distributed.all_reduce_max(wanted, over(config.save_minutes, self.saved))
            if self.due(config.save_every) or save or stop:
                self.save()
            if stop:
                resume = command_to_type("train.py", "--resume", "--out", str(self.run.folder))
                raise Stopped(stop, resume, "--max-minutes" if out_of_time else "")
            if self.due(config.eval_every):
                self.log_evaluation()

    def due(self, every: int) -> bool:
        """True every `every` steps and at the last step."""
        return self.step % every == 0 or self.step == self.run.config.steps

    def train_step(self) -> None:
        """One optimizer step, on the batch of this step."""
        run, config = self.run, self.run.config
        if not self.pending:
            self.lap_started = time.perf_counter()  # evaluation and saving do not count
        # A resumed run repeats its dropout; rank 0 has that of a single process. CPUs use the low 32 bits of the seed.
        torch.manual_seed(config.seed + 1_000_003 * self.step + 2_654_435_769 * distributed.rank())
        rows = distributed.rows(config.batch_size)
        context, size, vocab_size = run.model_config.context, config.batch_size, run.model_config.vocab_size
        batch = training_batch(run.data.train, config.seed, self.step, rows, context, config.order, size, vocab_size)
        inputs, targets = (to_device(ids, run.device) for ids in batch)
        self.pending.append(self.update(inputs, targets, learning_rate(config, self.step)))

    def update(self, inputs: Tensor, targets: Tensor, lr: float) -> dict[str, Tensor]:
        """One optimizer step on a batch. Returns the terms of the objective, and the norm of the gradient."""
        run, config, watch = self.run, self.run.config, self.make_watch()
        size = config.micro_batch_size
        batches = [*zip(inputs.split(size), targets.split(size), strict=True)]
        pairs = self.parallel.micro_batches(batches)
        terms = accumulate_gradients(self.objective, pairs, len(batches), run.dtype, self.scaler)
        if watch:
            watch.start(batches[0][0], run.dtype, self.scaler.get_scale())
        grad_norm = update_weights(self.model, self.optimizers, lr, config.clip, self.scaler, self.step + 1)
        if watch:
            watch.finish()
        return {name: distributed.all_reduce_mean(term) for name, term in terms.items()} | {"grad_norm": grad_norm}

    def make_watch(self) -> Any:
        """At the steps that `--watch` records, the measurement of the step that comes next; else None."""
        run, step, every = self.run, self.step + 1, self.run.config.watch
        if not every or not distributed.is_main() or (step % every and step not in (1, run.config.steps)):
            return None
        return Watch(self.model, step, run.folder / "watch.jsonl")

    # Before the first step.

    def __init__(self, run: Run):
        self.run = run
        config = run.config
        checkpoint = distributed.from_main(checkpoints.intact_checkpoint, run.folder) if run.earlier else None
        torch.manual_seed(config.seed)  # imported norms may draw initial weights
        with distributed.raise_on_all_ranks():
            if config.shard:
                with matrices_on_meta():
                    self.model = Llama(run.model_config, config.seed)
            elif run.source:
                self.model = read_model(run.source, run.model_config).to(run.device, torch.float32)
            else:
                self.model = Llama(run.model_config, config.seed).to(run.device, torch.float32)
        self.model.recompute = config.recompute
        self.parallel = Parallel(self.model, config.shard, run.device, run.dtype, config.compile)
        self.objective = self.parallel.objective
        if config.shard and not (run.source or checkpoint):
            draw_weights(self.model, config.seed, distributed.copy)
        with distributed.raise_on_all_ranks():
            if config.shard and run.source:
                checkpoints.load_weights(open_model(run.source, run.model_config)[1], self.model)
            stored_state(self.model)  # a model that no checkpoint can hold is an error now
        self.optimizers = make_optimizers(self.model, config)
        self.scaler = GradScaler(run.device.type, enabled=run.dtype == torch.float16)
        self.step = 0  # steps that are done
        self.started = self.began = self.saved = time.perf_counter()  # the first less the seconds before a resume
        # The terms and the gradient norm of each step since `read_pending`, on the device.
        self.pending: list[dict[str, Tensor]] = []
        self.logged_losses: list[dict[str, float]] = []  # the terms of each step since the last row of the log
        self.restored, self.evaluated = checkpoint is not None, False
        if checkpoint:
            self.restore(checkpoint)

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the run."""
        with distributed.raise_on_all_ranks():
            state = checkpoints.load_checkpoint(checkpoint, self.model, self.optimizers)
            own = state.get("run", self.run.id) == self.run.id and checkpoint.name == f"step-{state['step']:06d}"
            require(own, f"{checkpoint} holds another step, or is of another run; move it away")
        self.step = state["step"]
        self.logged_losses = state["losses"]
        self.started -= state["seconds"]
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        rows = distributed.from_main(read_rows, self.run.folder / "metrics.jsonl")
        newest = rows[-1]["step"] if rows else 0
        if newest < self.step - len(self.logged_losses):  # a checkpoint has the steps that came after a row
            warn(f"warning: {self.run.folder}/metrics.jsonl ends at step {newest}, before {checkpoint.name}")
        self.evaluated = any(row["step"] == self.step and "val_loss" in row for row in rows)  # at this step

    # Between steps.

    def read_pending(self) -> float:
        """Read what the steps since the last call gave, and return the last gradient norm. Waits for the device.

        Raises NotFinite, which names the step. It is called before every save.
        """
        grad_norm, pending, self.pending = math.nan, self.pending, []
        read = iter(torch.stack([x for terms in pending for x in terms.values()]).tolist() if pending else [])
        for step, terms in enumerate(pending, self.step - len(pending) + 1):
            losses = {name: next(read) for name in terms}
            grad_norm = losses.pop("grad_norm")
            if not all(map(math.isfinite, losses.values())):
                raise diverged("loss is", step)
            if not (math.isfinite(grad_norm) or self.scaler.is_enabled()):
                raise diverged("gradient is", step)
            self.logged_losses.append(losses)
        return grad_norm

    def log_training(self) -> None:
        """Add a row about the steps since the last one. Waits for the device."""
        config = self.run.config
        timed_steps = len(self.pending)  # those before a resume are not timed
        grad_norm = self.read_pending()
        losses, self.logged_losses = self.logged_losses, []
        if not self.progress:
            return
        tokens_per_step = config.batch_size * self.run.model_config.context
        speed = timed_steps * tokens_per_step / (time.perf_counter() - self.lap_started)
        row = {
            "step": self.step,
            "tokens": self.step * tokens_per_step,
            "seconds": round(self.seconds(), 3),
            **{name: sum(step[name] for step in losses) / len(losses) for name in losses[0]},
            "lr": learning_rate(config, self.step - 1),
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,  # infinite in a skipped float16 step
            "tokens_per_second": round(speed, 1),
        }
        self.progress.add_training(losses[-1]["train_loss"], row)

    def log_evaluation(self) -> None:
        """Evaluate and sample, and add a row. Raises NotFinite for a loss that is NaN or infinite."""
        val_loss, val_bpb = evaluate(self.model, self.run)
        if not math.isfinite(val_loss):
            raise diverged("validation loss is", self.step)
        sample = self.sample()
        large = self.run.config.shard and sample is None
        note = "; --shard has no sample of so large a model: see generate.py" if large else ""
        if self.progress:
            self.progress.add_evaluation({"step": self.step, "val_loss": val_loss, "val_bpb": val_bpb}, sample, note)

    def sample(self) -> str | None:
        """A text by the model. None without a tokenizer, and where a token would take too many gathered weights."""
        run, tokenizer = self.run, self.run.data.tokenizer
        weights = sum(weight.numel() for weight in self.model.parameters())
        if tokenizer.kind == NoTokenizer.kind or (run.config.shard and weights > SHARDED_SAMPLE):
            return None
        prompt = run.data.val[: min(SAMPLE_PROMPT, run.model_config.context // 2)].tolist()
        with autocast(run.device, run.dtype, cache=True), deterministic(False):  # CUDA's cumsum is not deterministic
            tokens = min(SAMPLE_TOKENS, run.model_config.context - len(prompt))
            ids = generate(self.model, prompt, tokenizer.ends, tokens=tokens, temperature=0.8, top_p=0.95)
        return TextStream().add(tokenizer.decode_bytes(ids.tolist()))

    def save(self) -> None:
        """Write a checkpoint. Raises NotFinite if a loss, a gradient, a weight or a buffer is not finite."""
        self.read_pending()
        tensors = map(distributed.local, self.model.state_dict().values())
        finite = torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
        if not all(distributed.all_gather(bool(finite))):
            raise diverged("a weight or a running statistic is", self.step)
        run = self.run
        state = {
            "run": run.id,
            "seconds": self.seconds(),
            "scaler": self.scaler.state_dict(),
            "losses": self.logged_losses,  # for the next row of the log, if a signal stops the run
        }
        made = self.model, run.data.tokenizer, self.optimizers, state
        checkpoints.save_checkpoint(run.folder, self.step, *made, run.config.keep)
        self.saved = time.perf_counter()

    def seconds(self) -> float:
        """Seconds of the whole run, with those before it was resumed."""
        return time.perf_counter() - self.started


def over(minutes: float, since: float) -> bool:
    """Whether so many minutes have passed, unless they are 0."""
    return 0 < minutes * 60 <= time.perf_counter() - since


# --- evaluation ------------------------------------------------------------------------------------------------------


@torch.no_grad()  # in inference_mode, FSDP2's first gather would make weights that cannot be trained
def evaluate(model: Llama, run: Run) -> tuple[float, float | None]:
    """Loss on the validation text, in nats per token and in bits per UTF-8 byte, which takes a tokenizer.

    It covers at most `eval_tokens` tokens, in windows of one context that are evenly spaced over the text, and always
    the same ones. Special tokens add their loss and no bytes. The ranks take turns with the batches, and add
    the losses in the order of the text, so their number changes nothing.
    """
    training = model.training
    model.eval()
    losses, counts = [], []  # a count is tokens and bytes
    context, rank = run.model_config.context, distributed.rank()
    batch_size = max(run.config.micro_batch_size, EVAL_BATCH_TOKENS // context)
    most, vocab_size = run.config.eval_tokens, run.model_config.vocab_size
    token_bytes = np.pad(run.data.tokenizer.token_bytes, (0, vocab_size))  # the model may have more ids
    batches = evaluation_batches(run.data.val, context, batch_size, most, vocab_size)
    while turn := list(islice(batches, distributed.world_size())):
        inputs, targets = turn[min(rank, len(turn) - 1)]  # with --shard, ranks without a batch have to help
        with autocast(run.device, run.dtype):
            losses.append(model.loss(to_device(inputs, run.device), to_device(targets, run.device)))
        size = int(token_bytes[targets.numpy()].sum())
        counts.append((targets.numel(), size) if rank < len(turn) else (0, 0))
    # The losses stay on the device until here, since reading one waits for it.
    measured = zip(torch.stack(losses).tolist(), counts, strict=True)
    parts = distributed.all_gather([(loss * count, count, size) for loss, (count, size) in measured])
    in_order = chain.from_iterable(zip(*parts, strict=True))
    nats, tokens, utf8_bytes = map(sum, zip(*in_order, strict=True))
    model.train(training)
    return nats / tokens, nats / math.log(2) / utf8_bytes if utf8_bytes else None


def evaluate_only(run: Run) -> None:
    """Print the loss of the run's newest checkpoint, or of the model in `--init-from`, also as JSON."""
    with bad_input(), distributed.raise_on_all_ranks():
        source = run.source
        if run.earlier or not source:
            source = read_config(checkpoints.find_checkpoint(run.folder))
            require(source.config == run.model_config, f"{source.directory} does not match the model in run.json")
        model = read_model(source, run.model_config).to(run.device, torch.float32).eval()
    val_loss, val_bpb = evaluate(model, run)
    if distributed.is_main():
        print(f"{source.directory}: {losses_line(val_loss, val_bpb)}")
        print(json.dumps({"checkpoint": str(source.directory), "val_loss": val_loss, "val_bpb": val_bpb}))


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    with distributed.process_group(), exit_codes("--micro-batch-size, --context or --dim, or --recompute"):
        asked = read_train(arguments)
        with bad_input():
            run = open_run(asked, ["train.py", *arguments])
        if asked.get("eval_only"):
            evaluate_only(run)
        else:
            execute(run)


class Trained(NamedTuple):
    """What `train` returns: the run directory, the trained model, its tokenizer, the rows of `metrics.jsonl`."""

    folder: Path
    model: Llama
    tokenizer: Tokenizer
    rows: list[Row]


def train(**options: Any) -> Trained:
    """Train in this process as the command does: `train(norm="dyt", norm_args={"alpha": 0.5}, steps=200)`.

    Raises ValueError with the command's message for invalid options, NotFinite if the run diverges, InUse if another
    process uses its directory, and Stopped if a signal has ended it.
    """
    if missing := missing_packages():  # such as matplotlib, which draws at the end
        raise BadInput(missing)
    set_up_cpu()
    asked = read_keywords(options, {"preset": str, "recipe": str, "config": str, "resume": bool, "import": list[str]})
    import_files(asked.pop("import", ()))
    with distributed.process_group():
        run = open_run(asked, ["train.py", *import_flags(), *to_flags(asked)])
        trainer = execute(run)
    return Trained(run.folder, trainer.model.eval(), run.data.tokenizer, read_rows(run.folder / "metrics.jsonl"))


def execute(run: Run) -> Trainer:
    """Train a resolved run, with its folder locked."""
    with ExitStack() as lock:
        with bad_input():
            distributed.from_main(lock.enter_context, lock_file(run.folder / LOCK))
            if not run.earlier:
                distributed.from_main(check_has_no_run, run.folder)
            distributed.from_main(checkpoints.clear_unfinished, run.folder)
            trainer = Trainer(run)
        trainer.train()
    return trainer


if __name__ == "__main__":
    set_up_cpu()
    main(sys.argv[1:])
