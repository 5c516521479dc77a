"""The decoding kernel for one token of heads of 128 channels, in Gluon: a program owns one query head of one sequence.

    q, k, v = silu(conv)       S <- Diag(a) S       u = beta (v - S^T k)       S <- S + k u^T       o = S^T q

For one sequence a step is latency: the launch, the slot, the state, then whatever stands between the last of the state and its
way back. So everything that no slot decides is loaded first, then the windows, then the state, and all vectors are ready
before the state is. q and k meet the state before their lengths are known; the lengths are divided out of the sums. Barriers
are left where q, k, v and the decay change hands, and where warps add up, once each. Two layouts of the state:

    few programs    a warp has 16 value channels and all keys: sums over keys are shuffles, the norm's sum crosses warps
    many            a warp has 16 keys and all values: whole rows of 512 bytes, where pieces of 64 cost bandwidth;
                    sums over keys cross warps, the norm's are shuffles; the state is loaded last

Layouts decide all this, and Triton proper chooses its own (29 to 34 barriers, twice the instructions).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openkda.ops.triton import api as shared

WARPS = gl.constexpr(8)
D = gl.constexpr(128)
WHOLE_COLUMNS = gl.constexpr(gl.BlockedLayout([4, 4], [8, 4], [1, WARPS.value], [1, 0]))
WHOLE_ROWS = gl.constexpr(gl.BlockedLayout([4, 4], [1, 32], [WARPS.value, 1], [1, 0]))
PAIR = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))  # [256]: q | k, and v | gate input
SUMS = gl.constexpr(gl.BlockedLayout([WARPS.value], [32], [WARPS.value], [0]))  # one of each warp, all in every thread
PARTS = gl.constexpr(gl.BlockedLayout([WARPS.value, 4], [1, 32], [1, WARPS.value], [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
TABLE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))

log2_decay = gluon.jit(shared.log2_decay.fn)
decay_rate = gluon.jit(shared.decay_rate.fn)
sigmoid = gluon.jit(shared.sigmoid.fn)


@gluon.jit
def _add2(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@gluon.jit
def _own_keys(x):
    """[128, 128] with rows by warp in turn, four at a time -> [WARPS, 128]: each warp's sum over its rows."""
    x = gl.reshape(x, [32 // WARPS, WARPS, 4, 128])
    return gl.sum(gl.sum(x, axis=2), axis=0)


@gluon.jit
def _load(p, mask):
    return gl.load(p, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _taps(p, mask, W: gl.constexpr):
    """Weights of the window, oldest first (zeros for what W lacks), and of the token."""
    wx = _load(p + W - 1, mask)
    wc = _load(p + W - 2, mask)
    wb = wc * 0.0
    wa = wc * 0.0
    if W >= 3:
        wb = _load(p + W - 3, mask)
    if W == 4:
        wa = _load(p, mask)
    return wa, wb, wc, wx


@gluon.jit
def _window(p, step, mask, W: gl.constexpr):
    """The last three inputs, oldest first (zeros for what W lacks)."""
    c = _load(p + (W - 2) * step, mask)
    b = c * 0.0
    a = c * 0.0
    if W >= 3:
        b = _load(p + (W - 3) * step, mask)
    if W == 4:
        a = _load(p, mask)
    return a, b, c


@gluon.jit
def _silu_conv(window, x, taps, OUT: gl.constexpr):
    """Rounded as the activations are."""
    a, b, c = window
    wa, wb, wc, wx = taps
    y = a * wa + b * wb + c * wc + x * wx
    return (y * sigmoid(y)).to(OUT).to(gl.float32)


@gluon.jit
def _move(p, step, window, x, mask, W: gl.constexpr):
    """The window moved on by x."""
    _, b, c = window
    ty: gl.constexpr = p.dtype.element_ty
    if W == 4:
        gl.store(p, b.to(ty), mask)
    if W >= 3:
        gl.store(p + (W - 3) * step, c.to(ty), mask)
    gl.store(p + (W - 2) * step, x.to(ty), mask)


@gluon.jit(do_not_specialize=["sbb", "sbh"])
def one_kernel(
    q_p, k_p, v_p, g_p, beta_p, og_p, y_p,
    wq_p, wk_p, wv_p, norm_p, A_log_p, dt_bias_p, slots_p,
    s0_p, cq0_p, ck0_p, cv0_p, s1_p, cq1_p, ck1_p, cv1_p,
    sqn, skn, svn, sgn, sgh, sbb, sbh, son, soh,
    s0n, s0h, s0k, cq0n, cq0d, cq0w, ck0n, ck0d, ck0w, cv0n, cv0d, cv0w,
    s1n, s1h, s1k, cq1n, cq1d, cq1w, ck1n, ck1d, ck1w, cv1n, cv1d, cv1w,
    bound, eps, norm_eps, scale,
    H: gl.constexpr, GROUP: gl.constexpr, W: gl.constexpr, GATE: gl.constexpr, HAS_A: gl.constexpr,
    HAS_DT: gl.constexpr, INDEXED: gl.constexpr, DENSE: gl.constexpr, MANY: gl.constexpr,
):  # fmt: skip
    """DENSE: each sequence's state and windows are contiguous, so that their offsets are known when compiling."""
    STATE: gl.constexpr = WHOLE_ROWS if MANY else WHOLE_COLUMNS
    ROWS: gl.constexpr = gl.SliceLayout(1, STATE)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, STATE)
    if DENSE:
        s0h = D * D
        s1h = D * D
        s0k = D
        s1k = D
        cq0d = W - 1
        ck0d = W - 1
        cv0d = W - 1
        cq1d = W - 1
        ck1d = W - 1
        cv1d = W - 1
        cq0w = 1
        ck0w = 1
        cv0w = 1
        cq1w = 1
        ck1w = 1
        cv1w = 1
    pid = gl.program_id(0)
    hq = pid % H
    row = (pid // H).to(gl.int64)
    place = row
    if INDEXED:
        place = gl.load(slots_p + row).to(gl.int64)
    c = gl.arange(0, 128, layout=ROWS)
    x = gl.arange(0, 128, layout=COLUMNS)
    e = gl.arange(0, 256, layout=PAIR)
    at = e % D
    first = e < D
    everywhere = e >= 0
    HV: gl.constexpr = H * GROUP
    OUT: gl.constexpr = y_p.dtype.element_ty
    qk_s = gl.allocate_shared_memory(gl.float32, [256], FLAT)  # two of them: no barrier between their stores
    vd_s = gl.allocate_shared_memory(gl.float32, [256], FLAT)
    if MANY:
        sk_s = gl.allocate_shared_memory(gl.float32, [WARPS, 128], TABLE)
        sq_s = gl.allocate_shared_memory(gl.float32, [WARPS, 128], TABLE)
    else:
        sum_s = gl.allocate_shared_memory(gl.float32, [WARPS], FLAT)
    chan = hq * D + at
    for j in gl.static_range(GROUP):
        head = hq * GROUP + j
        h = head.to(gl.int64)
        vchan = head * D + at
        qk = _load(gl.where(first, q_p + row * sqn, k_p + row * skn) + chan, everywhere)
        vz = _load(gl.where(first, v_p + row * svn + head * D, g_p + row * sgn + h * sgh) + at, everywhere)
        taps_qk = _taps(gl.where(first, wq_p, wk_p) + chan * W, everywhere, W)
        taps_v = _taps(wv_p + vchan * W, first, W)
        dt = qk * 0.0
        if HAS_DT:
            dt = _load(dt_bias_p + h * D + at, e >= D)
        rate = 1.0
        if HAS_A:
            rate = decay_rate(gl.load(A_log_p + h))
        beta = sigmoid(gl.load(beta_p + row * sbb + h * sbh).to(gl.float32))
        if not MANY:
            og = gl.load(og_p + row * son + h * soh + x).to(gl.float32)
            norm = gl.load(norm_p + x).to(gl.float32)
        if INDEXED and j == 0:  # noqa: SIM102 (constants, and a value)
            if place < 0:
                for i in range(GROUP):
                    gl.store(y_p + (row * HV + hq * GROUP + i) * D + x, gl.zeros([128], OUT, COLUMNS))
                return
        p_qk = gl.where(first, cq0_p + place * cq0n, ck0_p + place * ck0n) + chan * gl.where(first, cq0d, ck0d)
        w_qk = _window(p_qk, gl.where(first, cq0w, ck0w), everywhere, W)
        w_v = _window(cv0_p + place * cv0n + vchan * cv0d, cv0w, first, W)
        p_s = s0_p + place * s0n + h * s0h + c[:, None] * s0k + x[None, :]
        if not MANY:
            S = gl.load(p_s).to(gl.float32)
        decay = gl.exp2(log2_decay(vz + dt, rate, bound, GATE))
        if j > 0:
            gl.thread_barrier()
        qk_s.store(_silu_conv(w_qk, qk, taps_qk, OUT))
        vd_s.store(gl.where(first, _silu_conv(w_v, vz, taps_v, OUT), decay))
        p_qk = gl.where(first, cq1_p + place * cq1n, ck1_p + place * ck1n) + chan * gl.where(first, cq1d, ck1d)
        if j == GROUP - 1:
            _move(p_qk, gl.where(first, cq1w, ck1w), w_qk, qk, everywhere, W)
        _move(cv1_p + place * cv1n + vchan * cv1d, cv1w, w_v, vz, first, W)
        if MANY:  # behind the convolutions: their loads are not in the way, and other programs fill the wait
            S = gl.load(p_s).to(gl.float32)
        gl.thread_barrier()
        q = qk_s.slice(0, 128).load(ROWS)
        k = qk_s.slice(128, 128).load(ROWS)
        v = vd_s.slice(0, 128).load(COLUMNS)
        S *= vd_s.slice(128, 128).load(ROWS)[:, None]
        if MANY:
            q1 = qk_s.slice(0, 128).load(COLUMNS)
            k1 = qk_s.slice(128, 128).load(COLUMNS)
            qq, kk, kq = gl.reduce((q1 * q1, k1 * k1, q1 * k1), 0, _add3)
        else:
            qq, kk, kq = gl.reduce((q * q, k * k, q * k), 0, _add3)
        rq = gl.rsqrt(qq + eps)
        rk = gl.rsqrt(kk + eps)
        if MANY:
            sk_s.store(_own_keys(S * k[:, None]))
            sq_s.store(_own_keys(S * q[:, None]))
            gl.thread_barrier()
            sk = gl.convert_layout(gl.sum(sk_s.load(PARTS), axis=0), COLUMNS, assert_trivial=True)
            sq = gl.convert_layout(gl.sum(sq_s.load(PARTS), axis=0), COLUMNS, assert_trivial=True)
        else:
            sk, sq = gl.reduce((S * k[:, None], S * q[:, None]), 0, _add2)
        u = beta * (v - sk * rk)
        o = ((sq * rq + kq * (rq * rk) * u) * scale).to(OUT).to(gl.float32)
        S += k[:, None] * (u * rk)[None, :]
        gl.store(s1_p + place * s1n + h * s1h + c[:, None] * s1k + x[None, :], S.to(s1_p.dtype.element_ty))
        if MANY:
            og = gl.load(og_p + row * son + h * soh + x).to(gl.float32)
            norm = gl.load(norm_p + x).to(gl.float32)
            square = gl.sum(o * o, axis=0)
        else:
            sum_s.store(gl.sum(gl.reshape(o * o, [WARPS, 128 // WARPS]), axis=1))  # each warp its own channels
            gl.thread_barrier()
            square = gl.sum(sum_s.load(SUMS), axis=0)
        o *= gl.rsqrt(square / D + norm_eps)
        gl.store(y_p + (row * HV + h) * D + x, (o * norm * sigmoid(og)).to(OUT))
