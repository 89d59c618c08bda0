"""Programs that maintainers run from a checkout; the wheel does not contain them."""

import kvbench  # noqa: F401 - before any script imports transformers: torchvision may be broken
