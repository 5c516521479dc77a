"""Checkpoints come back bit for bit, or not at all with the file and tensor named."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from openkda.models import checkpoint
from openkda.models.checkpoint import CONFIG, WEIGHTS, load_checkpoint, load_config, save_checkpoint
from openkda.models.hybrid import HybridLM
from openkda.models.official import is_published, read_config
from openkda.models.official_shards import Shards
from openkda.models.presets import PRESETS
from openkda.models.tokenizer import load_tokenizer

TINY = PRESETS["tiny"]


def built(seed: int = 0, **changes: object) -> HybridLM:
    model = HybridLM(TINY.replace(**changes))
    model.init_weights(seed)
    return model.eval()


def assert_equal(a: HybridLM, b: HybridLM) -> None:
    assert a.config == b.config
    x, y = a.state_dict(), b.state_dict()
    assert x.keys() == y.keys()
    assert all(x[n].dtype == y[n].dtype and torch.equal(x[n], y[n]) for n in x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    model = built(tie_word_embeddings=tied).to(dtype)
    save_checkpoint(model, tmp_path / "a" / "b")
    assert sorted(os.listdir(tmp_path / "a")) == ["b"]
    assert sorted(os.listdir(tmp_path / "a" / "b")) == [CONFIG, WEIGHTS]
    again = load_checkpoint(tmp_path / "a" / "b")
    assert_equal(again, model)
    assert not again.training and all(p.requires_grad for p in again.parameters())
    x = torch.arange(20).view(1, 20)
    with torch.no_grad():
        assert torch.equal(again(x).logits, model(x).logits)
    assert {p.dtype for n, p in again.named_parameters() if "A_log" in n} == {torch.float32}
    mode = (tmp_path / "a" / "b" / WEIGHTS).stat().st_mode & 0o777
    assert mode == (tmp_path / "a" / "b" / CONFIG).stat().st_mode & 0o777  # readable by whoever reads the config


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_is_saved_under_its_own_names(tmp_path: Path, whole: bool) -> None:
    model = HybridLM(PRESETS["tiny"])
    want = {n: t.clone() for n, t in model.state_dict().items()}
    if whole:
        save_checkpoint(torch.compile(model), tmp_path / "c")  # type: ignore[arg-type]
    else:
        model.model.layers[1] = torch.compile(model.model.layers[1])  # type: ignore[assignment]
        save_checkpoint(model, tmp_path / "c")
    got = load_checkpoint(tmp_path / "c").state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


def test_dtype_converts_all_but_float32_parameters(tmp_path: Path) -> None:
    model = built()
    save_checkpoint(model, tmp_path / "c")
    assert_equal(load_checkpoint(tmp_path / "c", dtype=torch.bfloat16), model.to(torch.bfloat16))


def test_float32_parameters_stored_narrow_are_widened(tmp_path: Path) -> None:
    save_checkpoint(built(), tmp_path / "c")
    rewrite(tmp_path / "c", lambda t: {n: v.bfloat16() for n, v in t.items()})
    model = load_checkpoint(tmp_path / "c")
    assert model.model.layers[0].self_attn.A_log.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_loaded_weights_are_the_models_own(tmp_path: Path) -> None:
    """Not views of a mapped file that the next save replaces."""
    model = built()
    save_checkpoint(model, tmp_path / "c")
    again = load_checkpoint(tmp_path / "c")
    (tmp_path / "c" / WEIGHTS).write_bytes(b"")
    assert_equal(again, model)
    with torch.no_grad():
        for p in again.parameters():
            p.add_(1)


def test_saving_again_replaces_and_leaves_other_files(tmp_path: Path) -> None:
    save_checkpoint(built(0), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    new = built(1, intermediate_size=32)
    save_checkpoint(new, tmp_path)
    assert_equal(load_checkpoint(tmp_path), new)
    assert sorted(os.listdir(tmp_path)) == [CONFIG, WEIGHTS, "notes.txt"]


class PowerCut(BaseException):
    """Nothing catches this by accident."""


CUTS = ["save_file", "flush", "os.replace", "os.rename"]


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("exists", [False, True], ids=["new", "over-an-old-one"])
def test_a_crash_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, exists: bool
) -> None:
    """Stopped before, within and after each step of a save: what is there loads, and is one whole checkpoint or none."""
    old, new, where = built(0), built(1, intermediate_size=32), tmp_path / "c"
    home, attribute = (os, name.split(".")[1]) if name.startswith("os.") else (checkpoint, name)
    real = getattr(home, attribute)
    for stop_at in range(1, 5):
        if exists:
            save_checkpoint(old, where)
        calls = 0

        def cut(*args: object, stop_at: int = stop_at, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise PowerCut
            return real(*args, **kwargs)

        monkeypatch.setattr(home, attribute, cut)
        try:
            save_checkpoint(new, where)
        except PowerCut:
            pass
        finally:
            monkeypatch.setattr(home, attribute, real)
        if where.exists():
            found = load_checkpoint(where)
            assert_equal(found, new if found.config == new.config else old)
            assert sorted(os.listdir(where)) == [CONFIG, WEIGHTS]
        else:
            assert not exists and calls
        assert [p.name for p in tmp_path.iterdir() if p != where] == []
        if not exists and where.exists():
            for file in where.iterdir():
                file.unlink()
            where.rmdir()


def test_cut_between_the_two_renames_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights carry their own config; the copy beside them may be the older one."""
    save_checkpoint(built(0), tmp_path)
    real, new = os.replace, built(1, gate_lower_bound=-4.0)

    def replace(a: Path, b: Path) -> None:
        if Path(b).name == CONFIG:
            raise PowerCut
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(PowerCut):
        save_checkpoint(new, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["gate_lower_bound"] == -5.0
    with caplog.at_level(logging.WARNING):
        assert_equal(load_checkpoint(tmp_path), new)
    assert "gate_lower_bound" in caplog.text


def test_leftovers_of_a_killed_process_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / ".c.partial").mkdir()
    (tmp_path / ".c.partial" / "junk").write_text("x")
    save_checkpoint(built(), tmp_path / "c")
    (tmp_path / "c" / f".{WEIGHTS}.partial").write_text("x")
    save_checkpoint(built(), tmp_path / "c")
    assert sorted(os.listdir(tmp_path / "c")) == [CONFIG, WEIGHTS] and os.listdir(tmp_path) == ["c"]


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("x")
    with pytest.raises(NotADirectoryError, match="found a file"):
        save_checkpoint(built(), tmp_path / "c")


