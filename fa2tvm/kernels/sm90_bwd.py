"""Algorithm 2 (attention backward) for Hopper: three kernels behind one entry.

`preprocess` writes D and L and clears dQ, the sweep goes over key blocks with five wgmma GEMMs a
step, `postprocess` converts dQ (sm90_bwd_passes.py, with the workspace's layout). In the sweep a
producer warp keeps rings of K_j, V_j and of Q_i, dO_i with their statistics full; each of two
consumer warpgroups carries dK and dV of 64 keys. sm90_bwd.md draws the schedule.

Source: FlashAttention-2, arXiv:2307.08691, Algorithm 2; FlashAttention-3, arXiv:2407.08608
(producer and consumer warps; S^T and dP^T, so that P^T and dS^T are register operands).
"""

from types import SimpleNamespace

import tvm
from tvm.script import tirx as T
from tvm.tirx.layout import S as LayoutOf
from tvm.tirx.layout import TileLayout

from fa2tvm.device import Device
from fa2tvm.kernels.ring import Ring
from fa2tvm.kernels.sm90_bwd_consumer import Consumer, consume
from fa2tvm.kernels.sm90_bwd_passes import postprocess, preprocess
from fa2tvm.kernels.sm90_bwd_split import SplitConsumer
from fa2tvm.kernels.sm90_bwd_tiles import Tile, head_group_of, produce
from fa2tvm.kernels.sm90_bwd_wide import KeysConsumer, ValuesConsumer
from fa2tvm.kernels.softmax import LOG2_E
from fa2tvm.kernels.wgmma import encode_tensor_map
from fa2tvm.problem import Variant
from fa2tvm.schedule import Sm90Backward, sm90_bwd_head_dim
from fa2tvm.schedule.sm90_bwd import (
    CONSUMER_REGISTERS,
    CONSUMER_WARPGROUPS,
    COUNTER_FLOATS,
    PRODUCER_REGISTERS,
)

CONSUMER_WARPS = 4 * CONSUMER_WARPGROUPS


def plan(variant, schedule, device, make_dq=True):
    """Everything that is a constant of the program, by name; `make_dq` is one of the sweep."""
    d, dv = sm90_bwd_head_dim(variant.head_dim_qk), sm90_bwd_head_dim(variant.head_dim_v)
    by_columns = d % (64 * CONSUMER_WARPGROUPS) == 0
    _, dq_floats = schedule.floats_per_block(variant)
    decisions = schedule.to_dict()
    decisions["early_dk"] = schedule.early_dk and not schedule.deterministic
    if not make_dq:
        decisions |= {"bulk_dq": False, "deterministic": False}
    return SimpleNamespace(
        **decisions,
        make_dq=make_dq,
        dtype=variant.dtype,
        causal=variant.causal,
        columns_qk=variant.head_dim_qk,
        columns_v=variant.head_dim_v,
        head_dim=d,
        head_dim_v=dv,
        Q_tile=Tile(schedule.block_q, d),
        dO_tile=Tile(schedule.block_q, dv),
        K_tile=Tile(schedule.block_kv, d),
        V_tile=Tile(schedule.block_kv, dv),
        # The split consumers keep dS^T, and P^T beside it.
        dS_tile=Tile(
            *(
                (schedule.block_kv, schedule.block_q)
                if schedule.split
                else (schedule.block_q, schedule.block_kv)
            )
        ),
        statistics_bytes=8 * schedule.block_q,
        # dQ^T: a warpgroup takes its share of the columns of d, else of the queries.
        dQ_by_columns=by_columns,
        dQ_slices=d // 64 // (CONSUMER_WARPGROUPS if by_columns else 1),
        dQ_queries=schedule.block_q // (1 if by_columns else CONSUMER_WARPGROUPS),
        dq_floats=dq_floats,
        wide=schedule.block_kv == 64,
        split=schedule.split,
        row_lanes=8 if dv == 64 else 16 if dv == 128 else 32,
        multiprocessors=device.cores,
    )


