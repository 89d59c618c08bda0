"""Makes what ships with kvbench for its models: `python -m kvbench.profiles.ship [MODEL ...]`.

Head profiles and Q-filters. Run it again whenever the reference model gets a successor or the file
of SmolLM2 changes; each takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from kvbench.artifacts import shipped_name
from kvbench.profiles.command import describe, measure_filters, measure_profile
from kvbench.profiles.files import PROFILES
from kvbench.profiles.filters import FILTERS, save_filters
from kvbench.progress import reporter

SHIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("ablation", {"length": [512, 1024, 2048], "samples": 33}),
    # `ablation` would take 180 forwards for each of its answers.
    "smollm2": ("reason", {"length": [512, 1024], "samples": 11, "dtype": "bfloat16"}),
}
"""Kind and settings of the head profile by model."""
FILTER_SETTINGS: dict[str, dict[str, Any]] = {
    "reference": {"length": [512, 1024]},
    "smollm2": {"length": [512, 1024], "dtype": "bfloat16"},
}
"""Settings of the Q-filters by model."""


def main() -> None:
    """Measure the profiles and filters of models and write them next to this file."""
    parser = argparse.ArgumentParser(description="Make the profiles that ship with kvbench.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--filters", action="store_true", help="only the Q-filters")
    arguments = parser.parse_args()
    for model in arguments.models or SHIPPED:
        given = {**FILTER_SETTINGS[model], "seed": 0, "device": "cpu"}
        filters, notes = measure_filters(model, given, reporter(Console(stderr=True)))
        folder = FILTERS.shipped / FILTERS.pattern.format(model=shipped_name(model))
        save_filters(folder, filters, notes)
        print(f"wrote {folder}")
        if arguments.filters:
            continue
        kind, settings = SHIPPED[model]
        given = {**settings, "seed": 0, "device": "cpu"}
        profile = measure_profile(model, kind, given, reporter(Console(stderr=True)))
        path = PROFILES.shipped / PROFILES.pattern.format(model=shipped_name(model), kind=kind)
        profile.save(path)
        print(f"wrote {path}\n{describe(profile)}")


if __name__ == "__main__":
    main()
