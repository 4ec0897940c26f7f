"""What several tests use. What scripts use too lies in ``scripts/lib``: tests import scripts, never
the other way round."""
