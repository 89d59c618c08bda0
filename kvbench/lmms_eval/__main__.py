"""Runs `python -m kvbench.lmms_eval`."""

from __future__ import annotations

import sys

from kvbench.errors import UserError
from kvbench.lmms_eval import run_lmms_eval

if __name__ == "__main__":
    try:
        run_lmms_eval(sys.argv[1:])
    except UserError as error:
        sys.exit(f"kvbench: {error}")
