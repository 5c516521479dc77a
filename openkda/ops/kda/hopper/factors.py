"""Chunk factors of KDA on Hopper: everything a 64-token chunk needs that does not depend on the state.

One warpgroup turns raw q, k and gate tiles into the five operands of the state recurrence:

    Kt[i] = k_i 2^(G_i)          what token i reads from the entering state
    Qt[i] = q_i 2^(G_i)          the same for the query
    Kh[j] = k_j 2^(G_64 - G_j)   what token j leaves in the outgoing state
    M[i,j] = q_i . k_j 2^(G_i - G_j), j <= i
    T      = (1 + beta L)^-1 beta, L[i,j] = k_i . k_j 2^(G_i - G_j), j < i

with G the running sum of the log2 decay. Warp w owns the 16-token tile w and all channels, in the register
layout of an mma accumulator, so that scaled rows are matmul operands without leaving registers:

    load g -> gate -> fp16 -> tri @ g = G (rows), upper @ g = G_tile_end - G (columns)      tensor cores sum
    tile w,   w     rows 2^G_i,          columns 2^-G_j        tf32: 2^80 needs eight exponent bits
    tile w,   w-1   rows 2^G_i,          columns 2^(E - G_j)   fp16, E = end of the column tile
    tiles 23, 01    rows 2^(G_i - E_1),  columns 2^(E_1 - G_j) fp16, E_1 = end of tile 1

No exponent outside the diagonal tiles is positive and every anchor lies before the row that uses it, so no
output depends on a later token. Diagonal tiles are inverted by substitution in fp32 (a Neumann product
overflows for near-equal keys), then merged 16 -> 32 -> 64.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from openkda.ops.kda.hopper.instructions import _ex2, _ex2_neg, _rcp
from openkda.ops.kda.hopper.unordered import unordered

W = gl.constexpr(64)  # channels per slice: 32 fp32 registers a thread
FAR_BELOW = gl.constexpr(-158)  # -3e38 in bfloat16's bits
# A tensor core cuts tf32 operands to ten bits: their products are 7e-4 too small on average, all of them, which adds up.
CUT = gl.constexpr(1.000704)
WR = gl.constexpr(16)  # narrower where the 64 score accumulators are live

# Tile layouts. M3 [tile, token, channel]: warp = tile. M2: the same registers seen as [64, channel].
M3 = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]))
M2 = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
# Pairs of tiles: batch = pair, rows 32.
MP = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2, 1], instr_shape=[1, 16, 8]))
A3H = gl.constexpr(gl.DotOperandLayout(0, M3.value, 2))
B3H = gl.constexpr(gl.DotOperandLayout(1, M3.value, 2))
A3B = A3H
B3B = B3H
A3F = gl.constexpr(gl.DotOperandLayout(0, M3.value, 1))
B3F = gl.constexpr(gl.DotOperandLayout(1, M3.value, 1))
A2H = gl.constexpr(gl.DotOperandLayout(0, M2.value, 2))
B2H = gl.constexpr(gl.DotOperandLayout(1, M2.value, 2))
APH = gl.constexpr(gl.DotOperandLayout(0, MP.value, 2))
BPH = gl.constexpr(gl.DotOperandLayout(1, MP.value, 2))


def _sum_operand(width):
    """B operand of the in-tile sums, as [64, width]: tokens along k."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0]] + [[0, 8 << i] for i in range((width // 8).bit_length() - 1)],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )  # fmt: skip


