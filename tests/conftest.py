"""For all tests: one thread, because their tensors are small."""

import torch

torch.set_num_threads(1)