def rewrite(directory: Path, change) -> None:
    path = directory / WEIGHTS
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(change(load_file(path)), path, metadata)


def without(tensors: dict, *names: str) -> dict:
    return {n: t for n, t in tensors.items() if n not in names}


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(bytes(data))


DAMAGE = {
    "no directory": (
        lambda d: [f.unlink() for f in d.iterdir()] + [d.rmdir()],
        FileNotFoundError,
        "no such checkpoint",
    ),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), FileNotFoundError, WEIGHTS),
    "no config": (lambda d: (d / CONFIG).unlink(), FileNotFoundError, CONFIG),
    "empty weights": (lambda d: truncate(d / WEIGHTS, 0), ValueError, WEIGHTS),
    "half a header": (lambda d: truncate(d / WEIGHTS, 100), ValueError, WEIGHTS),
    "truncated weights": (lambda d: truncate(d / WEIGHTS, 300_000), ValueError, WEIGHTS),
    "one byte short": (lambda d: truncate(d / WEIGHTS, (d / WEIGHTS).stat().st_size - 1), ValueError, WEIGHTS),
    "corrupt header": (lambda d: flip_header(d / WEIGHTS), ValueError, WEIGHTS),
    "config is no JSON": (lambda d: truncate(d / CONFIG, 40), ValueError, CONFIG),
    "config is a list": (lambda d: (d / CONFIG).write_text("[]"), ValueError, CONFIG),
    "config is binary": (lambda d: (d / CONFIG).write_bytes(b"\xff\xfe\x00"), ValueError, CONFIG),
    "missing tensors": (
        lambda d: rewrite(d, lambda t: without(t, "model.norm.weight", "model.layers.1.self_attn.A_log")),
        ValueError,
        r"missing: model.layers.1.self_attn.A_log, model.norm.weight",
    ),
    "unexpected tensor": (
        lambda d: rewrite(d, lambda t: {**t, "model.extra": torch.ones(1)}),
        ValueError,
        "unexpected: model.extra",
    ),
    "other shape": (
        lambda d: rewrite(d, lambda t: {**t, "model.layers.0.self_attn.A_log": torch.ones(3)}),
        ValueError,
        r"model.layers.0.self_attn.A_log: expected \[2\], found \[3\]",
    ),
    "integers": (
        lambda d: rewrite(d, lambda t: {**t, "model.norm.weight": torch.ones(64, dtype=torch.int32)}),
        ValueError,
        "model.norm.weight: expected a float dtype, found torch.int32",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    where = tmp_path / "c"
    save_checkpoint(built(), where)
    spoil, error, message = DAMAGE[damage]
    spoil(where)
    with pytest.raises(error, match=message) as caught:
        load_checkpoint(where)
    assert str(where) in str(caught.value)


def test_impossible_and_unknown_config_fields_are_named(tmp_path: Path) -> None:
    save_checkpoint(built(), tmp_path)
    save_file(load_file(tmp_path / WEIGHTS), tmp_path / WEIGHTS)  # without the config in its header
    assert load_config(tmp_path) == TINY
    fields = TINY.to_dict()
    for change, message in (({"kda_num_heads": 0}, "kda_num_heads"), ({"rope": 1}, r"unknown keys \['rope'\]")):
        (tmp_path / CONFIG).write_text(json.dumps({**fields, **change}))
        with pytest.raises(ValueError, match=f"{CONFIG}: .*{message}"):
            load_checkpoint(tmp_path)


def test_json_that_nests_without_end(tmp_path: Path) -> None:
    """A file of brackets exhausts the parser's stack: the same one-line answer as for any other damage."""
    deep = "[" * 200_000
    for name in (CONFIG, "model.safetensors.index.json", "openkda_tokenizer.json"):
        (tmp_path / name).write_text(deep)
    for load in (load_config, load_checkpoint, read_config, Shards, load_tokenizer):
        with pytest.raises(ValueError, match=r"\.json: "):
            load(tmp_path)
    assert not is_published(tmp_path)


def test_eight_bit_floats_are_not_weights(tmp_path: Path) -> None:
    save_checkpoint(built(), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"model\.norm.weight: expected a float dtype, found torch\.float8_e4m3fn"):
        load_checkpoint(tmp_path)