LB = gl.constexpr(_sum_operand(64))
LG = gl.constexpr(_sum_operand(128))
LBR = gl.constexpr(_sum_operand(16))
# Even tiles as the B operand of the pair product [2, 16, WR]: both warps of a pair hold the pair's first tile.
LPAIR = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], [0, 0, 8]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 0, 0], [1, 0, 0]],
        block_bases=[],
        shape=[2, 16, 16],
    )
)
LPAIRX = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 8, 0], [0, 0, 8]],
        lane_bases=[[0, 2, 0], [0, 4, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        warp_bases=[[0, 0, 0], [1, 0, 0]],
        block_bases=[],
        shape=[2, 16, 16],
    )
)
# Substitution: a thread owns one column of one tile's inverse [tile, column, row].
LX = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 16, 16],
    )
)
F1 = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FR = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [1, 4], [0, 1]))
LROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
S64 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
FLAT1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Barriers that `arrivals` arrivals complete. Each is to be waited for, or invalidated, at the very end of its kernel: the
    memory of a barrier nobody names any more goes to another buffer, and where the processor was given to another process in
    between, a barrier's bits stood in that buffer (PTX: undefined without mbarrier.inval). tests/ops/kda/barrier_memory.py."""
    b = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(b.index(i), count=arrivals)
    return b


@gluon.jit
def _load_beta(beta_ptr, row0, n, hv, HV):
    """Raw write strengths of a chunk; -inf past the end, where the sigmoid is zero."""
    i = gl.arange(0, 64, layout=F1)
    return gl.load(beta_ptr + (row0 + i).to(gl.int64) * HV + hv, mask=i < n, other=float("-inf"))


@gluon.jit
def _scaled(x, f):
    """x * f in fp16, two at a time."""
    x, f = gl.broadcast(x, f)
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, f], dtype=gl.float16, is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def _rows(smem, s: gl.constexpr, width: gl.constexpr):
    """Slice s of a raw [64, 128] tile as fp32 [4, 16, width] in the accumulator layout."""
    unordered()
    x = smem.slice(width * s, width, dim=1).load(M2)
    return gl.convert_layout(x.reshape([4, 16, width]), M3, assert_trivial=True).to(gl.float32)


@gluon.jit
def _flat(x):
    """[4, 16, width] registers seen as [64, width]."""
    return gl.convert_layout(x.reshape([64, x.shape[2]]), M2, assert_trivial=True)


@gluon.jit
def _permuted(x):
    """Channel order in which accumulator registers are a tf32 operand; the order of a contraction is free."""
    width: gl.constexpr = x.shape[2]
    return x.reshape([4, 16, width // 8, 4, 2]).permute((0, 1, 2, 4, 3)).reshape([4, 16, width])


@gluon.jit
def _half_view(g_s):
    """The gate tile as fp16: decays replace the raw gate in place."""
    return g_s._reinterpret(gl.float16, [64, 128], S64)


@gluon.jit
def _clean(smem, n, fill: gl.constexpr):
    """Replaces the rows of a raw bfloat16 tile past the end of the sequence: they belong to someone else."""
    bits: gl.constexpr = 0 if fill == 0.0 else FAR_BELOW
    x = smem.load(LROW)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LROW))
    clean = gl.full(x.shape, bits, gl.int16, LROW)
    clean = gl.where((row < n)[:, None], x.to(gl.int16, bitcast=True), clean).to(x.dtype, bitcast=True)
    gl.thread_barrier()
    smem.store(clean)
    gl.thread_barrier()


@gluon.jit
def _gates(g_s, c2_s, t_s, c1, bound2):
    """Raw gates to log2 decays in fp16, in place (error of a decay at most 9e-5); tile sums go to t_s."""
    view = _half_view(g_s)
    x = view.load(LG).to(gl.bfloat16, bitcast=True).to(gl.float32)
    c2 = c2_s.load(gl.SliceLayout(0, LG))
    per = _rcp(bound2)
    x = _rcp(_ex2(x * c1 + c2[None, :]) * per + per)
    view.store(x.to(gl.float16))
    t_s.store(gl.sum(x.reshape([4, 16, 128]), axis=1))


@gluon.jit
def _inner_products(x_s):
    """Of the rows of a raw tile of 64 with those of their tile of 16."""
    x = x_s.load(M2).reshape([4, 16, 128])
    a = gl.convert_layout(x, A3B, assert_trivial=True)
    b = gl.convert_layout(x.permute((0, 2, 1)), B3B, assert_trivial=True)
    return mma_v2(a, b, gl.zeros([4, 16, 16], gl.float32, M3))


