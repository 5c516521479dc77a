"""The whole model: the laws of its layers hold through the stack, and bad input never reaches them."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda.layers.kda import KimiDeltaAttention
from openkda.models.hybrid import HybridLM
from openkda.models.presets import PRESETS
from openkda.testing.compare import rel

TINY = PRESETS["tiny"].replace(initializer_range=0.1)
CONFIGS = {
    "bounded": TINY,
    "softplus": TINY.replace(gate_lower_bound=None, use_full_rank_gate=False, mla_use_output_gate=False),
    "mla-first": TINY.replace(kda_layers=(2, 3), full_attn_layers=(1, 4), q_lora_rank=24, tie_word_embeddings=True),
    "grouped": TINY.replace(kda_num_v_heads=4, kda_head_dim=16, kda_v_head_dim=24),
}
SAME = 2e-5


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> HybridLM:
    return built(request.param)


def built(name: str) -> HybridLM:
    model = HybridLM(CONFIGS[name])
    model.init_weights(0)
    return model.eval()


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_prefill_in_pieces_and_decoding_equal_one_call(model: HybridLM) -> None:
    x = ids(2, 150)
    whole = model(x).logits
    for sizes in ([13, 2, 3, 64, 65, 1, 2], [64, 64, *[1] * 22], [150]):
        outputs, state, at = [], None, 0
        for size in sizes:
            out = model(x[:, at : at + size], state=state, return_state=True)
            outputs, state, at = [*outputs, out.logits], out.state, at + size
        assert rel(torch.cat(outputs, 1), whole) < SAME, sizes


@torch.no_grad()
def test_a_pack_equals_each_document_alone(model: HybridLM) -> None:
    lengths = (5, 0, 64, 1, 37)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    x = ids(1, sum(lengths))
    out = model(x, cu_seqlens=cu, return_state=True)
    last = model(x, cu_seqlens=cu, last_only=True).logits
    assert last.shape == (1, 5, TINY.vocab_size)
    again = model(ids(1, 5, seed=2), state=out.state, cu_seqlens=torch.arange(6)).logits
    for n, (a, b) in enumerate(pairwise(cu.tolist())):
        alone = model(torch.cat([x[:, a:b], ids(1, 5, seed=2)[:, n : n + 1]], 1)).logits
        assert rel(again[:, n], alone[:, -1]) < SAME
        if a == b:
            assert not last[:, n].any()
            continue
        assert rel(out.logits[:, a:b], alone[:, :-1]) < SAME
        assert rel(last[:, n], alone[:, -2]) < SAME


@torch.no_grad()
def test_left_padded_prompts_decode_as_if_alone(model: HybridLM) -> None:
    lengths, width = (3, 9, 17), 17
    mask = torch.arange(width) >= width - torch.tensor(lengths).view(-1, 1)
    x = ids(3, width)
    out = model(x, attention_mask=mask, return_state=True)
    changed = model(torch.where(mask, x, (x + 7) % 256), attention_mask=mask)
    assert torch.equal(changed.logits, out.logits) and not out.logits[~mask].any()
    tokens, state = out.logits[:, -1:].argmax(-1), out.state
    assert (
        rel(model(x, attention_mask=mask, last_only=True).logits, out.logits[:, -1:]) < SAME
    )  # a product of other sizes
    for n, length in enumerate(lengths):
        row, alone = x[n : n + 1, width - length :], []
        for _ in range(20):
            alone.append(model(row).logits[:, -1])
            row = torch.cat([row, alone[-1].argmax(-1, keepdim=True)], 1)
        got, here, token = [out.logits[n : n + 1, -1]], state, tokens
        for _ in range(19):
            step = model(token, state=here, return_state=True)
            here, token = step.state, step.logits.argmax(-1)
            got.append(step.logits[n : n + 1, -1])
        assert rel(torch.stack(got), torch.stack(alone)) < SAME
        assert torch.equal(torch.stack(got).argmax(-1), torch.stack(alone).argmax(-1))


@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_a_token_changes_nothing_before_it(model: HybridLM, training: bool) -> None:
    model.train(training)
    x = ids(1, 130)
    want = model(x).logits
    for at in (0, 1, 15, 16, 63, 64, 65, 129):
        other = x.clone()
        other[0, at] = (other[0, at] + 1) % 256
        got = model(other).logits
        assert torch.equal(got[:, :at], want[:, :at])
        assert not torch.equal(got[:, at], want[:, at])


@torch.no_grad()
def test_rows_of_a_batch_are_strangers(model: HybridLM) -> None:
    x = ids(1, 40)
    same = model(x.expand(4, -1)).logits
    assert all(torch.equal(same[0], row) for row in same)
    mixed = model(torch.cat([ids(3, 40, seed=5), x])).logits
    assert torch.equal(mixed[3], same[0])


def test_gradients_reach_every_parameter(model: HybridLM) -> None:
    """Also after one token was fed with a state in eval mode."""
    x = ids(2, 20)
    state = model(x[:, :19], return_state=True).state
    model(x[:, 19:], state=state).logits.square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and bool(p.grad.any()) and bool(torch.isfinite(p.grad).all()), name


def test_weights_start_as_published_and_the_same_everywhere() -> None:
    a, b = HybridLM(PRESETS["tiny"]), HybridLM(PRESETS["tiny"])
    a.init_weights(3)
    b.init_weights(3)
    with torch.device("meta"):
        c = HybridLM(PRESETS["tiny"])
    c.to_empty(device="cpu")
    with torch.no_grad():
        for p in c.parameters():
            p.fill_(torch.nan)
    c.init_weights(3)
    for x, y, z in zip(a.parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)
    b.init_weights(4)
    assert not torch.equal(a.model.embed_tokens.weight, b.model.embed_tokens.weight)
    for name, module in a.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            w, error = module.weight.detach(), 0.02 * module.weight.numel() ** -0.5  # standard error of the mean
            assert abs(w.mean().item()) < 5 * error and abs(w.std().item() - 0.02) < 5 * error, name
    fresh = HybridLM(PRESETS["tiny"])  # without a seed too
    assert abs(fresh.lm_head.weight.std().item() - 0.02) < 1e-3
    assert abs(fresh.model.layers[0].mlp.up_proj.weight.std().item() - 0.02) < 1e-3


def test_low_precision_keeps_what_must_be_float32() -> None:
    model = built("bounded").bfloat16()
    kept = {n.split("self_attn.")[1] for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight"}
    logits = model(ids(1, 30)).logits
    assert logits.dtype == torch.bfloat16 and rel(logits, built("bounded")(ids(1, 30)).logits) < 0.1


@torch.no_grad()
def test_copies_are_whole(model: HybridLM) -> None:
    x = ids(1, 12)
    want = model(x, return_state=True)
    assert torch.equal(copy.deepcopy(model)(x).logits, want.logits)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x[:, :1], state=want.state).logits, model(x[:, :1], state=want.state).logits)


def test_tied_embeddings_are_one_matrix() -> None:
    model = built("mla-first")
    assert model.lm_head is None and not any("lm_head" in n for n in model.state_dict())
    h = model.model(ids(1, 4), state=None, cu_seqlens=None, return_state=False)[0]
    assert torch.equal(model(ids(1, 4)).logits, h @ model.model.embed_tokens.weight.T)


@torch.no_grad()
def test_no_tokens_at_all() -> None:
    model = built("bounded")
    out = model(torch.empty(2, 0, dtype=torch.long), return_state=True)
    assert out.logits.shape == (2, 0, TINY.vocab_size)
    assert rel(model(ids(2, 9), state=out.state).logits, model(ids(2, 9)).logits) < SAME
    empty = model(torch.empty(1, 0, dtype=torch.long), cu_seqlens=torch.zeros(3, dtype=torch.long), last_only=True)
    assert empty.logits.shape == (1, 2, TINY.vocab_size)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"input_ids": torch.ones(1, 4)}, TypeError, "int64 or int32 tensor, received torch.float32"),
        ({"input_ids": [[1, 2]]}, TypeError, "received list"),
        ({"input_ids": torch.ones(4, dtype=torch.long)}, ValueError, r"\[B, T\], received \[4\]"),
        ({"input_ids": torch.tensor([[1, 260]])}, ValueError, r"\[0, 260\), received 1..260"),
        ({"input_ids": torch.tensor([[-1, 2]])}, ValueError, r"received -1..2"),
        ({"input_ids": torch.tensor([[1, 2]]), "state": ()}, ValueError, "4 layers, received 0"),
        ({"input_ids": torch.tensor([[1, 2]]), "cu_seqlens": torch.tensor([0, 3])}, ValueError, "last value T = 2"),
    ],
)
def test_bad_input(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        built("bounded")(**arguments)


def test_states_of_another_model_are_refused() -> None:
    model, other = built("bounded"), built("mla-first")
    with pytest.raises(
        ValueError, match=r"layer 0 .KimiDeltaAttention.: expected a KDAState of 1 rows, received MLAState"
    ):
        model(ids(1, 2), state=other(ids(1, 2), return_state=True).state)


@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3"])
def test_published_models_build_without_memory(name: str) -> None:
    with torch.device("meta"):
        model = HybridLM(PRESETS[name])
    assert all(p.is_meta for p in model.parameters())
    kinds = [isinstance(layer.self_attn, KimiDeltaAttention) for layer in model.model.layers]
    assert sum(kinds) == {"kimi-linear-48b": 20, "kimi-k3": 69}[name]
    mla = {"kimi-linear-48b": [3, 7, 11, 15, 19, 23, 26], "kimi-k3": [*range(3, 92, 4), 92]}[name]
    assert [i for i, kda in enumerate(kinds) if not kda] == mla


SHAPES = {  # of the published checkpoints, by layer kind
    "kimi-k3": {
        "model.layers.0.self_attn.q_proj.weight": (12288, 7168),
        "model.layers.0.self_attn.g_proj.weight": (12288, 7168),
        "model.layers.0.self_attn.o_proj.weight": (7168, 12288),
        "model.layers.0.self_attn.f_a_proj.weight": (128, 7168),
        "model.layers.0.self_attn.f_b_proj.weight": (12288, 128),
        "model.layers.0.self_attn.b_proj.weight": (96, 7168),
        "model.layers.0.self_attn.A_log": (96,),
        "model.layers.0.self_attn.dt_bias": (12288,),
        "model.layers.0.self_attn.v_conv1d.weight": (12288, 1, 4),
        "model.layers.0.self_attn.o_norm.weight": (128,),
        "model.layers.3.self_attn.q_a_proj.weight": (1536, 7168),
        "model.layers.3.self_attn.q_a_layernorm.weight": (1536,),
        "model.layers.3.self_attn.q_b_proj.weight": (18432, 1536),
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "model.layers.3.self_attn.kv_a_layernorm.weight": (512,),
        "model.layers.3.self_attn.kv_b_proj.weight": (24576, 512),
        "model.layers.3.self_attn.g_proj.weight": (12288, 7168),
        "model.layers.3.self_attn.o_proj.weight": (7168, 12288),
        "model.layers.92.input_layernorm.weight": (7168,),
        "model.layers.92.post_attention_layernorm.weight": (7168,),
        "model.embed_tokens.weight": (163840, 7168),
        "model.norm.weight": (7168,),
        "lm_head.weight": (163840, 7168),
    },
    "kimi-linear-48b": {
        "model.layers.0.self_attn.q_proj.weight": (4096, 2304),
        "model.layers.0.self_attn.q_conv1d.weight": (4096, 1, 4),
        "model.layers.0.self_attn.f_a_proj.weight": (128, 2304),
        "model.layers.0.self_attn.f_b_proj.weight": (4096, 128),
        "model.layers.0.self_attn.b_proj.weight": (32, 2304),
        "model.layers.0.self_attn.g_a_proj.weight": (128, 2304),
        "model.layers.0.self_attn.g_b_proj.weight": (4096, 128),
        "model.layers.0.mlp.gate_proj.weight": (9216, 2304),
        "model.layers.0.mlp.down_proj.weight": (2304, 9216),
        "model.layers.26.self_attn.q_proj.weight": (6144, 2304),
        "model.layers.26.self_attn.kv_b_proj.weight": (8192, 512),
        "model.layers.26.self_attn.o_proj.weight": (2304, 4096),
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_shapes_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        found = {n: tuple(p.shape) for n, p in HybridLM(PRESETS[name]).named_parameters()}
    assert {n: found.get(n) for n in SHAPES[name]} == SHAPES[name]
    attention = {n.split(".", 3)[3] for n in found if ".self_attn." in n}
    assert ("self_attn.q_a_proj.weight" in attention) == (name == "kimi-k3")
    assert ("self_attn.g_a_proj.weight" in attention) == (name == "kimi-linear-48b")


def test_ids_on_another_device_are_refused() -> None:
    """torch's embedding reads stray memory for ids without data."""
    model = HybridLM(PRESETS["tiny"])
    model.init_weights(0)
    with pytest.raises(ValueError, match=r"input_ids\.device: expected cpu .*, received meta"):
        model(torch.zeros(1, 3, dtype=torch.int64, device="meta"))


