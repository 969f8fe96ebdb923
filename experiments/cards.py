"""GPUs: what their data sheets say."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A GPU's limits. GeForce cards' FLOP/s follow from their float32, of which tensor cores do twice as many."""

    flops: float  # dense FLOP/s in bfloat16, or in float16 on a card without it, summed in float32
    float32: float  # FLOP/s without tensor cores
    bandwidth: float  # bytes/s from and to the device memory
    memory: float  # bytes


# name, TFLOP/s, TFLOP/s in float32, GB/s, GB
TABLE = """\
t4            65      8.1   320   16
v100         125     15.7   900   16
a10          125     31.2   600   24
a100         312     19.5  2039   80
h100         989       67  3350   80
h200         989       67  4800  141
b200        2250       75  7700  180
l4           121     30.3   300   24
l40s         362     91.6   864   48
rtx-3060    25.4     12.7   360   12
rtx-3080    59.5     29.8   760   10
rtx-3090      71     35.6   936   24
rtx-4060    30.2     15.1   272    8
rtx-4070    58.3     29.1   504   12
rtx-4080    97.5     48.7   717   16
rtx-4090     165     82.6  1008   24
rtx-5070    61.7     30.9   672   12
rtx-5080     113     56.3   960   16
rtx-5090     210      105  1792   32
"""
CARDS = {}
for line in TABLE.splitlines():
    name, flops, float32, bandwidth, memory = line.split()
    CARDS[name] = Card(float(f"{flops}e12"), float(f"{float32}e12"), float(f"{bandwidth}e9"), float(f"{memory}e9"))
BEFORE_AMPERE = ("t4", "v100")  # without bfloat16 and TF32