@gluon.jit
def _square_norm(x_s):
    """|x|^2 of the 64 rows of a raw tile: the diagonal of a tensor core product of the tile with itself."""
    d = _inner_products(x_s)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, M3)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, M3)))[None, None, :]
    return gl.sum(gl.where(i == j, d, 0.0), axis=2)


@gluon.jit
def _store_slices(f_s, e):
    """2^e, [tile, channel], as [slice of channels, tile, channel]."""
    count: gl.constexpr = f_s.shape[0]
    width: gl.constexpr = 128 // count
    f_s._reinterpret(gl.float16, [count, 4, width], FLAT3).permute((1, 0, 2)).store(
        _ex2(e).to(gl.float16).reshape([4, count, width])
    )


@gluon.jit
def _row(t, tile, i: gl.constexpr):
    """Row i of [4, 128], where every thread has all four rows, as [1, 128]."""
    return gl.sum(gl.where(tile == i, t, 0.0), axis=0)[None, :]


@gluon.jit
def _tile_factors(t, xb_s, fk_s, ck_s, e1_s):
    """From tile sums t: per-channel factors from a tile's own anchor to the chunk's (fk, ck) or tile 1's (xb), and over tile 1
    (e1); returns the chunk's decay."""
    tile = gl.arange(0, 4, layout=gl.SliceLayout(1, FR))[:, None]
    t0, t1, t2, t3 = _row(t, tile, 0), _row(t, tile, 1), _row(t, tile, 2), _row(t, tile, 3)
    before = gl.where(tile == 0, 0.0, gl.where(tile == 1, t0, gl.where(tile == 2, t0 + t1, t0 + t1 + t2)))
    after = gl.where(tile == 3, 0.0, gl.where(tile == 2, t3, gl.where(tile == 1, t2 + t3, t1 + t2 + t3)))
    _store_slices(xb_s, gl.where(tile == 3, t2, 0.0))
    unordered()
    _store_slices(fk_s, before)
    unordered()
    _store_slices(ck_s, after)
    e1_s._reinterpret(gl.float16, [128], FLAT1).store(_ex2(gl.sum(t1, axis=0)).to(gl.float16))
    return _ex2(gl.sum(t, axis=0))


@gluon.jit
def _tri(upper: gl.constexpr):
    """fp16 ones on and below the diagonal, or strictly above it."""
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, A3H)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, A3H)))[None, None, :]
    m = j > i if upper else j <= i
    return gl.where(m, 1.0, 0.0).to(gl.float16) + gl.full([4, 16, 16], 0.0, gl.float16, A3H)


@gluon.jit
def _to_chunk_end(col, ck_s, s):
    """Slice s of keys scaled to the end of their tile, scaled to the end of the chunk."""
    return _flat(_scaled(col, ck_s.index(s).load(gl.SliceLayout(1, M3))[:, None, :]))


@gluon.jit
def _columns(g_s, k_s, rk, kc_s):
    """Keys scaled to the end of their tile."""
    for s in range(2):
        g16 = _half_view(g_s)._reinterpret(gl.float16, [2, 64, W], S64).index(s).load(LB).reshape([4, 16, W])
        g16 = gl.convert_layout(g16, B3H, assert_trivial=True)
        hs = mma_v2(_tri(True), g16, gl.zeros([4, 16, W], gl.float32, M3))
        k = _rows(k_s._reinterpret(gl.bfloat16, [2, 64, W], S64).index(s), 0, W)
        col = (k * rk[:, :, None] * _ex2(hs)).to(gl.float16)
        kc_s._reinterpret(gl.float16, [2, 64, W], S64).index(s).store(_flat(col))


