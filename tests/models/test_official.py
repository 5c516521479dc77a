"""Loading and saving published checkpoints: bit-equal, any layers, one file at a time, and every fault named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openkda.models import official, official_shards
from openkda.models.hybrid import HybridLM
from openkda.models.make_checkpoint import make_checkpoint, random_model
from openkda.models.multimodal import MultimodalLM
from openkda.models.official import load_official, read_config, save_official

K3 = {"layers": 5, "hidden": 64, "heads": 2, "head_dim": 16, "experts": 4, "vocab_size": 96}
LINEAR = {**K3, "layers": 4}
ROOT = "language_model.model."


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published") / "k3"
    make_checkpoint(directory, **K3)
    return directory


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published") / "linear"
    make_checkpoint(directory, like="kimi-linear-48b", **LINEAR)
    return directory


@pytest.fixture
def copy_of_k3(k3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(k3, tmp_path / "k3"))


def tensors_of(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(str(file))
    return found


def edit(directory: Path, name: str, change: Callable[[Tensor], Tensor | None], index: bool = True) -> None:
    """Replace one tensor in its shard (None: remove it, from the index too if asked)."""
    path = directory / official_shards.INDEX
    listed = json.loads(path.read_text())
    file = directory / listed["weight_map"][name]
    values = load_file(str(file))
    new = change(values.pop(name))
    if new is not None:
        values[name] = new
    elif index:
        del listed["weight_map"][name]
        path.write_text(json.dumps(listed))
    save_file(values, str(file))


@pytest.mark.parametrize("which", ["k3", "linear"])
def test_saving_again_gives_the_same_bytes(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    directory: Path = request.getfixturevalue(which)
    model = load_official(directory)
    save_official(model, tmp_path / "again", config=read_config(directory))
    names = sorted(p.name for p in directory.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "again").iterdir())
    for name in names:
        assert (directory / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_layout_of_a_miniature_k3(k3: Path) -> None:
    assert (k3 / "model-00001-of-000008.safetensors").is_file()  # five layers, then head, projector, tower
    found = tensors_of(k3)
    assert found[f"{ROOT}layers.0.self_attn.A_log"].shape == (128,)
    assert not found[f"{ROOT}layers.0.self_attn.A_log"][2:].any()
    assert found[f"{ROOT}layers.1.block_sparse_moe.experts.3.w1.weight_packed"].dtype == torch.uint8
    dtypes = {n.split("layers.0.")[1]: t.dtype for n, t in found.items() if ".layers.0." in n}
    assert {n for n, d in dtypes.items() if d == torch.float32} == {
        f"self_attn.{n}"
        for n in ("A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight")
    }
    assert "vision_tower.encoder.blocks.1.wqkv.weight" in found and "mm_projector.proj.2.weight" in found
    total = json.loads((k3 / official_shards.INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(t.nbytes for t in found.values())


def test_stored_values_arrive_in_the_model(linear: Path) -> None:
    model, found = load_official(linear), tensors_of(linear)
    assert isinstance(model, HybridLM) and not model.training
    state = model.state_dict()
    assert torch.equal(state["model.layers.0.self_attn.A_log"], found["model.layers.0.self_attn.A_log"].flatten())
    for e in range(4):
        for w in ("w1", "w2", "w3"):
            stored = found[f"model.layers.1.block_sparse_moe.experts.{e}.{w}.weight"]
            assert torch.equal(state[f"model.layers.1.block_sparse_moe.experts.{w}"][e], stored)
    plain = {n: t for n, t in state.items() if "experts.w" not in n and "A_log" not in n}
    assert all(torch.equal(t, found[n]) and t.dtype == found[n].dtype for n, t in plain.items())


def test_any_layers(k3: Path) -> None:
    whole, some = load_official(k3, vision=False), load_official(k3, layers=[1, 3], vision=False)
    assert isinstance(some, HybridLM) and some.config.num_hidden_layers == 2
    assert some.config.kda_layers == (1,) and some.config.full_attn_layers == (2,)
    assert not hasattr(some.model.layers[0], "mlp"), "layer 1 has experts, so layer 0 of the smaller model has them too"
    for ours, theirs in ((0, 1), (1, 3)):
        a, b = (m.model.layers[i].state_dict() for m, i in ((some, ours), (whole, theirs)))
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    assert torch.equal(some.model.embed_tokens.weight, whole.model.embed_tokens.weight)
    first = load_official(k3, layers=range(1))
    assert isinstance(first, MultimodalLM) and first.language_model.config.first_k_dense_replace == 1
    for bad in ([], [3, 1], [1, 1], [5], [-1]):
        with pytest.raises(ValueError, match=r"ascending indices in 0\.\.4"):
            load_official(k3, layers=bad)


def test_layers_left_out_need_no_files(copy_of_k3: Path) -> None:
    """Their shards are not opened: they may hold anything, and need not be there."""
    shard = copy_of_k3 / "model-00005-of-000008.safetensors"
    shard.write_bytes(b"nothing")
    load_official(copy_of_k3, layers=range(4))
    with pytest.raises(ValueError, match=r"model-00005-of-000008\.safetensors: not a whole safetensors file"):
        load_official(copy_of_k3)
    shard.unlink()
    load_official(copy_of_k3, layers=range(4))
    for number in (1, 2, 7, 8):  # the first layers; projector and tower
        (copy_of_k3 / f"model-0000{number}-of-000008.safetensors").unlink()
    load_official(copy_of_k3, layers=[2, 3], vision=False)
    with pytest.raises(FileNotFoundError, match=r"names files that do not exist: model-00007-.*model-00008-"):
        load_official(copy_of_k3, layers=[2, 3])


def test_one_file_is_open_at_a_time_and_each_once(k3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real = official.opened

    class Watched:
        def __init__(self, path: Path) -> None:
            self.path, self.inner = path, real(path)

        def __enter__(self):
            events.append(f"+{self.path.name}")
            return self.inner.__enter__()

        def __exit__(self, *error: object) -> None:
            events.append(f"-{self.path.name}")
            self.inner.__exit__(*error)

    monkeypatch.setattr(official, "opened", Watched)
    load_official(k3)
    assert [e[0] for e in events] == ["+", "-"] * 8 and len({e[1:] for e in events}) == 8


def test_dtype_and_the_float32_list(k3: Path) -> None:
    kept = {n for n, t in load_official(k3, dtype=torch.float16).state_dict().items() if t.dtype == torch.float32}
    assert {n.rsplit(".", 2)[-1] if "gate" in n else n.split("self_attn.")[-1] for n in kept} == {
        "A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight", "e_score_correction_bias",
    }  # fmt: skip
    wide = load_official(k3, dtype=torch.float32).state_dict()
    assert {t.dtype for t in wide.values()} == {torch.float32, torch.uint8}


def test_plain_experts_and_all_forms_of_a_log_in_the_k3_layout(k3: Path, tmp_path: Path) -> None:
    model = load_official(k3)
    want = model.state_dict()["language_model.model.layers.0.self_attn.A_log"]
    for form, shape in (("heads", (2,)), ("broadcast", (1, 1, 2, 1)), ("padded", (128,))):
        save_official(model, tmp_path / form, a_log=form)
        assert tensors_of(tmp_path / form)[f"{ROOT}layers.0.self_attn.A_log"].shape == shape
        got = load_official(tmp_path / form).state_dict()["language_model.model.layers.0.self_attn.A_log"]
        assert torch.equal(got, want)
    make_checkpoint(tmp_path / "plain", like="kimi-linear-48b", **LINEAR)
    assert not load_official(tmp_path / "plain").config.packed_experts


def test_single_file_without_index(linear: Path, tmp_path: Path) -> None:
    save_file(tensors_of(linear), str(tmp_path / "model.safetensors"))
    shutil.copy(linear / "config.json", tmp_path)
    a, b = load_official(linear).state_dict(), load_official(tmp_path).state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("junk", [b"", b"\x00" * 100, None])
def test_corrupt_and_truncated_shards(copy_of_k3: Path, junk: bytes | None) -> None:
    path = copy_of_k3 / "model-00003-of-000008.safetensors"
    path.write_bytes(path.read_bytes()[:-10] if junk is None else junk)
    with pytest.raises(ValueError, match=r"model-00003-of-000008\.safetensors: not a whole safetensors file"):
        load_official(copy_of_k3)


def test_every_fault_of_the_tensors_is_named_at_once(copy_of_k3: Path) -> None:
    edit(copy_of_k3, f"{ROOT}layers.0.self_attn.q_proj.weight", lambda t: None)
    edit(copy_of_k3, f"{ROOT}layers.1.self_attn.k_proj.weight", lambda t: t[:5].clone())
    edit(copy_of_k3, f"{ROOT}layers.2.self_attn.v_proj.weight", lambda t: t.to(torch.int32))
    edit(copy_of_k3, f"{ROOT}layers.3.block_sparse_moe.experts.1.w2.weight_packed", lambda t: t.float())
    edit(copy_of_k3, f"{ROOT}norm.weight", lambda t: None, index=False)
    path = copy_of_k3 / official_shards.INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["model.mtp.weight"] = "model-00006-of-000008.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError) as error:
        load_official(copy_of_k3)
    for part in (
        f"missing: {ROOT}layers.0.self_attn.q_proj.weight",
        "unexpected: model.mtp.weight",
        f"{ROOT}layers.1.self_attn.k_proj.weight: expected [32, 64], found [5, 64]",
        f"{ROOT}layers.2.self_attn.v_proj.weight: expected F64 or F32 or F16 or BF16, found I32",
        "experts.1.w2.weight_packed: expected U8, found F32",
        f"in the index, not in the file: {ROOT}norm.weight, model.mtp.weight",
    ):
        assert part in str(error.value)


def test_extra_tensors_in_a_file(copy_of_k3: Path) -> None:
    file = copy_of_k3 / "model-00001-of-000008.safetensors"
    save_file({**load_file(str(file)), "stowaway": torch.ones(1)}, str(file))
    with pytest.raises(ValueError, match="in the file, not in the index: stowaway"):
        load_official(copy_of_k3)


def test_index_that_names_missing_files(copy_of_k3: Path) -> None:
    (copy_of_k3 / "model-00002-of-000008.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names files that do not exist: model-00002-of-000008\.safetensors"):
        load_official(copy_of_k3)
    (copy_of_k3 / official_shards.INDEX).write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    with pytest.raises(ValueError, match="plain file names"):
        load_official(copy_of_k3)
    (copy_of_k3 / official_shards.INDEX).write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object with weight_map"):
        load_official(copy_of_k3)
    (copy_of_k3 / official_shards.INDEX).unlink()
    with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors\.index\.json or model\.safetensors"):
        load_official(copy_of_k3)


def test_padding_of_a_log_must_be_zero(copy_of_k3: Path) -> None:
    def spoil(t: Tensor) -> Tensor:
        t[3] = 0.5
        return t

    edit(copy_of_k3, f"{ROOT}layers.1.self_attn.A_log", spoil)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.A_log: expected zeros behind its 2 heads"):
        load_official(copy_of_k3)
    edit(copy_of_k3, f"{ROOT}layers.1.self_attn.A_log", lambda t: t[:3].clone())
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.A_log: expected \[128\], found \[3\]"):
        load_official(copy_of_k3)


def test_nan_scales(copy_of_k3: Path) -> None:
    def spoil(t: Tensor) -> Tensor:
        t[2, 0] = 255
        return t

    edit(copy_of_k3, f"{ROOT}layers.2.block_sparse_moe.experts.3.w1.weight_scale", spoil)
    with pytest.raises(
        ValueError, match=r"experts\.3\.w1\.weight_scale: expected scale bytes 0\.\.254, received 255 \(NaN\)"
    ):
        load_official(copy_of_k3)


def test_experts_both_plain_and_packed(copy_of_k3: Path) -> None:
    file = copy_of_k3 / "model-00002-of-000008.safetensors"
    name = f"{ROOT}layers.1.block_sparse_moe.experts.0.w1.weight"
    save_file({**load_file(str(file)), name: torch.ones(32, 32)}, str(file))
    path = copy_of_k3 / official_shards.INDEX
    index = json.loads(path.read_text())
    index["weight_map"][name] = file.name
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="both plain"):
        load_official(copy_of_k3)


def test_experts_of_several_dtypes(linear: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(linear, tmp_path / "linear"))
    edit(directory, "model.layers.1.block_sparse_moe.experts.2.w1.weight", lambda t: t.float())
    with pytest.raises(ValueError, match=r"experts\.2\.w1\.weight: expected torch\.bfloat16 as its first expert's"):
        load_official(directory, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"matrices of one dtype .*found BF16: .* more; F32: .*experts\.2\.w1\.weight$"
    ):
        load_official(directory)


def test_matrices_of_several_dtypes(linear: Path, tmp_path: Path) -> None:
    """Such a model used to load, and to fail in its first product; what is widened anyway may have any dtype."""
    directory = Path(shutil.copytree(linear, tmp_path / "linear"))
    names = (
        "model.norm.weight",
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.layers.0.self_attn.q_conv1d.weight",
    )
    for name in names:
        edit(directory, name, lambda t: t.to(torch.float64))
    assert load_official(directory)(torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16
    edit(directory, "model.layers.2.self_attn.o_proj.weight", lambda t: t.half())
    with pytest.raises(ValueError, match=r"matrices of one dtype .*; F16: model\.layers\.2\.self_attn\.o_proj\.weight"):
        load_official(directory)
    assert load_official(directory, dtype=torch.float32)(torch.tensor([[1, 2]])).logits.dtype == torch.float32


def test_a_checkpoint_replaced_while_it_is_loaded(copy_of_k3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it would come from one checkpoint and half from the other."""
    other = random_model(read_config(copy_of_k3).model, seed=7)
    real, opened = official.opened, []

    def replaced(path: Path) -> Any:
        opened.append(path)
        if len(opened) == 3:
            save_official(other, copy_of_k3, overwrite=True)
        return real(path)

    monkeypatch.setattr(official, "opened", replaced)
    with pytest.raises(ValueError, match=r"changed while it was loaded: config\.json, model-00001.*; load it again"):
        load_official(copy_of_k3)
    assert torch.equal(
        load_official(copy_of_k3).state_dict()["language_model.lm_head.weight"], other.language_model.lm_head.weight
    )