@T.inline
def sweep(p, z, maps, workspace, dK, dV):
    """The kernel between the two passes: Algorithm 2 but for D and dQ's conversion."""
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
    block = T.cta_id([z.blocks])
    warpgroup = T.warpgroup_id([CONSUMER_WARPGROUPS + 1])
    warp = T.warp_id_in_wg([4])
    lane = T.lane_id([32])
    T.thread_id_in_wg([128])

    ds_elements = T.meta_var(p.ds_stages * p.dS_tile.elements if p.make_dq or p.split else 8)
    pool = T.SMEMPool()
    K_smem = pool.alloc((p.k_stages * p.K_tile.elements,), p.dtype, align=1024)
    V_smem = pool.alloc((p.V_tile.elements,), p.dtype, align=1024)
    Q_smem = pool.alloc((p.q_stages * p.Q_tile.elements,), p.dtype, align=1024)
    dO_smem = pool.alloc((p.do_stages * p.dO_tile.elements,), p.dtype, align=1024)
    dS_smem = pool.alloc((ds_elements,), p.dtype, align=1024)
    dQ_smem = pool.alloc((p.dq_floats if p.bulk_dq else 4,), "float32", align=128)
    # P in float32, or two stages of it in the operands' dtype.
    P_floats = T.meta_var(p.block_q * p.block_kv if p.wide or p.split else 4)
    P_smem = pool.alloc((P_floats,), "float32", align=1024 if p.split else 128)
    statistics_smem = pool.alloc((p.q_stages * 2 * p.block_q,), "float32", align=128)
    K_ring = Ring(pool, p.k_stages, CONSUMER_WARPS)
    V_ring = Ring(pool, 1, CONSUMER_WARPS // 2 if p.wide else CONSUMER_WARPS)
    Q_ring = Ring(pool, p.q_stages, CONSUMER_WARPS)
    dO_ring = Ring(pool, p.do_stages, CONSUMER_WARPS)
    tile_ring = Ring(pool, 2, CONSUMER_WARPS)
    tiles_smem = pool.alloc((1, 2), "int32", align=8)
    pool.commit()
    shared = T.meta_var(
        SimpleNamespace(
            K=K_smem,
            V=V_smem,
            Q=Q_smem,
            dO=dO_smem,
            dS=dS_smem,
            dQ=dQ_smem,
            P=P_smem,
            statistics=statistics_smem,
            tiles=tiles_smem,
            K_ring=K_ring,
            V_ring=V_ring,
            Q_ring=Q_ring,
            dO_ring=dO_ring,
            tile_ring=tile_ring,
        )
    )
    if warpgroup == 0 and warp == 0:
        if T.cuda.elect_sync():
            K_ring.initialise()
            V_ring.initialise()
            Q_ring.initialise()
            dO_ring.initialise()
            tile_ring.initialise()
            T.ptx.fence.mbarrier_init.release.cluster()
    T.ptx.fence.proxy.async_.shared__cta()
    T.cuda.cta_sync()

    if warpgroup == 0:
        T.ptx.setmaxnreg.dec.sync.aligned.u32(PRODUCER_REGISTERS)
        if warp == 0:
            if T.cuda.elect_sync():
                produce(p, z, shared, maps, workspace, block)
    else:
        T.ptx.setmaxnreg.inc.sync.aligned.u32(CONSUMER_REGISTERS)
        if p.split:
            halves = SplitConsumer(p, z, shared, workspace, warpgroup - 1, warp, lane)
            halves.run(dK, dV)
        elif p.wide:
            if warpgroup == 1:
                values = ValuesConsumer(p, z, shared, workspace, 0, warp, lane)
                values.run(dV)
            else:
                keys = KeysConsumer(p, z, shared, workspace, 1, warp, lane)
                keys.run(dK)
        else:
            consumer = Consumer(p, z, shared, workspace, warpgroup - 1, warp, lane)
            consume(consumer, dK, dV)


def strided(handle, shape, strides, dtype):
    """A tensor [batch, seq, heads, dim] of any strides that device code reads or writes.

    Device code indexes by the layout; `strides` alone is only checked on the host (TVM 0.27).
    """
    strides = [*strides, 1]
    layout = TileLayout(LayoutOf[tuple(shape) : tuple(strides)])
    return T.match_buffer(handle, shape, dtype, strides=strides, layout=layout, align=16)


def build(variant: Variant, schedule: Sm90Backward, device: Device) -> tvm.IRModule:
    """The backward program of a Variant on Hopper.

    `backward(Q, K, V, O, LSE, dO, dLSE, dQ, dK, dV, workspace, softmax_scale, causal_offset,
    has_dlse, need_dq, need_dk, need_dv, splits)`: Q, dQ [B, Sq, H, D], K, dK [B, Sk, Hk, D], V, dV
    [B, Sk, Hk, Dv], O, dO [B, Sq, H, Dv] of the variant's dtype, 16-byte aligned, any strides that
    are multiples of 16 bytes with the innermost 1; LSE, dLSE [B, H, Sq] float32, contiguous;
    workspace float32 [`schedule.workspace_floats(problem, splits)`], 16-byte aligned, of any
    content; `splits` is ignored. No size may be 0. dLSE (where has_dlse is 0) and the gradients
    that are not needed may be any tensors of the right rank, dtype and last dimension; they stay
    untouched.

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit.
    """
    schedule.require_feasible(variant, device)
    p = plan(variant, schedule, device)
    p_without = plan(variant, schedule, device, make_dq=False)

    @T.prim_func
    def backward(
        q: T.handle,
        k: T.handle,
        v: T.handle,
        o: T.handle,
        lse: T.handle,
        do: T.handle,
        dlse: T.handle,
        dq: T.handle,
        dk: T.handle,
        dv: T.handle,
        work: T.handle,
        softmax_scale: T.float32,
        causal_offset: T.int64,
        has_dlse: T.int32,
        need_dq: T.int32,
        need_dk: T.int32,
        need_dv: T.int32,
        splits: T.int32,
    ):
        B, H, Hk, Sq, Sk = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        qb, qn, qh = T.int64(), T.int64(), T.int64()
        kb, kn, kh = T.int64(), T.int64(), T.int64()
        vb, vn, vh = T.int64(), T.int64(), T.int64()
        ob, on, oh = T.int64(), T.int64(), T.int64()
        gb, gn, gh = T.int64(), T.int64(), T.int64()
        # What is not needed is a dummy of any size.
        l0, l1, l2 = T.int64(), T.int64(), T.int64()
        dq0, dq1, dq2 = T.int64(), T.int64(), T.int64()
        dqb, dqn, dqh = T.int64(), T.int64(), T.int64()
        dk0, dk1, dk2 = T.int64(), T.int64(), T.int64()
        dkb, dkn, dkh = T.int64(), T.int64(), T.int64()
        dv0, dv1, dv2 = T.int64(), T.int64(), T.int64()
        dvb, dvn, dvh = T.int64(), T.int64(), T.int64()
        floats = T.int64()
        Q = T.match_buffer(q, (B, Sq, H, p.columns_qk), p.dtype, strides=[qb, qn, qh, 1], align=16)
        K = T.match_buffer(k, (B, Sk, Hk, p.columns_qk), p.dtype, strides=[kb, kn, kh, 1], align=16)
        V = T.match_buffer(v, (B, Sk, Hk, p.columns_v), p.dtype, strides=[vb, vn, vh, 1], align=16)
        O = strided(o, (B, Sq, H, p.columns_v), (ob, on, oh), p.dtype)
        LSE = T.match_buffer(lse, (B, H, Sq), "float32", align=4)
        dO = strided(do, (B, Sq, H, p.columns_v), (gb, gn, gh), p.dtype)
        dLSE = T.match_buffer(dlse, (l0, l1, l2), "float32", align=4)
        dQ = strided(dq, (dq0, dq1, dq2, p.columns_qk), (dqb, dqn, dqh), p.dtype)
        dK = strided(dk, (dk0, dk1, dk2, p.columns_qk), (dkb, dkn, dkh), p.dtype)
        dV = strided(dv, (dv0, dv1, dv2, p.columns_v), (dvb, dvn, dvh), p.dtype)
        workspace = T.match_buffer(work, (floats,), "float32", align=16)

        Q_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        K_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        V_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        dO_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode_tensor_map(
            Q_map, Q, p.dtype, (B, Sq, H, p.columns_qk), (qb, qn, qh), p.Q_tile, p.block_q
        )
        encode_tensor_map(
            K_map, K, p.dtype, (B, Sk, Hk, p.columns_qk), (kb, kn, kh), p.K_tile, p.block_kv
        )
        encode_tensor_map(
            V_map, V, p.dtype, (B, Sk, Hk, p.columns_v), (vb, vn, vh), p.V_tile, p.block_kv
        )
        encode_tensor_map(
            dO_map, dO, p.dtype, (B, Sq, H, p.columns_v), (gb, gn, gh), p.dO_tile, p.block_q
        )
        seq_q: T.let = T.Cast("int32", Sq)
        seq_kv: T.let = T.Cast("int32", Sk)
        heads: T.let = T.Cast("int32", H)
        heads_kv: T.let = T.Cast("int32", Hk)
        batch: T.let = T.Cast("int32", B)
        group: T.let = T.truncdiv(heads, heads_kv)
        query_blocks: T.let = T.truncdiv(seq_q + (p.block_q - 1), p.block_q)
        key_blocks: T.let = T.truncdiv(seq_kv + (p.block_kv - 1), p.block_kv)
        tiles: T.let = key_blocks * batch * heads_kv
        row_blocks: T.let = T.Cast("int64", query_blocks * batch * heads)
        offset: T.let = T.Cast("int32", causal_offset)
        scale_log2: T.let = softmax_scale * T.float32(LOG2_E)
        sizes = T.meta_var(
            SimpleNamespace(
                tiles=tiles,
                blocks=T.min(p.multiprocessors, tiles) if p.persistent else tiles,
                query_blocks=query_blocks,
                key_blocks=key_blocks,
                batch_heads_q=batch * heads,
                batch_heads_kv=batch * heads_kv,
                heads=heads,
                heads_kv=heads_kv,
                group=group,
                head_group=T.min(head_group_of(p, seq_q, group), batch * heads_kv),
                seq_q=seq_q,
                seq_kv=seq_kv,
                causal_offset=offset,
                scale_log2=scale_log2,
                softmax_scale=softmax_scale,
                statistics_first=T.int64(COUNTER_FLOATS),
                dq_first=T.int64(COUNTER_FLOATS) + row_blocks * T.int64(2 * p.block_q),
                turns_first=T.int64(COUNTER_FLOATS)
                + row_blocks * T.int64(2 * p.block_q + p.dq_floats),
                need_dq=need_dq,
                need_dk=need_dk,
                need_dv=need_dv,
            )
        )
        maps = T.meta_var(SimpleNamespace(Q=Q_map, K=K_map, V=V_map, dO=dO_map))
        with T.attr({"tirx.device_entry": True}):
            preprocess(p, sizes, O, dO, LSE, dLSE, workspace, has_dlse)
        if need_dq != 0:
            with T.attr({"tirx.device_entry": True}):
                sweep(p, sizes, maps, workspace, dK, dV)
            with T.attr({"tirx.device_entry": True}):
                postprocess(p, sizes, workspace, dQ, softmax_scale)
        else:
            with T.attr({"tirx.device_entry": True}):
                sweep(p_without, sizes, maps, workspace, dK, dV)

    return tvm.IRModule({"backward": backward})
