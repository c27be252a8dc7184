"""Algorithm 1 (attention forward) for Hopper: TMA, wgmma and warp specialisation in TensorIR.

One persistent thread block a multiprocessor: a producer warp keeps rings of K_j and V_j full, a
scheduler warp hands out tiles, each consumer warpgroup carries 64 query rows. sm90_fwd.md draws the
schedule and keeps the profile.

Source: FlashAttention-2, arXiv:2307.08691, Algorithm 1; FlashAttention-3, arXiv:2407.08608
(producer and consumer warps, ping-pong, S of the next block issued before P V of this one).
"""

from types import SimpleNamespace

import tvm
from tvm.script import tirx as T
from tvm.tirx.layout import S as LayoutOf
from tvm.tirx.layout import TileLayout

from fa2tvm.device import Device
from fa2tvm.kernels.ring import Ring
from fa2tvm.kernels.sm90_consumer import Consumer
from fa2tvm.kernels.sm90_epilogue import repair_tile, report_tile, store_tile
from fa2tvm.kernels.sm90_tiles import Scheduler, Tile, packing_log2, publish, walked_units
from fa2tvm.kernels.softmax import LOG2_E
from fa2tvm.kernels.wgmma import SharedTile, encode_tensor_map, fence_floats
from fa2tvm.problem import Variant
from fa2tvm.schedule import Sm90Forward, sm90_head_dim


def plan(variant, schedule, device):
    """Everything that is a constant of the program, by name."""
    head_dim, head_dim_v = sm90_head_dim(variant.head_dim_qk), sm90_head_dim(variant.head_dim_v)
    footprint = schedule.footprint(variant, device)
    half = variant.dtype == "float16"
    Q_tile, K_tile = SharedTile(64, head_dim), SharedTile(schedule.block_kv, head_dim)
    Q_bytes = schedule.q_stages * schedule.consumer_warpgroups * Q_tile.bytes
    return SimpleNamespace(
        **schedule.to_dict(),
        block_q=schedule.block_q,
        consumer_registers=schedule.consumer_registers,
        producer_registers=schedule.producer_registers,
        dtype=variant.dtype,
        causal=variant.causal,
        columns_qk=variant.head_dim_qk,
        columns_v=variant.head_dim_v,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        Q_tile=Q_tile,
        K_tile=K_tile,
        V_tile=SharedTile(schedule.block_kv, head_dim_v),
        # Where the rings of K and V start, counted from that of Q.
        K_start_bytes=Q_bytes,
        V_start_bytes=Q_bytes + schedule.k_stages * K_tile.bytes,
        consumer_warps=4 * schedule.consumer_warpgroups,
        # The first of two warpgroups may not see the tile's first key block. It waits for the next
        # K while it holds the turn, so the ring must hold both; four warpgroups deadlocked.
        skips=(
            variant.causal
            and schedule.consumer_warpgroups == 2
            and 64 <= schedule.block_kv < schedule.block_q
            and schedule.k_stages >= 3
        ),
        # The largest weight under an exact maximum. float16 ends at 2**16: 2**-4 leaves trusted
        # sums 13 nats, and weights down to 2**-10 of the largest keep all their bits.
        weight_log2=-4 if half else 0,
        # Sums of trusted weights end below 2**16 in float16; elsewhere they leave O_i room.
        trust_limit_log2=15 if half else 60,
        multiprocessors=device.cores,
        shared_bytes=footprint.scratch_bytes,
    )