def test_keys_that_stand_twice(copy_of_k3: Path) -> None:
    """The second one used to win in silence."""
    for file, key in ((official_shards.INDEX, f"{ROOT}norm.weight"), ("config.json", "hidden_size")):
        path = copy_of_k3 / file
        text = path.read_text()
        path.write_text(text.replace(f'"{key}":', f'"{key}": "model-00001-of-000008.safetensors", "{key}":', 1))
        with pytest.raises(ValueError, match=rf"{re.escape(file)}.*twice: {re.escape(key)}"):
            load_official(copy_of_k3)
        path.write_text(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, "dtype: expected a float torch.dtype or None, received torch.int8"),
        ({"dtype": "float16"}, "dtype: expected a float torch.dtype or None, received 'float16'"),
        ({"device": "gpu"}, "device: expected a device of this machine, received 'gpu'"),
        ({"device": "cuda:99"}, "device: expected a device of this machine, received 'cuda:99'"),
        ({"device": 1.5}, "device: expected a device of this machine, received 1.5"),
        ({"layers": 3}, r"layers: expected indices in 0\.\.4, received 3"),
        ({"layers": "01"}, r"layers: expected indices in 0\.\.4, received '01'"),
        ({"layers": [0.0, 1.0]}, r"layers: expected indices in 0\.\.4, received \[0.0, 1.0\]"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_read(k3: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_official(k3, **options)
    assert load_official(k3, layers=torch.arange(2)).config.num_hidden_layers == 2  # type: ignore[arg-type]


def test_config_faults_name_the_file(copy_of_k3: Path) -> None:
    path = copy_of_k3 / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["hidden_sise"] = 3
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: .*unknown: hidden_sise"):
        load_official(copy_of_k3)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        load_official(copy_of_k3)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json: not found"):
        load_official(copy_of_k3)