@gluon.jit
def _rescale_columns(kc_s, ck_s):
    """Keys scaled to the end of their tile become keys scaled to the end of the chunk, in place."""
    halves = kc_s._reinterpret(gl.float16, [2, 64, W], S64)
    x0 = gl.convert_layout(halves.index(0).load(M2).reshape([4, 16, W]), M3, assert_trivial=True)
    x1 = gl.convert_layout(halves.index(1).load(M2).reshape([4, 16, W]), M3, assert_trivial=True)
    halves.index(0).store(_to_chunk_end(x0, ck_s, 0))
    x1 = _to_chunk_end(x1, ck_s, 1)
    unordered()
    halves.index(1).store(x1)


@gluon.jit
def _score_slice(row, row_h, xb, dcol_f, kc_b, kc0_b, kc1_b, diag, adj, far0, far1):
    """Adds slice s of one row operand to its diagonal, neighbour and far scores."""
    a = gl.convert_layout(_permuted(row), A3F, assert_trivial=True)
    diag = mma_v2(a, dcol_f, diag, input_precision="tf32")
    a = _flat(row_h).reshape([2, 32, WR])
    adj = mma_v2(gl.convert_layout(a, APH, assert_trivial=True), kc_b, adj)
    a = gl.convert_layout(_flat(_scaled(row_h, xb)), A2H, assert_trivial=True)
    far0 = mma_v2(a, kc0_b, far0)
    far1 = mma_v2(a, kc1_b, far1)
    return diag, adj, far0, far1


@gluon.jit
def _row_slice(g_s, q_s, k_s, rq, rk, kc_s, e1_s, xb_s, fk_s, acc, half: gl.constexpr):
    """Adds the scores of half of a slice of 32 channels to acc; returns acc and the halves of Kt and Qt."""
    ld, la, l0, l1, md, ma, m0, m1 = acc
    at: gl.constexpr = WR * half
    g16 = g_s.slice(at, WR, dim=1).load(LBR).reshape([4, 16, WR])
    g16 = gl.convert_layout(g16, B3H, assert_trivial=True)
    g = mma_v2(_tri(False), g16, gl.zeros([4, 16, WR], gl.float32, M3))
    k = _rows(k_s, half, WR) * rk[:, :, None]
    dcol = _permuted(k * _ex2_neg(g)).permute((0, 2, 1))
    dcol = gl.convert_layout(dcol, B3F, assert_trivial=True)
    xb = xb_s.slice(at, WR, dim=1).load(gl.SliceLayout(1, M3))[:, None, :]
    fk = fk_s.slice(at, WR, dim=1).load(gl.SliceLayout(1, M3))[:, None, :]
    er = _ex2(g)
    kc_b = kc_s.reshape([2, 32, 32]).slice(0, 16, dim=1).slice(at, WR, dim=2).load(LPAIR).permute((0, 2, 1))
    kc_b = gl.convert_layout(kc_b, BPH, assert_trivial=True)
    e1 = e1_s.slice(at, WR, dim=0).load(gl.SliceLayout(1, B2H))[:, None]
    kc0_b = _scaled(kc_s.slice(0, 16, dim=0).slice(at, WR, dim=1).permute((1, 0)).load(B2H), e1)
    kc1_b = kc_s.slice(16, 16, dim=0).slice(at, WR, dim=1).permute((1, 0)).load(B2H)
    kr = k * er
    kh = kr.to(gl.float16)
    ld, la, l0, l1 = _score_slice(kr, kh, xb, dcol, kc_b, kc0_b, kc1_b, ld, la, l0, l1)
    kt = _scaled(kh, fk)
    qr = _rows(q_s, half, WR) * rq[:, :, None] * er
    qh = qr.to(gl.float16)
    md, ma, m0, m1 = _score_slice(qr, qh, xb, dcol, kc_b, kc0_b, kc1_b, md, ma, m0, m1)
    qt = _scaled(qh, fk)
    return (ld, la, l0, l1, md, ma, m0, m1), kt, qt


@gluon.jit
def _store_pair(dst_s, x0, x1):
    """Two neighbouring halves as the 32 channels of an operand's slice."""
    x = gl.join(x0, x1).permute((0, 1, 3, 2)).reshape([64, 2 * WR])
    unordered()
    dst_s.store(gl.convert_layout(x, M2, assert_trivial=True))


