"""Several models and versions in one server: where they lie, which of them answers, and what is compared."""
