"""Makes the head profiles that ship with kvbench: `python -m kvbench.profiles.ship [MODEL ...]`.

Run it again whenever the reference model gets a successor or the file of SmolLM2 changes; each
takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from kvbench.artifacts import shipped_name
from kvbench.profiles.command import describe, measure_profile
from kvbench.profiles.files import PROFILES
from kvbench.progress import reporter

SHIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("ablation", {"length": [512, 1024, 2048], "samples": 33}),
    # `ablation` would take 180 forwards for each of its answers.
    "smollm2": ("reason", {"length": [512, 1024], "samples": 11, "dtype": "bfloat16"}),
}
"""Kind and settings by model."""


def main() -> None:
    """Measure the profiles of models and write them next to this file."""
    parser = argparse.ArgumentParser(description="Make the head profiles that ship with kvbench.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    for model in parser.parse_args().models or SHIPPED:
        kind, settings = SHIPPED[model]
        given = {**settings, "seed": 0, "device": "cpu"}
        profile = measure_profile(model, kind, given, reporter(Console(stderr=True)))
        path = PROFILES.shipped / PROFILES.pattern.format(model=shipped_name(model), kind=kind)
        profile.save(path)
        print(f"wrote {path}\n{describe(profile)}")


if __name__ == "__main__":
    main()
