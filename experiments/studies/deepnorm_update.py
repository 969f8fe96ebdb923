"""With DeepNorm, does the first update of the logits keep its size with depth?"""

from experiments.studies.last_gradient import DEPTHS, FLAT, at_depths, exponent, gradients_and_updates
from experiments.studies.study import Protocol, Study

STUDY = Study(
    "deepnorm-update",
    [
        exponent("exponent, DeepNorm", "deepnorm {}, SGD", reproduced=FLAT),
        exponent("exponent, post-norm", "post {}, SGD"),
        exponent("exponent, DeepNorm, sign", "deepnorm {}, sign"),
        *at_depths("DeepNorm", "deepnorm {}, SGD"),
    ],
    {"initialization": Protocol(5, depths=DEPTHS)},
    measure=gradients_and_updates,
    unit="exponent of the number of blocks",
)
