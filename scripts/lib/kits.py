"""SGLang's server test kits: what each needs, and why the others are left out.

A kit is a class of test methods in ``sglang.test.kits`` that expects a running server. ``KITS``
names those that say something about a cache, ``LEFT_OUT`` gives a reason for every other one.
"""

from __future__ import annotations

import ast
import importlib
import json
import random
import unittest
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from scripts.lib.traffic import absent_datasets

MODULES = "sglang.test.kits"


class Setup(NamedTuple):
    """A server that kits need; ``int2``: what only its int2 form is given."""

    flags: tuple[str, ...]
    env: dict[str, str] = {}
    int2: tuple[str, ...] = ()


STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
SESSIONS = ("--enable-streaming-session",)
SETUPS = {
    "plain": Setup(
        (*SESSIONS, "--chunked-prefill-size", "512", "--enable-return-hidden-states"), STRICT
    ),
    # The rest of a prompt that is computed again would not count as cached.
    "reuse": Setup((), {}, ("--oscar-prefix-window", "reuse")),
    "waiting": Setup(("--max-running-requests", "1"), {"SGLANG_REQ_WAITING_TIMEOUT": "0.001"}),
    "running": Setup((), {"SGLANG_REQ_RUNNING_TIMEOUT": "2"}),
    # Lengths of the kit's own constants (server_fixtures/streaming_session_fixture).
    "short": Setup(
        (*SESSIONS, "--context-length", "512", "--chunked-prefill-size", "4096"), STRICT
    ),
}


class Kit(NamedTuple):
    """``small``: attributes for a CPU, where SGLang's own sizes take hours."""

    module: str
    name: str
    setup: str = "plain"
    small: dict[str, Any] = {}


KITS = (
    Kit("basic_api_contract_kit", "BasicAPIContractMixin"),
    Kit("basic_decode_correctness_kit", "BasicDecodeCorrectnessMixin"),
    Kit("basic_scheduler_stress_kit", "BasicSchedulerStressMixin"),
    Kit("json_constrained_kit", "JSONConstrainedMixin"),
    Kit("json_mode_kit", "JSONModeMixin"),
    Kit("regex_constrained_kit", "RegexConstrainedMixin"),
    Kit("ebnf_constrained_kit", "EBNFConstrainedMixin"),
    Kit("matched_stop_kit", "MatchedStopMixin"),
    Kit("anthropic_messages_kit", "AnthropicMessagesMixin"),
    Kit("spec_server_kits", "SpecLogprobKit"),
    Kit("spec_server_kits", "SpecPenaltyKit"),
    Kit("spec_server_kits", "SpecFeatureKit"),
    Kit("spec_server_kits", "SpecHiddenStatesKit"),
    Kit("streaming_session_kit", "StreamingSessionKitMixin"),
    Kit(
        "abort_timeout_kit", "AbortAllMixin",
        small={"abort_all_num_requests": 12, "abort_all_max_new_tokens": 2000},
    ),
    Kit(
        "pause_generation_kit", "PauseResumeInPlaceMixin",
        small={"pause_num_requests": 8, "pause_max_new_tokens": 48},
    ),
    Kit("cache_hit_kit", "run_multiturn_cache_hit_test", "reuse"),
    Kit(
        "abort_timeout_kit", "WaitingTimeoutMixin", "waiting",
        {"waiting_timeout_max_new_tokens": 64},
    ),
    Kit(
        "abort_timeout_kit", "RunningTimeoutTwoWaveMixin", "running",
        {"running_timeout_num_wave1": 4, "running_timeout_num_wave2": 4},
    ),
    Kit("streaming_session_kit", "AbortLeakReproKitMixin", "short"),
)  # fmt: skip

MULTIMODAL = "images: int2 serves text models"
DATA = "an accuracy score on a data set that is downloaded"
SPECULATION = "asks that speculation runs, which int2 refuses"
LEFT_OUT = {
    "AccuracyTwoPassMixin": f"{DATA}, and a third cache level (HiCache), which int2 refuses",
    "FwdOccupancyMixin": "the share of time in which the GPU computes: speed, not answers",
    "GSM8KMixin": DATA,
    "HumanEvalMixin": DATA,
    "KLDivergenceMixin": "`oscar-sglang verify --url` measures this",
    "LMEvalMixin": DATA,
    "MGSMEnMixin": DATA,
    "MMLUMixin": DATA,
    "MMLUSanityMixin": DATA,
    "MMMUMixin": MULTIMODAL,
    "MMMUProMixin": MULTIMODAL,
    "PDLogprobParityMixin": "disaggregation, which int2 refuses",
    "PrefixCacheBranchingMixin": "asks that a prefix is not found before it has branched twice: "
    "the cache of Mamba states only",
    "ReasoningTokenUsageMixin": "a model with a reasoning parser",
    "SeparateReasoningMixin": "a model with a reasoning parser",
    "SpecAccuracyKit": DATA,
    "SpecCorrectnessKit": SPECULATION,
    "SpecGrammarKit": SPECULATION,
    "SpecParityKit": SPECULATION,
    "SpecPerfKit": f"{DATA}, and a throughput",
    "SpecDecodingMixin": SPECULATION,
    "SpecSamplingMaskKit": "needs --sampling-mask-max-tokens: sampling, nothing of a cache",
    "UnifiedRadixTreeTestMixin": "`oscar-sglang verify --url` measures its KL; the rest is a score",
}


def kit_classes(folder: Path) -> set[str]:
    """Names of the classes with test methods in a folder of kits; read, not imported."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(f, ast.FunctionDef) and f.name.startswith("test") for f in node.body
            ):
                found.add(node.name)
    return found


def load(kit: Kit) -> ModuleType:
    """Its module; ImportError where that needs a package."""
    with absent_datasets():
        return importlib.import_module(f"{MODULES}.{kit.module}")


def test_case(kit: Kit, server, model: str, small: bool) -> type[unittest.TestCase]:
    """The kit as a class for a running server; ImportError where it needs a package."""
    module = load(kit)
    base = f"http://127.0.0.1:{server.port}"
    attributes: dict[str, Any] = {"base_url": base, "process": server.process, "model": model}
    attributes["api_key"] = "EMPTY"
    attributes |= kit.small if small else {}
    found = getattr(module, kit.name)
    if not isinstance(found, type):
        attributes["test_" + kit.name.removeprefix("run_").removesuffix("_test")] = _as_method(
            found
        )
        return type(kit.name, (unittest.TestCase,), attributes)
    if kit.module == "streaming_session_kit":
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        attributes["tokenizer"] = get_tokenizer(model)
    if kit.module == "json_mode_kit":
        import openai

        attributes["client"] = openai.Client(api_key="EMPTY", base_url=base + "/v1")
    if kit.module == "spec_server_kits":
        from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase as Fixture

        for name in ("send_request", "send_requests_abort", "run_decode"):
            attributes[name] = getattr(Fixture, name)
    return type(kit.name, (found, unittest.TestCase), attributes)


def _as_method(run: Callable) -> Callable:
    """The kit that is a function: its prompts are cut from conversations, which we make up."""

    def test(self: unittest.TestCase) -> None:
        import tempfile

        rng = random.Random(1)
        words = "the a of river stone green walks slowly over seven open doors and sings".split()
        talks = [
            {"conversations": [{"value": " ".join(rng.choices(words, k=400))} for _ in range(2)]}
            for _ in range(40)
        ]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(talks, file)
            file.flush()
            run(self.base_url, self.model, dataset_path=file.name)

    return test
