"""Attributes of a module that is not there: importable, and refusing when called."""


def absent(module: str):
    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args, **_kwargs):
            raise NotImplementedError(
                f"{module}.{name} needs the real torchvision: pip install torchvision"
            )

        return missing

    return __getattr__
