"""Claims about normalization, one file each, with a protocol and a rule for the verdict. `python ablate.py claim NAME`.

`claim.py` says what a claim is, `runs.py` and `verdict.py` hold what several claims share, and `document.py` keeps the
results and writes CLAIMS.md from them.
"""

import importlib
import pkgutil

from experiments.claims.claim import Claim


def load_claims() -> dict[str, Claim]:
    """All claims by name, in the order of their numbers: the `CLAIM` of each module of this package that has one."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    claims = sorted((module.CLAIM for module in modules if hasattr(module, "CLAIM")), key=lambda claim: claim.number)
    return {claim.name: claim for claim in claims}
