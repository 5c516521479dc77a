"""Steps in fixed memory: the laws of `Decoder` hold, whatever the room; on a GPU, replayed, logits are the eager ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openkda.generation import graph
from openkda.generation.decoder import Decoder
from openkda.generation.graph import FixedStep, GraphDecoder
from openkda.layers.moe import pack_experts
from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS

K3 = PRESETS["tiny"].replace(
    vocab_size=300, initializer_range=0.2, q_lora_rank=24, attn_res_block_size=2, num_experts=4, num_experts_per_token=2,
    num_shared_experts=1, moe_intermediate_size=32, routed_expert_hidden_size=32, latent_moe_use_norm=True,
    first_k_dense_replace=1, hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
)  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps, run instead of replayed."""
    monkeypatch.setattr(graph, "captured", lambda step, state: step.run)
    monkeypatch.setattr(graph, "_check_device", lambda device: None)


@pytest.fixture(params=["hybrid", "k3"])
def either(request: pytest.FixtureRequest, model: HybridLM) -> HybridLM:
    if request.param == "hybrid":
        return model
    k3 = HybridLM(K3)
    k3.init_weights(0)
    return k3.double().eval()


def logits_of(decoder: Decoder, prompts: list[list[int]], steps: int = 7) -> Tensor:
    """Of a prefill, some steps, a second prompt, and steps of a selection of rows."""
    rows = len(prompts)
    found = [decoder.prefill(prompts)] + [decoder.step(torch.arange(rows) + i) for i in range(steps)]
    found.append(decoder.prefill([[i, i + 1] for i in range(rows)]))
    found += [decoder.step(torch.arange(rows) + i) for i in range(2)]
    decoder.keep([2, 0, 2])
    found += [decoder.step(torch.tensor([7, 8, 9]) + i) for i in range(steps)]
    return torch.cat(found)


@pytest.mark.parametrize("room", [2, 3, 512])
def test_the_laws_of_decoder(on_cpu: None, either: HybridLM, prompts: list[list[int]], room: int) -> None:
    want = logits_of(Decoder(either), prompts)
    got = logits_of(GraphDecoder(either, room=room), prompts)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def test_every_step_uses_the_same_memory(either: HybridLM, prompts: list[list[int]]) -> None:
    """What a graph needs; and nothing of the state that it began with changes."""
    decoder = Decoder(either)
    decoder.prefill(prompts)
    assert decoder.state is not None
    before = [t.clone() for layer in decoder.state for t in vars(layer).values() if isinstance(t, Tensor)]
    step = FixedStep(either, decoder.state, room=4)
    places = [t.data_ptr() for layer in step.state for t in vars(layer).values() if isinstance(t, Tensor)]
    for _ in range(4):
        step.run()
        step.done += 1
    assert places == [t.data_ptr() for layer in step.state for t in vars(layer).values() if isinstance(t, Tensor)]
    after = [t for layer in decoder.state for t in vars(layer).values() if isinstance(t, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_state_read_meanwhile_stays_what_it_was(on_cpu: None, model: HybridLM, prompts: list[list[int]]) -> None:
    decoder = GraphDecoder(model)
    decoder.prefill(prompts)
    decoder.step(torch.arange(5))
    state = decoder.state
    first = decoder.step(torch.arange(5))
    decoder.step(torch.arange(5))
    again = Decoder(model, state=state).step(torch.arange(5))
    torch.testing.assert_close(again, first, rtol=1e-9, atol=1e-9)


def test_refusals(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = HybridLM(K3)
    with pytest.raises(ValueError, match="expected a state"):
        GraphDecoder(model).step(torch.tensor([1]))
    with pytest.raises(ValueError, match="room: expected at least 2"):
        GraphDecoder(model, room=1)
    decoder = GraphDecoder(model)
    decoder.prefill([[1], [2]])
    with pytest.raises(
        ValueError, match=r"one for each of 2 rows, received \[1\]"
    ):  # copying would spread it over both
        decoder.step(torch.tensor([1]))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="expected a model on a CUDA device, received cpu; use Decoder"):
        GraphDecoder(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_replayed_on_a_gpu(prompts: list[list[int]], rows: int, packed: bool) -> None:
    """bfloat16, several captures: the eager decoder's logits, but for products over the room that is masked."""
    prompts = [prompts[i % len(prompts)] for i in range(rows)]
    model = HybridLM(K3.replace(kda_head_dim=64))
    model.init_weights(0)
    if packed:
        pack_experts(model)
    model = model.bfloat16().cuda().eval()
    eager, replayed = Decoder(model), GraphDecoder(model, room=4)
    for decoder in (eager, replayed):
        decoder.prefill(prompts)
    for i in range(10):
        tokens = torch.arange(rows) + i
        a, b = replayed.step(tokens).float(), eager.step(tokens.cuda()).float()
        assert (a - b).norm() <= 2e-2 * b.norm(), i
