"""Whole runs: exact resume, Ctrl-C, NaN, budgets, checkpoints, metrics."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openkda.models.checkpoint import load_checkpoint
from openkda.models.presets import PRESETS
from openkda.training import trainer as trainer_module
from openkda.training.metrics import read_metrics
from openkda.training.options import TrainOptions
from openkda.training.progress import Progress, StepReport
from openkda.training.run_directory import steps_of
from openkda.training.train import resume, train
from openkda.training.trainer import TrainingDiverged

Make = Callable[..., TrainOptions]


class At(Progress):
    """Does something when a step is done."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.at, self.action = step, action
        self.reports: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        self.reports.append(report)
        if report.step == self.at:
            self.action()


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dicts and lists by path."""
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, value in pairs for k, v in flat(value, f"{prefix}/{key}").items()}
    return {prefix: tree}


def assert_same_checkpoint(a: Path, b: Path) -> None:
    """Model, optimizer and random state, bit by bit."""
    one, two = (
        flat(torch.load(p / "trainer.pt", weights_only=True)) | flat(load_file(p / "model.safetensors")) for p in (a, b)
    )
    assert one.keys() == two.keys() and any("momentum_buffer" in k for k in one) and "/rng/cpu" in one
    for key, value in one.items():
        assert torch.equal(value, two[key]) if isinstance(value, torch.Tensor) else value == two[key], key


def numbers(out: Path) -> list[dict[str, Any]]:
    """Metrics without what the clock decides."""
    clock = ("seconds", "seconds_left", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in clock} for line in read_metrics(out / "metrics.jsonl")]


@pytest.mark.parametrize("stop_at", [1, 3, 4])
def test_resume_is_exact(options: Make, stop_at: int) -> None:
    """Ctrl-C after any step (the 4th has a checkpoint of its own), then on: every bit and every metric is the same."""
    straight = train(options("straight"))
    assert straight.step == 6 and straight.interrupted is None
    broken = train(options("broken"), progress=At(stop_at, ctrl_c))
    assert (broken.step, broken.interrupted, broken.checkpoint.name) == (stop_at, signal.SIGINT, f"step-{stop_at}")
    torch.manual_seed(12345)  # whatever the process did before must not matter
    resumed = resume(broken.out)
    assert resumed.step == 6 and resumed.val_loss == straight.val_loss and resumed.tokens == straight.tokens
    assert_same_checkpoint(straight.checkpoint, resumed.checkpoint)
    assert numbers(straight.out) == numbers(resumed.out)
    again = resume(broken.out)  # a finished run: nothing is trained, nothing is scored twice
    assert again.step == 6 and again.val_loss == straight.val_loss and numbers(again.out) == numbers(straight.out)


def test_stopped_before_the_first_line_of_metrics(options: Make) -> None:
    """There is nothing to draw, and that is no reason to lose the run."""
    broken = train(options("broken", log_every=10, val_every=10), progress=At(1, ctrl_c))
    assert broken.interrupted is signal.SIGINT and not (broken.out / "metrics.jsonl").exists()
    straight, resumed = train(options("straight")), resume(broken.out)
    assert resumed.step == 6 and resumed.val_loss == straight.val_loss


def test_resume_from_an_older_checkpoint_of_a_moved_run(options: Make, tmp_path: Path) -> None:
    """After a crash metrics.jsonl may be ahead of the checkpoint, and its last line cut off."""
    straight = train(options("straight"))
    first = train(options("first"))
    with open(first.out / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')
    moved = tmp_path / "moved"
    shutil.move(first.out, moved)
    resumed = resume(moved / "step-2")
    assert resumed.out == moved and (moved / "last").resolve().name == "step-6"
    assert_same_checkpoint(straight.checkpoint, resumed.checkpoint)
    assert numbers(straight.out) == numbers(moved)


def test_accumulation_gives_the_same_gradient(options: Make) -> None:
    """One part or four: the losses agree to float32 rounding; parts that were not averaged would differ at once."""
    losses = []
    for parts in (1, 4):
        seen = At(0, ctrl_c)
        train(options(f"parts{parts}", accumulate=parts), progress=seen)
        losses.append([r.loss for r in seen.reports])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.3


def test_recomputation_changes_no_bit(options: Make) -> None:
    """And a run may be continued with it."""
    straight, again = train(options("straight")), train(options("again", recompute=True))
    assert numbers(straight.out) == numbers(again.out)
    train(options("half"), progress=At(4, ctrl_c))
    resumed = resume(Path(options("half").out), settings=["recompute=true"])
    assert_same_checkpoint(straight.checkpoint, resumed.checkpoint)


def test_a_second_ctrl_c_interrupts_at_once(options: Make) -> None:
    def twice() -> None:
        ctrl_c()
        ctrl_c()

    before = signal.getsignal(signal.SIGINT)  # a background job of a shell starts with SIGINT ignored
    with pytest.raises(KeyboardInterrupt):
        train(options(), progress=At(3, twice))
    assert signal.getsignal(signal.SIGINT) is before
    assert steps_of(Path(options().out)) == [2]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_the_run(options: Make, monkeypatch: pytest.MonkeyPatch, poison: float) -> None:
    calls, good = 0, trainer_module.token_loss

    def token_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return good(*args, **kwargs) * (poison if calls == 8 else 1.0)  # the second part of step 4

    monkeypatch.setattr(trainer_module, "token_loss", token_loss)
    with pytest.raises(TrainingDiverged, match=r"step 4: loss is (nan|inf); last good checkpoint: .*step-2$"):
        train(options())
    out = Path(options().out)
    assert steps_of(out) == [2] and max(line["step"] for line in read_metrics(out / "metrics.jsonl")) == 3
    monkeypatch.undo()
    assert resume(out).step == 6


def test_a_gradient_that_is_no_number_stops_before_the_parameters_change(
    options: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = trainer_module.token_loss
    seen: list[dict[str, torch.Tensor]] = []

    def token_loss(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = good(model, *args, **kwargs)
        seen.append({k: v.clone() for k, v in model.state_dict().items()})
        loss.register_hook(lambda grad: grad * float("nan"))
        seen.append(model.state_dict())
        return loss

    monkeypatch.setattr(trainer_module, "token_loss", token_loss)
    with pytest.raises(TrainingDiverged, match="step 1: gradient norm is nan; last good checkpoint: none yet"):
        train(options())
    assert all(torch.equal(v, seen[-1][k]) for k, v in seen[0].items())


@pytest.mark.parametrize(("val_every", "error"), [(100, "largest parameter is nan"), (4, "validation loss is nan")])
def test_broken_parameters_are_never_saved(
    options: Make, monkeypatch: pytest.MonkeyPatch, val_every: int, error: str
) -> None:
    """The step that breaks them has a finite loss: step 4, which is due for a checkpoint, must look at what it saves."""
    advance = trainer_module.Trainer.advance

    def breaking(self: trainer_module.Trainer) -> StepReport:
        report = advance(self)
        if report.step == 4:
            self.model.lm_head.weight.data[0, 0] = float("nan")
        return report

    monkeypatch.setattr(trainer_module.Trainer, "advance", breaking)
    with pytest.raises(TrainingDiverged, match=rf"step 4: {error}; last good checkpoint: .*step-2$"):
        train(options(val_every=val_every))
    assert steps_of(Path(options().out)) == [2]


def test_parameters_and_checkpoint_are_float32(options: Make) -> None:
    """Also under autocast to bfloat16: only the matmuls are narrow, and A_log moves by less than bfloat16 resolves."""
    result = train(options(dtype="bfloat16", lr=1e-4))
    model = load_checkpoint(result.checkpoint)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    A_log = model.model.layers[0].self_attn.A_log.detach()
    assert 0 < A_log.abs().max() < 2e-3  # it starts at 0


def test_checkpoints_are_kept_and_named(options: Make) -> None:
    result = train(options(keep=2, steps=7))
    out = result.out
    assert steps_of(out) == [6, 7] and os.readlink(out / "last") == "step-7"
    assert not [p for p in out.rglob("*") if ".partial" in p.name]
    record = json.loads((out / "last" / "trainer.json").read_text())
    assert record["step"] == 7 and TrainOptions.from_dict(record["options"]) == options(keep=2, steps=7)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_metrics(options: Make) -> None:
    result = train(options(val_every=4))
    lines = read_metrics(result.out / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    values = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6] and [line["step"] for line in values] == [4, 6]
    assert steps[-1]["tokens"] == 6 * 4 * 24 and steps[-1]["done"] == 1.0 and steps[-1]["loss"] == result.loss
    assert values[-1]["val_loss"] == result.val_loss < steps[0]["loss"]
    assert all(line["lr"] > 0 and line["grad_norm"] > 0 and line["tokens_per_second"] > 0 for line in steps)


def test_time_budget(options: Make) -> None:
    """The run ends with the clock, its learning rate fallen to nothing, and counts what came before a resume."""
    seen = At(0, ctrl_c)
    result = train(options(steps=10**6, max_seconds=1.0, val_every=10**6, checkpoint_every=10**6), progress=seen)
    assert 1 < result.step < 10**5 and 1.0 <= result.seconds < 5.0 and result.interrupted is None
    assert seen.reports[-1].lr < 0.2 * max(r.lr for r in seen.reports)
    assert resume(result.out).step == result.step


def test_more_steps_on_resume_and_nothing_else(options: Make) -> None:
    out = train(options()).out
    assert resume(out, settings=["steps=8"]).step == 8
    notes: list[str] = []
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]
    assert resume(out, progress=progress).step == 8
    assert notes == ["nothing to train: step 8 of 8; raise the limit to go on"]
    with pytest.raises(ValueError, match=r"steps: expected at least 8, where .*step-8 stands, received 7"):
        resume(out, settings=["steps=7"])
    for setting in ("lr=1", "hidden_size=64", "seed=1", "data=elsewhere"):
        with pytest.raises(ValueError, match=r"resume: expected changes of .* only, received"):
            resume(out, settings=[setting])


def test_experts_are_trained_and_balanced(options: Make) -> None:
    """Stacked experts get Muon, the router bias moves, and both survive a resume to the bit."""
    experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    model = options().model | experts
    straight, broken = (train(options(n, model=model), progress=p) for n, p in (("s", None), ("b", At(3, ctrl_c))))
    assert_same_checkpoint(straight.checkpoint, resume(broken.out).checkpoint)
    tensors = load_checkpoint(straight.checkpoint).state_dict()
    assert tensors["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"].abs().max() > 0
    assert all(line["expert_load"] >= 1.0 for line in read_metrics(straight.out / "metrics.jsonl") if "loss" in line)


def test_per_head_muon_and_qk_clip(options: Make) -> None:
    """Exact resume with both on; each changes what is learnt."""
    both = {"per_head_muon": True, "qk_clip": 0.01}
    straight, broken = (train(options(n, **both), progress=p) for n, p in (("s", None), ("b", At(3, ctrl_c))))
    assert_same_checkpoint(straight.checkpoint, resume(broken.out).checkpoint)
    others = [train(options(f"other{i}", **change)) for i, change in enumerate(({}, {"per_head_muon": True}))]
    assert len({r.val_loss for r in (straight, *others)}) == 3
    logits = [line["max_logit"] for line in read_metrics(straight.out / "metrics.jsonl") if "loss" in line]
    assert len(logits) == 6 and max(logits[1:]) > 0
    assert not any("max_logit" in line for line in read_metrics(others[0].out / "metrics.jsonl"))
    with pytest.raises(ValueError, match="qk_clip: expected a positive number or none, received 0"):
        options(qk_clip=0.0)


def test_validation_text_of_its_own(options: Make, text: Path) -> None:
    result = train(options(data=(str(text / "part0"),), val_data=(str(text / "part1"),), val_tokens=10**6))
    header = json.loads((result.out / "data" / "val.json").read_text())
    assert header["documents"] == len(list((text / "part1").iterdir()))
    assert read_metrics(result.out / "metrics.jsonl")[-1]["val_tokens"] == header["tokens"] - 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"preset": "huge"}, "preset: expected one of tiny, demo"),
        ({"data": ("/nowhere",)}, "no such file"),
        ({"device": "cuda:77"}, "device: expected"),
        ({"tokenizer": "/nowhere.json"}, "tokenizer"),
        ({"seq_len": 10**7}, "expected more than seq_len = 10000000"),
        ({"model": {"kda_layers": (1, 2)}}, "received holes"),
        ({"model": {"vocab_size": 100}}, "vocab_size: expected at least 257"),
        ({"preset": "kimi-k3", "model": {}}, "memory: expected at most"),
        ({"batch_size": 2**34}, r"at least \d+\.\d GB for 206158430208 tokens at a time"),
    ],
)
def test_bad_options_stop_before_anything_is_written(
    options: Make, tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        train(options("deep/run", **changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), torch.OutOfMemoryError("CUDA out of"),
     MemoryError("Unable to allocate")],
    ids=["cpu", "gpu", "numpy"],
)  # fmt: skip
def test_a_batch_that_does_not_fit(
    options: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """In the first step nothing stays behind, in a later one all that was saved."""
    calls, good = 0, trainer_module.token_loss

    def token_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in (1, 8):
            raise error
        return good(*args, **kwargs)

    monkeypatch.setattr(trainer_module, "token_loss", token_loss)
    message = (
        r"batch_size / accumulate = 2 sequences of 24 tokens does not fit on cpu; raise accumulate, lower batch_size"
    )
    with pytest.raises(MemoryError, match=message):
        train(options("deep/run"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(MemoryError, match=message):
        train(options("deep/run"))
    assert steps_of(tmp_path / "deep" / "run") == [2]


def test_other_errors_of_a_step_are_not_taken_for_that(options: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def token_loss(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("something else")

    monkeypatch.setattr(trainer_module, "token_loss", token_loss)
    with pytest.raises(RuntimeError, match="something else"):
        train(options())


def test_the_config_of_a_file(options: Make, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRESETS["tiny"].replace(hidden_size=96).to_dict()))
    result = train(options(preset=str(path), model={}, steps=1))
    assert load_checkpoint(result.checkpoint).config.hidden_size == 96
    path.write_text("[]")
    with pytest.raises(ValueError, match="JSON of a model config"):
        train(options("again", preset=str(path)))