@gluon.jit
def _slice_scores(raw, rq, rk, work, kt_s, qt_s, acc, s):
    """Adds the scores of channels 32 s .. 32 (s + 1); a tile's slices of 32 channels lie one behind the other."""
    q_s, k_s, g_s = raw
    kc_s, e1_s, xb_s, fk_s = work
    q = q_s._reinterpret(gl.bfloat16, [4, 64, 32], S64).index(s)
    k = k_s._reinterpret(gl.bfloat16, [4, 64, 32], S64).index(s)
    g = g_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s)
    kc = kc_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s)
    e1, xb, fk = e1_s.index(s), xb_s.index(s), fk_s.index(s)
    acc, k0, q0 = _row_slice(g, q, k, rq, rk, kc, e1, xb, fk, acc, 0)
    acc, k1, q1 = _row_slice(g, q, k, rq, rk, kc, e1, xb, fk, acc, 1)
    _store_pair(kt_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s), k0, k1)
    _store_pair(qt_s._reinterpret(gl.float16, [4, 64, 32], S64).index(s), q0, q1)
    return acc


@gluon.jit
def _scores(raw, rq, rk, work, kt_s, qt_s):
    """Scores of a chunk, after its columns are in kc_s; Kt and Qt are written slice by slice (they may replace k and q)."""
    z3 = gl.zeros([4, 16, 16], gl.float32, M3)
    zp = gl.zeros([2, 32, 16], gl.float32, MP)
    z2 = gl.zeros([64, 16], gl.float32, M2)
    acc = (z3, zp, z2, z2, z3, zp, z2, z2)
    for s in range(4):  # a loop, not copies: three programs an SM share the instruction cache
        acc = _slice_scores(raw, rq, rk, work, kt_s, qt_s, acc, s)
    return acc


@gluon.jit
def _halves(diag, adj):
    """[64, 32] of the two 32 x 32 diagonal blocks, from diagonal tiles and the neighbours of odd tiles."""
    tile = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, M3)))[:, None, None]
    odd = (tile & 1) == 1
    x = gl.join(gl.where(odd, adj, diag), gl.where(odd, diag, 0.0))
    x = x.permute((0, 1, 3, 2)).reshape([64, 32])
    return gl.convert_layout(x, M2, assert_trivial=True)


@gluon.jit
def _join_far(f0, f1):
    """Two [64, 16] column tiles as [64, 32]."""
    x = gl.join(f0, f1).permute((0, 2, 1)).reshape([64, 32])
    return gl.convert_layout(x, M2, assert_trivial=True)


@gluon.jit
def _substitute(lt_s):
    """Inverse of 1 + L for four 16 x 16 tiles in fp32; lt_s holds L as [column, tile, row]. [tile, column, row]."""
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LX)))[None, :, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LX)))[None, None, :]
    x = gl.where(col == row, 1.0, 0.0) + gl.full([4, 16, 16], 0.0, gl.float32, LX)
    for j in gl.static_range(15):
        lj = lt_s.index(j).load(gl.SliceLayout(1, LX))[:, None, :]
        xj = gl.sum(gl.where(row == j, x.to(gl.int32, bitcast=True), 0), axis=2).to(gl.float32, bitcast=True)
        x = gl.where(row > j, x - lj * xj[:, :, None], x)
    return x


@gluon.jit
def _masked(acc, b_s, UP: gl.constexpr = CUT):
    """The scores as parts of two lower triangles: L (diagonal tiles, neighbours, far block) and M (halves, far), M in fp16.
    Scores inside tiles, of operands that were cut, times UP."""
    ld, la, l0, l1, md, ma, m0, m1 = acc
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, M3)))[None, :, None]
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, M3)))[None, None, :]
    unordered()
    b3 = b_s.reshape([4, 16]).load(gl.SliceLayout(2, M3))[:, :, None]
    bp = b_s.reshape([2, 32]).load(gl.SliceLayout(2, MP))[:, :, None]
    b2 = b_s.load(gl.SliceLayout(1, M2))[:, None]
    ld = gl.where(row > col, ld, 0.0) * (b3 * UP)
    md = gl.where(row >= col, md, 0.0) * UP
    ma = gl.convert_layout(ma.reshape([4, 16, 16]), M3, assert_trivial=True)
    lf = (_join_far(l0, l1) * b2).to(gl.float16)
    return (ld, (la * bp).to(gl.float16), lf), (_halves(md, ma).to(gl.float16), _join_far(m0, m1).to(gl.float16))


