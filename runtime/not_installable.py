"""The build backend that pyproject.toml names: `pip install .` is refused in one line.

Installed, `model`, `data` and `config` would collide with modules of other projects.
"""

import sys
from typing import NoReturn

HOW_TO_USE = (
    "normal-llama is not installed but used from its folder: pip install -r requirements.txt, then from anywhere "
    "python FOLDER/train.py, or PYTHONPATH=FOLDER python yours.py"
)


def refuse(*args: object, **kwargs: object) -> NoReturn:
    sys.exit(HOW_TO_USE)


# The hooks of PEP 517 and PEP 660, of which pip and other installers call the first before anything else.
get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = refuse
build_wheel = build_editable = build_sdist = refuse
