"""The figures of published tables: browse them, check them, lay a run beside them."""
