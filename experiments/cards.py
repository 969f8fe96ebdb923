"""GPUs: what their data sheets say."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A GPU's limits. GeForce cards' FLOP/s follow from their float32, of which tensor cores do twice as many."""

    flops: float  # dense FLOP/s in bfloat16, or in float16 on a card without it, summed in float32
    float32: float  # FLOP/s without tensor cores
    bandwidth: float  # of the device memory, in bytes/s
    memory: float  # in bytes


CARDS = {
    "t4": Card(65e12, 8.1e12, 320e9, 16e9),
    "v100": Card(125e12, 15.7e12, 900e9, 16e9),
    "a10": Card(125e12, 31.2e12, 600e9, 24e9),
    "a100": Card(312e12, 19.5e12, 2039e9, 80e9),
    "h100": Card(989e12, 67e12, 3350e9, 80e9),
    "h200": Card(989e12, 67e12, 4800e9, 141e9),
    "b200": Card(2250e12, 75e12, 7700e9, 180e9),
    "l4": Card(121e12, 30.3e12, 300e9, 24e9),
    "l40s": Card(362e12, 91.6e12, 864e9, 48e9),
    "rtx-3060": Card(25.4e12, 12.7e12, 360e9, 12e9),
    "rtx-3080": Card(59.5e12, 29.8e12, 760e9, 10e9),
    "rtx-3090": Card(71e12, 35.6e12, 936e9, 24e9),
    "rtx-4060": Card(30.2e12, 15.1e12, 272e9, 8e9),
    "rtx-4070": Card(58.3e12, 29.1e12, 504e9, 12e9),
    "rtx-4080": Card(97.5e12, 48.7e12, 717e9, 16e9),
    "rtx-4090": Card(165e12, 82.6e12, 1008e9, 24e9),
    "rtx-5070": Card(61.7e12, 30.9e12, 672e9, 12e9),
    "rtx-5080": Card(113e12, 56.3e12, 960e9, 16e9),
    "rtx-5090": Card(210e12, 105e12, 1792e9, 32e9),
}
BEFORE_AMPERE = ("t4", "v100")  # without bfloat16 and TF32
