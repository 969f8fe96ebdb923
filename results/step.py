"""Where the time of a training step goes: python results/step.py whole|blocks|eager FILE [flags of train.py].

Prints the seconds until the first step has ended, in which it is compiled, the median of the following steps and the
seconds of the first evaluation. FILE gets the table of torch.profiler over 20 steps. `blocks` is what train.py
compiles, `whole` the objective as one graph. For a cold start, TORCHINDUCTOR_CACHE_DIR must name an empty folder.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from machine.device import set_up_cpu
from runtime.flags import read_train
from runtime.run import open_run
from train import Trainer, evaluate

STEPS = 20


def seconds(call, *arguments) -> float:
    """Until the device is done as well."""
    started = time.perf_counter()
    call(*arguments)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def main(how: str, file: str, *flags: str) -> None:
    set_up_cpu()
    run = open_run(read_train([*flags, "--compile" if how == "blocks" else "--no-compile"]), sys.argv)
    trainer = Trainer(run)
    if how == "whole":
        trainer.objective.compile()
    print(f"{how}: first step {seconds(trainer.train_step):.1f} s", flush=True)
    steps = [seconds(trainer.train_step) for _ in range(STEPS)]
    print(f"{how}: a step {1e3 * statistics.median(steps):.2f} ms", flush=True)
    print(f"{how}: first evaluation {seconds(evaluate, trainer.model, run):.1f} s", flush=True)
    cuda = run.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]) as found:
        for _ in range(STEPS):
            seconds(trainer.train_step)
    order = f"self_{'cuda' if cuda else 'cpu'}_time_total"
    Path(file).write_text(found.key_averages().table(sort_by=order, row_limit=40) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
