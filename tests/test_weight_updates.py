"""What a server with an int2 cache says and does when its weights are replaced."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.managers import io_struct

from oscar_sglang.calibration.errors import CalibrationError
from oscar_sglang.plugin import weight_updates as weights
from oscar_sglang.pool.memory_pool import Calibration, Counters, OscarKVPool

DISK = io_struct.UpdateWeightFromDiskReqInput(model_path="m")
IPC = io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={})
TENSOR = io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[])
DISTRIBUTED = io_struct.UpdateWeightsFromDistributedReqInput(names=[], dtypes=[], shapes=[])
BEGIN, END = io_struct.BeginWeightUpdateReqInput(), io_struct.EndWeightUpdateReqInput()


class Updater(SimpleNamespace):
    """Stands for SGLang's ``SchedulerWeightUpdaterManager``; ``wrote``: what it was asked."""

    def __init__(self, policy: str, codec: str = "feedback") -> None:
        pool = object.__new__(OscarKVPool)
        pool.size, pool.calibration = 100, Calibration("old", "artifact")
        pool.segments = SimpleNamespace(spec=SimpleNamespace(name=codec))
        allocator = SimpleNamespace(available_size=lambda: self.free)
        super().__init__(
            pool=pool,
            policy=policy,
            free=100,
            idle=True,
            wrote=[],
            offload_tags=set(),
            _session=None,
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool)),
            scheduler=SimpleNamespace(
                _engine_paused=False,
                is_fully_idle=lambda ignore_waiting: self.idle,
                token_to_kv_pool_allocator=allocator,
            ),
        )

    def call(self, hook, request):
        """SGLang's own method stands for nothing but a note that it ran."""

        def original(updater, request):
            updater.wrote.append(request)
            if request is BEGIN:
                updater._session = object()
            if request is END:
                updater._session = None
            kind = type(request).__name__.replace("Input", "Output")
            return getattr(io_struct, kind)(success=True, message="Done.")

        return hook(original, self, request)


@pytest.fixture
def updater(monkeypatch):
    def make(policy: str, codec: str = "feedback") -> Updater:
        made = Updater(policy, codec)
        monkeypatch.setattr(weights, "_policy", lambda updater: updater.policy)

        def recalibrate(updater, pool):
            pool.calibration.stale = False
            pool.calibration.recalibrations += 1
            return "Measured."

        monkeypatch.setattr(weights, "_recalibrate", recalibrate)
        return made

    return make


@pytest.mark.parametrize("request_", [DISK, IPC], ids=["disk", "ipc"])
def test_a_whole_update_is_followed_at_once(updater, request_):
    u = updater("recalibrate")
    assert u.call(weights.around_update, request_).message == "Done. Measured."
    state = u.pool.calibration
    assert (state.stale, state.weight_updates, state.recalibrations) == (False, 1, 1)


@pytest.mark.parametrize("part", [TENSOR, DISTRIBUTED], ids=["tensor", "distributed"])
def test_an_update_in_parts_is_followed_when_it_ends(updater, part):
    u = updater("recalibrate")
    u.call(weights.around_part, part)
    assert not u.pool.calibration.stale, "without a session SGLang refuses it"
    u.call(weights.around_begin, BEGIN)
    for _ in range(3):
        u.call(weights.around_part, part)
        assert u.pool.calibration.stale
        assert "waits for /end_weight_update" in weights.renew(u)  # a flush on the way
    assert u.call(weights.around_end, END).message == "Done. Measured."
    state = u.pool.calibration
    assert (state.stale, state.weight_updates, state.recalibrations) == (False, 1, 1)


def test_weights_written_past_sglang_count_too(updater):
    u = updater("recalibrate")
    u.call(weights.around_begin, BEGIN)
    assert u.call(weights.around_end, END).message == "Done. Measured."
    u.call(weights.around_end, END)  # no session is open
    assert u.pool.calibration.weight_updates == 1


