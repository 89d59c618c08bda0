"""Makes the profiles that ship with kvbench: `python -m kvbench.profiles.ship`.

To be run again whenever the reference model gets a successor; it takes about a minute on two cores.
"""

from __future__ import annotations

from rich.console import Console

from kvbench import reference
from kvbench.profiles.command import describe, profiles
from kvbench.profiles.files import KINDS, SHIPPED
from kvbench.progress import reporter

SETTINGS = {"lengths": [512, 1024, 2048], "samples": 33, "seed": 0, "device": "cpu"}


def main() -> None:
    """Measure both kinds for the reference model and write them beside this file."""
    made = profiles("reference", KINDS, SETTINGS, reporter(Console(stderr=True)))
    for kind, profile in made.items():
        path = SHIPPED / f"{reference.NAME}.{kind}.json"
        profile.save(path)
        print(f"wrote {path}\n{describe(profile)}")


if __name__ == "__main__":
    main()
