"""Our models behind transformers' Auto classes: loading and saving both layouts, generation, training."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from openkda.compat import hf  # noqa: E402
from openkda.compat.hf import register  # noqa: E402
from openkda.compat.hf_register.versions import CACHE  # noqa: E402
from openkda.models.make_checkpoint import make_checkpoint  # noqa: E402
from openkda.models.official import load_official  # noqa: E402
from openkda.testing.compare import check_close  # noqa: E402

SIZES = {"layers": 4, "hidden": 64, "heads": 2, "head_dim": 16, "experts": 4, "vocab_size": 96}
LIKE = ("kimi-linear-48b", "kimi-k3")
PLACE = 95


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    register()
    register()  # again is harmless
    root = tmp_path_factory.mktemp("published")
    for like in LIKE:
        make_checkpoint(root / like, like=like, dtype=torch.float32, **SIZES)
    return {like: root / like for like in LIKE}


@pytest.fixture(params=LIKE)
def directory(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Path:
    return directories[request.param]


@pytest.fixture
def model(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


def ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if "generation" not in p.name}


def test_config(directory: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(directory)
    assert type(config).__module__.startswith("openkda")
    published = json.loads((directory / "config.json").read_text())
    assert config.to_dict() == published
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == published
    text = config.get_text_config()
    assert (text.vocab_size, text.hidden_size, text.num_hidden_layers) == (96, 64, 4)
    text.num_hidden_layers = 7
    with pytest.raises(ValueError, match="layer"):
        config.official()
    copy.deepcopy(config)


def test_loading_and_saving_give_the_same_bytes(directory: Path, tmp_path: Path) -> None:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()) and not model.training
    model.save_pretrained(tmp_path / "out")
    assert files(tmp_path / "out") == files(directory)
    want = load_official(directory).state_dict()
    got = model.model.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForImageTextToText"])
def test_other_auto_classes_of_a_model_with_pictures(directories: dict[str, Path], auto: str) -> None:
    model = getattr(transformers, auto).from_pretrained(directories["kimi-k3"])
    assert type(model).__name__ == "KimiK3ForConditionalGeneration"


def test_dtypes(directory: Path) -> None:
    for dtype in (torch.bfloat16, "bfloat16"):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        kinds = {n.rsplit(".", 1)[-1]: p.dtype for n, p in model.named_parameters()}
        assert kinds["A_log"] == kinds["dt_bias"] == torch.float32 and model.dtype == torch.bfloat16
    assert transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").dtype == torch.float32


def test_logits_and_loss(model: Any, directory: Path) -> None:
    x = ids(2, 12)
    out = model(input_ids=x, labels=x)
    want = load_official(directory, vision=False)(x).logits
    assert torch.equal(out.logits, want)
    loss = torch.nn.functional.cross_entropy(want[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    check_close("loss", out.loss, loss, 1e-6)
    check_close("last", model(input_ids=x, logits_to_keep=1).logits, want[:, -1:], 1e-5)
    embeds = model.get_input_embeddings()(x)
    assert torch.equal(model(inputs_embeds=embeds).logits, want)
    assert len(model(input_ids=x, use_cache=False, return_dict=False)) == 1


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_on_any_side(model: Any, side: str) -> None:
    x = ids(3, 10)
    mask = torch.ones(3, 10, dtype=torch.long)
    for row, n in enumerate((0, 3, 6)):
        if side in ("left", "both"):
            mask[row, : n // (2 if side == "both" else 1)] = 0
        if side in ("right", "both"):
            mask[row, 10 - n // (2 if side == "both" else 1) :] = 0
    with torch.no_grad():
        logits = model(input_ids=x, attention_mask=mask).logits
        for row in range(3):
            real = mask[row].bool()
            check_close(f"row {row}", logits[row][real], model(input_ids=x[row : row + 1, real]).logits[0], 2e-5)
            assert not logits[row][~real].any()


def test_flattened_documents(model: Any) -> None:
    x, lengths = ids(1, 15), (4, 1, 10)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    with torch.no_grad():
        a = model(input_ids=x, position_ids=positions).logits
        for name in ("cu_seq_lens_q", "cu_seqlens"):
            assert torch.equal(a, model(input_ids=x, **{name: bounds}).logits)
        collated = transformers.DataCollatorWithFlattening(
            return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True, return_position_ids=True
        )([{"input_ids": row.tolist()} for row in x[0].split(lengths)])
        assert torch.equal(a, model(**collated).logits)
        with pytest.raises(ValueError, match="seq_idx: expected position_ids or cu_seqlens"):
            model(input_ids=x, seq_idx=torch.zeros(1, 15, dtype=torch.int32))
        with pytest.raises(TypeError, match=r"no meaning for \['attention_masks', 'cu_seq_lens'\]"):
            model(input_ids=x, cu_seq_lens=bounds, attention_masks=x)
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            check_close("document", a[:, start:end], model(input_ids=x[:, start:end]).logits, 2e-5)
        assert torch.equal(model(input_ids=x, position_ids=torch.arange(15)[None]).logits, model(input_ids=x).logits)


def test_documents_in_the_rows_of_a_batch(model: Any) -> None:
    """Positions that begin anew in a row of several used to be passed over, and the state ran on across the documents."""
    x, rows = ids(2, 9), ((4, 5), (2, 1, 6))
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    labels = x.clone()
    with torch.no_grad():
        got = model(input_ids=x, position_ids=positions).logits
        mask = torch.tensor([[1] * 9, [0] * 2 + [1] * 7])
        padded = model(input_ids=x, position_ids=positions, attention_mask=mask, labels=labels).logits
        for b, lengths in enumerate(rows):
            for end, n in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths, strict=True):
                want = model(input_ids=x[b : b + 1, end - n : end]).logits[0]
                check_close("document", got[b, end - n : end], want, 2e-5)
                if b == 0 or end > 2:
                    check_close("document beside padding", padded[b, end - n : end], want, 2e-5)
        assert not padded[1, :2].any()
        usual = mask.cumsum(1).sub(1).clamp(min=0)  # of a padded batch: zeros in the padding start nothing
        alone = model(input_ids=x, attention_mask=mask).logits
        assert torch.equal(model(input_ids=x, attention_mask=mask, position_ids=usual).logits, alone)
    for wrong in (positions[:, :-1], torch.zeros(3, 2, 9)):
        with pytest.raises(ValueError, match=r"position_ids.shape: expected \[B, T\] = \[2, 9\] or \[1, T\]"):
            model(input_ids=x, position_ids=wrong)


OPTIONS = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


def by_hand(directory: Path, prompt: Tensor, steps: int) -> Tensor:
    model, rows = load_official(directory, vision=False), prompt
    with torch.no_grad():
        for _ in range(steps):
            rows = torch.cat([rows, model(rows).logits[:, -1:].argmax(-1)], 1)
    return rows


def test_greedy(model: Any, directory: Path) -> None:
    prompt = ids(2, 5)
    want = by_hand(directory, prompt, 12)
    for options in ({}, {"use_cache": False}):
        assert torch.equal(model.generate(prompt, do_sample=False, **OPTIONS, **options), want)


def test_left_padded_batch(model: Any, directory: Path) -> None:
    prompts = [ids(1, 3, 1), ids(1, 7, 2)]
    batch = torch.cat([torch.nn.functional.pad(p, (7 - p.shape[1], 0)) for p in prompts])
    mask = torch.tensor([[0] * 4 + [1] * 3, [1] * 7])
    got = model.generate(batch, attention_mask=mask, do_sample=False, **OPTIONS)
    for row, prompt in enumerate(prompts):
        assert got[row, 7:].tolist() == by_hand(directory, prompt, 12)[0, prompt.shape[1] :].tolist()


def test_beams_equal_beams_without_a_cache(model: Any) -> None:
    prompt = ids(2, 5)
    options = {**OPTIONS, "num_beams": 3, "do_sample": False, "num_return_sequences": 2}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options))


def test_sampling_follows_the_seed(model: Any) -> None:
    prompt = ids(2, 5)
    options = {**OPTIONS, "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}
    rows = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        rows.append(model.generate(prompt, **options))
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])


def test_a_returned_cache_continues(model: Any, directory: Path) -> None:
    prompt = ids(1, 5)
    first = model.generate(prompt, do_sample=False, return_dict_in_generate=True, **OPTIONS)
    cache = getattr(first, CACHE)
    longer = torch.cat([first.sequences, ids(1, 3, seed=9)], 1)
    again = model.generate(longer, do_sample=False, **{CACHE: cache}, **OPTIONS)
    assert torch.equal(again, by_hand(directory, longer, 12))


def test_assisted_generation_is_refused(model: Any) -> None:
    for options in ({"assistant_model": copy.deepcopy(model)}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            model.generate(ids(1, 5), **OPTIONS, **options)


def test_images(directories: dict[str, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directories["kimi-k3"])
    grids = torch.tensor([[1, 2, 4], [1, 4, 4]])
    pixels = torch.randn(24, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    prompt = torch.tensor([[1, PLACE, 2, 3], [4, 5, PLACE, 6]])
    options = {**OPTIONS, "do_sample": False}
    both = model.generate(prompt, pixel_values=pixels, grid_thws=grids, **options)
    for row, part in ((0, slice(0, 8)), (1, slice(8, 24))):
        one = {"pixel_values": pixels[part], "grid_thws": grids[row : row + 1]}
        assert torch.equal(model.generate(prompt[row : row + 1], **one, **options), both[row : row + 1])
        no_cache = model.generate(prompt[row : row + 1], use_cache=False, **one, **options)
        assert torch.equal(no_cache, both[row : row + 1])
    beams = model.generate(prompt, pixel_values=pixels, grid_thws=grids, num_beams=2, **options)
    assert beams.shape == both.shape
    out = model(input_ids=prompt, pixel_values=pixels, grid_thws=grids, labels=prompt)
    assert out.logits.shape == (2, 7, 96) and bool(torch.isfinite(out.loss))
    other = model(input_ids=prompt, pixel_values=-pixels, grid_thws=grids).logits
    assert not torch.allclose(other[:, -1], out.logits[:, -1])


def test_gradient_checkpointing(directory: Path) -> None:
    grads = []
    for on in (False, True):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory).train()
        if on:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        calls: list[int] = []
        model.text_model.model.layers[1].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        x = ids(2, 12)
        model(input_ids=x, labels=x).loss.backward()
        assert len(calls) == 1 + on
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        idle = [
            n for n, p in model.named_parameters() if p.grad is None
        ]  # no picture; layer 0 reads the embedding alone
        assert all("vision" in n or "mm_projector" in n or "layers.0.self_attention_res" in n for n in idle)
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


def test_from_config_and_published_state_dicts(directories: dict[str, Path]) -> None:
    directory = directories["kimi-linear-48b"]
    config = transformers.AutoConfig.from_pretrained(directory)
    torch.manual_seed(1)
    fresh = transformers.AutoModelForCausalLM.from_config(config)
    std = fresh.get_input_embeddings().weight.std().item()
    assert abs(std - 0.02) < 2e-3
    from safetensors.torch import load_file

    for file in directory.glob("*.safetensors"):
        fresh.load_state_dict(load_file(str(file)), strict=False)
    x = ids(1, 9)
    assert torch.equal(fresh.eval()(input_ids=x).logits, load_official(directory)(x).logits)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fresh.load_state_dict({**fresh.state_dict(), "model.layers.9.nothing": torch.ones(1)})


def test_trainer(directory: Path, tmp_path: Path) -> None:
    """Of the K3 layout everything but the packed experts learns; they are written back as they came."""
    rows = [{"input_ids": r, "labels": r} for r in ids(8, 16)]

    def trained(steps: int, resume: bool = False) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2,
            save_steps=4, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, lr_scheduler_type="constant",
        )  # fmt: skip
        transformers.set_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    first = trained(8)
    losses = [e["loss"] for e in first.state.log_history if "loss" in e]
    assert losses[-1] < 0.8 * losses[0]
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-8")
    x = ids(1, 9)
    assert torch.equal(saved(input_ids=x).logits, first.model.eval()(input_ids=x).logits)
    import shutil

    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    again = trained(8, resume=True)
    check_close("resumed", again.model.eval()(input_ids=x).logits, saved(input_ids=x).logits, 1e-4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"load_in_8bit": True}, "no meaning for .*load_in_8bit"),
        ({"device_map": {"model": 0, "lm_head": 1}}, "one device for the whole model"),
        ({"dtype": "int8"}, "expected a float torch.dtype"),
        ({"ignore_mismatched_sizes": True}, "ignore_mismatched_sizes"),
        ({"attn_implementation": "flash_attention_2"}, "does not support Flash Attention 2"),
    ],
)
def test_options_without_a_meaning(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(directory, **options)


def test_other_refusals(model: Any, directory: Path, tmp_path: Path) -> None:
    x = ids(1, 4)
    with pytest.raises(ValueError, match="this model keeps neither"):
        model(input_ids=x, output_hidden_states=True)
    with pytest.raises(ValueError, match="exactly one of the two"):
        model()
    with pytest.raises(NotImplementedError, match="resizing the vocabulary: expected 96 tokens, received 100"):
        model.resize_token_embeddings(100)
    with pytest.raises(ValueError, match=r"no meaning for .*push_to_hub"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    config = transformers.AutoConfig.from_pretrained(directory)
    config.get_text_config().intermediate_size = 128
    with pytest.raises(ValueError, match="differs from the checkpoint's own"):
        type(model).from_pretrained(directory, config=config)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        type(model).from_pretrained(tmp_path / "nowhere", config=config, local_files_only=True)


def test_masks_caches_and_positions_that_would_be_misread(model: Any) -> None:
    """A mask of another shape used to be cut to fit, a cache of transformers' own to fail inside."""
    x = ids(2, 6)
    for mask, message in (
        (torch.ones(2, 1, 6, 6), r"expected \[B, T\] = \[2, 6\] \(or wider\), received \[2, 1, 6, 6\]"),
        (torch.ones(2, 4), r"expected \[B, T\] = \[2, 6\] \(or wider\), received \[2, 4\]"),
        (torch.ones(1, 6), r"expected \[B, T\] = \[2, 6\] \(or wider\), received \[1, 6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(input_ids=x, attention_mask=mask)
    with pytest.raises(TypeError, match="attention_mask: expected a tensor"):
        model(input_ids=x, attention_mask={"full_attention": None})
    with pytest.raises(TypeError, match=r"expected none, or what an earlier call .* received DynamicCache"):
        model.generate(x, **{CACHE: transformers.DynamicCache()}, **OPTIONS)
    with pytest.raises(ValueError, match="logits_to_keep: expected 0 or more"):
        model(input_ids=x, logits_to_keep=-1)
    chosen = torch.tensor([0, 3])
    assert torch.equal(model(input_ids=x, logits_to_keep=chosen).logits, model(input_ids=x).logits[:, chosen])
    for name in ("output_attentions", "output_hidden_states"):
        with pytest.raises(ValueError, match=f"{name}: expected False"):
            model.generate(x, return_dict_in_generate=True, **{name: True}, **OPTIONS)


def test_placeholders_without_their_images(directories: dict[str, Path]) -> None:
    """The placeholder used to be read as a word where no picture came with it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directories["kimi-k3"])
    prompt, grids = torch.tensor([[1, PLACE, 2]]), torch.tensor([[1, 2, 4]])
    pixels = torch.randn(8, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    for call in (lambda **o: model(input_ids=prompt, **o), lambda **o: model.generate(prompt, **OPTIONS, **o)):
        with pytest.raises(
            ValueError, match=rf"placeholder tokens \(id {PLACE}\): expected 0, one an image, received 1"
        ):
            call()
        with pytest.raises(ValueError, match="pixel_values: expected the patches beside grid_thws"):
            call(grid_thws=grids)
    want = model(input_ids=prompt, pixel_values=pixels, grid_thws=grids, labels=prompt)
    got = model(input_ids=prompt, pixel_values=pixels, grid_thws=grids.tolist())
    assert torch.equal(got.logits, want.logits)
    padded = torch.cat([prompt, torch.zeros(1, 2, dtype=torch.long)], 1)  # as collators for training pad
    labels = torch.tensor([[1, PLACE, 2, -100, -100]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    right = model(input_ids=padded, attention_mask=mask, pixel_values=pixels, grid_thws=grids, labels=labels)
    check_close("loss of a batch padded on the right", right.loss, want.loss, 1e-6)
    with pytest.raises(ValueError, match="expected one document a row beside images"):
        model(input_ids=prompt, pixel_values=pixels, grid_thws=grids, position_ids=torch.tensor([[0, 1, 0]]))


def test_every_published_key_is_an_attribute(directory: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(directory)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        assert all(hasattr(part, key) for key in part.published)
    config.get_text_config().use_cache = False
    assert json.loads(config.get_text_config().to_json_string())["use_cache"] is False


def test_importing_the_package_imports_no_transformers() -> None:
    import subprocess

    code = "import sys, openkda, openkda.compat.hf_register; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_without_transformers_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (hf.patch, hf.register):
        with pytest.raises(ImportError, match=r"needs transformers.*pip install 'openkda\[hf\]'"):
            call()
