"""The patch of transformers' KDA models: same logits, gradients and tokens; packs kept apart; put back exactly."""

from __future__ import annotations

import concurrent.futures
import copy
import importlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from openkda.compat import hf, hf_packs
from openkda.testing.compare import rel

transformers = pytest.importorskip("transformers")
NAMES = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_fn")
MODULES = [importlib.import_module(f"transformers.models.{m}.modeling_{m}") for m in hf.MODELS if m in hf._modules()]


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    hf.unpatch()


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.KimiLinearConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, num_local_experts=4, num_experts_per_tok=2, linear_head_dim=16, linear_num_heads=3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, layer_types=["linear_attention"] * 3 + ["full_attention"],
        mlp_layer_types=["dense"] + ["sparse"] * 3,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.KimiLinearForCausalLM(config).eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(1))


def test_same_logits_and_gradients(model: Any) -> None:
    x = ids(2, 150)
    want = model(x, labels=x)
    want_grads = torch.autograd.grad(want.loss, list(model.parameters()), allow_unused=True)
    with hf.patched() as names:
        assert "kimi_linear" in names
        got = model(x, labels=x)
        got_grads = torch.autograd.grad(got.loss, list(model.parameters()), allow_unused=True)
    assert rel(got.logits, want.logits) < 1e-5
    scale = max(g.norm().item() for g in want_grads if g is not None)
    for g, w in zip(got_grads, want_grads, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            assert (g - w).norm().item() < 1e-5 * max(w.norm().item(), 1e-2 * scale)


def test_same_tokens_with_cache_and_left_padding(model: Any) -> None:
    x = ids(3, 40)
    mask = torch.ones_like(x)
    for row, pad in enumerate((0, 5, 37)):
        x[row, :pad], mask[row, :pad] = 0, 0
    want = model.generate(x, attention_mask=mask, max_new_tokens=12, do_sample=False)
    with hf.patched():
        got = model.generate(x, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, want)


def test_packed_documents_are_kept_apart(model: Any) -> None:
    a, b = ids(2, 60)[0], ids(2, 60)[1, :50]
    position = torch.cat([torch.arange(60), torch.arange(50)])[None]
    with hf.patched(), torch.no_grad():
        packed = model(torch.cat([a, b])[None], position_ids=position, cu_seqlens=torch.tensor([0, 60, 110]),
                       use_cache=False).logits[0]  # fmt: skip
        alone = [model(t[None]).logits[0] for t in (a, b)]
    assert rel(packed[:60], alone[0]) < 1e-5
    assert rel(packed[60:], alone[1]) < 1e-5


CU = torch.tensor([0, 60, 110])
POSITIONS = torch.cat([torch.arange(60), torch.arange(50)])[None]
PACK = {"cu_seqlens": CU, "position_ids": POSITIONS, "use_cache": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_cache": True}, "pass use_cache=False"),
        ({"use_cache": None}, "pass use_cache=False"),  # what transformers does by default
        ({"past_key_values": "a cache"}, "pass use_cache=False"),
        ({"position_ids": None}, r"received none; pass position_ids=torch\.cat"),
        ({"position_ids": torch.arange(110)[None]}, r"at \[60\], received \[\]; pass position_ids=torch\.cat"),
        ({"position_ids": POSITIONS.roll(1)}, r"at \[60\], received \[1, 61\]"),
        ({"attention_mask": torch.ones(1, 110)}, "expected no attention_mask"),
        ({"cu_seqlens": None}, r"a new one at \[60\]: .*pass cu_seqlens=torch\.tensor\(\[0, 60, 110\]\)"),
    ],
    ids=["cache", "default", "given cache", "no positions", "one run", "elsewhere", "mask", "no offsets"],
)
def test_a_pack_that_attention_would_mix_is_refused(model: Any, change: dict[str, Any], message: str) -> None:
    x = ids(1, 110)
    with hf.patched(), torch.no_grad():
        model(x, **PACK)
        with pytest.raises(ValueError, match=message):
            model(x, **(PACK | change))
        model(x, cu_seqlens=torch.tensor([0, 110]))  # one sequence is no pack


def test_packs_in_the_rows_of_a_batch_are_refused(model: Any) -> None:
    """The attention layers keep them apart, the KDA layers would not; only a batch of one row was looked at."""
    x, positions = ids(2, 50), torch.arange(50).expand(2, -1).clone()
    with hf.patched(), torch.no_grad():
        model(x, position_ids=positions)
        positions[1, 20:] = torch.arange(30)
        with pytest.raises(ValueError, match=r"a new one in row 1 at 20: .* lay all rows end to end"):
            model(x, position_ids=positions, use_cache=False)


def test_a_pack_may_hold_empty_sequences(model: Any) -> None:
    x = ids(1, 110)
    with hf.patched(), torch.no_grad():
        want = model(x, **PACK).logits
        got = model(x, **(PACK | {"cu_seqlens": torch.tensor([0, 0, 60, 60, 110, 110])})).logits
    assert rel(got, want) < 1e-6


def test_a_model_whose_attention_knows_no_packs_refuses_them() -> None:
    for name in hf_packs.NEVER_PACKED & set(hf._modules()):
        with pytest.raises(
            ValueError, match=f"the attention of {name} in transformers cannot keep packed sequences apart"
        ):
            hf_packs.check_pack(name, CU, None, POSITIONS, False)


