"""Calibration: a model and some tokens in, an ``Artifact`` out. No GPU needed.

SGLang is imported by ``sglang_*.py`` alone, and those only when that engine is asked for.

    Plan(model_dir, data, tokens, ...)          what to run, and on which tokens    (plan.py)
    calibrate(plan, codec)                      run the model, fit the codec        (pipeline.py)
    calibrate_codecs(plan, codecs)              several codecs from one pass        (pipeline.py)
    ensure_artifact(plan, codec)                the same, cached per user and model (auto.py)
    evaluate(Options(model_dir, ...))           judge methods and artifacts         (evaluation/)
    import_zoo(k_file, v_file, model_dir)       OSCAR's published rotations         (zoo.py)

Names are resolved on first use: importing this package imports neither torch nor transformers.
"""

from importlib import import_module

_HOME = {
    "CalibrationError": "errors",
    "Options": "evaluation.evaluate",
    "Plan": "plan",
    "calibrate": "pipeline",
    "calibrate_codecs": "pipeline",
    "ensure_artifact": "auto",
    "evaluate": "evaluation.evaluate",
    "export_zoo": "zoo",
    "import_zoo": "zoo",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