@T.inline
def produce(p, z, shared, maps):
    """The producer: one thread loads Q_i and the K_j, V_j of each tile, last key block first."""
    Q_ring = shared.Q_ring.producer()
    K_ring = shared.K_ring.producer()
    V_ring = shared.V_ring.producer()
    tile_ring = shared.tile_ring.consumer()
    request = shared.request_ring.producer()
    tile = Tile()
    tile_ring.wait()
    tile.get(shared.tiles, tile_ring.fill())
    while tile.j_end > 0:
        tile_ring.release(0)
        tile_ring.advance()
        h_kv: T.let = T.truncdiv(tile.h, z.units_of_kv)
        j: T.int32 = tile.j_end - 1
        while j >= 0:
            if p.dynamic:
                if j == 0:
                    request.commit()
            K_ring.acquire(p.K_tile.bytes)
            p.K_tile.load(
                shared.K,
                K_ring.stage * p.K_tile.elements,
                maps.K,
                j * p.block_kv,
                h_kv,
                tile.b,
                K_ring.barrier(),
            )
            K_ring.advance()
            if j == tile.j_end - 1:
                Q_ring.acquire(p.consumer_warpgroups * p.Q_tile.bytes)
                for w in T.unroll(p.consumer_warpgroups):
                    p.Q_tile.load(
                        shared.Q,
                        (Q_ring.stage * p.consumer_warpgroups + w) * p.Q_tile.elements,
                        maps.Q,
                        tile.h * z.heads_of_unit,
                        tile.i * z.block_queries + T.shift_right(64 * w, z.pack_log2),
                        tile.b,
                        Q_ring.barrier(),
                    )
                Q_ring.advance()
            V_ring.acquire(p.V_tile.bytes)
            p.V_tile.load(
                shared.V,
                V_ring.stage * p.V_tile.elements,
                maps.V,
                j * p.block_kv,
                h_kv,
                tile.b,
                V_ring.barrier(),
            )
            V_ring.advance()
            j = j - 1
        tile_ring.wait()
        tile.get(shared.tiles, tile_ring.fill())


@T.inline
def consume(c, tensors):
    """The consumer: Algorithm 1 over this thread block's tiles.

    S of the first block of the next tile is issued behind the last P V of this one, so that the
    epilogue runs under a GEMM.
    """
    c.begin()
    c.take_tile()
    c.Q_ring.wait()
    c.take_Q()
    c.skip(c.K_ring)
    c.K_ring.wait()
    c.issue_S()
    T.ptx.wgmma.wait_group.sync.aligned(0)
    c.finish_S(c.has_one_block())
    while c.tile.j_end > 0:
        c.first_block()
        c.other_blocks()
        # Both before the turn: a record waits for reports of all warps, and nobody for its holder.
        report_tile(c)
        c.take_tile()
        c.await_turn()
        c.issue_O()
        c.Q_ring.advance()
        if c.tile.j_end > 0:
            c.Q_ring.wait()
            c.skip(c.K_ring)
            c.K_ring.wait()
            c.take_Q()
        # After the last tile this S reads stale shared memory and is dropped: no branch may
        # surround a GEMM in flight (ptxas C7515 would serialise all of them).
        c.issue_S()
        c.pass_turn()
        c.find_place()
        T.ptx.wgmma.wait_group.sync.aligned(1)
        fence_floats(c.O_i)
        c.V_ring.release(c.lane)
        c.V_ring.advance()
        store_tile(c, tensors)
        T.ptx.wgmma.wait_group.sync.aligned(0)
        fence_floats(c.S_ij)
        if c.p.causal:
            repair_tile(c, tensors)
        if c.tile.j_end > 0:
            c.finish_S(c.has_one_block())


def strided(shape, strides):
    """The layout that device code indexes by; `strides` is only checked on the host (TVM 0.27)."""
    return TileLayout(LayoutOf[shape : tuple(strides)])


