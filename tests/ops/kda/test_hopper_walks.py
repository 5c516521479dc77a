"""The backward's walks over chunks of 64 on Hopper: on a CPU with torch under their source, ahead of time, and on the card."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import backward_checks as checks
import gluon_clocks_on_cpu as on_cpu
from gluon_on_cpu import Value

from openkda.ops.kda.hopper import TRITON_RELEASE, _triton_release

if _triton_release() != TRITON_RELEASE:
    pytest.skip(f"Gluon of Triton {TRITON_RELEASE}", allow_module_level=True)
import test_hopper

from openkda.ops.kda.hopper import chains, factors, gradient_tiles, instructions, products, replay, reverse, scan, state
from openkda.testing.inputs import KDAInputs, make_inputs
from openkda.testing.runs import gradients

F64 = torch.float64
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PACK = [0, 5, 5, 75, 194]


def workspace(T: int, HV: int, cu: list[int] | None, states: bool) -> SimpleNamespace:
    """Prepared chunks of random tokens, and in float64 what both walks over them give."""
    gen = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(shape, generator=gen)  # noqa: E731
    members = list(pairwise([0, T] if cu is None else cu))
    n = len(members)
    slots, tiles = (-(-T // c) if cu is None else T // c + n for c in (64, 16))
    x = SimpleNamespace(members=members, slots=slots, tiles=tiles, T=T, HV=HV, packed=cu is not None)
    x.v, x.do = rand(1, T, HV, 128).bfloat16(), rand(1, T, HV, 128).bfloat16()
    x.s0 = rand(n, HV, 128, 128) if states else None
    x.ds1 = rand(n, HV, 128, 128) if states else None
    x.wide, x.square = torch.zeros(slots * HV * 192, 128).half(), torch.zeros(slots * HV * 192, 32).half()
    x.decay = torch.zeros(slots * HV, 128)
    zeros = lambda *shape: torch.zeros(shape, dtype=F64)  # noqa: E731
    x.want = {"u": zeros(T, HV, 128), "dd": zeros(T, HV, 128), "s": zeros(HV, slots, 128, 128),
              "ds": zeros(HV, slots, 128, 128), "ds0": zeros(n, HV, 128, 128)}  # fmt: skip
    slot, first = 0, []
    for i, (start, end) in enumerate(members):
        first.append(slot)
        count = -(-(end - start) // 64)
        save = start // 64 + i if x.packed else 0
        for h in range(HV):
            found = [_chunk(gen, min(64, end - start - 64 * c)) for c in range(count)]
            for c, operands in enumerate(found):
                _lay(x, (slot + c) * HV + h, operands)
            S = zeros(128, 128) if x.s0 is None else x.s0[i, h].double()
            for c, (Kt, _, Kh, _, T1, decay) in enumerate(found):
                at = slice(start + 64 * c, min(end, start + 64 * c + 64))
                x.want["s"][h, save + c] = S.T
                u = T1 @ (_rows(x.v[0, at, h]) - Kt @ S)
                x.want["u"][at, h] = u[: at.stop - at.start]
                S = decay[:, None] * S + Kh.T @ u
            dS = zeros(128, 128) if x.ds1 is None else x.ds1[i, h].double()
            for c, (Kt, Qt, Kh, M, T1, decay) in reversed(list(enumerate(found))):
                at = slice(start + 64 * c, min(end, start + 64 * c + 64))
                x.want["ds"][h, save + c] = dS.T
                do = _rows(x.do[0, at, h])
                dd = T1.T @ (Kh @ dS + M.T @ do)
                x.want["dd"][at, h] = dd[: at.stop - at.start]
                dS = decay[:, None] * dS + Qt.T @ do - Kt.T @ dd
            x.want["ds0"][i, h] = dS
        slot += count
    x.ranks = torch.tensor([[i, first[i], s, e - s] for i, (s, e) in enumerate(members)], dtype=torch.int32).flatten()
    return x


def _rows(x: Tensor) -> Tensor:
    return torch.cat([x.double(), torch.zeros(64 - x.shape[0], 128, dtype=F64)])


def _chunk(gen: torch.Generator, n: int) -> list[Tensor]:
    """Kt, Qt, Kh, M, T as float16 holds them, and the decay."""
    real = (torch.arange(64) < n)[:, None]
    unit = lambda: real * torch.nn.functional.normalize(torch.randn(64, 128, generator=gen), dim=1)  # noqa: E731
    k, q = unit(), unit() * 128**-0.5
    G = (real * torch.rand(64, 128, generator=gen) * -0.1).cumsum(0)
    beta = real[:, 0] * torch.rand(64, generator=gen)
    decay = torch.exp2((G[:, None] - G[None]).clamp(max=0.0))
    L = torch.einsum("ic,ijc,jc->ij", k, decay, k).tril(-1)
    M = torch.einsum("ic,ijc,jc->ij", q, decay, k).tril()
    T = torch.linalg.inv(torch.eye(64) + beta[:, None] * L).tril() * beta
    halves = (k * torch.exp2(G), q * torch.exp2(G), k * torch.exp2(G[-1] - G), M, T)
    return [*(y.half().double() for y in halves), torch.exp2(G[-1]).double()]


def _lay(x: SimpleNamespace, place: int, operands: list[Tensor]) -> None:
    """As `kda_prepare_kernel` lays a chunk: three operands, three quarters of T and of M, the decay."""
    for j in range(3):
        x.wide[place * 192 + 64 * j :][:64] = operands[j].half()
    for j, square in enumerate((operands[4], operands[3])):
        for i, (r, c) in enumerate(((0, 0), (32, 0), (32, 32))):
            x.square[place * 192 + 96 * j + 32 * i :][:32] = square[r : r + 32, c : c + 32].half()
    x.decay[place] = operands[5].float()


@pytest.mark.parametrize(
    "T, HV, cu, states, split",
    [(64, 1, None, True, False), (150, 2, None, True, False), (250, 1, None, False, True), (194, 1, PACK, True, False),
     (194, 1, PACK, False, True)],
    ids=["one chunk", "partial chunk", "half a head, no states", "pack", "pack, half a head, no states"],
)  # fmt: skip
def test_on_a_cpu(T: int, HV: int, cu: list[int] | None, states: bool, split: bool) -> None:
    x = workspace(T, HV, cu, states)
    names = on_cpu.load(instructions, factors, chains, state, gradient_tiles, products, scan, replay, reverse)
    n = len(x.members)
    nan = lambda *shape, dtype=torch.float32: torch.full(shape, float("nan"), dtype=dtype)  # noqa: E731
    token, kept = (1, T, HV, 128), (HV, x.slots, 128, 128)
    got = {m: nan(*shape, dtype=torch.float16) for m, shape in (("u", token), ("dd", token), ("s", kept), ("ds", kept))}
    unit = {m: nan(HV, x.tiles, 2, 16) if m in ("u", "dd") else nan(HV, x.slots, 2) for m in got}
    ds0 = nan(n, HV, 128, 128)
    tokens = lambda t: on_cpu.Matrix(t.view(T, HV * 128), (64, 64))  # noqa: E731
    matrix = lambda t: on_cpu.Matrix(t.view(-1, 128), (64, 128))  # noqa: E731
    operands = (matrix(x.wide), on_cpu.Matrix(x.square, (32, 32)))
    sizes = [Value(torch.tensor(i)) for i in (HV, T, T, x.slots, x.tiles)]
    programs = n * HV * (2 if split else 1)
    on_cpu.run(names["kda_replay_kernel"], programs, [
        *operands, tokens(x.v), tokens(got["u"]), matrix(got["s"]), x.decay, x.ranks, got["u"], unit["u"], unit["s"],
        x.decay if x.s0 is None else x.s0, *sizes, states, x.packed, split,
    ])  # fmt: skip
    on_cpu.run(names["kda_reverse_kernel"], programs, [
        *operands, tokens(x.do), tokens(got["dd"]), matrix(got["ds"]), x.decay, x.ranks, got["dd"], unit["dd"], unit["ds"],
        x.decay if x.ds1 is None else x.ds1, ds0, *sizes, Value(torch.tensor(1.0)), states, True, x.packed, split,
    ])  # fmt: skip
    assert _off(ds0.double(), x.want["ds0"]) < 3e-4
    for m in ("s", "ds"):
        found = (got[m].double().unflatten(2, (2, 64)) * unit[m][..., None, None].double()).view_as(x.want[m])
        assert _off(torch.where(x.want[m] == 0, 0.0, found), x.want[m]) < 4e-4, m
        assert bool((got[m].abs() <= 2.0**13)[x.want[m] != 0].all()), m
    for m in ("u", "dd"):
        assert bool((got[m].abs() <= 2.0**13).all()), m
        for i, (start, end) in enumerate(x.members):
            for t in range(start, end):
                tile = (start // 16 + i if x.packed else 0) + (t - start) // 16
                got_t = got[m][0, t].double().view(HV, 2, 64) * unit[m][:, tile, :, (t - start) % 16, None].double()
                assert _off(got_t.view(HV, 128), x.want[m][t]) < 3e-3, (m, t)


def _off(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


def signature() -> dict[str, str]:
    known = test_hopper._signature()
    half = known["v_desc"].replace("bf16", "fp16")
    more = {
        "do_desc": known["v_desc"],
        "u_desc": half,
        "dd_desc": half,
        "u_ptr": "*fp16",
        "dd_ptr": "*fp16",
        "wide": "fp32",
    }
    more |= dict.fromkeys(("s_desc", "ds_desc"), half.replace("[64, 64]", "[64, 128]"))
    more |= dict.fromkeys(("u_unit_ptr", "s_unit_ptr", "dd_unit_ptr", "ds_unit_ptr", "ds1_ptr", "ds0_ptr"), "*fp32")
    return known | more | {"saves": "i32", "tiles": "i32"}


def compiled(which: str, split: bool) -> tuple[Any, dict[str, Any]]:
    """A kernel and its constants."""
    constants = {"STATE_IN": True, "VARLEN": True, "SPLIT": split} | ({"STATE_OUT": True} if which == "reverse" else {})
    return {"replay": replay.kda_replay_kernel, "reverse": reverse.kda_reverse_kernel}[which], constants


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("which", ["replay", "reverse"])
def test_compiles_for_sm90(which: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, constants = compiled(which, split)
    known = signature()
    monkeypatch.setattr(test_hopper, "_signature", lambda: known)
    counts, shared, remarks = test_hopper._compile(kernel, constants)
    assert counts["spill stores"] <= 16 and counts["spill loads"] <= 16, remarks
    assert shared <= 232448
    assert "serialized" not in remarks, remarks


@pytest.mark.parametrize("gate", [0, 1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_what_the_host_hands_over(gate: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel gets all its arguments, in their order; matrices begin where their memory does."""
    from openkda.ops.kda.hopper import walks
    from openkda.ops.kda.triton.launch import readable

    B, T, H, HV = (1 if packed else 2), 150, 1, 2
    rand = lambda *shape: torch.randn(shape).bfloat16()  # noqa: E731
    q, v, beta = rand(B, T, H, 128), rand(B, T, HV, 128), rand(B, T, HV)
    cu = torch.tensor([0, 20, 150]) if packed else None
    N = 2
    s0 = torch.randn(N, HV, 128, 128)
    a = readable(q, q, v, v, beta, torch.zeros(HV) if gate else None, torch.zeros(HV, 128) if gate else None, cu, s0, None,
                 None, gate, -5.0, 0.1, True, True, True, False, torch.float32, False, False)  # fmt: skip
    seen: dict[str, dict[str, Any]] = {}

    def launch(kernel: Any, grid: Any, descriptors: Any, pointers: Any, sizes: Any, numbers: Any, constants: Any, index: Any,
               **options: int) -> None:  # fmt: skip
        given = (*descriptors, *pointers, *sizes, *numbers, *constants)
        assert len(given) == len(kernel.arg_names), (kernel, len(given))
        seen[kernel.fn.__name__] = dict(zip(kernel.arg_names, given, strict=True)) | {"grid": grid[0]}

    monkeypatch.setattr(walks, "_launch", launch)
    monkeypatch.setattr(walks, "_sm_count", lambda index: 132)
    slots, tiles = (B * -(-T // c) if cu is None else T // c + N for c in (64, 16))
    f16 = lambda *shape: torch.zeros(shape, dtype=torch.float16)  # noqa: E731
    u, dd, s, ds = f16(B, T, HV, 128), f16(B, T, HV, 128), f16(HV, slots, 128, 128), f16(HV, slots, 128, 128)
    units = [
        torch.zeros(HV, tiles, 2, 16),
        torch.zeros(HV, tiles, 2, 16),
        torch.zeros(HV, slots, 2),
        torch.zeros(HV, slots, 2),
    ]
    token, ds0 = torch.zeros(HV, tiles, 3, 16), torch.zeros(N, HV, 128, 128)
    walks.walk(a, v, s0, slots, tiles, token, u.view(-1), dd, s.view(-1), ds.view(-1), *units, ds0)
    prepare = seen["kda_prepare_backward_kernel" if gate == 2 else "kda_prepare_levels_kernel"]
    assert prepare["norm_ptr"] is token and prepare["VARLEN"] == packed and prepare["grid"] == slots * HV
    assert (prepare["T"], prepare["tiles"], prepare["groups"], prepare["scale"]) == (T, tiles, HV // H, 0.1)
    assert prepare.get("bound", -5.0) == -5.0 and prepare.get("GATE", 2) == gate
    for name, made, kept in (("kda_replay_kernel", u, s), ("kda_reverse_kernel", dd, ds)):
        given = seen[name]
        mine = given["u_desc" if made is u else "dd_desc"]
        assert mine.base.data_ptr() == made.data_ptr() and mine.shape == [B * T, HV * 128]
        states = given["s_desc" if made is u else "ds_desc"]
        assert states.base.data_ptr() == kept.data_ptr() and states.shape == [HV * slots * 128, 128]
        assert (given["T"], given["rows"], given["saves"], given["tiles"]) == (T, B * T, slots, tiles)
        assert given["grid"] == 2 * N * HV and given["SPLIT"] and given["STATE_IN"]
        assert given["x_desc"].base.data_ptr() == prepare["x_desc"].base.data_ptr()
        assert given["dec_ptr"].data_ptr() == prepare["dec_ptr"].data_ptr()
    assert seen["kda_reverse_kernel"]["ds0_ptr"] is ds0 and seen["kda_reverse_kernel"]["ds1_ptr"] is s0


def inputs(seed: int, **sizes: Any) -> KDAInputs:
    sizes = {"gate": "bounded"} | sizes
    x = make_inputs(seed, K=128, use_qk_l2norm=True, use_beta_sigmoid=True, unit_keys=False, **sizes)
    return x.to(dtype=torch.bfloat16, device="cuda")


class TestOnTheCard:
    pytestmark = gpu

    @pytest.fixture(autouse=True)
    def walked(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Every test here takes the walks that it is about."""
        from openkda.ops.kda.hopper import walks
        from openkda.ops.kda.triton.autograd import BACKWARDS

        BACKWARDS.forget()  # a repeated call takes them from its tape
        monkeypatch.setattr("openkda.ops.kda.triton.backward.HOPPER_WALKS", True)
        real, calls = walks.walk, []
        monkeypatch.setattr(walks, "walk", lambda *a, **options: (calls.append(1), real(*a, **options))[1])
        yield
        assert calls

    @pytest.mark.parametrize(
        "sizes",
        [{"T": 200, "H": 2}, {"T": 64, "B": 3, "H": 1, "HV": 2}, {"T": 1000, "H": 1, "decay": "fast"},
         {"T": 1000, "H": 1, "decay": "slow"}, {"T": 300, "H": 1, "decay": "saturated"}, {"T": 130, "H": 80},
         {"T": 200, "H": 2, "gate": "softplus"},
         {"T": 300, "H": 1, "gate": "softplus", "decay": "fast"}, {"T": 300, "H": 1, "gate": "softplus", "decay": "slow"},
         {"T": 150, "H": 2, "gate": None}, {"T": 150, "H": 2, "gate": None, "decay": "hard"},
         {"lengths": (0, 1, 18, 0, 64, 130, 2), "H": 1, "HV": 2, "gate": "softplus"},
         {"T": 512, "H": 2, "near_equal_keys": True}, {"lengths": (0, 1, 18, 0, 64, 130, 2), "H": 1, "HV": 2}],
        ids=str,
    )  # fmt: skip
    def test_gradients(self, sizes: dict[str, Any]) -> None:
        x = inputs(0, **sizes)
        checks.hold(str(sizes), x, gradients(x, impl=None), checks.reference(x), "near_equal_keys" in sizes)

    def test_without_states(self) -> None:
        x = inputs(1, T=150, H=2)
        x.initial_state, x.dS = None, torch.zeros_like(x.dS)
        checks.hold("no states", x, gradients(x, impl=None), checks.reference(x))

    @pytest.mark.parametrize("scale", [2.0**-6, 4.0])
    def test_scales(self, scale: float) -> None:
        x = inputs(2, T=150, H=2)
        x.options["scale"] = scale
        checks.hold(f"scale {scale}", x, gradients(x, impl=None), checks.reference(x))

    @pytest.mark.parametrize("power", [-90, 60])
    def test_upstream_of_any_size(self, power: int) -> None:
        """Every value channel carries powers of two of its own."""
        x = inputs(3, T=150, H=2)
        x.do, x.dS = x.do * 2.0**power, x.dS * 2.0**power
        checks.hold(f"do 2^{power}", x, gradients(x, impl=None), checks.reference(x))

    def test_a_last_token_whose_output_nobody_asks_for(self) -> None:
        """A chunk of one token: all scores' gradients in it are 0, those of the state that leaves it are not."""
        x = inputs(8, T=65, H=2)
        x.do[:, 64:], x.dS = 0, 100 * x.dS
        checks.hold("nothing behind", x, gradients(x, impl=None), checks.reference(x))

    def test_values_of_any_size(self) -> None:
        """A state of 0 beside them, and chunks without any behind those with huge ones."""
        x = inputs(9, T=300, H=2, decay="saturated")
        x.initial_state = None
        x.v, x.do, x.dS = x.v * 2.0**24, x.do * 2.0**24, torch.zeros_like(x.dS)
        x.v[:, 128:192] = 0
        x.do[:, 64:128] = 0
        checks.hold("huge values", x, gradients(x, impl=None), checks.reference(x))

    def test_repeats_to_the_bit(self) -> None:
        x = inputs(4, T=700, H=5)
        a, b = gradients(x, impl=None), gradients(x, impl=None)
        assert all(torch.equal(a[n], b[n]) for n in a)

    @pytest.mark.parametrize("t", [0, 15, 63, 64, 100])
    def test_later_tokens_change_no_earlier_gradient(self, t: int) -> None:
        """A loss on the first tokens only."""
        x, other = inputs(5, T=150, H=2), inputs(6, T=150, H=2)
        x.do[:, t + 1 :], x.dS = 0, torch.zeros_like(x.dS)
        before = gradients(x, impl=None)
        for n in checks.TOKENS:
            assert not bool(before[f"d{n}"][:, t + 1 :].any()), n
            getattr(x, n)[:, t + 1 :] = getattr(other, n)[:, t + 1 :]
        after = gradients(x, impl=None)
        for n in checks.TOKENS:
            assert torch.equal(after[f"d{n}"][:, : t + 1], before[f"d{n}"][:, : t + 1]), n

    def test_members_of_a_pack_are_apart(self) -> None:
        x = inputs(7, lengths=(70, 100, 33), H=2)
        before = gradients(x, impl=None)
        for n in (*checks.TOKENS, "do"):
            getattr(x, n)[:, 70:170] = float("nan")
        after = gradients(x, impl=None)
        for n in checks.TOKENS:
            a, b = after[f"d{n}"], before[f"d{n}"]
            assert torch.equal(a[:, :70], b[:, :70]) and torch.equal(a[:, 170:], b[:, 170:]), n
        a, b = after["dinitial_state"], before["dinitial_state"]
        assert torch.equal(a[[0, 2]], b[[0, 2]])
