"""Build the shipped head profiles, Q-filters and query statistics: `python -m kvbench.profiles.ship [MODEL ...]`.

Rerun it when the reference model or the SmolLM2 file changes; each takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from kvbench.artifacts import shipped_name
from kvbench.profiles.command import describe, measure_profile, measure_queries
from kvbench.profiles.files import PROFILES
from kvbench.profiles.summaries import FILTERS, STATISTICS
from kvbench.progress import reporter

SHIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("ablation", {"length": [512, 1024, 2048], "samples": 33}),
    # `ablation` would take 180 forward passes per answer.
    "smollm2": ("reason", {"length": [512, 1024], "samples": 11, "dtype": "bfloat16"}),
}
"""Kind and settings of the head profile, by model."""
QUERY_SETTINGS: dict[str, dict[str, Any]] = {
    "reference": {"length": [512, 1024]},
    "smollm2": {"length": [512, 1024], "dtype": "bfloat16"},
}
"""Settings of the query summaries, by model."""


def main() -> None:
    """Measure the profiles and summaries of models and write them to the package."""
    parser = argparse.ArgumentParser(description="Build the profiles that ship with kvbench.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--queries", action="store_true", help="skip head profiles")
    parsed_args = parser.parse_args()
    for model in parsed_args.models or SHIPPED:
        options = {**QUERY_SETTINGS[model], "seed": 0, "device": "cpu"}
        for summary in (FILTERS, STATISTICS):
            tensors, notes = measure_queries(summary, model, options, reporter(Console(stderr=True)))
            artifacts = summary.artifacts
            folder = artifacts.shipped / artifacts.pattern.format(model=shipped_name(model))
            if summary is STATISTICS:  # a matrix for every head
                tensors = {tensor_name: tensor.half() for tensor_name, tensor in tensors.items()}
            summary.save(folder, tensors, notes)
            print(f"wrote {folder}")
        if parsed_args.queries:
            continue
        kind, settings = SHIPPED[model]
        options = {**settings, "seed": 0, "device": "cpu"}
        profile = measure_profile(model, kind, options, reporter(Console(stderr=True)))
        profile_path = PROFILES.shipped / PROFILES.pattern.format(model=shipped_name(model), kind=kind)
        profile.save(profile_path)
        print(f"wrote {profile_path}\n{describe(profile)}")


if __name__ == "__main__":
    main()
