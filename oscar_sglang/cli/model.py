"""``--model`` of every command: a folder or a hub name, as SGLang's server takes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..plugin.model_folder import OVERRIDES_FLAG, NamedModel


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        required=required,
        metavar="DIR|NAME",
        help="folder in Hugging Face format, or a name on the hub, which is fetched as the server "
        "fetches it (offline with HF_HUB_OFFLINE=1)",
    )
    group.add_argument("--revision", metavar="REV", help="of a hub's model (default: main)")
    group.add_argument(
        "--download-dir", metavar="DIR", help="of a hub's weights (default: the hub's own cache)"
    )
    group.add_argument(
        OVERRIDES_FLAG,
        metavar="JSON",
        help="changes to the model's config, as SGLang's flag of that name will be given",
    )


def named(args: argparse.Namespace) -> NamedModel:
    """The model of ``add_model``'s arguments; makes SGLang importable if it has to be fetched."""
    model = NamedModel(args.model, args.revision, args.download_dir, args.json_model_override_args)
    if model.on_a_hub:
        from ..launch_server import enter_cpu_mode, has_gpu

        if not has_gpu():
            enter_cpu_mode()  # before anything imports transformers or sglang
    return model


@contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[Path]:
    """The folder of ``add_model``'s arguments while the context lasts."""
    with named(args).folder() as folder:
        yield folder
