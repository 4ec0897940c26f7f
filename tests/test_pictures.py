"""Calibration of vision-language models: on text, and on pictures if there are any."""

from __future__ import annotations

import pytest
import torch

from oscar_sglang.calibration import CalibrationError, Plan, calibrate
from oscar_sglang.calibration.collect import collect, decoder_layers, load_model
from oscar_sglang.calibration.pictures import load_pictures
from oscar_sglang.calibration.stats import HOLD_EVERY
from scripts.lib.tiny_models import family, llama, random_ids
from scripts.lib.tiny_vision import picture, with_processor

SINK = 64


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return with_processor(family("qwen3-vl", tmp_path_factory.mktemp("vision") / "model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{seed}.png" for seed in range(2)]
    for seed, path in enumerate(paths):
        picture(seed, 128, 192).save(path)
    return paths


def test_pictures_are_more_sequences(model_dir, files):
    """What is gathered is K, V and Q of the language model, over each prompt of a picture."""
    model, inputs = load_model(model_dir, "cpu"), load_pictures(model_dir, files)
    lengths = [i["input_ids"].shape[1] for i in inputs]
    assert min(lengths) > 96, "24 x 16 patches, four to a token, and words"
    text, rows = random_ids(300), []
    hook = decoder_layers(model)[0].self_attn.v_proj.register_forward_hook(
        lambda _module, _args, out: rows.append(out[0].detach().reshape(-1, 2, 64)[SINK:])
    )
    with torch.no_grad():
        for prompt in ({"input_ids": text[0][None]}, *inputs):
            model(**prompt)
    hook.remove()
    assert [len(v) + SINK for v in rows] == [300, *lengths]
    seen = torch.cat(rows).double()
    seen = seen[torch.arange(len(seen)) % HOLD_EVERY != HOLD_EVERY - 1]
    expected = torch.einsum("thi,thj->hij", seen, seen) / len(seen)
    found = collect(model, text, pictures=inputs)[0].vtv
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_what_was_seen_is_written_down(model_dir, files):
    made = calibrate(Plan(model_dir, tokens=400, images=tuple(files)))
    assert made.provenance["images"] == 2 and len(made.provenance["images_hash"]) == 16
    assert "images" not in calibrate(Plan(model_dir, tokens=400)).provenance


def test_mistakes(model_dir, files, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    for wrong in (broken, tmp_path / "nowhere.png"):
        with pytest.raises(CalibrationError, match=f"{wrong}: cannot be read as a picture"):
            calibrate(Plan(model_dir, tokens=400, images=(wrong,)))
    with pytest.raises(CalibrationError, match="drop --engine, the codec, or --images"):
        calibrate(Plan(model_dir, tokens=400, images=tuple(files)), "position")
    with pytest.raises(CalibrationError, match="has no processor of pictures"):
        calibrate(Plan(llama(tmp_path), tokens=400, images=tuple(files)))
