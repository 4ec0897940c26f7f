"""``--oscar-debug-tags`` and the dump: what looks on, and is looked at by nobody in ``pool``."""