def test_one_graph_forward_and_backward() -> None:
    """torch.compile(fullgraph=True) of the whole model; only additions that the compiler may reorder differ."""
    model = HybridLM(PRESETS["tiny"])
    model.init_weights(0)
    ids = torch.randint(0, 260, (2, 20), generator=torch.Generator().manual_seed(0))
    parameters = list(model.parameters())

    def gradients(f: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f(ids).logits.square().mean(), parameters)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(compiled), gradients(model), strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("dynamic", [True, None])
@torch.no_grad()
def test_one_graph_for_all_lengths(dynamic: bool | None) -> None:
    """Lengths, and under dynamic=True even the eps of a norm, are symbols; nothing is compiled after the second."""
    model = built("mla-first")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (20, 33, 64, 7):
        with torch.compiler.set_stance("fail_on_recompile" if length in (64, 7) else "default"):
            assert rel(compiled(ids(2, length)).logits, model(ids(2, length)).logits) < SAME


def test_targets_give_the_loss_of_the_logits() -> None:
    """Also with tied embeddings; and where logits of padded or left out positions would be asked for, it says so."""
    for tied in (False, True):
        model = HybridLM(PRESETS["tiny"].replace(tie_word_embeddings=tied))
        model.init_weights(0)
        ids = torch.randint(0, 260, (2, 21), generator=torch.Generator().manual_seed(0))
        out = model(ids[:, :-1], targets=ids[:, 1:])
        logits = model(ids[:, :-1]).logits.flatten(0, 1)
        want = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
        assert rel(out.loss, want) < SAME and out.logits.numel() == 0
    for options in ({"last_only": True}, {"attention_mask": torch.ones(2, 20, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="targets: expected"):
            model(ids[:, :-1], targets=ids[:, 1:], **options)
    with pytest.raises(ValueError, match="targets: expected"):
        model(ids[:, :-1], targets=ids)


K3 = TINY.replace(
    attn_res_block_size=2, q_lora_rank=24, num_experts=4, num_experts_per_token=2, num_shared_experts=1,
    moe_intermediate_size=32, routed_expert_hidden_size=32, latent_moe_use_norm=True, first_k_dense_replace=1,
    hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
)  # fmt: skip


@pytest.mark.parametrize("config", [TINY, K3], ids=["hybrid", "k3"])
@pytest.mark.parametrize("training", [True, False])
def test_autocast(config: Any, training: bool) -> None:
    """What training in bfloat16 runs: float32 parameters and stream, the loss and gradients of float32 within its roundings."""
    model = HybridLM(config).train(training)
    model.init_weights(0)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.arange(bias.numel()))  # no rounding sends a token to another expert
    x, parameters = ids(2, 40), list(model.parameters())
    found = []
    with torch.set_grad_enabled(training):
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = model(x, targets=x).loss / x.numel()
            assert loss.dtype == torch.float32
            grads = torch.autograd.grad(loss, parameters, allow_unused=True) if training else ()
            found.append((loss, [g for g in grads if g is not None]))
    (want, wanted), (got, gradients) = found
    assert abs(got - want) < 2e-3 * want
    assert all(g.dtype == torch.float32 for g in gradients) and len(gradients) == len(wanted)
    if training:
        norm = torch.stack([w.norm() for w in wanted]).norm()
        assert torch.stack([(g - w).norm() for g, w in zip(gradients, wanted, strict=True)]).norm() < 0.1 * norm
