"""For all tests: one thread, since theirs are small tensors, on which more threads only wait for each other."""

import torch

torch.set_num_threads(1)