@gluon.jit
def _invert_tiles(ld, lt_s, x_s):
    """Inverses of the four diagonal tiles of 1 + L, in x_s. lt_s: [16, 4, 16] fp32; x_s [4, 16, 16] fp16."""
    lt_s._reinterpret(gl.float32, [16, 4, 16], FLAT3).permute((1, 2, 0)).store(ld)
    gl.thread_barrier()
    x = _substitute(lt_s)
    x_s.permute((0, 2, 1)).store(x.to(gl.float16))


@gluon.jit
def _merge_tiles(la, lf, x_s, p_s, th_s, p2_s):
    """(1 + L)^-1 of the chunk from its tiles' inverses: its two 32 x 32 diagonal blocks and the block below, [64, 32] each.

    th_s may be where _invert_tiles had lt_s, and p2_s where x_s and p_s are.
    """
    # Neighbour below a diagonal tile: -X_a L_ab X_b for (a, b) = (1, 0), (3, 2).
    lap = gl.convert_layout(la, APH, assert_trivial=True)
    xe = x_s.reshape([2, 32, 16]).slice(0, 16, dim=1).load(LPAIRX)
    p = mma_v2(lap, gl.convert_layout(xe, BPH, assert_trivial=True), gl.zeros([2, 32, 16], gl.float32, MP))
    unordered()
    p_s.store(p.reshape([4, 16, 16]).to(gl.float16))
    unordered()
    xa = x_s.load(A3H)
    gl.thread_barrier()
    adj = -mma_v2(xa, p_s.load(B3H), gl.zeros([4, 16, 16], gl.float32, M3))
    diag = gl.convert_layout(xa, M3).to(gl.float32)
    th = _halves(diag, adj)
    th16 = th.to(gl.float16)
    unordered()
    th_s.store(th16)
    gl.thread_barrier()
    # Block of tiles 2, 3 against 0, 1: -T_hi L T_lo. Rows 0..31 of both products are unused.
    lfh = gl.convert_layout(lf, A2H, assert_trivial=True)
    p2 = mma_v2(lfh, th_s.slice(0, 32, dim=0).load(B2H), gl.zeros([64, 32], gl.float32, M2))
    unordered()
    p2_s.store(p2.to(gl.float16))
    gl.thread_barrier()
    tha = gl.convert_layout(th16, A2H, assert_trivial=True)
    low = -mma_v2(tha, p2_s.slice(32, 32, dim=0).load(B2H), gl.zeros([64, 32], gl.float32, M2))
    return th, low


@gluon.jit
def _store_t(tt_s, th, low, b_s):
    """T = (1 + beta L)^-1 beta: the inverse with its columns scaled."""
    blo = b_s.slice(0, 32, dim=0).load(gl.SliceLayout(0, M2))[None, :]
    bhi = b_s.slice(32, 32, dim=0).load(gl.SliceLayout(0, M2))[None, :]
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, M2))[:, None]
    tt_s.slice(0, 32, dim=1).store((gl.where(row < 32, th, low) * blo).to(gl.float16))
    unordered()
    tt_s.slice(32, 32, dim=1).store((gl.where(row < 32, 0.0, th) * bhi).to(gl.float16))


@gluon.jit
def _store_m(m_s, halves, far):
    """M from its diagonal halves and its lower left block."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, M2))[:, None]
    m_s.slice(0, 32, dim=1).store(gl.where(row < 32, halves, far))
    unordered()
    m_s.slice(32, 32, dim=1).store(gl.where(row < 32, 0.0, halves).to(gl.float16))
