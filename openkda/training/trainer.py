"""The optimizer step, and everything a step depends on: model, optimizer, data position, random numbers, clock."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from openkda.layers.balance import QuantileBalancer
from openkda.models.hybrid import HybridLM
from openkda.models.tokenizer import Tokenizer
from openkda.training.batches import Batch, Batches
from openkda.training.evaluate import token_loss
from openkda.training.graph import GraphedGradients, GraphedUpdate, graph_refusals
from openkda.training.optim import Optimizer, group_parameters
from openkda.training.options import TrainOptions
from openkda.training.progress import StepReport
from openkda.training.qk_clip import QKClip
from openkda.training.run_directory import TrainerState, save
from openkda.training.schedule import rate
from openkda.training.token_file import TokenFile

log = logging.getLogger("openkda.training")


class TrainingDiverged(FloatingPointError):
    """A loss, gradient or parameter is NaN or infinite. What was saved before is not."""


class Trainer:
    """Trains `model` (float32 parameters, already on its device) on `tokens`. dtype: of autocast, float32 for none.

    The next step is a function of the parameters, the optimizer's state, the step number and torch's random state:
    `state` and `restore` carry all four. Routed experts are balanced after every step (their biases are model state).
    """

    def __init__(self, options: TrainOptions, model: HybridLM, tokens: TokenFile, dtype: torch.dtype) -> None:
        self.options, self.model, self.dtype = options, model, dtype
        model.model.gradient_checkpointing = options.recompute
        self.device = next(model.parameters()).device
        self.batches = Batches(tokens, seq_len=options.seq_len, batch_size=options.batch_size, seed=options.seed)
        self.optimizer = Optimizer(
            group_parameters(model, per_head=options.per_head_muon),
            lr=options.lr,
            weight_decay=options.weight_decay,
            momentum=options.momentum,
            betas=(options.beta1, options.beta2),
        )
        config = model.config
        routed = any(config.is_moe(layer) for layer in range(config.num_hidden_layers))
        self.balancer = QuantileBalancer(model) if routed else None
        self.clip = None if options.qk_clip is None else QKClip(model, options.qk_clip)
        self.graphed: GraphedGradients | None = None
        self.graphed_update: GraphedUpdate | None = None
        if not graph_refusals(model, options, dtype, self.device):
            self.graphed = GraphedGradients(model, dtype=dtype, parts=options.accumulate, longest=options.seq_len)
            self.graphed_update = GraphedUpdate(self.optimizer, self.device)
        self._ahead: tuple[int, Batch] | None = None  # a step, and its first micro-batch
        self.step = self.tokens = 0
        self.last_checkpoint: Path | None = None
        self._earlier_seconds = 0.0
        self._clock: float | None = None
        self._durations: deque[float] = deque(maxlen=20)

    def start_clock(self) -> None:
        self._clock = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall-clock time of this run, earlier parts of it included."""
        return self._earlier_seconds + (0.0 if self._clock is None else time.perf_counter() - self._clock)

    @property
    def done(self) -> float:
        """Share of the run that lies behind, 0..1."""
        return min(1.0, max(self.step / self.options.steps, self._budget_spent()))

    @property
    def finished(self) -> bool:
        return self.done >= 1.0

    def advance(self) -> StepReport:
        """One optimizer step. Raises TrainingDiverged before the parameters change."""
        began = time.perf_counter()
        lr = self._set_rate()
        self.model.train()
        total = self._gradients()
        clipped = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.grad_clip)
        loss, norm = torch.stack([total, clipped]).tolist()  # the one place where a step waits for the GPU
        self.require_finite("loss", loss, self.step + 1)
        self.require_finite("gradient norm", norm, self.step + 1)
        self._update()
        loads = [] if self.balancer is None else self.balancer.step().values()
        logits = [] if self.clip is None else self.clip.step().values()
        self.step += 1
        self.tokens += self._tokens_per_step
        self._durations.append(time.perf_counter() - began)
        return self._report(loss, lr, norm, max(loads, default=None), max(logits, default=None))

    def state(self) -> TrainerState:
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return TrainerState(self.options, self.step, self.tokens, self.seconds, self.optimizer.state_dict(), rng)

    def restore(self, state: TrainerState, checkpoint: Path) -> None:
        """Take up where `state` was taken; the model has been loaded from the same `checkpoint` already."""
        self.optimizer.load_state_dict(state.optimizer)
        torch.set_rng_state(state.rng["cpu"])
        if self.device.type == "cuda" and "cuda" in state.rng:
            torch.cuda.set_rng_state(state.rng["cuda"], self.device)
        self.step, self.tokens, self._earlier_seconds = state.step, state.tokens, state.seconds
        self.last_checkpoint = checkpoint

    def save(self, tokenizer: Tokenizer) -> Path:
        """The checkpoint of this step; written unless it is there already, and never with a parameter that is NaN."""
        out = Path(self.options.out)
        if self.last_checkpoint != out / f"step-{self.step}":
            largest = torch.stack([p.detach().abs().max() for p in self.model.parameters()]).max()
            self.require_finite("largest parameter", float(largest))
            self.last_checkpoint = save(out, self.state(), self.model, tokenizer, keep=self.options.keep)
        return self.last_checkpoint

    def require_finite(self, name: str, value: float, step: int | None = None) -> None:
        """TrainingDiverged, naming the step and the last good checkpoint, unless `value` is a finite number."""
        if not math.isfinite(value):
            last = "none yet" if self.last_checkpoint is None else self.last_checkpoint
            raise TrainingDiverged(f"step {step or self.step}: {name} is {value}; last good checkpoint: {last}")

    @property
    def _tokens_per_step(self) -> int:
        return self.options.batch_size * self.options.seq_len

    def _budget_spent(self) -> float:
        return 0.0 if self.options.max_seconds is None else self.seconds / self.options.max_seconds

    def _set_rate(self) -> float:
        """The rate of the step about to be taken: neither the first nor the last step is lost to a rate of 0."""
        done = max((self.step + 1) / (self.options.steps + 1), self._budget_spent())
        lr = self.options.lr * rate(done, warmup=self.options.warmup, end=self.options.lr_end)
        self.optimizer.set_rate(lr)
        return lr

    def _gradients(self) -> Tensor:
        """The batch's mean loss, a scalar, and its gradient in the parameters; every part has the same number of tokens."""
        parts = self.options.accumulate
        total = torch.zeros((), device=self.device)
        for index in range(parts):
            batch = self._micro_batch(index)
            replayed = self._replayed(batch)
            if replayed is not None:
                total += replayed
                continue
            loss = token_loss(self.model, batch.to(self.device), dtype=self.dtype) / parts
            with torch.autograd.set_multithreading_enabled(False):  # a second thread and the first wait for each other
                loss.backward()
            total += loss.detach()
        if self.device.type != "cpu":  # while the GPU computes
            self._ahead = self.step + 1, self.batches.micro_batch(self.step + 1, 0, parts)
        return total

    def _update(self) -> None:
        """The optimizer's step; afterwards there are no gradients, or zeros where a graph adds to them."""
        if self.graphed_update is not None:
            try:
                return self.graphed_update()
            except RuntimeError as error:
                self._launch_from_now_on(error)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _replayed(self, batch: Batch) -> Tensor | None:
        """The loss of a batch whose gradient came from a CUDA graph; None where it has to be launched."""
        if self.graphed is None or not self.graphed.takes(batch):
            return None
        try:
            return self.graphed(batch)
        except RuntimeError as error:  # torch's, for a capture: a wait for the GPU, memory, ...
            self._launch_from_now_on(error)
            return None

    def _launch_from_now_on(self, error: RuntimeError) -> None:
        log.warning("training without CUDA graphs: %s", str(error).splitlines()[0] if str(error) else error)
        self.graphed = self.graphed_update = None

    def _micro_batch(self, index: int) -> Batch:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and index == 0 and ahead[0] == self.step:
            return ahead[1]
        return self.batches.micro_batch(self.step, index, self.options.accumulate)

    def _report(
        self, loss: float, lr: float, norm: float, expert_load: float | None, max_logit: float | None
    ) -> StepReport:
        per_step = sum(self._durations) / len(self._durations)
        left = (self.options.steps - self.step) * per_step
        if self.options.max_seconds is not None:
            left = min(left, self.options.max_seconds - self.seconds)
        return StepReport(
            step=self.step,
            done=self.done,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens=self.tokens,
            tokens_per_second=self._tokens_per_step / per_step,
            seconds=self.seconds,
            seconds_left=max(0.0, left),
            expert_load=expert_load,
            max_logit=max_logit,
        )
