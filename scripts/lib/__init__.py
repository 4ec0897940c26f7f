"""What several scripts, and tests, use."""
