"""What a run says and leaves while it trains, on rank 0: run.json, its logs, the progress bar, and its page."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from config import preset_lr
from data.tokenizer import NoTokenizer
from machine.device import peak_memory
from machine.process import NotFinite, Stopped
from runtime.plugins import command_to_type
from runtime.run import Run
from runtime.run_dir import Log, Row, RunFile, continued, keep_rows, open_tracker, write_run_file

EVERY = 30  # seconds between lines where there is no progress bar, and between reports


class Progress(ExitStack):
    """Opens the run directory at `step`: writes run.json from its `description`, and drops what came after the step."""

    def __init__(self, run: Run, description: RunFile, step: int, write_page: Callable[[Path, float | None], None]):
        super().__init__()
        self.run, self.write_page, config = run, write_page, run.config
        if run.earlier:
            description = continued(run.earlier, description, step)
            keep_rows(run.folder / "metrics.jsonl", step)  # before a new --save-every is in run.json
        write_run_file(run.folder / "run.json", description)
        self.log = Log(run.folder, step, self.enter_context(open_tracker(config.log, run.folder, description, step)))
        bar = tqdm(total=config.steps, initial=step, unit="step", disable=None, dynamic_ncols=True)
        self.bar = self.enter_context(bar)
        self.printed = self.reported = time.perf_counter()
        lr, preset = f"lr {config.lr}", preset_lr(description["resolved"])
        if "lr" not in run.asked and (config.init_from or preset != config.lr):
            lr += f" (the preset's {preset}, for {'new models' if config.init_from else 'these sizes'})"
        self.bar.write(
            f"{description['parameters']:,} parameters, norm {run.model_config.norm}, placement "
            f"{run.model_config.placement}, on {description['device']} in {config.dtype}"
            f"{', with torch.compile' if config.compile else ''}; {lr}; "
            f"the run is {run.folder}{f', from step {step}' if step else ''}"
        )

    def __exit__(self, *error: Any) -> None:
        """A run that diverges or is stopped gets its report, and the tracker is told of any error."""
        if isinstance(error[1], NotFinite):
            self.log.add(step=error[1].step, not_finite=True)
        if isinstance(error[1], NotFinite | Stopped):
            self.report()
        super().__exit__(*error)

    def add_training(self, loss: float, row: Row) -> None:
        """Log a row, and show the `loss` of the last step."""
        self.log.add(**row)
        figures = f"loss {loss:.3f}, tokens/s {row['tokens_per_second']:,.0f}"
        self.bar.set_postfix_str(figures, refresh=False)
        self.bar.update(row["step"] - self.bar.n)
        if self.bar.disable and time.perf_counter() - self.printed >= EVERY:  # not a terminal
            self.printed = time.perf_counter()
            self.bar.write(f"step {row['step']}: {figures}")

    def add_evaluation(self, row: Row, sample: str | None, note: str = "") -> None:
        if sample is not None:
            self.log.add_sample(row["step"], sample)
        self.log.add(**row)  # last: a resumed run repeats any evaluation without a row
        if row["step"] < self.run.config.steps and time.perf_counter() - self.reported >= EVERY:
            self.report()
        self.bar.write(f"step {row['step']}: {losses_line(row['val_loss'], row['val_bpb'])}{note}")

    def report(self) -> None:
        self.write_page(self.run.folder, self.run.data.val_gzip_bpb)
        self.reported = time.perf_counter()

    def print_summary(self, seconds: float) -> None:
        run, last = self.run, self.log.rows[-1]
        name = "val_loss" if last["val_bpb"] is None else "val_bpb"
        self.report()
        gzip_bpb = run.data.val_gzip_bpb
        than = f"; gzip -9 on the validation text: {gzip_bpb:.4f} bits per byte" if gzip_bpb else ""
        print(f"{name} {last[name]:.4f}{than}")
        print(f"done in {seconds:.0f} s, peak memory {peak_memory(run.device) / 1e9:.1f} GB")
        print(f"loss curve, samples and settings: {run.folder}/report.html")
        if run.data.tokenizer.kind != NoTokenizer.kind:
            print(f"generate text: {command_to_type('generate.py', '--checkpoint', str(run.folder))}")


def losses_line(val_loss: float, val_bpb: float | None) -> str:
    return f"val_loss {val_loss:.4f}" + (f", val_bpb {val_bpb:.4f}" if val_bpb else "")
