"""What arms cost: parameters, FLOPs and the time of a step. And the steps with which they cost the same."""

import math
from statistics import median

import torch

from config import Asked, ModelConfig, TrainConfig
from experiments.benchmarks import flops_per_token, host_seconds, make_step
from experiments.records import Arm
from files import require
from model import Llama

Configs = dict[Arm, tuple[ModelConfig, TrainConfig]]
Interval = tuple[float, float, float]  # a median, and both ends of its 95% interval
EQUAL = ("tokens", "flops", "time")
ROUNDS, MOST_ROUNDS = 100, 500  # of steps, before and after which a measurement does not end
PRECISE = 0.03  # half of an interval is at most so much of its median


def costs(model_config: ModelConfig, config: TrainConfig) -> Asked:
    """Parameters, training tokens, and FLOPs of a run."""
    with torch.device("meta"):
        model = Llama(model_config)
    tokens = config.steps * config.batch_size * model_config.context
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"parameters": parameters, "tokens": tokens, "flops": float(tokens * flops_per_token(model))}


def step_times(arms: Configs, threads: int) -> dict[Arm, Interval]:
    """The time of a training step over that of the first arm of its size. All arms take their steps in turn.

    Steps are as in a run with so many `threads`, on random tokens, and compiled if the run would be. Rounds end when
    all intervals are narrow. Raises ValueError if some stay wide, as on a busy machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    device = torch.device(next(iter(arms.values()))[1].device)
    steps = {arm: make_step(model, config) for arm, (model, config) in arms.items()}
    first = {arm.size: arm for arm in reversed(arms)}
    ratios = {arm: list[float]() for arm in arms}
    for number in range(-3, MOST_ROUNDS):
        order = steps if number % 2 else reversed(steps)
        seconds = {arm: host_seconds(steps[arm], device) for arm in order}
        if number >= 0:  # the first ones compile, and allocate the optimizers' state
            for arm in arms:
                ratios[arm].append(seconds[arm] / seconds[first[arm.size]])
        if number + 1 >= ROUNDS:
            found = {arm: interval(each) for arm, each in ratios.items()}
            middle, low, high = max(found.values(), key=lambda each: (each[2] - each[1]) / each[0])  # the widest
            if precise := high - low <= 2 * PRECISE * middle:
                break
    torch.set_num_threads(before)
    steps.clear()
    if device.type != "cpu":
        torch.accelerator.empty_cache()  # the runs need the memory
    ratio = f"a step takes {middle:.2f} ({low:.2f} to {high:.2f}) times as long"
    require(precise, f"--equal time: this machine is busy: {ratio}; try again later")
    return found


def interval(values: list[float]) -> Interval:
    """The median and its 95% interval, from the ranks that a binomial distribution gives."""
    ordered, n = sorted(values), len(values)
    low = int(n / 2 - 0.98 * math.sqrt(n))
    return median(ordered), ordered[low], ordered[n - 1 - low]


def equal_steps(arms: Configs, equal: str, times: dict[str, float]) -> dict[Arm, Asked]:
    """The steps with which an arm costs as much as the first of its size, by `equal` of `EQUAL`.

    `times` are those of a step, by the names of arms. A warmup that does not follow from the steps grows with them.
    The learning rate does not follow from them, nor whether to compile: it was measured as it is.
    """
    first = {arm.size: arm for arm in reversed(arms)}
    asked = {}
    for arm, (model, config) in arms.items() if equal != "tokens" else ():
        base = arms[first[arm.size]]
        ratio = times[arm.name] if equal == "time" else costs(model, config)["flops"] / costs(*base)["flops"]
        steps = max(1, round(base[1].steps / ratio))
        asked[arm] = {"steps": steps, "compile": config.compile, "lr": config.lr}
        if config.warmup != config.steps // 20:
            asked[arm]["warmup"] = round(config.warmup * steps / config.steps)
    return asked