def build(variant: Variant, schedule: Sm90Forward, device: Device) -> tvm.IRModule:
    """The forward program of a Variant on Hopper.

    `forward(Q, K, V, O, LSE, workspace, softmax_scale, causal_offset)`: Q [B, Sq, H, D],
    K [B, Sk, Hk, D], V [B, Sk, Hk, Dv], O [B, Sq, H, Dv] of the variant's dtype, 16-byte aligned,
    any strides that are multiples of 16 bytes with the innermost 1; LSE [B, H, Sq] float32,
    contiguous; workspace int32 [1], zero, and zero again afterwards; softmax_scale > 0; no size may
    be 0.

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit.
    """
    schedule.require_feasible(variant, device)
    p = plan(variant, schedule, device)
    threads_groups = p.consumer_warpgroups + 1

    @T.prim_func
    def forward(
        q: T.handle,
        k: T.handle,
        v: T.handle,
        o: T.handle,
        lse: T.handle,
        workspace: T.handle,
        softmax_scale: T.float32,
        causal_offset: T.int64,
    ):
        B = T.int64()
        H = T.int64()
        Hk = T.int64()
        Sq = T.int64()
        Sk = T.int64()
        qb = T.int64()
        qn = T.int64()
        qh = T.int64()
        kb = T.int64()
        kn = T.int64()
        kh = T.int64()
        vb = T.int64()
        vn = T.int64()
        vh = T.int64()
        ob = T.int64()
        on = T.int64()
        oh = T.int64()
        q_shape = T.meta_var((B, Sq, H, p.columns_qk))
        k_shape = T.meta_var((B, Sk, Hk, p.columns_qk))
        v_shape = T.meta_var((B, Sk, Hk, p.columns_v))
        o_shape = T.meta_var((B, Sq, H, p.columns_v))
        q_strides = T.meta_var([qb, qn, qh, 1])
        k_strides = T.meta_var([kb, kn, kh, 1])
        v_strides = T.meta_var([vb, vn, vh, 1])
        o_strides = T.meta_var([ob, on, oh, 1])
        Q = T.match_buffer(
            q, q_shape, p.dtype, strides=q_strides, layout=strided(q_shape, q_strides), align=16
        )
        K = T.match_buffer(
            k, k_shape, p.dtype, strides=k_strides, layout=strided(k_shape, k_strides), align=16
        )
        V = T.match_buffer(
            v, v_shape, p.dtype, strides=v_strides, layout=strided(v_shape, v_strides), align=16
        )
        O = T.match_buffer(
            o, o_shape, p.dtype, strides=o_strides, layout=strided(o_shape, o_strides), align=16
        )
        LSE = T.match_buffer(lse, (B, H, Sq), "float32", align=4)
        counter = T.match_buffer(workspace, (1,), "int32", align=4)

        Q_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        K_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        V_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode_tensor_map(
            K_map, K, p.dtype, (B, Sk, Hk, p.columns_qk), (kb, kn, kh), p.K_tile, p.block_kv
        )
        encode_tensor_map(
            V_map, V, p.dtype, (B, Sk, Hk, p.columns_v), (vb, vn, vh), p.V_tile, p.block_kv
        )
        # On the host, so that the producer's few registers hold none of it.
        seq_q: T.let = T.Cast("int32", Sq)
        seq_kv: T.let = T.Cast("int32", Sk)
        group: T.let = T.Cast("int32", T.truncdiv(H, Hk))
        pack_log2: T.let = packing_log2(p, seq_q, group)
        pack: T.let = T.shift_left(1, pack_log2)
        heads_of_unit: T.let = T.Select(pack_log2 == 0, 1, group)
        units: T.let = T.truncdiv(T.Cast("int32", H), heads_of_unit)
        units_of_kv: T.let = T.truncdiv(group, heads_of_unit)
        batch_units: T.let = T.Cast("int32", B) * units
        walked: T.let = T.min(walked_units(p, seq_kv, units_of_kv), batch_units)
        block_queries: T.let = T.shift_right(p.block_q, pack_log2)
        query_blocks: T.let = T.truncdiv(seq_q + (block_queries - 1), block_queries)
        key_blocks: T.let = T.truncdiv(seq_kv + (p.block_kv - 1), p.block_kv)
        walked_tiles: T.let = walked * query_blocks
        tiles: T.let = query_blocks * batch_units
        offset: T.let = T.Cast("int32", causal_offset)
        scale_log2: T.let = softmax_scale * T.float32(LOG2_E)
        # A few queries wait for memory, and get the more precise weights for nothing.
        exact: T.let = T.Select(seq_q < 64, 1, 0)
        # Heads before queries: a box holds the packed heads of a query, query after query.
        encode_tensor_map(
            Q_map,
            Q,
            p.dtype,
            (B, H, Sq, p.columns_qk),
            (qb, qh, qn),
            p.Q_tile,
            pack,
            T.shift_right(64, pack_log2),
        )

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        block = T.cta_id([T.min(p.multiprocessors, tiles)])
        warpgroup = T.warpgroup_id([threads_groups])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        T.thread_id_in_wg([128])

        pool = T.SMEMPool()
        Q_smem = pool.alloc(
            (p.q_stages * p.consumer_warpgroups * p.Q_tile.elements,), p.dtype, align=1024
        )
        K_smem = pool.alloc((p.k_stages * p.K_tile.elements,), p.dtype, align=1024)
        V_smem = pool.alloc((p.v_stages * p.V_tile.elements,), p.dtype, align=1024)
        Q_ring = Ring(pool, p.q_stages, p.consumer_warps)
        K_ring = Ring(pool, p.k_stages, p.consumer_warps)
        V_ring = Ring(pool, p.v_stages, p.consumer_warps)
        tile_ring = Ring(pool, 2, p.consumer_warps + 1)
        request_ring = Ring(pool, 1, 1)
        report_ring = Ring(pool, 2, 1, fills=p.consumer_warps)
        tiles_smem = pool.alloc((Tile.RECORDS, Tile.FIELDS), "int32", align=8)
        failures_smem = pool.alloc((1, 2), "int32", align=8)
        pool.commit()
        shared = T.meta_var(
            SimpleNamespace(
                Q=Q_smem,
                K=K_smem,
                V=V_smem,
                tiles=tiles_smem,
                Q_ring=Q_ring,
                K_ring=K_ring,
                V_ring=V_ring,
                tile_ring=tile_ring,
                request_ring=request_ring,
                report_ring=report_ring,
                failures=failures_smem,
            )
        )
        maps = T.meta_var(SimpleNamespace(Q=Q_map, K=K_map, V=V_map))
        tensors = T.meta_var(SimpleNamespace(Q=Q, K=K, V=V, O=O, LSE=LSE))

        sizes = T.meta_var(
            SimpleNamespace(
                tiles=tiles,
                blocks=T.min(p.multiprocessors, tiles),
                query_blocks=query_blocks,
                key_blocks=key_blocks,
                pack=pack,
                pack_log2=pack_log2,
                heads_of_unit=heads_of_unit,
                units=units,
                units_of_kv=units_of_kv,
                batch_units=batch_units,
                walked=walked,
                walked_tiles=walked_tiles,
                block_queries=block_queries,
                seq_q=seq_q,
                seq_kv=seq_kv,
                causal_offset=offset,
                exact=exact,
                scale_log2=scale_log2,
                softmax_scale=softmax_scale,
            )
        )

        if warpgroup == 0 and warp == 0:
            if T.cuda.elect_sync():
                Q_ring.initialise()
                K_ring.initialise()
                V_ring.initialise()
                tile_ring.initialise()
                request_ring.initialise()
                report_ring.initialise()
                publish(failures_smem, 0, 0, 0)
                publish(failures_smem, 0, 1, 0)
                T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()

        if warpgroup == 0:
            T.ptx.setmaxnreg.dec.sync.aligned.u32(p.producer_registers)
            if warp == 0:
                if T.cuda.elect_sync():
                    produce(p, sizes, shared, maps)
            if warp == 1:
                if T.cuda.elect_sync():
                    scheduler = Scheduler(p, sizes, shared, counter)
                    scheduler.run(block)
        else:
            T.ptx.setmaxnreg.inc.sync.aligned.u32(p.consumer_registers)
            consumer = Consumer(p, sizes, shared, warpgroup - 1, warp, lane)
            consume(consumer, tensors)

    return tvm.IRModule({"forward": forward})
