"""Which page size suits prefix-heavy traffic: hit rate and speed of the same agents at each.

    python -m scripts.bench_page_size [--page-sizes 1,16,64,128] [--shape qwen3-8b] [--layers N]
                                      [--json OUT] [--commit HASH] [--agents-...]

One int2 server per page size, dummy weights, the ``agents`` traffic of ``bench_serving.py``, whose
lengths are no multiples of a page here. What a page size costs the attention
kernels alone is in ``bench_kernels.py``'s table.
"""

from __future__ import annotations

import json
from pathlib import Path

from scripts.lib import endurance, serving_options, throughput
from scripts.lib.provenance import header
from scripts.lib.server import Server
from scripts.lib.shapes import CACHES, UNCHECKED, common_arguments, model_folder

ODD_LENGTHS = {"agents_system": 8101, "agents_in": 499, "agents_out": 53}


def measure(page_size: int, folder: Path, args) -> dict:
    flags = [*common_arguments(args.job_mem_fraction), *CACHES["int2"], *args.server_flags]
    log = args.log_dir / f"page-{page_size}.log"
    flags += ["--page-size", str(page_size)]
    with Server(folder, log, *flags, env=UNCHECKED, timeout=400) as server:
        assert server.internal_state()["page_size"] == page_size
        row = throughput.agents(server, args, "radix", args.agents_sessions)
    return {"page_size": page_size, **row}


def main() -> None:
    parser = serving_options.parser(__doc__.splitlines()[0])
    parser.add_argument("--page-sizes", type=serving_options.numbers, default=[1, 16, 64, 128])
    parser.set_defaults(**ODD_LENGTHS)
    args = serving_options.finish(parser)
    folder, rows = model_folder(args.shape, args.layers), []
    for page_size in args.page_sizes:
        rows.append(measure(page_size, folder, args))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        **header(endurance.device_name(), args.commit),
        "baselines": "the page sizes, one against the other",
        "model": args.shape,
        "layers": args.layers,
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
