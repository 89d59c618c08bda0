"""Programs that maintainers run from a checkout; the wheel does not contain them."""
