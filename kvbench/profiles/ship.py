"""Makes the head profile that ships with kvbench: `python -m kvbench.profiles.ship`.

Run it again whenever the reference model gets a successor; it takes a few minutes on two cores.
"""

from __future__ import annotations

from rich.console import Console

from kvbench import reference
from kvbench.profiles.command import describe, measure_profile
from kvbench.profiles.files import PROFILES
from kvbench.progress import reporter

KIND = "ablation"
SETTINGS = {"length": [512, 1024, 2048], "samples": 33, "seed": 0, "device": "cpu"}


def main() -> None:
    """Measure the profile of the reference model and write it next to this file."""
    profile = measure_profile("reference", KIND, SETTINGS, reporter(Console(stderr=True)))
    path = PROFILES.shipped / PROFILES.pattern.format(model=reference.NAME, kind=KIND)
    profile.save(path)
    print(f"wrote {path}\n{describe(profile)}")


if __name__ == "__main__":
    main()