def test_every_model_has_the_class_that_is_checked() -> None:
    for name, module in hf._modules().items():
        parameters = inspect.signature(getattr(module, hf_packs.MODEL_CLASSES[name]).forward).parameters
        assert {"attention_mask", "position_ids", "use_cache"} <= set(parameters)


def test_one_graph_with_ours_inside(model: Any) -> None:
    """torch.compile(fullgraph=True) of the patched model, a pack: eager's logits and gradients, our operator in the graph."""
    x, dense = ids(1, 110), copy.deepcopy(model.config)
    dense.mlp_layer_types = ["dense"] * 4  # transformers' experts do not trace whole
    torch.manual_seed(0)
    small = transformers.KimiLinearForCausalLM(dense).eval()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def loss(x: Tensor, cu: Tensor, positions: Tensor) -> Tensor:
        return small(x, cu_seqlens=cu, position_ids=positions, use_cache=False).logits.square().mean()

    with hf.patched():
        found = []
        for f in (torch.compile(loss, fullgraph=True, backend=backend), loss):
            found.append(torch.autograd.grad(f(x, CU, POSITIONS), list(small.parameters())))
    assert str(graphs[0].graph).count("openkda.kda_chunkwise") >= 3
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() < 1e-5 * max(want.norm(), 1e-6)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rsplit(".", 1)[-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_functions_of_every_model(module: Any, dtype: torch.dtype) -> None:
    """With and without a state, several tokens and one; only the rounding of 16-bit outputs may differ."""
    gen = torch.Generator().manual_seed(2)
    limit = 1e-5 if dtype == torch.float32 else 3e-3
    for T in (1, 70):
        q, k, v = (torch.randn(2, T, 3, 16, generator=gen).to(dtype) for _ in range(3))
        g, beta = -torch.rand(2, T, 3, 16, generator=gen), torch.rand(2, T, 3, generator=gen).to(dtype)
        for state in (None, torch.randn(2, 3, 16, 16, generator=gen)):
            options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
            for name in NAMES[:2]:
                before = None if state is None else state.clone()
                want = getattr(module, name)(q, k, v, g=g, beta=beta, **options)
                with hf.patched():
                    got = getattr(module, name)(q, k, v, g=g, beta=beta, **options)
                assert got[0].dtype == dtype
                assert rel(got[0], want[0]) < limit
                assert rel(got[1], want[1]) < 1e-5
                assert before is None or torch.equal(before, state)


def test_put_back_exactly_and_harmless_when_repeated() -> None:
    before = {(m.__name__, n): getattr(m, n) for m in MODULES for n in NAMES}
    forwards = {name: getattr(m, hf_packs.MODEL_CLASSES[name]).forward for name, m in hf._modules().items()}
    hf.unpatch()
    first = hf.patch()
    ours = {(m.__name__, n): getattr(m, n) for m in MODULES for n in NAMES}
    assert hf.patch() == first
    assert all(getattr(m, n) is ours[m.__name__, n] is not before[m.__name__, n] for m in MODULES for n in NAMES)
    with hf.patched():
        pass
    assert all(getattr(m, n) is ours[m.__name__, n] for m in MODULES for n in NAMES)  # the outer patch stands
    assert all(getattr(m, hf_packs.MODEL_CLASSES[n]).forward is not forwards[n] for n, m in hf._modules().items())
    hf.unpatch()
    hf.unpatch()
    assert all(getattr(m, n) is before[m.__name__, n] for m in MODULES for n in NAMES)
    assert all(getattr(m, hf_packs.MODEL_CLASSES[n]).forward is forwards[n] for n, m in hf._modules().items())


def test_an_error_inside_the_block_still_puts_back() -> None:
    before = getattr(MODULES[0], NAMES[0])
    with pytest.raises(RuntimeError, match="inside"), hf.patched():
        raise RuntimeError("inside")
    assert getattr(MODULES[0], NAMES[0]) is before


def test_blocks_that_overlap_in_threads_do_not_undo_each_other() -> None:
    before = getattr(MODULES[0], NAMES[0])
    inside, leave = threading.Event(), threading.Event()

    def long_block() -> None:
        with hf.patched():
            inside.set()
            assert leave.wait(20)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with hf.patched():
            other = pool.submit(long_block)
            assert inside.wait(20)
        assert getattr(MODULES[0], NAMES[0]) is not before, "the other thread is still in its block"
        hf.unpatch()
        assert getattr(MODULES[0], NAMES[0]) is not before, "nor may this take it away"
        hf.patch()
        leave.set()
        other.result(20)
    assert getattr(MODULES[0], NAMES[0]) is not before, "patch() outlasts the blocks"
    hf.unpatch()
    assert getattr(MODULES[0], NAMES[0]) is before


def test_many_threads_enter_and_leave() -> None:
    before = getattr(MODULES[0], NAMES[0])

    def often(_: int) -> bool:
        seen = []
        for _ in range(50):
            with hf.patched():
                seen.append(getattr(MODULES[0], NAMES[0]) is not before)
        return all(seen)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(often, range(8)))
    assert getattr(MODULES[0], NAMES[0]) is before


def test_no_such_models_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "_modules", dict)
    with pytest.raises(ImportError, match=r"transformers: expected one of the models kimi_linear.*found"):
        hf.patch()
