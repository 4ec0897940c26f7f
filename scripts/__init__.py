"""Demo, measurements and checks: ``python -m scripts.NAME`` in the checkout."""