@pytest.mark.parametrize(
    "obstacle, words",
    [
        (dict(offload_tags={GPU_MEMORY_TYPE_KV_CACHE}), "/resume_memory_occupation"),
        (dict(idle=False), "running requests to end, and /flush_cache"),
        (dict(free=90), "/flush_cache"),
    ],
)
def test_it_waits_and_says_for_what(updater, caplog, obstacle, words):
    u = updater("recalibrate")
    vars(u).update(obstacle)
    with caplog.at_level(logging.WARNING, "oscar_sglang"):
        message = u.call(weights.around_update, DISK).message
    assert words in message and words in u.pool.calibration.stats()["calibration_waits_for"]
    assert "STALE CALIBRATION" in caplog.text
    assert u.pool.calibration.stats()["calibration_stale"] == 1
    vars(u).update(free=100, idle=True, offload_tags=set())
    assert weights.renew(u) == "Measured." and weights.renew(u) == ""


def test_a_flush_inside_the_update_does_not_measure_half_of_it(updater):
    u = updater("recalibrate")
    u.pool.calibration.stale = True  # from an update before

    def original(updater, request):
        assert weights.renew(updater) == ""
        return io_struct.UpdateWeightFromDiskReqOutput(success=True, message="Done.")

    assert weights.around_update(original, u, DISK).message == "Done. Measured."
    assert u.pool.calibration.recalibrations == 1


def test_keep_says_so_every_time(updater, caplog):
    u = updater("keep")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "oscar_sglang"):
            message = u.call(weights.around_update, DISK).message
        assert "keeps calibration old of the old weights" in message
        assert "STALE CALIBRATION" in caplog.text
    stats = u.pool.calibration.stats()
    assert (stats["calibration_stale"], stats["weight_updates"]) == (1, 2)


@pytest.mark.parametrize(
    "hook, request_",
    [
        (weights.around_update, DISK),
        (weights.around_update, IPC),
        (weights.around_begin, BEGIN),
        (weights.around_part, TENSOR),
        (weights.around_part, DISTRIBUTED),
    ],
    ids=["disk", "ipc", "begin", "tensor", "distributed"],
)
def test_refuse_writes_nothing(updater, hook, request_):
    u = updater("refuse")
    answer = u.call(hook, request_)
    assert not answer.success and "--oscar-on-weight-update refuse" in answer.message
    assert u.wrote == [] and not u.pool.calibration.stale


def test_a_codec_without_statistics_is_never_stale(updater):
    u = updater("recalibrate", "omni")
    assert u.call(weights.around_update, DISK).message == "Done."
    assert not u.pool.calibration.stale


def test_a_failed_measurement_leaves_the_old_one_and_says_so(monkeypatch, caplog):
    u = Updater("recalibrate")
    monkeypatch.setattr(weights, "_policy", lambda updater: updater.policy)

    def fail(*_args, **_kwargs):
        raise CalibrationError("layer 3: K, V or Q is NaN or infinite")

    monkeypatch.setattr("oscar_sglang.plugin.recalibrate.gather_and_fit", fail)
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_schedule", lambda: SimpleNamespace(chunked_prefill_size=64)
    )
    u.pool.counters, u.tp_cpu_group, forgotten = Counters(5), None, []
    u.pool.forget_rows = lambda: forgotten.append(True)
    with caplog.at_level(logging.ERROR, "oscar_sglang"):
        message = u.call(weights.around_update, DISK).message
    assert "keeps the one of the old weights: layer 3" in message and "layer 3" in caplog.text
    state = u.pool.calibration
    assert state.stale and state.artifact == "old" and forgotten == [True]
    assert "last attempt failed" in state.waiting_for and u.pool.counters.demoted_tokens == 5


def test_beams_are_refused_with_a_message_for_the_client():
    """They exchange slots between request rows, whose windows would not follow."""
    from oscar_sglang.plugin.lifecycle import refuse_beams

    def coordinator(pool):
        allocator = SimpleNamespace(get_kvcache=lambda: pool)
        return SimpleNamespace(token_to_kv_pool_allocator=allocator)

    stock = refuse_beams(lambda *_: None, coordinator(object()), None, None)
    assert stock is None
    message = refuse_beams(lambda *_: None, coordinator(object.__new__(OscarKVPool)), None, None)
    assert "Beam search is not supported with --kv-cache-dtype int2" in message
